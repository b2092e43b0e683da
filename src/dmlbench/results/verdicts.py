"""Verdicts: whether our score reproduces a paper's."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import hypot
from typing import Any

import pandas as pd

from dmlbench.evaluation.metrics.registry import score_labeled
from dmlbench.papers import PaperScore
from dmlbench.results.caveats import rows_of_facts
from dmlbench.results.table import Table

REPRODUCED, DIFFERS, NOT_COMPARABLE = "reproduced", "differs", "not comparable"
PARTIAL, NOT_RUN = "partial", "not run"
NO_NUMBER = "no number in the paper"
NEEDS = "needs"
LEAST, LARGEST = 0.3, 2.0
"""Bounds of the tolerance in points."""
RULE = (
    f"reproduced: within the tolerance, two standard deviations of the difference, at least {LEAST} "
    f"and at most {LARGEST:.0f} points"
)
_HEADS = ("score", "ours", "paper", "difference", "tolerance", "verdict")
_OF_SCORE = ("row", "setting", "dataset", "backbone", "embedding_size", "protocol", "kind", "metric")


def tolerance(paper_std: float | None, our_std: float | None) -> float:
    """Points by which our mean may differ from a paper's: min(2, max(0.3, 2 sqrt(paper_std^2 + our_std^2)))."""
    return min(LARGEST, max(LEAST, 2 * hypot(paper_std or 0.0, our_std or 0.0)))


@dataclass(frozen=True)
class Comparison:
    """A score of a paper and ours, both in the paper's unit."""

    score: PaperScore
    verdict: str  # one of the words above, or "quoted"
    mean: float | None = None
    std: float | None = None
    kind: str = ""  # which of our scores it is: separated, concatenated, best or mean
    note: str = ""  # why it is not comparable, what it needs, or why it was not run

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's."""
        return None if self.mean is None or self.score.mean is None else self.mean - float(self.score.mean)

    @property
    def tolerance(self) -> float | None:
        if self.difference is None:
            return None
        return tolerance(None if self.score.std is None else float(self.score.std), self.std)


def compare(
    score: PaperScore, summary: Mapping[str, Any] | None, reasons: Sequence[str] = (), *, label: str = ""
) -> Comparison:
    """Compare a paper's score with a config's.

    Args:
        summary: of ``aggregate_config``; None for a config without complete runs.
        reasons: why no score of this config is comparable with the paper's.
        label: of our metric, if it is not the paper's label.
    """
    if summary is None:
        return Comparison(score, NOT_RUN)
    label = label or score.metric
    asked, kind = score_labeled(label), kind_of(score, summary)
    found = summary["scores"].get(kind, {}).get(asked.name) if asked else None
    if found is None or asked is None:
        return Comparison(score, NEEDS, note=f"needs {label} ({kind}), which these runs do not have")
    if label != score.metric:
        kind = f"{kind}, {label}"
    mean = asked.scale * found["mean"]
    std = None if found["std"] is None else asked.scale * found["std"]
    partial = f"{summary['n_runs']} of {summary['n_runs_expected']} runs" if summary["missing"] else ""
    if reasons:
        return Comparison(
            score, NOT_COMPARABLE, mean, std, kind, "; ".join([*reasons, *([partial] if partial else [])])
        )
    if partial:
        return Comparison(score, f"{PARTIAL} ({partial})", mean, std, kind)
    return verdict_on(score, mean, std, kind)


def verdict_on(score: PaperScore, mean: float, std: float | None, kind: str = "") -> Comparison:
    ours = Comparison(score, NO_NUMBER, mean, std, kind)
    if ours.difference is None or ours.tolerance is None:
        return ours
    is_near = abs(ours.difference) <= ours.tolerance + 1e-9
    return Comparison(score, REPRODUCED if is_near else DIFFERS, mean, std, kind)


def kind_of(score: PaperScore, summary: Mapping[str, Any]) -> str:
    """Which scores of a summary a paper's score is one of.

    If the paper does not say: of fold models those with its embedding size, else separated; of repeats the mean if the
    paper prints a standard deviation, else the best.
    """
    kinds = summary["scores"]
    if score.kind:
        return score.kind
    if "separated" in kinds:
        sizes = summary.get("dimension", {})
        return next(
            (kind for kind in ("separated", "concatenated") if sizes.get(kind) == score.embedding_size), "separated"
        )
    return "best" if "best" in kinds and score.std is None else "mean"


def count_of_verdicts(verdicts: Iterable[str]) -> str:
    """How many scores have which verdict, such as "2 reproduced, 1 partial"."""
    kinds = (PARTIAL if verdict.startswith(PARTIAL) else verdict for verdict in verdicts)
    return ", ".join(f"{count} {kind}" for kind, count in Counter(kinds).items())


def side_by_side(name: str, about: str, comparisons: Sequence[Comparison], notes: Sequence[str]) -> Table:
    """The paper's table ``name`` vs. ours, in blocks of the same data set, backbone, protocol, size and setting."""
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
        blocks=tuple(_heading(c) or name for c in comparisons), caveats=foot,
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
        score.metric, ours + kind, paper, "" if difference is None else f"{difference:+z.2f}",
        "" if allowed is None else f"{allowed:.2f}", comparison.verdict,
    ]  # fmt: skip


def _values(c: Comparison) -> dict[str, object]:
    """A line of the CSV; ours with full precision."""
    return {
        **{column: getattr(c.score, column) for column in _OF_SCORE},
        "ours": c.mean, "ours_std": c.std, "ours_is": c.kind, "paper": c.score.mean, "paper_std": c.score.std,
        "difference": c.difference, "tolerance": c.tolerance, "verdict": c.verdict, "note": c.note,
    }  # fmt: skip
