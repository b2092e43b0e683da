"""Verdicts of a reproduction, and our scores beside a paper's in every format."""

import csv
import io
from decimal import Decimal

import pytest

from dmlbench.papers import PaperScore
from dmlbench.results.table import Table
from dmlbench.results.verdicts import Comparison, compare, count_of_verdicts, side_by_side, tolerance, verdict_on

SCORE = PaperScore(
    row="C2+GAP", setting="", dataset="cub200", backbone="bn_inception", embedding_size=512, protocol="mlrc",
    kind="concatenated", metric="P@1", mean=Decimal("67.35"), std=Decimal("0.50"), origin="own", note="",
)  # fmt: skip


def _score(**changes: object) -> PaperScore:
    return PaperScore(**{**vars(SCORE), **changes})


def _summary(mean: float = 0.6735, std: float | None = 0.0, **changes: object) -> dict[str, object]:
    score = {"p_at_1": {"mean": mean, "std": std}}
    return {
        "scores": {"separated": {"p_at_1": {"mean": 0.1, "std": 0.0}}, "concatenated": score}, "missing": [],
        "n_runs": 12, "n_runs_expected": 12, **changes,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("paper", "ours", "points"),
    [(None, None, 0.3), (0.1, 0.1, 0.3), (0.3, 0.4, 1.0), (0.5, None, 1.0), (0.8, 0.6, 2.0), (3.0, 5.0, 2.0)],
)
def test_the_tolerance_is_two_deviations_of_the_difference_between_its_bounds(paper, ours, points) -> None:
    assert tolerance(paper, ours) == pytest.approx(points, abs=1e-12)


@pytest.mark.parametrize(
    ("ours", "verdict"), [(0.6835, "reproduced"), (0.6836, "differs"), (0.6635, "reproduced"), (0.6634, "differs")]
)
def test_a_score_is_reproduced_up_to_the_tolerance_and_no_further(ours: float, verdict: str) -> None:
    made = compare(SCORE, _summary(ours))
    assert (made.verdict, made.tolerance) == (verdict, pytest.approx(1.0))
    assert made.difference == pytest.approx(100 * ours - 67.35)


def test_a_difference_above_the_tolerance_by_rounding_alone_is_reproduced() -> None:
    assert 0.4 - 0.1 > 0.3
    assert verdict_on(_score(mean=Decimal("0.1"), std=None), 0.4, None).verdict == "reproduced"


def test_what_is_missing_or_of_something_else_gets_no_verdict_on_the_paper() -> None:
    assert compare(SCORE, None).verdict == "not run"
    assert compare(SCORE, _summary(), label="R@1 (raw)").note.startswith("needs R@1 (raw)")
    partial = _summary(missing=["fold3_rep0"], n_runs=11)
    assert compare(SCORE, partial).verdict == "partial (11 of 12 runs)"
    subset = compare(SCORE, partial, ["NOT THE PUBLISHED DATA: a subset"])
    assert (subset.verdict, subset.note) == ("not comparable", "NOT THE PUBLISHED DATA: a subset; 11 of 12 runs")
    assert compare(_score(mean=None, std=None), _summary()).verdict == "no number in the paper"
    accuracy = compare(_score(metric="accuracy"), _summary())
    assert (accuracy.verdict, accuracy.mean) == ("needs", None)
    assert "accuracy" in accuracy.note
    assert compare(_score(metric="NMI"), _summary()).verdict == "needs"


def test_scores_of_a_paper_without_kind_are_of_its_size_or_the_best() -> None:
    fold_models = _summary(dimension={"separated": 128, "concatenated": 512})
    assert compare(_score(kind=""), fold_models).kind == "concatenated"
    assert compare(_score(kind="", embedding_size=128), fold_models).kind == "separated"
    repeats = _summary(
        scores={"mean": {"p_at_1": {"mean": 0.5, "std": 0.1}}, "best": {"p_at_1": {"mean": 0.6, "std": None}}}
    )
    assert compare(_score(kind="", std=None), repeats).mean == pytest.approx(60)
    assert compare(_score(kind=""), repeats).mean == pytest.approx(50)


def _table() -> Table:
    made = (
        compare(SCORE, _summary(0.68, 0.001)),
        compare(_score(row="C2|x_y", dataset="sop"), _summary(), ["backbone a instead of b"]),
        Comparison(_score(row="DAS [7]", dataset="sop"), "quoted"),
        Comparison(_score(row="LIBC"), "needs", note="needs LIBC"),
    )
    return side_by_side("gsp/table2", "Six losses", made, ("a note",))


def test_the_text_has_a_block_for_each_data_set_and_says_every_reason_once() -> None:
    lines = _table().to_text().splitlines()
    assert lines[0] == "gsp/table2: Six losses"
    assert lines[1] == "cub200, bn_inception, mlrc, concatenated, 512-D"
    assert " ".join(lines[3].split()) == "C2+GAP P@1 68.00 ± 0.10 67.35 ± 0.50 +0.65 1.02 reproduced"
    assert " ".join(lines[4].split()) == "LIBC P@1 – 67.35 ± 0.50 needs"
    assert lines[6] == "sop, bn_inception, mlrc, concatenated, 512-D"
    foot = "\n".join(lines[-6:])
    assert "1 reproduced, 1 not comparable, 1 quoted, 1 needs" in foot
    assert "at least 0.3 and at most 2 points" in foot
    assert "C2|x_y: backbone a instead of b" in foot
    assert "LIBC: needs LIBC" in foot
    assert foot.endswith("  a note")


def test_markdown_latex_and_csv_hold_the_same() -> None:
    table = _table()
    assert "| C2+GAP | P@1 | 68.00 ± 0.10 | 67.35 ± 0.50 | +0.65 | 1.02 | reproduced |" in table.to_markdown()
    assert r"| C2\|x_y | P@1 |" in table.to_markdown()
    latex = table.to_latex()
    assert r"C2+GAP & P@1 & 68.00 $\pm$ 0.10 & 67.35 $\pm$ 0.50 & +0.65 & 1.02 & reproduced \\" in latex
    assert r"C2|x\_y: backbone a instead of b" in latex
    rows = list(csv.DictReader(io.StringIO(table.to_csv())))
    assert [row["verdict"] for row in rows] == ["reproduced", "not comparable", "quoted", "needs"]
    assert float(rows[0]["difference"]) == pytest.approx(0.65)
    assert rows[0]["paper"] == "67.35"
    assert rows[3]["note"] == "needs LIBC"


def test_partial_verdicts_are_counted_together() -> None:
    assert count_of_verdicts(["partial (1 of 2 runs)", "differs", "partial (2 of 3 runs)"]) == "2 partial, 1 differs"
