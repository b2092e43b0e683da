"""Write test vectors for retrieval evaluation code: embeddings with exact scores, and the scores of common errors.

python scripts/test_vectors.py [--output outputs/published/test_vectors/vectors.json]

Every score is a loop over exact fractions; dmlbench is not imported. Running it again writes the same bytes.
"""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

OUTPUT = Path(__file__).resolve().parents[1] / "outputs/published/test_vectors/vectors.json"
WIDTH = 110  # characters of a line of the file, if its value can be split
GAP = 1e-3  # by which the similarities of different rows differ at least

Row = tuple[int, ...]
Marks = Sequence[bool]
"""Whether the item at each rank is relevant, nearest first."""


@dataclass(frozen=True)
class Part:
    """Queries or gallery."""

    rows: list[Row]
    labels: list[int]
    ids: list[int]


def cosine(query: Row, item: Row) -> Fraction:
    """The square of the cosine times the query's squared length, with the cosine's sign: it orders like the cosine."""
    product = dot(query, item)
    return product * abs(product) / dot(item, item)


def dot(query: Row, item: Row) -> Fraction:
    return Fraction(sum(x * y for x, y in zip(query, item, strict=True)))


def euclidean(query: Row, item: Row) -> Fraction:
    return Fraction(-sum((x - y) ** 2 for x, y in zip(query, item, strict=True)))


def precision(marks: Marks, k: int) -> Fraction:
    return Fraction(sum(marks[:k]), k)


def share_found(marks: Marks, k: int) -> Fraction:
    """Recall of information retrieval."""
    return Fraction(sum(marks[:k]), sum(marks))


def precision_sum(marks: Marks, k: int) -> Fraction:
    """Sum of P(r) over the relevant ranks r <= k."""
    return sum((precision(marks, r + 1) for r, relevant in enumerate(marks[:k]) if relevant), Fraction(0))


def any_found(marks: Marks, k: int) -> Fraction:
    return Fraction(any(marks[:k]))


SCORES: dict[str, tuple[str, Callable[[Marks], Fraction]]] = {
    "p_at_1": ("rel(1)", lambda m: precision(m, 1)),
    "recall_at_1": ("1 if any of the nearest 1 is relevant, else 0", lambda m: any_found(m, 1)),
    "recall_at_2": ("1 if any of the nearest 2 is relevant, else 0", lambda m: any_found(m, 2)),
    "recall_at_4": ("1 if any of the nearest 4 is relevant, else 0", lambda m: any_found(m, 4)),
    "precision_at_2": ("P(2)", lambda m: precision(m, 2)),
    "precision_at_4": ("P(4); items that the gallery lacks are not relevant", lambda m: precision(m, 4)),
    "r_precision": ("P(R)", lambda m: precision(m, sum(m))),
    "map_at_r": ("(1/R) sum_{r <= R} rel(r) P(r)", lambda m: precision_sum(m, sum(m)) / sum(m)),
    "map_at_2": ("(1/min(R, 2)) sum_{r <= 2} rel(r) P(r)", lambda m: precision_sum(m, 2) / min(sum(m), 2)),
    "map": ("(1/R) sum_r rel(r) P(r) over all ranks", lambda m: precision_sum(m, len(m)) / sum(m)),
}  # fmt: skip
CONVENTIONS = [
    "The similarity is the cosine; equal similarities are ordered by gallery index.",
    "An item is relevant if its label is the query's. A gallery item with the query's id is the query and is removed.",
    "R is the number of relevant items of a query, rel(r) whether the item at rank r is relevant,"
    " P(r) the share of relevant items among the nearest r.",
    "A score is the mean over the queries with R > 0; n_skipped_queries counts the others.",
    "wrong lists the scores that an error changes; the other scores stay as expected.",
]


@dataclass(frozen=True)
class Rules:
    """How to rank and score; the defaults are right.

    Attributes:
        removed: "own" (items with the query's id), "none", "row" (the gallery row with the query's row number), "first"
            (the first result), "one" (the first row with the query's id) or "equal" (rows equal to the query's).
        own_is_relevant: whether the query counts as relevant where it is not removed.
        ties: "index", "reversed" (last gallery index first), "highest" (relevant items first) or "lowest".
        above_zero: only items with a positive similarity count as relevant.
        without_positive: score of a query with R = 0, or None to leave it out.
        formulas: replaced formulas, by score.
    """

    similarity: Callable[[Row, Row], Fraction] = cosine
    removed: str = "own"
    own_is_relevant: bool = True
    ties: str = "index"
    above_zero: bool = False
    without_positive: Fraction | None = None
    formulas: dict[str, Callable[[Marks], Fraction]] = field(default_factory=dict)


RIGHT = Rules()


@dataclass(frozen=True)
class Case:
    """An entry of the file; ``gallery`` None searches the queries among themselves."""

    name: str
    catches: str
    query: Part
    gallery: Part | None
    wrong: dict[str, Rules]
    behavior: str = "Give the expected scores."

    @property
    def searched(self) -> Part:
        return self.query if self.gallery is None else self.gallery


def ranked(query: Part, gallery: Part, q: int, rules: Rules) -> tuple[list[int], list[bool]]:
    """Gallery rows of query ``q``, nearest first, and whether each is relevant."""
    own = [g for g, number in enumerate(gallery.ids) if number == query.ids[q]]
    equal = [g for g, row in enumerate(gallery.rows) if row == query.rows[q]]
    removed = {"own": own, "none": [], "row": [q], "first": [], "one": own[:1], "equal": equal}[rules.removed]
    similarity = [rules.similarity(query.rows[q], row) for row in gallery.rows]
    relevant = [
        label == query.labels[q] and (rules.own_is_relevant or g not in own) and (value > 0 or not rules.above_zero)
        for g, (label, value) in enumerate(zip(gallery.labels, similarity, strict=True))
    ]
    tie = {
        "index": lambda g: g, "reversed": lambda g: -g, "highest": lambda g: not relevant[g],
        "lowest": lambda g: relevant[g],
    }[rules.ties]  # fmt: skip
    order = sorted((g for g in range(len(gallery.rows)) if g not in removed), key=lambda g: (-similarity[g], tie(g)))
    order = order[1:] if rules.removed == "first" else order
    return order, [relevant[g] for g in order]


def evaluated(query: Part, gallery: Part, rules: Rules = RIGHT) -> dict[str, Fraction]:
    """Mean scores by name."""
    formulas = {name: formula for name, (_, formula) in SCORES.items()} | rules.formulas
    found: dict[str, list[Fraction]] = {name: [] for name in formulas}
    for q in range(len(query.rows)):
        _, marks = ranked(query, gallery, q, rules)
        for name, formula in formulas.items():
            if any(marks):
                found[name].append(formula(marks))
            elif rules.without_positive is not None:
                found[name].append(rules.without_positive)
    return {name: sum(values, Fraction(0)) / len(values) for name, values in found.items()}


def distinct(part: Part) -> Part:
    """The first row of each id."""
    first = [i for i, number in enumerate(part.ids) if number not in part.ids[:i]]
    return Part([part.rows[i] for i in first], [part.labels[i] for i in first], [part.ids[i] for i in first])


def check_gaps(case: Case) -> None:
    """Only equal rows may tie; other similarities differ by more than rounding, so that float32 code ranks alike."""
    rows = sorted(set(case.searched.rows))
    for query in case.query.rows:
        values = sorted(cosine(query, row) / dot(query, query) for row in rows)
        cosines = [math.copysign(abs(value) ** 0.5, value) for value in values]
        assert all(high - low > GAP for low, high in pairwise(cosines)), f"{case.name}: {query} is too near to a tie"


def part_entry(part: Part) -> dict[str, Any]:
    return {"rows": [list(row) for row in part.rows], "labels": part.labels, "ids": part.ids}


def scores_entry(scores: dict[str, Fraction]) -> dict[str, Any]:
    return {name: {"fraction": str(value), "decimal": float(value)} for name, value in scores.items()}


def entry(case: Case) -> dict[str, Any]:
    """A case as it is in the file."""
    check_gaps(case)
    query, gallery = case.query, case.searched
    deduplicated = distinct(gallery)
    expected = evaluated(query, deduplicated)
    rankings = [ranked(query, deduplicated, q, RIGHT) for q in range(len(query.rows))]
    result: dict[str, Any] = {
        "name": case.name,
        "catches": case.catches,
        "behavior": case.behavior,
        "search": "the queries among themselves" if case.gallery is None else "the gallery",
        "query": part_entry(query),
        "gallery": part_entry(gallery),
        "ranked_ids": [[deduplicated.ids[g] for g in order] for order, _ in rankings],
        "relevant": [[int(mark) for mark in marks] for _, marks in rankings],
        "n_skipped_queries": sum(not any(marks) for _, marks in rankings),
        "expected": scores_entry(expected),
    }
    bounds = {bound: evaluated(query, deduplicated, replace(RIGHT, ties=bound)) for bound in ("lowest", "highest")}
    if bounds["lowest"] != bounds["highest"]:
        result["bounds_over_orders_of_ties"] = {bound: scores_entry(scores) for bound, scores in bounds.items()}
    result["wrong"] = []
    for error, rules in case.wrong.items():
        scores = evaluated(query, gallery, rules)
        changed = {name: value for name, value in scores.items() if value != expected[name]}
        assert changed, f"{case.name}: '{error}' changes no score"
        result["wrong"].append({"error": error, "scores": scores_entry(changed)})
    changes = [part["scores"] for part in result["wrong"]]
    assert all(one not in changes[:i] for i, one in enumerate(changes)), f"{case.name}: two errors change the same"
    return result


def text_of(value: Any, indent: str = "") -> str:
    """JSON, with every value that fits on one line."""
    line = json.dumps(value)
    if len(indent) + len(line) <= WIDTH or not isinstance(value, dict | list):
        return line
    inner = indent + " "
    if isinstance(value, dict):
        lines = [f"{inner}{json.dumps(key)}: {text_of(part, inner)}" for key, part in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    return "[\n" + ",\n".join(inner + text_of(part, inner) for part in value) + f"\n{indent}]"


NOT_REMOVED = {
    "The query is not removed and counts as relevant.": Rules(removed="none"),
    "The query is not removed and counts as not relevant.": Rules(removed="none", own_is_relevant=False),
}
ROW_REMOVED = {"The gallery row with the query's row number is removed.": Rules(removed="row")}
FIRST_REMOVED = {"The first result is removed.": Rules(removed="first")}

CASES = [
    Case(
        "self_match",
        "The query finds itself.",
        Part([(10, 0), (9, 3), (8, 5), (5, 8), (3, 9), (1, 10)], [0, 1, 0, 1, 1, 0], [50, 51, 52, 53, 54, 55]),
        None,
        NOT_REMOVED,
    ),
    Case(
        "self_match_by_id",
        "The query is removed by its row number or by its rank instead of its id."
        " The gallery has another order, and the last query is not in it.",
        Part([(10, 0), (8, 5), (3, 9), (1, 7)], [0, 0, 1, 1], [70, 72, 74, 79]),
        Part([(3, 9), (9, 3), (10, 0), (5, 8), (8, 5), (1, 10)], [1, 0, 0, 1, 0, 0], [74, 71, 70, 73, 72, 75]),
        {**NOT_REMOVED, **ROW_REMOVED, **FIRST_REMOVED},
    ),
    Case(
        "separate_gallery",
        "Something is removed although no query is in the gallery. A row number is no id.",
        Part([(10, 1), (7, 7), (1, 10)], [0, 1, 2], [0, 1, 2]),
        Part([(10, 2), (7, 6), (10, 4), (6, 9), (1, 10), (8, 4)], [0, 1, 1, 2, 2, 0], [10, 11, 12, 13, 14, 15]),
        {**ROW_REMOVED, **FIRST_REMOVED},
    ),
    Case(
        "recall_at_k",
        "R@K is the share of relevant items found, not whether any is found.",
        Part([(10, 0), (0, 10)], [0, 1], [0, 1]),
        Part(
            [(9, 1), (9, 3), (9, 5), (7, 7), (5, 8), (3, 9), (1, 9), (2, 9)], [1, 0, 0, 1, 0, 1, 1, 0], [*range(20, 28)]
        ),
        {
            "The share of relevant items found (recall of information retrieval).": Rules(
                formulas={f"recall_at_{k}": lambda m, k=k: share_found(m, k) for k in (1, 2, 4)}
            )
        },
    ),
    Case(
        "no_positive",
        "Queries without a relevant item count in the mean.",
        Part([(10, 0), (9, 4), (5, 7), (0, 10)], [0, 0, 1, 2], [30, 31, 32, 33]),
        None,
        {
            "These queries count as 0.": Rules(without_positive=Fraction(0)),
            "These queries count as 1.": Rules(without_positive=Fraction(1)),
        },
    ),
    Case(
        "ties",
        "Equal similarities are in another order than the gallery's.",
        Part([(1, 0), (0, 1)], [0, 1], [40, 41]),
        Part(
            [(3, 4), (4, 3), (4, 3), (4, 3), (3, 4), (3, 4), (5, 12)],
            [1, 0, 1, 1, 0, 1, 0],
            [60, 61, 62, 63, 64, 65, 66],
        ),
        {"Equal similarities are ordered by gallery index, last first.": Rules(ties="reversed")},
    ),
    Case(
        "duplicate_ids",
        "An id is in the gallery twice: a second copy of the query, and a relevant item that counts twice.",
        Part([(10, 0), (0, 10)], [0, 1], [80, 81]),
        Part(
            [(10, 0), (0, 10), (9, 3), (10, 0), (7, 6), (7, 6), (5, 8)],
            [0, 1, 1, 0, 0, 0, 1],
            [80, 81, 82, 80, 83, 83, 84],
        ),
        {
            "One row with the query's id is removed, the other is found.": Rules(removed="one"),
            "All rows with the query's id are removed, other repeated ids count twice.": Rules(),
        },
        "Raise an error, or keep the first row of each id and give the expected scores.",
    ),
    Case(
        "duplicate_images",
        "A copy of the query under another id is removed with the query, or in place of it.",
        Part([(10, 0), (10, 0), (7, 6), (6, 8), (6, 8), (1, 10)], [0, 0, 0, 1, 1, 1], [90, 91, 92, 93, 94, 95]),
        None,
        {
            "All rows equal to the query's are removed.": Rules(removed="equal"),
            "The first result is removed, and the query counts as not relevant.": Rules(
                removed="first", own_is_relevant=False
            ),
        },
    ),
    Case(
        "unnormalized",
        "Embeddings are compared by inner product or Euclidean distance instead of cosine.",
        Part([(4, 0), (0, 4)], [0, 1], [0, 1]),
        Part([(9, 1), (70, 20), (4, 5), (1, 9), (30, 80)], [0, 1, 1, 1, 0], [20, 21, 22, 23, 24]),
        {
            "Inner product without L2 normalization.": Rules(similarity=dot),
            "Euclidean distance without L2 normalization.": Rules(similarity=euclidean),
        },
    ),
    Case(
        "r_larger_than_k",
        "MAP@R, MAP@K and MAP are confused, or divided by another number.",
        Part([(10, 0), (0, 10)], [0, 1], [0, 1]),
        Part(
            [(9, 1), (9, 3), (9, 5), (7, 7), (5, 8), (3, 9), (1, 9), (2, 9)], [1, 0, 0, 1, 0, 1, 0, 0], [*range(20, 28)]
        ),
        {
            "MAP is reported as MAP@R.": Rules(formulas={"map_at_r": SCORES["map"][1]}),
            "MAP@R is divided by the relevant items found among the first R.": Rules(
                formulas={"map_at_r": lambda m: precision_sum(m, sum(m)) / sum(m[: sum(m)])}
            ),
            "The ranking ends at K = 2, but MAP@R, MAP and R-precision need more ranks.": Rules(
                formulas={
                    "map_at_r": lambda m: precision_sum(m, 2) / sum(m),
                    "map": lambda m: precision_sum(m, 2) / sum(m),
                    "r_precision": lambda m: Fraction(sum(m[:2]), min(sum(m), 2)),
                }
            ),
            "MAP ends at the largest R of a query, 5.": Rules(formulas={"map": lambda m: precision_sum(m, 5) / sum(m)}),
            "MAP@2 is divided by R, not by min(R, 2).": Rules(
                formulas={"map_at_2": lambda m: precision_sum(m, 2) / sum(m)}
            ),
            "MAP@2 is divided by the relevant items found among the first 2.": Rules(
                formulas={"map_at_2": lambda m: precision_sum(m, 2) / max(1, sum(m[:2]))}
            ),
            "R-precision is P(4).": Rules(formulas={"r_precision": SCORES["precision_at_4"][1]}),
        },
    ),
    Case(
        "k_larger_than_gallery",
        "K is larger than the gallery.",
        Part([(10, 0), (9, 4), (1, 10)], [0, 0, 0], [100, 101, 102]),
        None,
        {
            "P@4 is divided by the number of items.": Rules(
                formulas={"precision_at_4": lambda m: precision(m, min(4, len(m)))}
            )
        },
    ),
    Case(
        "negative_similarity",
        "A relevant item with a cosine of at most 0 counts as not relevant.",
        Part([(10, 0), (0, 10)], [0, 1], [0, 1]),
        Part([(9, -4), (7, 7), (0, -9), (-5, 8), (-8, -5)], [0, 1, 0, 0, 1], [20, 21, 22, 23, 24]),
        {"Items with a similarity of at most 0 are not relevant.": Rules(above_zero=True)},
    ),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    contents = {
        "format": 1,
        "conventions": CONVENTIONS,
        "scores": {name: formula for name, (formula, _) in SCORES.items()},
        "cases": [entry(case) for case in CASES],
    }
    parser.parse_args().output.write_text(text_of(contents) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
