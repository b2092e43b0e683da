"""Figures 9 and 10 of AVSL from runs: how edges changed in training, and histograms of reliabilities and coefficients.

python scripts/avsl_figures.py <run directory> [<another> ...] [--output avsl.png] [--pairs 2000]

Edges are drawn of every run, so that momenta can be compared, at the steps that were logged (fit.log_every=1: at each).
Histograms are of the first run.

Letters: L levels, r nodes of each, P pairs of images.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from numpy.typing import NDArray

from dmlbench.apps.loading import distance_of_run
from dmlbench.evaluation.embeddings.embed import load_embeddings
from dmlbench.results.store import EMBEDDINGS
from dmlbench.runtime import generator
from dmlbench.training.fit import HISTORY
from dmlbench.training.log import read_history
from dmlbench.types import DmlbenchError, EmbeddingSet, RunError

matplotlib.use("Agg")  # files only; works without a display
from matplotlib import pyplot as plt

COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")
_KINDS = ("mean", "max")


@dataclass(frozen=True)
class InferenceFacts:
    """What one run says about its inference; levels ascend from the second, the lowest is always reliable.

    Attributes:
        momentum: of its edges.
        steps: [T] optimizer steps that were logged, but for the first batch, whose edges replaced none.
        edge_changes: [T, L - 1, 2], mean and maximum of |new - old| over the edges to the level below.
        reliabilities: p [P, L - 1, r] of pairs of test images.
        coefficients: alpha [L - 1, r].
    """

    momentum: float
    steps: NDArray[np.int64]
    edge_changes: NDArray[np.float64]
    reliabilities: NDArray[np.float32]
    coefficients: NDArray[np.float32]


def inference_facts(run_dir: Path, *, num_pairs: int = 2000) -> InferenceFacts:
    """Read a run's history, embeddings and distance.

    Args:
        run_dir: a complete run of AVSL.
        num_pairs: pairs of different test images, drawn with a fixed seed.

    Raises:
        RunError: the run is not AVSL's, its history has no changes of edges, or a file is missing.
    """
    distance = distance_of_run(run_dir)
    if distance is None:
        raise RunError(
            f"{run_dir} is not a run of AVSL, which alone has edges and reliabilities; name one of head=avsl"
        )
    steps, changes = _edge_changes(run_dir, distance.num_levels)
    stored = load_embeddings(run_dir / EMBEDDINGS)
    first, second = _pairs(stored.queries, stored.gallery, num_pairs)
    with torch.no_grad():
        found = distance.attribute(first, second)
    return InferenceFacts(
        momentum=distance.momentum,
        steps=steps,
        edge_changes=changes,
        reliabilities=found.reliabilities[:, 1:].numpy(),
        coefficients=distance.alpha.detach().numpy(),
    )


def _edge_changes(run_dir: Path, num_levels: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Steps [T] and changes [T, L - 1, 2]."""
    logged: dict[int, dict[str, float]] = {}
    for step, name, value in read_history(run_dir / HISTORY):
        if name.startswith("train/edge_change_") and step > 1:
            logged.setdefault(step, {})[name.removeprefix("train/edge_change_")] = value
    if not logged:
        raise RunError(
            f"{run_dir / HISTORY} has no changes of edges; train the cell again, for longer than fit.log_every steps"
        )
    steps = sorted(logged)
    levels = range(1, num_levels)
    changes = [[[logged[step][f"{kind}_{level}"] for kind in _KINDS] for level in levels] for step in steps]
    return np.array(steps), np.array(changes)


def _pairs(queries: EmbeddingSet, gallery: EmbeddingSet | None, num_pairs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of pairs, each [P, D]; without a gallery an image is not paired with itself."""
    random = generator("avsl_figures", len(queries))
    first = random.integers(len(queries), size=num_pairs)
    if gallery is None:
        second = (first + random.integers(1, len(queries), size=num_pairs)) % len(queries)
    else:
        second = random.integers(len(gallery), size=num_pairs)
    return queries.rows[first], (queries if gallery is None else gallery).rows[second]


def draw_avsl_figures(runs: Sequence[Path], path: Path, *, num_pairs: int = 2000) -> None:
    """Write a PNG: changes of the edges of all runs above; reliabilities and coefficients of the first run below.

    Raises:
        RunError: as ``inference_facts``.

    Source: Zhang et al., Attributable Visual Similarity Learning, 2022, figures 9 and 10.
    """
    facts = [inference_facts(run, num_pairs=num_pairs) for run in runs]
    figure, axes = plt.subplots(2, 2, figsize=(10.5, 7.0), layout="constrained")
    for i, kind in enumerate(_KINDS):
        _curves(axes[0, i], facts, i, f"change of an edge at a step, {kind} over edges")
    figure.legend(
        *axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=3, fontsize=8, frameon=False
    )
    of_first = f"(momentum {facts[0].momentum:g})" if len(facts) > 1 else ""
    levels = range(2, facts[0].coefficients.shape[0] + 2)
    by_level = {f"level {level}": facts[0].reliabilities[:, level - 2].ravel() for level in levels}
    _histogram(axes[1, 0], by_level, f"reliability p of nodes, {num_pairs:,} pairs of test images {of_first}", (0, 1))
    by_level = {f"level {level}": facts[0].coefficients[level - 2] for level in levels}
    _histogram(axes[1, 1], by_level, f"coefficient alpha of nodes {of_first}", None)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _curves(axis: Axes, facts: Sequence[InferenceFacts], kind: int, title: str) -> None:
    for run, color in zip(facts, COLORS * len(facts), strict=False):
        for level, style in zip(range(run.edge_changes.shape[1]), ("-", "--", ":", "-.") * 9, strict=False):
            label = f"momentum {run.momentum:g}, levels {level + 1} and {level + 2}"
            axis.plot(run.steps, run.edge_changes[:, level, kind], style, color=color, linewidth=1.2, label=label)
    axis.set_yscale("log")
    axis.set_xlabel("optimizer step", fontsize=8)
    axis.set_title(title, fontsize=9)
    _plain(axis)


def _histogram(
    axis: Axes, values: dict[str, NDArray[np.float32]], title: str, limits: tuple[float, float] | None
) -> None:
    everything = np.concatenate(list(values.values()))
    low, high = limits or (float(everything.min()), float(everything.max()))
    bins = np.linspace(low, high, 51) if high > low else np.linspace(low - 0.5, low + 0.5, 51)
    for (name, of_level), color in zip(values.items(), COLORS * len(values), strict=False):
        share = np.full(len(of_level), 1 / len(of_level))
        axis.hist(of_level, bins=bins.tolist(), weights=share, alpha=0.55, color=color, label=name)
    axis.set_ylabel("share of nodes", fontsize=8)
    axis.set_title(title, fontsize=9)
    axis.legend(fontsize=7, frameon=False)
    _plain(axis)


def _plain(axis: Axes) -> None:
    axis.tick_params(which="both", labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Draw the runs of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, default=Path("avsl.png"))
    parser.add_argument("--pairs", type=int, default=2000)
    arguments = parser.parse_args()
    try:
        draw_avsl_figures(arguments.runs, arguments.output, num_pairs=arguments.pairs)
    except DmlbenchError as error:
        sys.exit(f"avsl_figures: error: {error}")
    print(arguments.output)


if __name__ == "__main__":
    main()
