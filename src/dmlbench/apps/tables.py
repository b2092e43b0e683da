"""Finds aggregated cells, names them and makes one table per data set and protocol."""

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from dmlbench.apps.changed_settings import changed_settings
from dmlbench.apps.trained import distance_of_run
from dmlbench.config import read_config, settings_of_cell
from dmlbench.evaluation.metrics.table import asked_scores, in_table_order
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.results.aggregate import aggregate_cell, has_scores, is_current, read_aggregate
from dmlbench.results.cautions import cautions
from dmlbench.results.store import CONFIG, RunInfo, cells_of, find_runs
from dmlbench.results.tables import NAMING_GROUPS, Table, cell_labels, make_table
from dmlbench.types import RunError

log = logging.getLogger(__name__)

Found = tuple[Path, list[RunInfo], dict[str, Any]]
"""A cell's folder, its runs and its summary."""


@dataclass(frozen=True)
class Cell:
    """An aggregated cell.

    Attributes:
        path: its folder.
        runs: its runs.
        summary: what ``aggregate_cell`` made of them.
        label: the name of its row.
        differing: notes on settings in which it and the other cells of its table differ, beyond their labels.
    """

    path: Path
    runs: tuple[RunInfo, ...]
    summary: dict[str, Any]
    label: str
    differing: tuple[str, ...] = ()


def asked_columns(spec: EvaluationSpec) -> list[str]:
    """The scores that ``spec`` asks for, in its own order."""
    columns = (score.name for metric in spec.metrics for score in asked_scores([metric], spec.recall_at))
    return list(dict.fromkeys(columns))


def find_cells(
    output_dir: str, pattern: str, spec: EvaluationSpec, *, allow_partial: bool = False
) -> dict[tuple[str, str], list[Cell]]:
    """Aggregated cells per (data set, protocol), trained ones first, each with the shortest name that tells it apart.

    Scores that ``spec`` asks for and a summary lacks are computed and kept.

    Raises:
        RunError: nothing matches; a cell is not aggregated, was aggregated from other runs, or is partial without
            ``allow_partial``.
    """
    cells = cells_of(find_runs(output_dir, pattern))
    if not cells:
        raise RunError(f"no run under {output_dir} matches '{pattern}'; `dmlbench status` lists what there is")
    grouped: dict[tuple[str, str], list[Found]] = {}
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
        if not has_scores(summary, spec):
            summary = aggregate_cell(
                runs, spec, distance_of=distance_of_run, allow_partial=allow_partial, progress=sys.stderr.isatty()
            )
        grouped.setdefault((runs[0].dataset, runs[0].protocol), []).append((path, runs, summary))
    if not grouped:
        raise RunError(f"no cell that matches '{pattern}' has a complete run; `dmlbench status` tells what happened")
    return named_cells(grouped)


def named_cells(grouped: Mapping[tuple[str, str], list[Found]]) -> dict[tuple[str, str], list[Cell]]:
    """Cells per (data set, protocol), trained ones first, each with the shortest name that tells it apart."""
    result = {}
    for key, everything in grouped.items():
        configs = {
            path: read_config(next(run.path for run in runs if run.state == "done") / CONFIG)
            for path, runs, _ in everything
        }
        settings = {path: _settings(config) for path, config in configs.items()}
        labels, differing = cell_labels(
            [(summary["choices"], settings[path]) for path, _, summary in everything],
            [changed_settings(configs[path], NAMING_GROUPS) for path, _, _ in everything],
        )
        labels = _distinct(labels, [path for path, _, _ in everything])
        named = [
            Cell(path, tuple(runs), summary, label, tuple(differing))
            for (path, runs, summary), label in zip(everything, labels, strict=True)
        ]
        result[key] = sorted(named, key=lambda cell: ("(untrained)" not in cell.label, cell.label))
    return result


def build_tables(
    grouped: Mapping[tuple[str, str], Sequence[Cell]], spec: EvaluationSpec, *, facts: Sequence[str] = ()
) -> dict[tuple[str, str], Table]:
    """One table per (data set, protocol) of what ``find_cells`` found; ``facts`` of their splits are columns, too.

    Raises:
        ConfigError: a metric or a fact is unknown.
    """
    tables, metrics = {}, asked_columns(spec)
    for (dataset, protocol), cells in grouped.items():
        summaries, labels = [cell.summary for cell in cells], [cell.label for cell in cells]
        title = f"{dataset} under {protocol}"
        tables[dataset, protocol] = make_table(title, summaries, labels, metrics, facts, cells[0].differing)
    return tables


def runs_to_csv(grouped: Mapping[tuple[str, str], Sequence[Cell]]) -> str:
    """Every run of the cells: where it stands, what its scores are not, and these as fractions."""
    rows = [
        {"dataset": dataset, "protocol": protocol, "row": cell.label, "cell": cell.path.name, "run": run,
         "scored_on": cell.summary["scored_on"], "notes": "; ".join(cautions(cell.summary)), **scores}
        for (dataset, protocol), cells in grouped.items() for cell in cells
        for run, scores in cell.summary["raw"].items()
    ]  # fmt: skip
    places = ["dataset", "protocol", "row", "cell", "run", "scored_on", "notes"]
    frame = pd.DataFrame(rows)
    return str(frame[[*places, *in_table_order(str(name) for name in frame if name not in places)]].to_csv(index=False))


def differing_settings(runs: Sequence[tuple[Path, Mapping[str, str]]]) -> list[str]:
    """Notes on settings in which the cells of runs, given with their choices, differ beyond their names."""
    configs = [read_config(run_dir / CONFIG) for run_dir, _ in runs]
    cells = [(choices, _settings(config)) for (_, choices), config in zip(runs, configs, strict=True)]
    return cell_labels(cells, [changed_settings(config, NAMING_GROUPS) for config in configs])[1]


def _settings(stored: Mapping[str, Any]) -> dict[str, Any]:
    """What defines the cell of a run's configuration, flattened."""
    return settings_of_cell(dict(stored))


def _distinct(labels: Sequence[str], cells: Sequence[Path]) -> list[str]:
    """Labels that several cells have, with the hashes that end the cells' names."""
    return [
        f"{label} [{cell.name.rpartition('-')[2]}]" if labels.count(label) > 1 else label
        for label, cell in zip(labels, cells, strict=True)
    ]
