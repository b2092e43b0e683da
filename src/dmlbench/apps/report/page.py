"""One HTML file of aggregated cells that needs no server and no network: styles, code, charts and images lie in it."""

import datetime
import html
import json
import sys
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs
from tqdm import tqdm

from dmlbench import __version__
from dmlbench.apps.report import numbers
from dmlbench.apps.report.paper_scores import paper_scores
from dmlbench.apps.report.pictures import galleries, overlays
from dmlbench.apps.report.retrievals import table_of
from dmlbench.apps.tables import Cell, asked_columns, build_tables
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.runtime import atomic_write
from dmlbench.types import DmlbenchError, RunError


def write_page(
    grouped: Mapping[tuple[str, str], Sequence[Cell]],
    path: Path,
    *,
    spec: EvaluationSpec,
    num_queries: int,
    num_nearest: int,
    num_classes: int,
    with_overlays: bool,
    device: str,
) -> None:
    """Write a page of cells, a part for each data set and protocol.

    Args:
        grouped: what ``find_cells`` found.
        path: file to write.
        spec: the scores to show.
        num_queries: queries to show with what is nearest to them; 0 for none.
        num_nearest: images a query.
        num_classes: classes to list, the hardest.
        with_overlays: whether to load each cell's first model and show what its pooling looks at.
        device: for these.

    Raises:
        ConfigError: a metric that no cell has.
        RunError: files that are not those of their run; the page cannot be written.
    """
    tables = build_tables(grouped, spec)
    groups = []
    for (dataset, protocol), cells in tqdm(grouped.items(), "report", unit="table", disable=not sys.stderr.isatty()):
        metrics = numbers.metrics_of_runs(cells, asked_columns(spec))
        names = [metric["name"] for metric in metrics]
        shown, class_names = _images(cells, num_queries, num_nearest, device if with_overlays else None)
        groups.append({
            "title": f"{dataset} under {protocol}",
            "leaderboard": numbers.leaderboard(tables[dataset, protocol], cells),
            "metrics": metrics,
            "differences": numbers.differences(cells, names),
            "curves": numbers.curves(cells),
            "classes": numbers.classes(cells, names, class_names, num_classes),
            "settings": [numbers.settings(cell) for cell in cells],
            "provenance": [numbers.provenance(cell) for cell in cells],
            "papers": paper_scores(cells),
            **shown,
        })  # fmt: skip
    made = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    content = {"made": f"dmlbench {__version__}, {made}", "groups": groups}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, _filled(content).encode())
    except OSError as error:
        raise RunError(f"cannot write '{path}' ({error.strerror}); choose another output") from error


def _images(
    cells: Sequence[Cell], num_queries: int, num_nearest: int, device: str | None
) -> tuple[dict[str, Any], Sequence[str] | None]:
    """Galleries and overlays, or why there are none, and the names of the classes where the data are there."""
    nothing: dict[str, Any] = {"cells": {}}
    try:
        table = table_of(cells[0])
    except DmlbenchError as error:  # tables, curves and differences need no images
        why = {"why": f"the images are not there: {error}"}
        return {"gallery": nothing | why, "overlays": nothing | why}, None
    if not num_queries:
        return {"gallery": nothing | {"why": "left out: queries=0"}, "overlays": nothing}, table.class_names
    gallery, rows = galleries(cells, table, num_queries=num_queries, num_nearest=num_nearest)
    laid = nothing | {"why": "left out: overlays=false"}
    if device is not None:
        laid = overlays(cells, rows, device=device) if rows else nothing | {"why": gallery["why"]}
    return {"gallery": gallery, "overlays": laid}, table.class_names


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
