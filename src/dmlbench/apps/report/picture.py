"""A picture of aggregated configs: bars with deviations, and the images nearest to a few queries, right or wrong."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from numpy.typing import NDArray

from dmlbench.apps.loaded import distance_of_run, table_of_run
from dmlbench.apps.pictures import save_figure
from dmlbench.apps.tables import ConfigSummary
from dmlbench.data.images.pixels import read_image
from dmlbench.evaluation.embeddings.embed import load_embeddings
from dmlbench.evaluation.metrics.table import score_named
from dmlbench.evaluation.search import nearest as search
from dmlbench.results.cautions import by_row, cautions_of_rows
from dmlbench.results.config_table import KINDS, check_metrics, size_of
from dmlbench.results.store import EMBEDDINGS, read_result, require_own_files
from dmlbench.runtime import generator
from dmlbench.types import EmbeddingSet, ImageTable, IntArray, Neighbors

_FRAMES = {None: ("black", 1.0, "-"), True: ("#1a9850", 3.5, "-"), False: ("#d73027", 3.5, "--")}
"""Color, width and style of a query's frame and of those of right and wrong neighbors."""
_LINE = 150  # letters across the figure
COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#882255", "#999933", "#332288")
DRAWN_FOR_EACH = 8
"""Queries from which each one that is shown is chosen."""
_TESTED_ON = ("dataset_fingerprint", "n_query", "n_gallery")


def is_trained(run_dir: Path) -> bool:
    """Whether a run took optimizer steps here, so that it has a history and weights."""
    return bool(read_result(run_dir).get("steps"))


def that_can_be_shown(configs: Sequence[ConfigSummary]) -> list[ConfigSummary]:
    """Trained configs with the embeddings of their first run, tested on the same images as the first of them."""
    shown = [
        config for config in configs if "(untrained)" not in config.label and (config.complete[0] / EMBEDDINGS).exists()
    ]
    for config in shown:
        require_own_files(config.complete[0], read_result(config.complete[0]))
    return [config for config in shown if all(config.summary[key] == shown[0].summary[key] for key in _TESTED_ON)]


def chosen_queries(shown: Sequence[ConfigSummary], count: int) -> tuple[IntArray, int]:
    """Queries to show, and how many were looked at: half fail in most configs, half succeed in most of them.

    They are among some drawn with a fixed seed; queries without another image of their class are left out.
    """
    total = shown[0].summary["n_query"]
    drawn = np.asarray(generator("report", total).permutation(total)[: DRAWN_FOR_EACH * count])
    some, searched, _ = _nearest(shown[0], drawn, 1)
    positive = (searched.labels[None] == some.labels[:, None]) & (searched.ids[None] != some.ids[:, None])
    drawn = drawn[positive.any(1).numpy()]
    wrong = np.sum([[not near[0][1] for _, near in retrieved(config, drawn, 1)] for config in shown], axis=0)
    order = np.argsort(-wrong, kind="stable")
    half = min(count // 2, int((wrong > 0).sum()))
    rest = order[half:][::-1][: count - half]
    return drawn[np.concatenate([order[:half], rest])], len(drawn)


def retrieved(config: ConfigSummary, chosen: IntArray, count: int) -> list[tuple[int, list[tuple[int, bool]]]]:
    """Chosen queries as rows of the table, and the rows nearest to them, each with whether it is of their class."""
    queries, searched, neighbors = _nearest(config, chosen, count)
    return [
        (int(row), [(int(searched.ids[j]), bool(searched.labels[j] == label)) for j in line])
        for row, label, line in zip(queries.ids, queries.labels, neighbors.index.tolist(), strict=True)
    ]


def _nearest(config: ConfigSummary, rows: IntArray, count: int) -> tuple[EmbeddingSet, EmbeddingSet, Neighbors]:
    """The queries ``rows`` of a config's first run, what is searched, and the nearest of it."""
    stored = load_embeddings(config.complete[0] / EMBEDDINGS)
    queries, searched = stored.queries, stored.queries if stored.gallery is None else stored.gallery
    some = EmbeddingSet(queries.rows[rows], queries.labels[rows], queries.ids[rows])
    count = min(count, len(searched) - 1)
    return some, searched, search.nearest(some, searched, count, distance=distance_of_run(config.complete[0]))


def image(table: ImageTable, row: int) -> NDArray[np.uint8]:
    """One image, [H, W] or [H, W, 3]."""
    if table.pixels is not None:
        return np.asarray(table.pixels[row])
    return np.asarray(read_image(Path(table.root) / str(table.paths[row])))


def draw_report(
    configs: Sequence[ConfigSummary],
    path: Path,
    *,
    title: str,
    metrics: Sequence[str],
    num_queries: int,
    num_nearest: int,
) -> None:
    """Write a PNG: scores of all configs on top, retrieved images of one run of each trained config below.

    The ``num_queries`` queries are the same for every config; half are failures of the first trained one, if it has
    enough.
    """
    known = {name for config in configs for scores in config.summary["scores"].values() for name in scores}
    check_metrics(metrics, known)
    shown = that_can_be_shown(configs)
    kinds = [kind for kind in KINDS if any(kind in config.summary["scores"] for config in configs)]
    bars_height = 3.0 + 0.2 * len(configs)
    grid_height = 0.82 * num_queries * -(-len(shown) // 2) + 0.5 if shown else 0.0
    figure = plt.figure(figsize=(10.5, bars_height + grid_height + 1.0), layout="constrained")
    figure.suptitle(title, fontsize=13)
    top: Any = figure
    if shown:
        top, bottom = np.ravel(np.asarray(figure.subfigures(2, 1, height_ratios=[bars_height, grid_height])))
    held = [(k, m) for k in kinds for m in metrics if any(m in c.summary["scores"].get(k, {}) for c in configs)]
    axes = top.subplots(1, len(held), sharey=False, squeeze=False)[0]
    for axis, (kind, metric) in zip(axes, held, strict=True):
        _bars(axis, configs, kind, metric)
    named = [
        Patch(color=COLORS[i % len(COLORS)], label=config.label + " PARTIAL" * bool(config.summary["missing"]))
        for i, config in enumerate(configs)
    ]
    top.legend(handles=named, loc="outside lower center", fontsize=8, frameon=False)
    if shown:
        table = table_of_run(shown[0].complete[0], shown[0].summary)
        chosen, _ = chosen_queries(shown[:1], num_queries)
        panels = np.ravel(np.asarray(bottom.subfigures(-(-len(shown) // 2), min(2, len(shown)), squeeze=False)))
        for panel, config in zip(panels, shown, strict=False):
            _retrievals(panel, config, table, chosen, num_nearest)
    notes = [*by_row(cautions_of_rows([config.summary for config in configs]), [config.label for config in configs]),
             *(f"DIFFERENT SETTINGS: {note}" for note in configs[0].differing)]  # fmt: skip
    if notes:
        figure.supxlabel("\n".join(textwrap.fill(note, _LINE) for note in notes), fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_figure(figure, path)


def _bars(axis: Axes, configs: Sequence[ConfigSummary], kind: str, metric: str) -> None:
    asked = score_named(metric)
    scores = [config.summary["scores"].get(kind, {}).get(metric) for config in configs]
    values = [asked.scale * score["mean"] if score else 0.0 for score in scores]
    deviations = [asked.scale * (score["std"] or 0.0) if score else 0.0 for score in scores]
    axis.bar(range(len(configs)), values, color=COLORS)
    spread = [x for x, score in enumerate(scores) if score and score["std"] is not None]  # one run has none
    axis.errorbar(
        spread, [values[x] for x in spread], [deviations[x] for x in spread], fmt="none", capsize=5, ecolor="k"
    )
    for x, (score, value, deviation) in enumerate(zip(scores, values, deviations, strict=True)):
        text = f"{value:.1f}" if asked.metric.percent else f"{value:.3f}"
        axis.text(x, max(value + deviation, 0), text if score else "–", ha="center", va="bottom", fontsize=9)
    axis.set_xticks([])
    ends = [v + d for v, d in zip(values, deviations, strict=True)]
    axis.set_ylim(1.15 * min(0, *values), 1.15 * max(0, *ends) or 1)
    axis.set_title(f"{asked.label}\n{kind}{size_of(kind, [config.summary for config in configs])}", fontsize=9)
    axis.set_ylabel("percent" if asked.metric.percent else "distance", fontsize=8)
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def _retrievals(panel: Any, config: ConfigSummary, table: ImageTable, chosen: IntArray, num_nearest: int) -> None:
    lines = retrieved(config, chosen, num_nearest)
    title = f"{config.label}: query and its {num_nearest} nearest ({config.complete[0].name})"
    panel.suptitle(textwrap.fill(title, 60), fontsize=9)
    axes = panel.subplots(len(lines), 1 + len(lines[0][1]), squeeze=False)
    for line, (query, near) in zip(axes, lines, strict=True):
        name = table.class_names[table.labels[query]].replace("_", " ")
        line[0].set_ylabel(textwrap.fill(name, 14), fontsize=6, rotation=0, ha="right", va="center")
        for axis, (row, is_right) in zip(line, [(query, None), *near], strict=True):
            pixels = image(table, row)
            axis.imshow(pixels, cmap="gray" if pixels.ndim == 2 else None, vmin=0, vmax=255)
            axis.set(xticks=[], yticks=[])
            color, linewidth, linestyle = _FRAMES[is_right]
            axis.spines[:].set(color=color, linewidth=linewidth, linestyle=linestyle)
