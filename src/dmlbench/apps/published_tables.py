"""Short form of all tables in a folder, as the documentation shows them."""

import re
from pathlib import Path

import pandas as pd

from dmlbench.results.cautions import OTHER_DATA
from dmlbench.results.table import Entry, markdown_lines
from dmlbench.types import DataError

_KINDS = "(separated|concatenated)"
_METRICS = ("P@1", "MAP@R")
_ONE_REPEAT = re.compile(r"PARTIAL: (\d+ of \d+ runs), .*; one collection, hence no std")


def summarize_tables(folder: Path) -> str:
    """Markdown of separated / concatenated scores of the tables below ``folder``, as ``dmlbench table`` writes them.

    A table counts if all of its scores have a standard deviation, or if its rows have one run of every fold.
    """
    rows, notes = [], []
    for path in sorted(folder.glob("*/*-*.csv")):
        table = pd.read_csv(path, dtype=str, keep_default_na=False)
        heads = [str(head).removesuffix(" mean") for head in table if str(head).endswith(" mean")]
        columns = {m: [h for h in heads if re.fullmatch(rf"{_KINDS} \(.*\) {m}", h)] for m in _METRICS}
        names = [name for of_metric in columns.values() for name in of_metric]
        if not names or table.empty:
            continue
        means = table[[f"{name} mean" for name in names]].set_axis(names, axis=1).apply(pd.to_numeric)
        deviations = table[[f"{name} std" for name in names]].set_axis(names, axis=1).apply(pd.to_numeric)
        partial = {found[1] for note in table.get("notes", []) if (found := _ONE_REPEAT.search(note))}
        scored = means.notna()
        if not (scored.any(axis=1).all() and (scored <= deviations.notna()).all(axis=None)) and len(partial) != 1:
            continue
        is_best = means == means.max()
        dataset, _, protocol = path.stem.rpartition("-")
        place = f"[{dataset}]({path.with_suffix('.md')}), `{protocol}`{''.join(f', {n}' for n in partial)}"
        for i, label in enumerate(table["row"]):
            texts = {}
            for name in names:
                std = deviations[name][i]
                text = str(Entry(means[name][i], None if pd.isna(std) else std)) if scored[name][i] else "–"
                texts[name] = f"**{text}**" if is_best[name][i] else text
            cells = [" / ".join(texts[name] for name in columns[metric]) for metric in _METRICS]
            rows.append(["" if i else place, label, *cells])
        notes += [f"{dataset}: {note}" for note in table.get("notes", [""])[0].split("; ") if OTHER_DATA in note]
    if not rows:
        raise DataError(
            f"{folder} holds no table whose rows have deviations or one run of every fold; "
            "name a folder such as outputs/published"
        )
    lines = markdown_lines(["data set, protocol", "method", *_METRICS], rows, "llll")
    return "\n".join([*lines, *(f"\n{note}" for note in notes)]) + "\n"
