"""The table of ``dmlbench reproduce``, printed and written; a part of it has files of its own."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from dmlbench.apps.experiment_tables import about
from dmlbench.cli.asked_table import Table
from dmlbench.types import DmlbenchError

if TYPE_CHECKING:
    from dmlbench.apps.plan import Cell, Plan
    from dmlbench.apps.reproduce import Summary

_SUFFIXES = {"md": "markdown", "csv": "csv", "tex": "latex"}
_MOST_LISTED = 5
_LONGEST = 40
"""Characters of a file's name that say in words which part of a table it holds; a hash tells it from all others."""


def print_table(
    cfg: DictConfig, table: Table, plan: "Plan", cells: Mapping[tuple[str, ...], "Cell | str"],
    moved: Sequence[str], mixed: Sequence[str], blocked: Mapping[str, DmlbenchError],
) -> None:  # fmt: skip
    """Sum up, print and write the table; a part of it, or one with values given by hand, has a name of its own.

    Args:
        cfg: of the command.
        table: what was asked for.
        plan: all runs of its cells as they are now.
        cells: by their overrides, or why they cannot be composed.
        moved: overrides of the command line that make other cells than the paper's.
        mixed: what else forbids to compare anything with the paper.
        blocked: why runs of cells could not begin, by ``sha256``.
    """
    from dmlbench.apps.reproduce import compare_lines, given_by_hand, grid_tables, spec_for, summarize
    from dmlbench.evaluation.spec import EvaluationSpec
    from dmlbench.results import side_by_side
    from dmlbench.results import tables as plain
    from dmlbench.runtime import remove_leftovers

    reasons = [*given_by_hand(moved), *mixed]
    base = Path(cfg.paths.output_dir) / "tables" / f"{table.name}{_suffix(table.part, moved)}"
    notes = [f"a part of the table: {'; '.join(table.part)}"] if table.part else []
    in_use = [str(run.path) for run in plan.runs if run.state == "running"]
    if in_use:
        listed = ", ".join(in_use[:_MOST_LISTED]) + (" and others" if len(in_use) > _MOST_LISTED else "")
        notes.append(f"left to the processes that have them: {len(in_use)} runs ({listed})")
    if table.lines:
        labels: dict[str, list[str]] = {}
        for line in table.lines:
            cell = cells.get(line.overrides)
            if not line.why and cell is not None and not isinstance(cell, str):
                labels.setdefault(cell.sha256, []).append(line.label)
        summaries = summarize(plan, {sha256: spec_for(asked) for sha256, asked in labels.items()})
        for sha256, error in blocked.items():
            if sha256 in summaries and summaries[sha256].found is None:
                summaries[sha256] = replace(summaries[sha256], problem=str(error))
        found = compare_lines(table.lines, cells, summaries, reasons)
        notes += _deviations(table, cells, summaries)
        done = side_by_side.SideBySide(table.name, about(table.name), tuple(found), (*_notes(table), *notes))
        print(side_by_side.to_text(done))
        renders = {suffix: getattr(side_by_side, f"to_{how}")(done) for suffix, how in _SUFFIXES.items()}
        remove_leftovers(base.parent)
        _write(base, renders)
        return
    spec = EvaluationSpec(metrics=tuple(cfg.metrics), recall_at=tuple(cfg.recall_at))
    summaries = summarize(plan, spec)
    for cell in plan.cells:
        if problem := summaries[cell.sha256].problem:
            print(f"{cell.name} cannot be summed up: {problem}")
    if not any(summary.found for summary in summaries.values()):
        print(f"{table.name}: no cell has a complete run yet")
        return
    for note in reasons:
        print(note)
    made = grid_tables(summaries, spec)
    remove_leftovers(base.parent)
    for (dataset, protocol), one in made.items():
        noted = replace(one, notes=(*one.notes, *notes))
        print(plain.to_text(noted))
        renders = {suffix: getattr(plain, f"to_{how}")(noted) for suffix, how in _SUFFIXES.items()}
        _write(base if len(made) == 1 else base.with_name(f"{base.name}-{dataset}-{protocol}"), renders)


def _suffix(part: Sequence[str], moved: Sequence[str]) -> str:
    """What follows a table's name in those of its files; empty for the whole table as the paper has it."""
    if not part and not moved:
        return ""
    values = "-".join(word.partition("=")[2] or word for word in part)
    readable = re.sub(r"[^\w+.,-]+", "_", values[:_LONGEST])
    words = [*([readable] if part else []), *(["own"] if moved else [])]
    digest = hashlib.sha256("\n".join([*part, "", *sorted(moved)]).encode()).hexdigest()
    return f"-{'-'.join([*words, digest[:8]])}"


def _write(base: Path, renders: Mapping[str, str]) -> None:
    from dmlbench.runtime import atomic_write

    base.parent.mkdir(parents=True, exist_ok=True)
    for suffix, text in renders.items():
        atomic_write(base.with_name(f"{base.name}.{suffix}"), text.encode())
    print(f"written: {base}.md, .csv, .tex\n")


def _deviations(
    table: Table, cells: Mapping[tuple[str, ...], "Cell | str"], summaries: Mapping[str, "Summary"]
) -> list[str]:
    """What rows that were run still differ in from the paper or its code."""
    from dmlbench.results.cautions import by_fact

    run = {}
    for line in table.lines:
        cell = None if line.why else cells.get(line.overrides)
        if cell is not None and not isinstance(cell, str) and (found := summaries[cell.sha256].found):
            run[line.score.row] = found[2].get("deviations", ())
    return by_fact(list(run.values()), list(run))


def _notes(table: Table) -> tuple[str, ...]:
    from dmlbench.papers import describe_table

    described = describe_table(table.name)
    return (f"the paper's numbers: {described.numbers}", *([described.note] if described.note else []))
