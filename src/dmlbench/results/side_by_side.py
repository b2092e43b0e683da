"""Our scores vs. a paper's as a table: ours, paper, difference, tolerance, verdict."""

from collections.abc import Sequence

import pandas as pd

from dmlbench.results.cautions import rows_of_facts
from dmlbench.results.table import Table
from dmlbench.results.verdicts import RULE, Comparison, count_of_verdicts

_HEADS = ("score", "ours", "paper", "difference", "tolerance", "verdict")
_OF_SCORE = ("row", "setting", "dataset", "backbone", "embedding_size", "protocol", "kind", "metric")


def side_by_side(name: str, about: str, comparisons: Sequence[Comparison], notes: Sequence[str]) -> Table:
    """A paper's table vs. ours, in blocks of the same data set, backbone, protocol, size and setting.

    Args:
        name: as in "gsp/table2".
        about: what the table is.
        comparisons: score by score in the paper's order.
        notes: caveats of our numbers.
    """
    reasons = rows_of_facts([[c.note] if c.note else [] for c in comparisons], [c.score.row for c in comparisons])
    foot = (
        count_of_verdicts(comparison.verdict for comparison in comparisons),
        f"percent, mean ± population std; {RULE}",
        *(f"{', '.join(rows)}: {reason}" for reason, rows in reasons.items()),
        *notes,
    )
    index = pd.Index([c.score.row for c in comparisons], name="row")
    return Table(
        name, pd.DataFrame(map(_cells, comparisons), index, _HEADS, dtype=object), foot, about, "llrrrrl",
        blocks=tuple(_heading(c) or name for c in comparisons), cautions=foot,
        data=pd.DataFrame(map(_values, comparisons), dtype=object),
    )  # fmt: skip


def _heading(comparison: Comparison) -> str:
    score = comparison.score
    size = f"{score.embedding_size}-D" if score.embedding_size else ""
    words = (score.dataset, score.backbone, score.protocol, score.kind, size, score.setting)
    return ", ".join(word for word in words if word)


def _cells(comparison: Comparison) -> list[str]:
    score, difference, allowed = comparison.score, comparison.difference, comparison.tolerance
    kinds = [word for word in comparison.kind.split(", ") if word and word not in ("separated", "concatenated")]
    kind = f" ({', '.join(kinds)})" if kinds else ""
    paper = "–" if score.mean is None else str(score.mean) + ("" if score.std is None else f" ± {score.std}")
    ours = "–" if comparison.mean is None else f"{comparison.mean:.2f}"
    ours += "" if comparison.std is None else f" ± {comparison.std:.2f}"
    return [
        score.metric, ours + kind, paper, "" if difference is None else f"{difference:+.2f}",
        "" if allowed is None else f"{allowed:.2f}", comparison.verdict,
    ]  # fmt: skip


def _values(c: Comparison) -> dict[str, object]:
    """A line of the CSV; ours with full precision."""
    return {
        **{column: getattr(c.score, column) for column in _OF_SCORE},
        "ours": c.mean, "ours_std": c.std, "ours_is": c.kind, "paper": c.score.mean, "paper_std": c.score.std,
        "difference": c.difference, "tolerance": c.tolerance, "verdict": c.verdict, "note": c.note,
    }  # fmt: skip
