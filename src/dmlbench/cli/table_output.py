"""Print and write the table of ``dmlbench reproduce``."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from dmlbench.apps.table_rows import about
from dmlbench.cli.table_selection import Table
from dmlbench.types import DmlbenchError

if TYPE_CHECKING:
    from dmlbench.apps.plan import Plan, PlannedConfig
    from dmlbench.results.table import Table as PrintedTable

_MOST_LISTED = 5
_LONGEST = 40
"""Characters of a file's name that describe the part of a table; a hash identifies it."""


def print_table(
    cfg: DictConfig, table: Table, plan: "Plan", configs: Mapping[tuple[str, ...], "PlannedConfig | str"],
    moved: Sequence[str], mixed: Sequence[str], blocked: Mapping[str, DmlbenchError],
) -> None:  # fmt: skip
    """Summarize, print and write the table. A part of it, or one with other values, has its own file name.

    Args:
        cfg: of the command.
        table: the selected rows.
        plan: with the present state of its runs.
        configs: by their overrides, or why these cannot be composed.
        moved: overrides of the command line that make other configs than the paper's.
        mixed: other reasons why no row is comparable with the paper.
        blocked: why runs of configs could not begin, by ``sha256``.
    """
    from dmlbench.apps.table_comparison import compare_rows, given_by_hand, grid_tables, summarize
    from dmlbench.evaluation.spec import EvaluationSpec
    from dmlbench.papers import describe_table
    from dmlbench.results.side_by_side import side_by_side

    reasons = [*given_by_hand(moved), *mixed]
    base = Path(cfg.paths.output_dir) / "tables" / f"{table.name}{_suffix(table.part, moved)}"
    notes = [f"a part of the table: {'; '.join(table.part)}"] if table.part else []
    if in_use := [str(run.path) for run in plan.runs if run.state == "running"]:
        listed = ", ".join(in_use[:_MOST_LISTED]) + (" and others" if len(in_use) > _MOST_LISTED else "")
        notes.append(f"left to the processes that have them: {len(in_use)} runs ({listed})")
    if table.has_scores:
        comparisons, deviations = compare_rows(table.rows, plan, configs, blocked, reasons)
        described = describe_table(table.name)
        of_paper = [f"the paper's numbers: {described.numbers}", *([described.note] if described.note else [])]
        write_table(side_by_side(table.name, about(table.name), comparisons, [*of_paper, *notes, *deviations]), base)
        return
    spec = EvaluationSpec(metrics=tuple(cfg.metrics), recall_at=tuple(cfg.recall_at))
    summaries = summarize(plan, {config.sha256: spec for config in plan.configs})
    for config in plan.configs:
        if problem := summaries[config.sha256].problem:
            print(f"{config.name} cannot be summarized: {problem}")
    if not any(summary.found for summary in summaries.values()):
        print(f"{table.name}: no config has a complete run yet")
        return
    for note in reasons:
        print(note)
    made = grid_tables(summaries, spec)
    for (dataset, protocol), one in made.items():
        noted = replace(one, notes=(*one.notes, *notes))
        write_table(noted, base if len(made) == 1 else base.with_name(f"{base.name}-{dataset}-{protocol}"))


def write_table(table: "PrintedTable", base: Path) -> None:
    """Print a table, and write it as ``base`` with several suffixes."""
    from dmlbench.runtime import remove_leftovers

    print(table.to_text())
    remove_leftovers(base.parent)
    table.write(base)
    print(f"written: {base}.md, .csv, .tex\n")


def _suffix(part: Sequence[str], moved: Sequence[str]) -> str:
    """The end of a table's file name; empty for the paper's whole table."""
    if not part and not moved:
        return ""
    values = "-".join(word.partition("=")[2] or word for word in part)
    readable = re.sub(r"[^\w+.,-]+", "_", values[:_LONGEST])
    words = [*([readable] if part else []), *(["own"] if moved else [])]
    digest = hashlib.sha256("\n".join([*part, "", *sorted(moved)]).encode()).hexdigest()
    return f"-{'-'.join([*words, digest[:8]])}"
