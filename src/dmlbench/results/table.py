"""A table of results in text, Markdown, CSV and LaTeX, and a short form of written tables."""

import itertools
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from dmlbench.results.caveats import PARTIAL, by_fact
from dmlbench.runtime import atomic_write, remove_leftovers
from dmlbench.types import DataError, escape_latex

_PERCENT, _BEST = "percent", "; best of each column in bold"
_WIDTH = 120
_MOST_FLOATING = 40
"""Rows of a table with blocks that LaTeX keeps on one page."""
_KINDS = "(separated|concatenated)"
_METRICS = ("P@1", "MAP@R")
_CAVEAT = re.compile(r"[A-Z][A-Z -]+: ")
_ONE_REPEAT = re.compile(r"PARTIAL: (\d+ of \d+ runs), .*; one collection, hence no std")


@dataclass(frozen=True)
class Entry:
    """A score in percent (a class distance as it is); ``std`` is None for a single value."""

    mean: float
    std: float | None

    def __str__(self) -> str:
        return f"{self.mean:.2f}" if self.std is None else f"{self.mean:.2f} ± {self.std:.2f}"


@dataclass(frozen=True)
class Table:
    """Entries, texts or None (printed as a dash) under heads, with notes.

    The index of ``frame`` labels the rows; its columns are heads or (group, head).
    """

    title: str
    frame: pd.DataFrame
    notes: tuple[str, ...] = ()  # lines under the table
    about: str = ""  # what the table is, after the title
    align: str = ""  # "l", "c" or "r" for the labels and each column; text and Markdown right-align what LaTeX centers
    blocks: tuple[str, ...] = ()  # heading of the block of each row
    higher_is_better: tuple[bool, ...] = ()  # of each column, whether its highest mean is marked
    competes: tuple[bool, ...] = ()  # of each row, whether it may be the best
    caveats: tuple[str, ...] = ()  # notes that the caption in LaTeX must not leave out
    row_notes: tuple[tuple[str, ...], ...] = ()  # notes of each row, in the CSV
    row_settings: tuple[str, ...] = ()  # settings of each row that its label does not say, in the CSV
    data: pd.DataFrame | None = None  # what the CSV holds instead of means, standard deviations and ``row_notes``

    @property
    def columns(self) -> list[tuple[str, ...]]:
        """Heads of the columns, behind their group where they have one."""
        return [column if isinstance(column, tuple) else (str(column),) for column in self.frame.columns]

    def best(self) -> list[float | None]:
        """Highest printed mean of each column among rows that compete; None where fewer than two do."""
        result: list[float | None] = []
        for marks, (_, column) in zip(self.higher_is_better, self.frame.items(), strict=True):
            competing = itertools.compress(column, self.competes)
            means = [round(entry.mean, 2) for entry in competing if isinstance(entry, Entry)]
            result.append(max(means) if marks and len(means) > 1 else None)
        return result

    @property
    def _marks_best(self) -> bool:
        return bool(self.higher_is_better) and any(top is not None for top in self.best())

    def _unit(self, best: str) -> str:
        """The unit of the scores and, if one is marked, the mark of the ``best``; empty for a table of texts."""
        return _PERCENT + best * self._marks_best if self.higher_is_better else ""

    def to_text(self) -> str:
        """For the terminal: aligned columns, a star at the best."""
        heads = [str(self.frame.index.name or ""), *(column[-1] for column in self.columns)]
        rows = self._cells("{}*", "{} ") if self._marks_best else self._cells()
        widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
        top = " " * widths[0]
        for name, size, stop in self._groups():
            room = sum(widths[stop - size + 1 : stop + 1]) + 2 * (size - 1)
            widths[stop] += max(0, len(name) - room)
            top += "  " + name.center(max(len(name), room))

        def line(cells: Sequence[str]) -> str:
            aligned = zip(cells, widths, self._align(), strict=True)
            return "  ".join(c.ljust(width) if side == "l" else c.rjust(width) for c, width, side in aligned).rstrip()

        lines = textwrap.wrap(f"{self.title}: {self.about}" if self.about else self.title, _WIDTH)
        if self.blocks:
            for name, block in self._blocks(rows):
                lines += [name, line(heads), *map(line, block), ""]
        else:
            rule = "-" * max(len(top), sum(widths) + 2 * (len(widths) - 1))
            lines += [rule, *([top.rstrip()] if top.strip() else []), line(heads), rule, *map(line, rows), rule]
        notes = filter(None, (self._unit("; * best of the column"), *self.notes))
        return "\n".join([*lines, *(f"  {note}" for note in notes)])

    def to_markdown(self) -> str:
        heads = [str(self.frame.index.name or ""), *self._full_heads()]
        lines = [f"### {self.title}", *([self.about] if self.about else [])]
        for name, rows in self._blocks(self._cells("**{}**")):
            lines += ["", *([f"**{name}**", ""] if name else []), *markdown_lines(heads, rows, self._align())]
        notes = filter(None, (self._unit(_BEST), *self.notes))
        return "\n".join([*lines, "", *(f"- {note}" for note in notes), ""])

    def to_csv(self) -> str:
        return str(self.to_frame().to_csv(index=False, lineterminator="\n"))

    def to_frame(self) -> pd.DataFrame:
        """What the CSV holds: means and standard deviations in columns of their own, with full precision."""
        if self.data is not None:
            return self.data
        columns: dict[str, Iterable[object]] = {"row": self.frame.index}
        for name, entries in zip(self._full_heads(), self._entries().T, strict=True):
            if all(isinstance(entry, str) for entry in entries if entry is not None) and any(entries):
                columns[name] = _numbers(entries)
                continue
            columns[f"{name} mean"] = [entry.mean if isinstance(entry, Entry) else entry for entry in entries]
            deviations = (entry.std if isinstance(entry, Entry) else None for entry in entries)
            columns[f"{name} std"] = [np.nan if std is None else std for std in deviations]
        settings = {"settings": self.row_settings} if any(self.row_settings) else {}
        return pd.DataFrame({**columns, **settings, "notes": ["; ".join(notes) for notes in self.row_notes]})

    def to_latex(self) -> str:
        """A floating ``table``, or a ``longtable`` of many rows in blocks; the caption has the caveats."""
        escape = escape_latex
        title = ", ".join(filter(None, (self.title, self._unit(_BEST))))
        sentences = filter(None, (title, self.about.removesuffix("."), *self.caveats))
        caption = rf"\caption{{{escape('. '.join(sentences))}.}}"
        label = rf"\label{{tab:{re.sub('[^a-z0-9]+', '-', self.title.lower())}}}"
        heads = " & ".join([str(self.frame.index.name or ""), *(escape(column[-1]) for column in self.columns)])
        rows = self._cells(r"\textbf{{{}}}", escape=True)
        body = [" & ".join(cells) + r" \\" for cells in rows]
        if self.blocks:
            body = []
            for name, block in self._blocks(rows):
                body.append(rf"\multicolumn{{{len(self._align())}}}{{l}}{{{escape(name)}}} \\")
                body += [*(" & ".join(cells) + r" \\" for cells in block), r"\addlinespace"]
        if self.blocks and len(rows) > _MOST_FLOATING:
            lines = [
                r"% needs \usepackage{booktabs,longtable}",
                rf"\begin{{longtable}}{{{self._align()}}}",
                rf"{caption}{label}\\",
                rf"\toprule {heads} \\ \midrule \endhead",
            ]
            return "\n".join([*lines, *body, r"\bottomrule", r"\end{longtable}", ""])
        groups = [rf"\multicolumn{{{size}}}{{c}}{{{escape(name)}}}" for name, size, _ in self._groups()]
        lines = [
            *(r"% needs \usepackage{booktabs}", *(f"% {note}" for note in self.notes)),
            *(r"\begin{table}", r"\centering", caption, label, rf"\begin{{tabular}}{{{self._align()}}}", r"\toprule"),
            *([" & ".join(["", *groups]) + r" \\"] if groups else []),
            *(heads + r" \\", r"\midrule", *body, r"\bottomrule"),
            *(r"\end{tabular}", r"\end{table}", ""),
        ]
        return "\n".join(lines)

    def write(self, base: Path, suffixes: Sequence[str] = ("md", "csv", "tex")) -> list[Path]:
        """Write ``<base>.md``, ``.csv`` and ``.tex``."""
        base.parent.mkdir(parents=True, exist_ok=True)
        forms = {"md": self.to_markdown, "csv": self.to_csv, "tex": self.to_latex}
        paths = {suffix: base.with_name(f"{base.name}.{suffix}") for suffix in suffixes}
        for suffix, path in paths.items():
            atomic_write(path, forms[suffix]().encode())
        return list(paths.values())

    def publish(self, base: Path) -> None:
        """Print the text, write the other forms, and say where, and whether they replace another table."""
        print(self.to_text())
        remove_leftovers(base.parent)
        csv = base.with_name(f"{base.name}.csv")
        replaced = csv.is_file() and csv.read_text(encoding="utf-8") != self.to_csv()
        self.write(base)
        print(f"written: {base}.md, .csv, .tex{' (replaced)' if replaced else ''}\n")

    def _align(self) -> str:
        return self.align or "l" + "r" * len(self.frame.columns)

    def _groups(self) -> list[tuple[str, int, int]]:
        """Runs of columns with the same group: (name, number of columns, one past the last)."""
        if self.frame.columns.nlevels == 1:
            return []
        runs = itertools.groupby(enumerate(self.columns), key=lambda column: column[1][0])
        members = [(name, list(run)) for name, run in runs]
        return [(name, len(run), run[-1][0] + 1) for name, run in members]

    def _full_heads(self) -> list[str]:
        """Heads of the columns as single words, each behind its group."""
        return [" ".join(filter(None, column)) for column in self.columns]

    def _entries(self) -> np.ndarray:
        return self.frame.to_numpy(dtype=object)

    def _cells(self, best: str = "{}", other: str = "{}", *, escape: bool = False) -> list[list[str]]:
        """Labels and entries as text, put into the templates ``best`` and ``other``."""
        tops = self.best() if self.higher_is_better else [None] * len(self.frame.columns)
        competes = self.competes or [False] * len(self.frame)
        lines = []
        for label, entries, may_be_best in zip(self.frame.index, self._entries(), competes, strict=True):
            cells = [escape_latex(str(label)) if escape else str(label)]
            for entry, top in zip(entries, tops, strict=True):
                text = "–" if entry is None else str(entry)
                is_best = may_be_best and isinstance(entry, Entry) and top == round(entry.mean, 2)
                cells.append((best if is_best else other).format(escape_latex(text) if escape else text))
            lines.append(cells)
        return lines

    def _blocks(self, rows: Sequence[list[str]]) -> Iterable[tuple[str, list[list[str]]]]:
        """Rows by the heading of their block."""
        blocks: dict[str, list[list[str]]] = {}
        for name, row in zip(self.blocks or [""] * len(rows), rows, strict=True):
            blocks.setdefault(name, []).append(row)
        return blocks.items()


def _numbers(texts: np.ndarray) -> Sequence[object]:
    """Texts such as "163,840" and "+3.3" as numbers if all are."""
    column = pd.Series(texts, dtype=object)
    numbers = pd.to_numeric(column.str.replace(",", ""), errors="coerce")
    return list(column if (numbers.isna() != column.isna()).any() else numbers.convert_dtypes())


def markdown_lines(heads: Sequence[str], rows: Iterable[Sequence[str]], align: str) -> list[str]:
    """A Markdown table; columns that ``align`` does not name "l" are right-aligned."""
    rule = "|" + "|".join("---" if side == "l" else "---:" for side in align) + "|"
    lines = (" | ".join(cell.replace("|", "\\|") for cell in cells) for cells in [heads, *rows])
    head, *body = (f"| {line} |" for line in lines)
    return [head, rule, *body]


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
        row_notes = table.get("notes", pd.Series("", table.index))
        one_repeat = {found and found[1] for found in map(_ONE_REPEAT.search, row_notes)}
        partial = one_repeat - {None} if len(one_repeat) == 1 else set()
        scored = means.notna()
        if not (scored.any(axis=1).all() and (scored <= deviations.notna()).all(axis=None)) and not partial:
            continue
        if partial:  # the place says so
            row_notes = row_notes.str.removeprefix(PARTIAL)
        competes = ~row_notes.str.contains(PARTIAL)
        is_best = (means == means[competes].max()).mul(competes, axis=0)
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
        caveats = [[part for part in note.split("; ") if _CAVEAT.match(part)] for note in row_notes]
        notes += [f"{dataset}: {line}" for line in by_fact(caveats, list(table["row"]))]
    if not rows:
        raise DataError(
            f"{folder} holds no table whose rows have standard deviations or one run of every fold. "
            "Name a folder such as outputs/published."
        )
    lines = markdown_lines(["data set, protocol", "method", *_METRICS], rows, "llll")
    return "\n".join([*lines, *(f"\n{note}" for note in notes)]) + "\n"
