"""``dmlbench report``: a picture of aggregated cells."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="dmlbench report",
        description="Draw aggregated cells: bars with deviations, and a few queries with their nearest images.",
        epilog="example: dmlbench report 'glyphs_collage/mlrc/*'",
    )
    parser.add_argument(
        "pattern", nargs="?", default="**", help="pattern of <dataset>/<protocol>/<cell> (default: all)"
    )
    parser.add_argument("--metrics", nargs="+", default=["p_at_1", "map_at_r"], help="default: %(default)s")
    parser.add_argument("--queries", type=int, default=5, help="queries to show (default: %(default)s)")
    parser.add_argument("--allow-partial", action="store_true", help="although runs are missing")
    parser.add_argument(
        "--output-dir", default=os.environ.get("DMLBENCH_OUTPUT", "outputs"), help="default: %(default)s"
    )
    options = parser.parse_args(list(arguments))

    from dmlbench.apps.report import draw_report
    from dmlbench.apps.tables import find_cells

    cells_by_group = find_cells(options.output_dir, options.pattern, allow_partial=options.allow_partial)
    for (dataset, protocol), cells in cells_by_group.items():
        path = Path(options.output_dir) / "tables" / f"{dataset}-{protocol}.png"
        title = f"{dataset} under {protocol}"
        draw_report(cells, path, title=title, metrics=options.metrics, num_queries=options.queries)
        print(f"written: {path}")
