"""Finds aggregated cells, names them and makes one table per data set and protocol."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from dmlbench.config import NOT_PART_OF_A_CELL, NOT_PART_OF_A_RUN, flatten, load_config
from dmlbench.results.aggregate import is_current, read_aggregate
from dmlbench.results.store import CONFIG, RunInfo, cells_of, find_runs
from dmlbench.results.tables import Table, cell_labels, make_table
from dmlbench.types import ConfigError, RunError

log = logging.getLogger(__name__)

# Keys that differ between runs or machines without moving a number, so that they never name a row.
_UNNAMED = (*NOT_PART_OF_A_CELL, *NOT_PART_OF_A_RUN, "dataset.table.cache_dir")


@dataclass(frozen=True)
class Cell:
    """An aggregated cell: its folder, its runs, its summary and the name of its row."""

    path: Path
    runs: tuple[RunInfo, ...]
    summary: dict[str, Any]
    label: str


def find_cells(output_dir: str, pattern: str, *, allow_partial: bool = False) -> dict[tuple[str, str], list[Cell]]:
    """Aggregated cells per (data set, protocol), trained ones first, each with the shortest name that tells it apart.

    Raises:
        RunError: nothing matches; a cell is not aggregated, was aggregated from other runs, or is partial without
            ``allow_partial``.
    """
    cells = cells_of(find_runs(output_dir, pattern))
    if not cells:
        raise RunError(f"no run under {output_dir} matches '{pattern}'; `dmlbench status` lists what there is")
    grouped: dict[tuple[str, str], list[tuple[Path, list[RunInfo], dict[str, Any]]]] = {}
    for path, runs in cells.items():
        if allow_partial and not any(run.state == "done" for run in runs):
            log.warning("%s has no complete run and is left out", path)
            continue
        summary = read_aggregate(path)
        if summary is None or not is_current(path, summary):
            how = "not aggregated" if summary is None else "aggregated from other runs than lie there now"
            raise RunError(f"{path} is {how}; run `dmlbench aggregate 'cells={path.relative_to(output_dir)}'`")
        if summary["missing"] and not allow_partial:
            raise RunError(
                f"{path} is partial, without {', '.join(summary['missing'])}; run them or set allow_partial=true"
            )
        grouped.setdefault((runs[0].dataset, runs[0].protocol), []).append((path, runs, summary))
    if not grouped:
        raise RunError(f"no cell that matches '{pattern}' has a complete run; `dmlbench status` tells what happened")
    result = {}
    for key, members in grouped.items():
        labels = cell_labels([(summary["choices"], _config(runs[0].path)) for _, runs, summary in members])
        named = [
            Cell(path, tuple(runs), summary, label)
            for (path, runs, summary), label in zip(members, labels, strict=True)
        ]
        result[key] = sorted(named, key=lambda cell: ("(untrained)" not in cell.label, cell.label))
    return result


def build_tables(
    output_dir: str, pattern: str, metrics: Sequence[str], *, allow_partial: bool = False
) -> dict[tuple[str, str], Table]:
    """One table per (data set, protocol) of the cells that match.

    Raises:
        RunError: as ``find_cells``.
        ConfigError: a metric is unknown.
    """
    tables = {}
    for (dataset, protocol), cells in find_cells(output_dir, pattern, allow_partial=allow_partial).items():
        title = f"{dataset} under {protocol}"
        try:
            tables[dataset, protocol] = make_table(title, [c.summary for c in cells], [c.label for c in cells], metrics)
        except KeyError as error:
            raise ConfigError(str(error.args[0])) from None
    return tables


def _config(run_dir: Path) -> dict[str, Any]:
    config = flatten(OmegaConf.to_container(load_config(run_dir / CONFIG)))
    return {key: value for key, value in config.items() if not key.startswith(_UNNAMED)}
