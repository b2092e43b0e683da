"""One HTML file of aggregated configs, with styles, code, charts and images; needs no server and no network."""

import base64
import datetime
import html
import io
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from plotly.offline import get_plotlyjs
from tqdm import tqdm

from dmlbench import __version__
from dmlbench.apps.explain import Explained, explain_run, greatest_weight, overlay
from dmlbench.apps.loaded import load_run, table_of_run
from dmlbench.apps.report import numbers
from dmlbench.apps.report.numbers import paper_scores
from dmlbench.apps.report.picture import chosen_queries, image, is_trained, retrieved, that_can_be_shown
from dmlbench.apps.tables import ConfigSummary, asked_columns, build_tables
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.runtime import atomic_write
from dmlbench.types import DmlbenchError, ImageTable

log = logging.getLogger(__name__)

_SIDE = 96  # pixels of a longer side of an image in the page
_QUALITY = 80


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
) -> None:
    """Write a page of configs, a part for each data set and protocol.

    Args:
        num_queries: queries to show with the ``num_nearest`` images nearest to them; 0 for none.
        num_classes: classes to list, the hardest.
        with_overlays: whether to load each config's first model and show what its pooling looks at.
    """
    tables = build_tables(grouped, spec)
    groups = []
    for (dataset, protocol), configs in tqdm(grouped.items(), "report", unit="table", disable=not sys.stderr.isatty()):
        metrics = numbers.metrics_of_runs(configs, asked_columns(spec))
        names = [metric["name"] for metric in metrics]
        shown, class_names = _images(configs, num_queries, num_nearest, device if with_overlays else None)
        groups.append({
            "title": f"{dataset} under {protocol}",
            "leaderboard": numbers.leaderboard(tables[dataset, protocol], configs),
            "metrics": metrics,
            "differences": numbers.differences(configs, names),
            "curves": numbers.curves(configs),
            "classes": numbers.classes(configs, names, class_names, num_classes),
            "settings": [numbers.settings(config) for config in configs],
            "provenance": [numbers.provenance(config) for config in configs],
            "papers": paper_scores(configs),
            **shown,
        })  # fmt: skip
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
        why = {"why": f"the images are not there: {error}"}
        return {"gallery": nothing | why, "overlays": nothing | why}, None
    if not num_queries:
        return {"gallery": nothing | {"why": "left out: queries=0"}, "overlays": nothing}, table.class_names
    gallery = _galleries(configs, table, num_queries=num_queries, num_nearest=num_nearest)
    laid = nothing | {"why": gallery.get("why", "left out: overlays=false")}
    if device is not None and "queries" in gallery:
        laid = _overlays(configs, gallery["queries"], device=device)
    return {"gallery": gallery, "overlays": laid}, table.class_names


def _galleries(
    configs: Sequence[ConfigSummary], table: ImageTable, *, num_queries: int, num_nearest: int
) -> dict[str, Any]:
    """The same queries of every trained config and what is nearest to them, in its first run."""
    shown = that_can_be_shown(configs)
    if not shown:
        return {"configs": {}, "why": "no trained config has kept its embeddings"}
    chosen, num_drawn = chosen_queries(shown, num_queries)
    found: dict[str, Any] = {}
    used: dict[int, None] = {}
    rows: list[int] = []
    for config in shown:
        lines = retrieved(config, chosen, num_nearest)
        rows = [row for row, _ in lines]
        found[str(configs.index(config))] = {"run": config.complete[0].name, "nearest": [near for _, near in lines]}
        used |= dict.fromkeys([*rows, *(row for _, near in lines for row, _ in near)])
    return {
        "configs": found,
        "queries": rows,
        "drawn": num_drawn,
        "images": {str(row): _thumbnail(image(table, row)) for row in used},
        "names": {str(row): table.class_names[table.labels[row]].replace("_", " ") for row in used},
    }


def _overlays(configs: Sequence[ConfigSummary], rows: Sequence[int], *, device: str) -> dict[str, Any]:
    """What the pooling of each config's first run looks at in images, by config, or why it does not say.

    One scale holds for all: white is the weight of average pooling.
    """
    explained: dict[int, Explained] = {}
    why: dict[str, str] = {}
    for i, config in enumerate(tqdm(configs, "overlays", unit="config", disable=not sys.stderr.isatty())):
        run_dir = config.complete[0]
        try:
            run = load_run(run_dir, {"num_workers": 0}, device=device)
            explained[i] = explain_run(run, np.asarray(rows, dtype=np.int64), run_dir)
        except DmlbenchError as error:
            if is_trained(run_dir):
                log.warning("%s is without overlays: %s", config.label, error)
            why[str(i)] = str(error).replace(str(run_dir), "/".join(run_dir.parts[-2:]))
    if not explained:
        return {"configs": {}, "why": why}
    most = greatest_weight(list(explained.values()))
    found = {}
    for i, one in explained.items():
        pictures = overlay(one, most)
        found[str(i)] = [
            [None if part is None else _thumbnail(part[row]) for part in pictures] for row in range(len(rows))
        ]
    return {"configs": found, "why": why, "rows": [int(row) for row in rows], "most": round(most, 2)}


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
    parts = {
        "TITLE": html.escape(", ".join(group["title"] for group in content["groups"])),
        "STYLE": text["page.css"],
        "CHARTS": get_plotlyjs(),
        "DATA": data,
        "CODE": text["page.js"],
    }
    page = text["page.html"]
    before, *rest = page.split("{{")
    return before + "".join(parts[part.partition("}}")[0]] + part.partition("}}")[2] for part in rest)
