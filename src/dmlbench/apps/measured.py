"""Whole published tables in short: what the documentation says has been measured."""

import csv
import re
from collections.abc import Iterator
from pathlib import Path

from dmlbench.types import DataError

_KINDS = ("separated", "concatenated")
_METRICS = ("P@1", "MAP@R")
_CAUTION = "NOT THE PUBLISHED DATA"
_ONE_REPEAT = re.compile(r"PARTIAL: (\d+ of \d+ runs), .*; one collection, hence no std")


def measured(folder: Path) -> str:
    """Markdown of all tables below ``folder`` whose rows have deviations, hence all runs, or one run of every fold:
    separated / concatenated.

    Args:
        folder: with ``<name>/<data set>-<protocol>.csv``, as ``dmlbench table`` writes them.

    Raises:
        DataError: there is no such table.
    """
    lines, notes = [], []
    for path in sorted(folder.glob("*/*-*.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        partial = {found[1] for row in rows if (found := _ONE_REPEAT.search(row.get("notes") or ""))}
        if not rows or not (all(_deviations(row) for row in rows) or len(partial) == 1):
            continue
        dataset, _, protocol = path.stem.rpartition("-")
        best = {metric: _best(rows, metric) for metric in _METRICS}
        for i, row in enumerate(rows):
            place = f"[{dataset}]({path.with_suffix('.md')}), `{protocol}`{''.join(f', {n}' for n in partial)}"
            cells = [" / ".join(_scores(row, metric, best[metric])) for metric in _METRICS]
            lines.append(f"| {place if i == 0 else ''} | {row['row']} | {' | '.join(cells)} |")
        notes += [f"{dataset}: {note}" for note in (rows[0].get("notes") or "").split("; ") if _CAUTION in note]
    if not lines:
        raise DataError(
            f"{folder} holds no table whose rows have deviations or one run of every fold; "
            "name a folder such as outputs/published"
        )
    head = [f"| data set, protocol | method | {' | '.join(_METRICS)} |", "|---|---|---|---|"]
    return "\n".join([*head, *lines, *(f"\n{note}" for note in notes)]) + "\n"


def _columns(row: dict[str, str], metric: str) -> Iterator[str]:
    """Columns of a metric without their last word, "mean" or "std", separated models first."""
    for kind in _KINDS:
        yield from (name[:-5] for name in row if re.fullmatch(rf"{kind} \(.*\) {re.escape(metric)} mean", name))


def _deviations(row: dict[str, str]) -> bool:
    """Whether every score has one; re-ranked results have none of concatenated models."""
    names = [name for metric in _METRICS for name in _columns(row, metric) if row[f"{name} mean"]]
    return bool(names) and all(row[f"{name} std"] for name in names)


def _best(rows: list[dict[str, str]], metric: str) -> dict[str, float]:
    return {
        name: max(float(mean) for row in rows if (mean := row[f"{name} mean"])) for name in _columns(rows[0], metric)
    }


def _scores(row: dict[str, str], metric: str, best: dict[str, float]) -> Iterator[str]:
    for name in _columns(row, metric):
        if not row[f"{name} mean"]:
            yield "–"
            continue
        mean = float(row[f"{name} mean"])
        text = f"{mean:.2f}" + (f" ± {float(row[f'{name} std']):.2f}" if row[f"{name} std"] else "")
        yield f"**{text}**" if mean == best[name] else text
