"""Rank correlations of measures of the training embeddings with test scores."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from omegaconf import DictConfig
from scipy.stats import spearmanr
from tqdm import tqdm

from dmlbench.apps.pictures import save_figure
from dmlbench.components import component
from dmlbench.evaluation.metrics.table import score_named
from dmlbench.oodml.split_runs import SplitRun, grouped_runs, notes_of, write_notes
from dmlbench.oodml.structure import MEASURES, Structure, structure_of_run
from dmlbench.results.run_scores import scores_of_run
from dmlbench.results.table import markdown_lines
from dmlbench.runtime import atomic_write
from dmlbench.types import ConfigError

DEFAULT = "default"
"""The kind of the published split, in the facts of a run."""
_FEWEST = 3
"""Points that a rank correlation needs: two lie on a line always."""
_MARKERS = "osD^vP*X<>"
_NAMES = {
    "intra": "intra-class distance",
    "inter": "inter-class distance",
    "density": "density",
    "spectral_decay": "spectral decay",
}


@dataclass(frozen=True)
class Measured:
    """A run with its measures and its test scores by name."""

    run: SplitRun
    structure: Structure
    scores: Mapping[str, float]


@dataclass(frozen=True)
class Correlation:
    """Spearman's rank correlation over ``count`` points; None where it is undefined."""

    rho: float | None
    count: int

    def __str__(self) -> str:
        return "undefined" if self.rho is None else f"{self.rho:.2f}"


def correlate(cfg: DictConfig) -> Iterator[str]:
    """Measure the chosen runs, and write tables and a figure of each group."""
    spec = component(cfg.evaluation)
    for title, stem, runs in grouped_runs(cfg):
        measured = []
        for run in tqdm(runs, desc="structure", disable=not sys.stderr.isatty(), unit="run"):
            # first: it raises for runs whose embeddings are not compared as unit vectors
            found = structure_of_run(run.path, device=cfg.device, num_workers=cfg.num_workers)
            known = scores_of_run(run.path, run.result, spec, distance_of=lambda run_dir: None)
            measured.append(Measured(run, found, {name: known[name] for name in spec.score_names}))
        text = correlation_tables(title, measured, spec.score_names)
        yield text
        atomic_write(stem.with_name(f"{stem.name}.md"), text.encode())
        for suffix, frame in (("", correlations_frame(measured, spec.score_names)), ("-runs", points_frame(measured))):
            atomic_write(stem.with_name(f"{stem.name}{suffix}.csv"), frame.to_csv(index=False).encode())
        draw(title, measured, stem.with_name(f"{stem.name}.png"), scores=spec.score_names)
        yield f"written: {stem}.md, .csv, -runs.csv, .png\n"


def points_of(measured: Sequence[Measured]) -> pd.DataFrame:
    """A row for each method on each split, mean over repeats; NaN where a measure is undefined."""
    lines = [{"label": one.run.label, "fold": one.run.fold, **asdict(one.structure), **one.scores} for one in measured]
    values = pd.DataFrame(lines).set_index(["label", "fold"]).astype(float)
    return values.groupby(["label", "fold"], sort=False).agg(pd.Series.mean, skipna=False).reset_index()


def normalized(points: pd.DataFrame, x: str, y: str) -> pd.DataFrame:
    """Scale both values to [0, 1] within each split, as columns "x" and "y".

    Leaves out points without one of the values, and splits on which one of them is constant.
    """
    parts = [pd.DataFrame(columns=["label", "fold", "x", "y"])]
    for _, own in points.dropna(subset=[x, y]).groupby("fold", sort=False):
        values = own[[x, y]].set_axis(["x", "y"], axis=1)
        spread = values.max() - values.min()
        if (spread > 0).all():
            parts.append(own[["label", "fold"]].join((values - values.min()) / spread))
    return pd.concat(parts[1:] or parts)


def correlation(points: pd.DataFrame, measure: str, score: str) -> Correlation:
    """Correlate all points, normalized by split."""
    scaled = normalized(points, measure, score)
    if len(scaled) < _FEWEST:
        return Correlation(None, len(scaled))
    return Correlation(float(spearmanr(scaled.x, scaled.y).statistic), len(scaled))


def correlations(points: pd.DataFrame, score: str) -> dict[str, dict[int | None, Correlation]]:
    """By measure: over all splits (None), then on every split."""
    folds = sorted(points.fold.unique().tolist())
    return {
        measure: {
            None: correlation(points, measure, score),
            **{fold: correlation(points[points.fold == fold], measure, score) for fold in folds},
        }
        for measure in MEASURES
    }


def correlation_tables(title: str, measured: Sequence[Measured], scores: Sequence[str]) -> str:
    """Markdown with a table for each score: a row a measure, a column for all splits together and for each of them."""
    points, names = points_of(measured), _names_of_splits(measured)
    parts = [f"### {title}: rank correlation of measures of the training embeddings with test scores", ""]
    for score in scores:
        found = correlations(points, score)
        heads = [score_named(score).label, "overall", *(names[fold] for fold in sorted(names))]
        rows = [[_NAMES[measure], *map(str, of_measure.values())] for measure, of_measure in found.items()]
        counts = ", ".join(f"{_NAMES[measure]} {of_measure[None].count}" for measure, of_measure in found.items())
        parts += [*markdown_lines(heads, rows, "l" + "r" * (len(heads) - 1)), "", f"- points overall: {counts}", ""]
    notes = [
        "Spearman's correlation; a point is a method on a split, mean over repeats; overall: both values normalized to "
        "[0, 1] on each split",
        f"undefined: fewer than {_FEWEST} points, or a value that is the same for all; overall leaves out splits on "
        "which a value is constant, and points without a value",
        "spectral decay: over all D singular values, as the public code computes it on a GPU (on a CPU: D - 1)",
        *notes_of([one.run for one in measured]),
    ]
    return "\n".join([*parts, *(f"- {note}" for note in notes), ""])


def points_frame(measured: Sequence[Measured]) -> pd.DataFrame:
    """A line a run: its split, measures and test scores."""
    lines = [
        {"row": one.run.label, "config": one.run.path.parent.name, "fold": one.run.fold, "repeat": one.run.repeat,
         "distance": one.run.distance, "kind": one.run.kind, **asdict(one.structure), **one.scores,
         "notes": "; ".join(notes_of([one.run]))} for one in measured
    ]  # fmt: skip
    return pd.DataFrame(lines)


def correlations_frame(measured: Sequence[Measured], scores: Sequence[str]) -> pd.DataFrame:
    """A line for each score, measure and split, with an empty correlation where it is undefined."""
    points = points_of(measured)
    lines = [
        {"score": score, "measure": measure, "split": "overall" if fold is None else fold, "spearman": one.rho,
         "points": one.count}
        for score in scores for measure, found in correlations(points, score).items() for fold, one in found.items()
    ]  # fmt: skip
    return pd.DataFrame(lines)


def draw(title: str, measured: Sequence[Measured], path: Path, *, scores: Sequence[str]) -> None:
    """Draw scores over measures, normalized by split, with least-squares lines of all splits and of the default one."""
    points, names = points_of(measured), _names_of_splits(measured)
    default = next((one.run.fold for one in measured if one.run.kind == DEFAULT), None)
    labels = points.label.unique().tolist()
    if len(labels) > len(_MARKERS):
        raise ConfigError(
            f"{len(labels)} methods are more than a picture has markers ({len(_MARKERS)}); name fewer configs"
        )
    order = {one.run.fold: (one.run.distance or 0.0, one.run.fold) for one in measured}
    folds = sorted(names, key=order.__getitem__)
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
        for axis, measure in zip(line, MEASURES, strict=True):
            _panel(axis, normalized(points, score, measure), markers, colors, default)
            axis.set_title(f"{_NAMES[measure]}\nrank correlation {correlation(points, measure, score)}", fontsize=9)
            axis.set_xlabel(score_named(score).label, fontsize=8)
    named = [Line2D([], [], color="0.4", marker=markers[label], linestyle="", label=label) for label in labels]
    named += [Line2D([], [], color=colors[fold], marker="s", linestyle="", label=names[fold]) for fold in folds]
    named.append(Line2D([], [], color="k", label="all splits"))
    if default is not None:
        named.append(Line2D([], [], color="#d73027", linestyle="--", label="default split"))
    figure.legend(handles=named, loc="outside right upper", fontsize=8, frameon=False)
    write_notes(figure, notes_of([one.run for one in measured]), 150)
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


def _names_of_splits(measured: Sequence[Measured]) -> dict[int, str]:
    return {one.run.fold: one.run.split + (f", {one.run.kind}" if one.run.kind == DEFAULT else "") for one in measured}
