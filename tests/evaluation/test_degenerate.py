"""Collapsed embeddings are told next to their scores."""

import numpy as np
import pytest

from dmlbench.evaluation.evaluate import evaluate_arrays
from dmlbench.evaluation.spec import EvaluationSpec

LABELS = np.repeat(np.arange(6), 10)
SPEC = EvaluationSpec(metrics=("p_at_1", "map_at_r"))


def rows_of(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(60, 8)).astype(np.float32)


def degenerate(rows: np.ndarray, **given: object) -> tuple[str, ...]:
    return evaluate_arrays(rows, LABELS, spec=SPEC, **given).degenerate  # type: ignore[arg-type]


def by_loop(rows: np.ndarray) -> float:
    """Share of queries whose first R places hold relevant and other items of one similarity."""
    unit = rows / np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
    tied = 0
    for query, label in enumerate(LABELS):
        others = [i for i in range(len(rows)) if i != query]
        values = {i: round(float(unit[i] @ unit[query]), 5) for i in others}
        last = sorted(values.values(), reverse=True)[9 - 1]
        kinds: dict[float, set[bool]] = {}
        for i, value in values.items():
            if value >= last:
                kinds.setdefault(value, set()).add(bool(LABELS[i] == label))
        tied += any(len(kind) == 2 for kind in kinds.values())
    return tied / len(rows)


def test_sound_embeddings_have_no_sign() -> None:
    assert degenerate(rows_of()) == ()
    rows = rows_of()
    rows[1] = rows[0]  # two photographs of one object may be one file
    rows = np.concatenate([rows, *(rows_of(i) for i in range(1, 6))])
    assert evaluate_arrays(rows, np.tile(LABELS, 6), spec=SPEC).degenerate == ()


def test_embeddings_so_near_that_rounding_decides_are_told() -> None:
    directions = np.linalg.qr(np.random.default_rng(0).normal(size=(60, 60)))[0]
    near = (directions[0] + 1e-4 * directions).astype(np.float32)
    assert degenerate(near) == ("the embeddings differ so little that rounding can decide their order",)
    assert degenerate((directions[0] + 1e-2 * directions).astype(np.float32)) == ()


@pytest.mark.parametrize("length", ["one", "many"])
def test_a_constant_is_told_with_the_ties_that_decide(length: str) -> None:
    rows = np.ones((60, 8), np.float32)
    if length == "many":
        rows *= np.random.default_rng(0).uniform(0.5, 2, (60, 1)).astype(np.float32)
    assert degenerate(rows) == (
        "100.0 % of the embeddings are equal to another one",
        "ties, broken by the gallery's order, decide 100.0 % of the queries",
    )


@pytest.mark.parametrize("distinct", [20, 40, 55])
def test_the_share_of_ties_is_that_of_a_loop(distinct: int) -> None:
    rows = rows_of()[np.random.default_rng(1).integers(0, distinct, 60)]
    signs = degenerate(rows)
    assert f"decide {100 * by_loop(rows):.1f} % of the queries" in signs[-1]


def test_equal_rows_of_one_class_decide_nothing() -> None:
    rows = np.repeat(rows_of()[:6], 10, axis=0)
    assert degenerate(rows) == ("100.0 % of the embeddings are equal to another one",)


def test_zero_vectors_and_numbers_that_underflow_are_counted() -> None:
    rows = rows_of().astype(np.float64)
    rows[:3] *= 1e-300
    assert degenerate(rows)[0] == "3 of 60 queries are zero vectors, similar to nothing"
    gallery = {"gallery_rows": rows_of(), "gallery_labels": LABELS}
    assert degenerate(rows, **gallery) == ("3 of 60 queries are zero vectors, similar to nothing",)
