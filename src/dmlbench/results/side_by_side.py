"""Our scores beside a paper's as text, Markdown, CSV and LaTeX: ours, paper, difference, tolerance, verdict."""

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dmlbench.results.verdicts import RULE, Comparison, counts
from dmlbench.types import escape_latex

HEADS = ("row", "score", "ours", "paper", "difference", "tolerance", "verdict")


@dataclass(frozen=True)
class SideBySide:
    """A paper's table with ours.

    Attributes:
        name: as in "gsp/table2".
        about: what the table is.
        comparisons: score by score in the paper's order.
        notes: what has to be known of our numbers.
    """

    name: str
    about: str
    comparisons: tuple[Comparison, ...]
    notes: tuple[str, ...]

    @property
    def foot(self) -> list[str]:
        """Lines under the table."""
        return [
            counts(self.comparisons),
            f"percent, mean ± population std; {RULE}",
            *_reasons(self.comparisons),
            *self.notes,
        ]


def _reasons(comparisons: Sequence[Comparison]) -> Iterator[str]:
    """Each note of the verdicts once, with the rows that it is about."""
    rows: dict[str, dict[str, None]] = {}
    for comparison in comparisons:
        if comparison.note:
            rows.setdefault(comparison.note, {})[comparison.score.row] = None
    for note, labels in rows.items():
        yield f"{', '.join(labels)}: {note}"


def _blocks(table: SideBySide) -> Iterator[tuple[str, list[Comparison]]]:
    """Scores that share data set, backbone, protocol, size and setting, under a head that says these."""

    def head(comparison: Comparison) -> str:
        score = comparison.score
        size = f"{score.embedding_size}-D" if score.embedding_size else ""
        words = (score.dataset, score.backbone, score.protocol, score.kind, size, score.setting)
        return ", ".join(word for word in words if word) or table.name

    blocks: dict[str, list[Comparison]] = {}
    for comparison in table.comparisons:
        blocks.setdefault(head(comparison), []).append(comparison)
    yield from blocks.items()


def _cells(comparison: Comparison) -> list[str]:
    score, difference, allowed = comparison.score, comparison.difference, comparison.tolerance
    kinds = [word for word in comparison.kind.split(", ") if word and word not in ("separated", "concatenated")]
    kind = f" ({', '.join(kinds)})" if kinds else ""
    paper = "–" if score.mean is None else str(score.mean) + ("" if score.std is None else f" ± {score.std}")
    ours = "–" if comparison.mean is None else f"{comparison.mean:.2f}"
    ours += "" if comparison.std is None else f" ± {comparison.std:.2f}"
    return [
        score.row, score.metric, ours + kind, paper, "" if difference is None else f"{difference:+.2f}",
        "" if allowed is None else f"{allowed:.2f}", comparison.verdict,
    ]  # fmt: skip


def to_text(table: SideBySide) -> str:
    """For the terminal: aligned columns, a block for each data set."""
    blocks = [(name, [_cells(comparison) for comparison in block]) for name, block in _blocks(table)]
    everything = [list(HEADS), *(cells for _, block in blocks for cells in block)]
    widths = [max(len(cells[i]) for cells in everything) for i in range(len(HEADS))]

    def line(cells: Sequence[str]) -> str:
        aligned = [c.rjust(w) if 2 <= i < 6 else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return "  ".join(aligned).rstrip()

    lines = [f"{table.name}: {table.about}" if table.about else table.name]
    for name, block in blocks:
        lines += [name, line(HEADS), *map(line, block), ""]
    return "\n".join([*lines, *(f"  {note}" for note in table.foot)])


def to_markdown(table: SideBySide) -> str:
    lines = [f"### {table.name}", *([f"{table.about}"] if table.about else [])]
    for name, block in _blocks(table):
        lines += ["", f"**{name}**", "", "| " + " | ".join(HEADS) + " |", "|---|---|---:|---:|---:|---:|---|"]
        lines += [
            "| " + " | ".join(cell.replace("|", "\\|") for cell in _cells(comparison)) + " |" for comparison in block
        ]
    return "\n".join([*lines, "", *(f"- {note}" for note in table.foot), ""])


def to_csv(table: SideBySide) -> str:
    """A line for each score; ours with full precision."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    of_score = ("row", "setting", "dataset", "backbone", "embedding_size", "protocol", "kind", "metric")
    writer.writerow(
        [*of_score, "ours", "ours_std", "ours_is", "paper", "paper_std", "difference", "tolerance", "verdict", "note"]
    )
    for c in table.comparisons:
        values = [c.mean, c.std, c.kind, c.score.mean, c.score.std, c.difference, c.tolerance, c.verdict, c.note]
        own = [getattr(c.score, column) for column in of_score]
        writer.writerow(["" if value is None else value for value in [*own, *values]])
    return buffer.getvalue()


def to_latex(table: SideBySide) -> str:
    """A ``longtable`` under a caption that says what the numbers are not; for the packages booktabs and longtable."""
    escape: Callable[[str], str] = escape_latex
    label = table.name.replace("/", "-").replace("_", "-")
    heads = " & ".join(HEADS)
    lines = [
        r"% needs \usepackage{booktabs,longtable}",
        r"\begin{longtable}{llrrrrl}",
        rf"\caption{{{escape('. '.join([table.name, *table.foot]))}.}}\label{{tab:{label}}}\\",
        rf"\toprule {heads} \\ \midrule \endhead",
    ]
    for name, block in _blocks(table):
        lines.append(rf"\multicolumn{{7}}{{l}}{{{escape(name)}}} \\")
        lines += [" & ".join(map(escape, _cells(comparison))) + r" \\" for comparison in block]
        lines.append(r"\addlinespace")
    return "\n".join([*lines, r"\bottomrule", r"\end{longtable}", ""])
