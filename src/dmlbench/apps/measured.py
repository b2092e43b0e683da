"""Whole published tables in short: what README says has been measured."""

import csv
import re
from collections.abc import Iterator
from pathlib import Path

from dmlbench.types import DataError

_KINDS = ("separated", "concatenated")
_METRICS = ("P@1", "MAP@R")
_CAUTION = "NOT THE PUBLISHED DATA"


def measured(folder: Path) -> str:
    """Markdown of all tables below ``folder`` whose rows have deviations, hence all runs: separated / concatenated.

    Args:
        folder: with ``<name>/<data set>-<protocol>.csv``, as ``dmlbench table`` writes them.

    Raises:
        DataError: there is no such table.
    """
    lines, notes = [], []
    for path in sorted(folder.glob("*/*-*.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        if not rows or not all(_deviations(row) for row in rows):
            continue
        dataset, _, protocol = path.stem.rpartition("-")
        best = {metric: _best(rows, metric) for metric in _METRICS}
        for i, row in enumerate(rows):
            place = f"[{dataset}]({path.with_suffix('.md')}), `{protocol}`" if i == 0 else ""
            cells = [" / ".join(_scores(row, metric, best[metric])) for metric in _METRICS]
            lines.append(f"| {place} | {row['row']} | {' | '.join(cells)} |")
        notes += [f"{dataset}: {note}" for note in (rows[0].get("notes") or "").split("; ") if _CAUTION in note]
    if not lines:
        raise DataError(f"{folder} holds no table whose rows have deviations; name a folder such as outputs/published")
    head = [f"| data set, protocol | method | {' | '.join(_METRICS)} |", "|---|---|---|---|"]
    return "\n".join([*head, *lines, *(f"\n{note}" for note in notes)]) + "\n"


def _columns(row: dict[str, str], metric: str) -> Iterator[str]:
    """Columns of a metric without their last word, "mean" or "std", separated models first."""
    for kind in _KINDS:
        yield from (name[:-5] for name in row if re.fullmatch(rf"{kind} \(.*\) {re.escape(metric)} mean", name))


def _deviations(row: dict[str, str]) -> list[str]:
    found = [row[f"{name} std"] for metric in _METRICS for name in _columns(row, metric)]
    return found if all(found) else []


def _best(rows: list[dict[str, str]], metric: str) -> dict[str, float]:
    return {name: max(float(row[f"{name} mean"]) for row in rows) for name in _columns(rows[0], metric)}


def _scores(row: dict[str, str], metric: str, best: dict[str, float]) -> Iterator[str]:
    for name in _columns(row, metric):
        mean = float(row[f"{name} mean"])
        text = f"{mean:.2f} ± {float(row[f'{name} std']):.2f}"
        yield f"**{text}**" if mean == best[name] else text
