"""Aggregated configs as one HTML file, which needs no server and no network, and as one picture."""

import base64
import datetime
import html
import io
import json
import logging
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from numpy.typing import NDArray
from PIL import Image
from plotly.offline import get_plotlyjs
from tqdm import tqdm

from dmlbench import __version__
from dmlbench.apps.compare_configs import ConfigSummary, asked_columns, build_tables
from dmlbench.apps.explain import Explained, explain_run, greatest_weight, overlay
from dmlbench.apps.loading import distance_of_run, load_run, table_of_run
from dmlbench.apps.pictures import COLORS, save_figure
from dmlbench.apps.report import numbers
from dmlbench.data.images.sources import read_image
from dmlbench.evaluation.embeddings.embed import load_embeddings
from dmlbench.evaluation.metrics.registry import score_named
from dmlbench.evaluation.search.rerank import nearest
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.results.caveats import by_row, caveats_of_rows
from dmlbench.results.config_table import NO_TRAINING, check_metrics, differing_settings, shown_kinds, size_of
from dmlbench.results.store import EMBEDDINGS, read_result, require_own_files
from dmlbench.runtime import atomic_write, generator, shows_progress
from dmlbench.types import DmlbenchError, EmbeddingSet, ImageTable, IntArray, Neighbors

log = logging.getLogger(__name__)
_SIDE = 192  # pixels of a longer side of an image in the page
_QUALITY = 75
_EQUAL = 1e-3  # range of pooling weights that count as equal; 1 is the weight of average pooling
_FRAMES = {None: ("black", 1.0, "-"), True: ("#1a9850", 3.5, "-"), False: ("#d73027", 3.5, "--")}
"""Color, width and style of a query's frame and of those of right and wrong neighbors."""
_LINE = 150  # letters across the figure
DRAWN_FOR_EACH = 32
"""Queries from which each one that is shown is chosen."""
_SAMPLES = 500
"""Random samples of which the picture shows the most representative."""
_REPRESENTATIVE = (
    "Queries and the images nearest to them. The queries are a random sample (fixed seed) of which every config gets\n"
    "about the same share right as of all queries. Solid green: same class as the query; dashed red: another."
)


def that_can_be_shown(configs: Sequence[ConfigSummary]) -> list[ConfigSummary]:
    """Configs with the embeddings of their first run, tested on the same images as the first config."""
    shown = [config for config in configs if (config.complete[0] / EMBEDDINGS).exists()]
    for config in configs:
        require_own_files(config.complete[0], read_result(config.complete[0]))
        if config not in shown:
            log.warning("%s is missing: no images are shown for %s", config.complete[0] / EMBEDDINGS, config.label)
    return [config for config in shown if numbers.has_test_images_of(configs[0], config)]


@dataclass(frozen=True)
class DrawnQueries:
    """Queries drawn at random with a fixed seed, by their places."""

    places: IntArray  # [N]
    right: NDArray[np.bool_]  # [configs, N], whether the nearest image is of the query's class

    def first(self, count: int) -> IntArray:
        """A random sample."""
        return self.places[:count]

    def failures(self, count: int, *, after: int) -> IntArray:
        """Those beyond the first ``after`` that most configs get wrong."""
        wrong = (~self.right[:, after:]).sum(0)
        worst = np.argsort(-wrong, kind="stable")[:count]
        return self.places[after:][worst[wrong[worst] > 0]]

    def representative(self, count: int) -> IntArray:
        """A random sample of which every config gets about the same share right as of all drawn ones."""
        rng = generator("report", len(self.places), count)
        samples = [rng.permutation(len(self.places))[:count] for _ in range(_SAMPLES)]
        share = self.right.mean(1)
        return self.places[min(samples, key=lambda sample: np.abs(self.right[:, sample].mean(1) - share).sum())]


def drawn_queries(shown: Sequence[ConfigSummary], count: int) -> DrawnQueries:
    """Draw enough queries to choose ``count``; those without another image of their class are left out."""
    total = read_result(shown[0].complete[0])["n_query"]  # of the run whose queries are drawn
    drawn = np.asarray(generator("report", total).permutation(total)[: DRAWN_FOR_EACH * count])
    some, searched, _ = _nearest(shown[0], drawn, 1)
    positive = (searched.labels[None] == some.labels[:, None]) & (searched.ids[None] != some.ids[:, None])
    drawn = drawn[positive.any(1).numpy()]
    return DrawnQueries(drawn, np.array([[near[0][1] for _, near in retrieved(c, drawn, 1)] for c in shown]))


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
    count = min(count, len(searched) - (stored.gallery is None))  # without the query itself
    return some, searched, nearest(some, searched, count, distance=distance_of_run(config.complete[0]))


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
    left_out: Sequence[str] = (),
) -> None:
    """Write a PNG: scores of all configs on top, retrieved images of one run of each trained config below.

    The ``num_queries`` queries are the same for every config, and representative.
    """
    known = {name for config in configs for scores in config.summary["scores"].values() for name in scores}
    check_metrics(metrics, known)
    trained = [config for config in configs if NO_TRAINING not in config.label]
    shown = that_can_be_shown(trained) if num_queries else []
    kinds = shown_kinds([config.summary for config in configs])
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
        chosen = drawn_queries(shown, num_queries).representative(num_queries)
        bottom.suptitle(_REPRESENTATIVE, fontsize=9)
        panels = np.ravel(np.asarray(bottom.subfigures(-(-len(shown) // 2), min(2, len(shown)), squeeze=False)))
        for panel, config in zip(panels, shown, strict=False):
            _retrievals(panel, config, table, chosen, num_nearest)
    caveats = by_row(caveats_of_rows([config.summary for config in configs]), [config.label for config in configs])
    notes = [*filter(None, [configs[0].shared]), *caveats, *differing_settings([config.settings for config in configs])]
    notes += [f"LEFT OUT: {text}" for text in left_out]
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
    right = sum(near[0][1] for _, near in lines)
    title = f"{config.label} ({config.complete[0].name}): {right} of {len(lines)} queries right{_p_at_1(config)}"
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


def _p_at_1(config: ConfigSummary) -> str:
    """P@1 of the config's first run, in words; empty if it is unknown."""
    score = config.summary.get("raw", {}).get(config.complete[0].name, {}).get("p_at_1")
    return "" if score is None else f", P@1 {100 * score:.1f} %"


def write_page(
    grouped: Mapping[tuple[str, str], Sequence[ConfigSummary]],
    path: Path,
    *,
    spec: EvaluationSpec,
    num_queries: int,
    num_nearest: int,
    num_classes: int,
    with_overlays: bool,
    device: str,
    left_out: Sequence[str] = (),
) -> None:
    """Write a page of configs, a part for each data set and protocol.

    Args:
        num_queries: random queries to show with the ``num_nearest`` images nearest to them, and half as many failures;
            0 for none.
        num_classes: classes to list, the hardest.
        with_overlays: whether to load each config's first model and show what its pooling looks at.
        left_out: configs that are not shown, each with the reason; notes below the scores.
    """
    tables = build_tables(grouped, spec)
    groups = []
    for (dataset, protocol), configs in tqdm(grouped.items(), "report", unit="table", disable=not shows_progress()):
        metrics = numbers.metrics_of_runs(configs, asked_columns(spec))
        names = [metric["name"] for metric in metrics]
        shown, class_names = _images(configs, num_queries, num_nearest, device if with_overlays else None)
        groups.append({
            "title": tables[dataset, protocol].title,
            "shared": configs[0].shared,
            "leaderboard": (board := numbers.leaderboard(tables[dataset, protocol], configs)),
            "metrics": metrics,
            "differences": (differences := numbers.differences(configs, names)),
            "headline": numbers.headline(board, metrics, differences),
            "curves": (curves := numbers.curves(configs)),
            "curve_labels": {name: numbers.curve_label(name) for name in curves},
            "classes": numbers.classes(configs, names, class_names, num_classes),
            "settings": [numbers.settings(config) for config in configs],
            "provenance": [numbers.provenance(config) for config in configs],
            "papers": numbers.paper_scores(configs),
            **shown,
        })  # fmt: skip
    for group in groups:
        group["leaderboard"]["notes"] += [f"LEFT OUT: {text}" for text in left_out]
    made = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    content = {"made": f"dmlbench {__version__}, {made}", "groups": groups}
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, _filled(content).encode())


def _images(
    configs: Sequence[ConfigSummary], num_queries: int, num_nearest: int, device: str | None
) -> tuple[dict[str, Any], Sequence[str] | None]:
    """Galleries and overlays, or why there are none, and the names of the classes where the data are there."""
    nothing: dict[str, Any] = {"configs": {}}
    try:
        table = table_of_run(configs[0].complete[0], configs[0].summary)
    except DmlbenchError as error:  # tables, curves and differences need no images
        why = {"why": f"the images cannot be loaded: {error}"}
        return {"gallery": nothing | why, "overlays": nothing | why}, None
    if not num_queries:
        why = {"why": "left out: queries=0."}
        return {"gallery": nothing | why, "overlays": nothing | why}, table.class_names
    gallery = _galleries(configs, table, num_queries=num_queries, num_nearest=num_nearest)
    laid = nothing | {"why": gallery.get("why", "left out: overlays=false.")}
    if device is not None and "queries" in gallery:
        laid = _overlays(configs, gallery["queries"][: gallery["random"]], device=device)
    return {"gallery": gallery, "overlays": laid}, table.class_names


def _galleries(
    configs: Sequence[ConfigSummary], table: ImageTable, *, num_queries: int, num_nearest: int
) -> dict[str, Any]:
    """The same queries of every config and what is nearest to them, in its first run: random ones, then failures."""
    shown = that_can_be_shown(configs)
    if not shown:
        return {"configs": {}, "why": "no config has kept its embeddings."}
    drawn = drawn_queries(shown, num_queries)
    sample = drawn.first(num_queries)
    chosen = np.concatenate([sample, drawn.failures(-(-num_queries // 2), after=len(sample))])
    found: dict[str, Any] = {}
    used: dict[int, None] = {}
    rows: list[int] = []
    for config in shown:
        lines = retrieved(config, chosen, num_nearest)
        rows = [row for row, _ in lines]
        told = {"run": config.complete[0].name, "score": _p_at_1(config)}
        found[str(configs.index(config))] = {**told, "nearest": [near for _, near in lines]}
        used |= dict.fromkeys([*rows, *(row for _, near in lines for row, _ in near)])
    return {
        "configs": found,
        "queries": rows,
        "random": len(sample),
        "drawn": len(drawn.places),
        "images": {str(row): _thumbnail(image(table, row)) for row in used},
        "names": {str(row): table.class_names[table.labels[row]].replace("_", " ") for row in used},
    }


def _overlays(configs: Sequence[ConfigSummary], rows: Sequence[int], *, device: str) -> dict[str, Any]:
    """What the pooling of each config's first run looks at in images, by config, or why it does not say.

    One scale holds for all: white is the weight of average pooling. Configs with equal weights everywhere are left out.
    """
    explained: dict[int, Explained] = {}
    why: dict[str, str] = {}
    for i, config in enumerate(tqdm(configs, "overlays", unit="config", disable=not shows_progress())):
        run_dir = config.complete[0]
        if not numbers.has_test_images_of(configs[0], config):
            why[str(i)] = f"tested on other images than {configs[0].label}."
            continue
        try:
            run = load_run(run_dir, {"num_workers": 0}, device=device)
            found = explain_run(run, np.asarray(rows, dtype=np.int64), run_dir)
            if np.ptp(found.weights, axis=(1, 2)).max() > _EQUAL:
                explained[i] = found
        except DmlbenchError as error:
            if numbers.is_trained(run_dir):
                log.warning("no overlays for %s: %s", config.label, error)
            why[str(i)] = str(error).replace(str(run_dir), "/".join(run_dir.parts[-2:]))
    if not explained:
        return {"configs": {}, "why": why}
    most = greatest_weight(list(explained.values()))
    drawn = {}
    for i, one in explained.items():
        pictures = overlay(one, most)
        drawn[str(i)] = [
            [None if part is None else _thumbnail(part[row]) for part in pictures] for row in range(len(rows))
        ]
    return {"configs": drawn, "why": why, "rows": [int(row) for row in rows], "most": round(most, 2)}


def _thumbnail(pixels: NDArray[np.uint8]) -> str:
    """A data URI of an image [H, W] or [H, W, 3], made smaller where it is large."""
    picture = Image.fromarray(pixels).convert("RGB")
    picture.thumbnail((_SIDE, _SIDE), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    picture.save(buffer, "WEBP", quality=_QUALITY)
    return f"data:image/webp;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _filled(content: Mapping[str, Any]) -> str:
    """The template with everything in it; what comes from users is data, never markup."""
    files = resources.files(__package__)
    text = {name: (files / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", "page.js")}
    data = json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    groups = content["groups"]
    headlines = [f"{one['title']}: " * (len(groups) > 1) + one["headline"] for one in groups if one["headline"]]
    parts = {
        "HEADLINES": "".join(f"<p>{html.escape(text)}</p>" for text in headlines),
        "TITLE": html.escape(", ".join(group["title"] for group in groups)),
        "STYLE": text["page.css"],
        "CHARTS": get_plotlyjs(),
        "DATA": data,
        "CODE": text["page.js"],
    }
    page = text["page.html"]
    before, *rest = page.split("{{")
    return before + "".join(parts[part.partition("}}")[0]] + part.partition("}}")[2] for part in rest)
