"""One HTML file of aggregated configs, with styles, code, charts and images; needs no server and no network."""

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
from dmlbench.apps.report.retrievals import first_run
from dmlbench.apps.tables import ConfigSummary, asked_columns, build_tables
from dmlbench.apps.trained import table_of_run
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.runtime import atomic_write
from dmlbench.types import DmlbenchError


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
        grouped: what ``find_configs`` found.
        spec: the scores to show.
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
        table = table_of_run(first_run(configs[0]), configs[0].summary)
    except DmlbenchError as error:  # tables, curves and differences need no images
        why = {"why": f"the images are not there: {error}"}
        return {"gallery": nothing | why, "overlays": nothing | why}, None
    if not num_queries:
        return {"gallery": nothing | {"why": "left out: queries=0"}, "overlays": nothing}, table.class_names
    gallery, rows = galleries(configs, table, num_queries=num_queries, num_nearest=num_nearest)
    laid = nothing | {"why": "left out: overlays=false"}
    if device is not None:
        laid = overlays(configs, rows, device=device) if rows else nothing | {"why": gallery["why"]}
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
