"""How the embeddings of a training set are arranged, and rank correlations of these measures with test scores.

Source: Roth et al., Revisiting Training Strategies and Generalization Performance in Deep Metric Learning, ICML 2020
    (pi_intra, pi_inter, pi_density, rho); Milbich et al., NeurIPS 2021, section 4.3.
"""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy.linalg
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from numpy.typing import ArrayLike
from scipy.stats import spearmanr
from tqdm import tqdm

from dmlbench.apps.loading import config_with_weights, load_run, require_unit_vectors
from dmlbench.apps.pictures import plt, save_figure
from dmlbench.components import component
from dmlbench.evaluation.metrics.clustering import class_distances
from dmlbench.evaluation.metrics.registry import score_named
from dmlbench.oodml.split_runs import SplitRun, grouped_runs, notes_of, write_notes
from dmlbench.results.rules import scores_of_run, spec_of_run
from dmlbench.results.store import kept_of, read_result, require_own_files
from dmlbench.results.table import markdown_lines
from dmlbench.runtime import atomic_write, write_json
from dmlbench.training.fit import BEST
from dmlbench.types import ConfigError, DataError, RetrievalSet

STRUCTURE = "structure.json"
"""Measures of a run's training embeddings, with the hash of its weights."""
MEASURES = {
    "intra": "intra-class distance",
    "inter": "inter-class distance",
    "density": "density",
    "spectral_decay": "spectral decay",
}
_SCHEMA = 1
_ROUNDING = 1e-6
"""Singular values below this share of the largest are rounding of float32."""
_SAME_DIRECTION = 1e-12
"""Cosine distances below this are rounding of float64."""
_DEFAULT = "default"
"""The kind of the published split, in the facts of a run."""
_FEWEST = 3
"""Points that a rank correlation needs: two lie on a line always."""
_MARKERS = "osD^vP*X<>"

Measures = Mapping[str, float | None]


def structure(rows: ArrayLike, labels: ArrayLike) -> Measures:
    """Measure embeddings [N, D] with labels [N] as unit vectors, in float64.

    Returns:
        intra: mean over classes of the mean cosine distance within the class, without classes of one image.
        inter: mean cosine distance between the normalized class means.
        density: intra / inter; None where all class means have one direction.
        spectral_decay: sum_i u log(u / s_i) with the singular values s, divided by their sum, and u = 1 / D; None where
            it is infinite, as with fewer images than dimensions. All D singular values count, as in ooDML's code on a
            GPU (metrics/rho_spectrum.py:19); on a CPU that code takes the D - 1 largest, 511 at most.
    """
    given, classes = np.asarray(rows, dtype=np.float64), np.asarray(labels, dtype=np.int64)
    if not np.isfinite(given).all():
        raise DataError("embeddings: got NaN or infinity, expected finite numbers. The model has diverged.")
    _, counts = np.unique(classes, return_counts=True)
    if len(counts) < 2 or counts.max() < 2:
        raise DataError(
            f"embeddings: got {len(classes)} images of {len(counts)} classes, expected two classes, one of them with "
            "two images."
        )
    length = np.linalg.norm(given, axis=1, keepdims=True)
    unit = given / np.where(length > 0, length, 1.0)
    intra, inter = class_distances(unit, classes)  # type: ignore[arg-type]  # which it takes of any precision
    values = scipy.linalg.svdvals(unit)  # [min(N, D)]
    decay = None
    if len(values) == unit.shape[1] and values[-1] > _ROUNDING * values[0]:
        decay = float(-np.mean(np.log(values / values.sum() * len(values))))
    density = intra / inter if inter > _SAME_DIRECTION else None
    return {"intra": intra, "inter": inter, "density": density, "spectral_decay": decay}


def structure_of_run(run_dir: Path, *, device: str = "auto", num_workers: int | None = None) -> Measures:
    """Measure a run's training images without augmentation by its best weights; keep that in ``structure.json``."""
    result = read_result(run_dir)
    config_with_weights(run_dir)
    bound = require_own_files(run_dir, result, (BEST,))
    if held := kept_of(run_dir / STRUCTURE, bound, "measures", schema=_SCHEMA):
        return held
    require_unit_vectors(run_dir)
    setup = load_run(run_dir, {"num_workers": num_workers}, device=device)
    embeddings, _ = setup.embed(RetrievalSet(setup.data.split.train))
    found = structure(embeddings.rows.numpy(), embeddings.labels.numpy())
    write_json(run_dir / STRUCTURE, {"schema": _SCHEMA, **bound, "n_images": len(embeddings), "measures": found})
    return found


def correlate(args: Any) -> Iterator[str]:
    """Measure the chosen runs, and write tables and a figure of each group."""
    spec = component(args.evaluation)
    groups = list(grouped_runs(args))
    for _, _, runs in groups:
        _require_markers({run.label for run in runs})
    for title, stem, runs in groups:
        values = []
        for run in tqdm(runs, desc="structure", disable=None, unit="run"):
            # first: it raises for runs whose embeddings are not compared as unit vectors
            measures = structure_of_run(run.path, device=args.device, num_workers=args.num_workers)
            of_run = spec_of_run(spec, run.result)
            known = scores_of_run(run.path, run.result, of_run, distance_of=lambda run_dir: None)
            values.append({**measures, **{name: known[name] for name in spec.score_names}})
        frame = frame_of_runs(runs, values)
        points = points_of(frame, spec.score_names)
        found = correlations(points, spec.score_names)
        text = correlation_tables(title, runs, found)
        yield text
        atomic_write(stem.with_name(f"{stem.name}.md"), text.encode())
        for suffix, table in (("", found), ("-runs", frame)):
            atomic_write(stem.with_name(f"{stem.name}{suffix}.csv"), table.to_csv(index=False).encode())
        draw(title, runs, points, stem.with_name(f"{stem.name}.png"), scores=spec.score_names)
        yield f"written: {stem}.md, .csv, -runs.csv, .png\n"


def frame_of_runs(runs: Sequence[SplitRun], values: Sequence[Mapping[str, float | None]]) -> pd.DataFrame:
    """A line for each run: its split, and its measures and test scores, given as ``values``."""
    return pd.DataFrame([
        {**run.place, "distance": run.distance, "kind": run.kind, **own, "notes": "; ".join(notes_of([run]))}
        for run, own in zip(runs, values, strict=True)
    ])  # fmt: skip


def points_of(frame: pd.DataFrame, scores: Sequence[str]) -> pd.DataFrame:
    """A row for each method on each split, mean over repeats; NaN where a measure is undefined."""
    values = frame.set_index(["row", "fold"])[[*MEASURES, *scores]].astype(float)
    return values.groupby(["row", "fold"], sort=False).agg(pd.Series.mean, skipna=False).reset_index()


def normalized(points: pd.DataFrame, x: str, y: str) -> pd.DataFrame:
    """Scale both values to [0, 1] within each split, as columns "x" and "y".

    Leaves out points without one of the values, and splits on which one of them is constant.
    """
    parts = [pd.DataFrame(columns=["row", "fold", "x", "y"])]
    for _, own in points.dropna(subset=[x, y]).groupby("fold", sort=False):
        values = own[[x, y]].set_axis(["x", "y"], axis=1)
        spread = values.max() - values.min()
        if (spread > 0).all():
            parts.append(own[["row", "fold"]].join((values - values.min()) / spread))
    return pd.concat(parts[1:] or parts)


def correlation(points: pd.DataFrame, measure: str, score: str) -> tuple[float, int]:
    """Spearman's rank correlation of points normalized by split, NaN where it is undefined, and their number."""
    scaled = normalized(points, measure, score)
    return float(spearmanr(scaled.x, scaled.y).statistic) if len(scaled) >= _FEWEST else np.nan, len(scaled)


def correlations(points: pd.DataFrame, scores: Sequence[str]) -> pd.DataFrame:
    """A line for each score and measure over all splits ("overall"), then on every split."""
    parts: list[tuple[object, pd.DataFrame]] = [("overall", points), *points.groupby("fold")]
    lines = [
        (score, measure, split, *correlation(own, measure, score))
        for score, measure, (split, own) in itertools.product(scores, MEASURES, parts)
    ]
    return pd.DataFrame(lines, columns=["score", "measure", "split", "spearman", "points"])


def correlation_tables(title: str, runs: Sequence[SplitRun], found: pd.DataFrame) -> str:
    """Markdown with a table for each score: a row a measure, a column for all splits together and for each of them."""
    names = _names_of_splits(runs)
    parts = [f"### {title}: rank correlation of measures of the training embeddings with test scores", ""]
    for score, of_score in found.groupby("score", sort=False):
        heads = [score_named(str(score)).label, "overall", *(names[fold] for fold in sorted(names))]
        rows = [[name, *map(_shown, of_score.spearman[of_score.measure == key])] for key, name in MEASURES.items()]
        overall = of_score[of_score.split == "overall"].set_index("measure").points
        counts = ", ".join(f"{MEASURES[str(measure)]} {count}" for measure, count in overall.items())
        parts += [*markdown_lines(heads, rows, "l" + "r" * (len(heads) - 1)), "", f"- points overall: {counts}", ""]
    notes = [
        "Spearman's correlation; a point is a method on a split, mean over repeats; overall: both values normalized to "
        "[0, 1] on each split",
        f"undefined: fewer than {_FEWEST} points, or a value that is the same for all; overall leaves out splits on "
        "which a value is constant, and points without a value",
        "spectral decay: over all D singular values, as the public code computes it on a GPU (on a CPU: D - 1)",
        *notes_of(runs),
    ]
    return "\n".join([*parts, *(f"- {note}" for note in notes), ""])


def _require_markers(labels: Collection[str]) -> None:
    if len(labels) > len(_MARKERS):
        raise ConfigError(
            f"configs: got {len(labels)} methods, expected at most {len(_MARKERS)}, one per marker. Name fewer configs."
        )


def draw(title: str, runs: Sequence[SplitRun], points: pd.DataFrame, path: Path, *, scores: Sequence[str]) -> None:
    """Draw scores over measures, normalized by split, with least-squares lines of all splits and of the default one."""
    names = _names_of_splits(runs)
    default = next((run.fold for run in runs if run.kind == _DEFAULT), None)
    labels = points.row.unique().tolist()
    _require_markers(labels)
    folds = [fold for _, fold in sorted({(run.distance or 0.0, run.fold) for run in runs})]
    shades = plt.get_cmap("viridis")(np.linspace(0, 0.95, len(folds)))
    colors = {fold: tuple(shade) for fold, shade in zip(folds, shades, strict=True)}
    markers = dict(zip(labels, _MARKERS, strict=False))
    figure, axes = plt.subplots(
        len(scores), len(MEASURES), figsize=(3.2 * len(MEASURES), 3.1 * len(scores) + 1.2), squeeze=False,
        layout="constrained", sharex=True, sharey=True,
    )  # fmt: skip
    heading = f"{title}: measures of the training embeddings over test scores, both normalized by split"
    figure.suptitle(heading, x=0.02, ha="left", fontsize=10)
    for line, score in zip(axes, scores, strict=True):
        for axis, (measure, name) in zip(line, MEASURES.items(), strict=True):
            _panel(axis, normalized(points, score, measure), markers, colors, default)
            rho, _ = correlation(points, measure, score)
            axis.set_title(f"{name}\nrank correlation {_shown(rho)}", fontsize=9)
            axis.set_xlabel(score_named(score).label, fontsize=8)
    named = [Line2D([], [], color="0.4", marker=markers[label], linestyle="", label=label) for label in labels]
    named += [Line2D([], [], color=colors[fold], marker="s", linestyle="", label=names[fold]) for fold in folds]
    named.append(Line2D([], [], color="k", label="all splits"))
    if default is not None:
        named.append(Line2D([], [], color="#d73027", linestyle="--", label="default split"))
    figure.legend(handles=named, loc="outside right upper", fontsize=8, frameon=False)
    write_notes(figure, notes_of(runs), 150)
    save_figure(figure, path)


def _panel(
    axis: Axes, scaled: pd.DataFrame, markers: Mapping[str, str], colors: Mapping[int, tuple[float, ...]],
    default: int | None,
) -> None:  # fmt: skip
    for label, fold, x, y in scaled.itertuples(index=False):
        axis.plot(x, y, markers[label], color=colors[fold], markersize=6, alpha=0.85)
    for color, style, own in (("k", "-", scaled), ("#d73027", "--", scaled[scaled.fold == default])):
        if len(own):  # normalized values of a split include 0 and 1, so a line is defined
            slope, start = np.polyfit(own.x, own.y, 1)
            axis.plot([0, 1], [start, start + slope], color=color, linestyle=style, linewidth=1.2)
    axis.set(xlim=(-0.06, 1.06), ylim=(-0.06, 1.06))
    axis.tick_params(labelsize=7)


def _shown(rho: float) -> str:
    return "undefined" if np.isnan(rho) else f"{rho:.2f}"


def _names_of_splits(runs: Sequence[SplitRun]) -> dict[int, str]:
    return {run.fold: run.split + (f", {run.kind}" if run.kind == _DEFAULT else "") for run in runs}
