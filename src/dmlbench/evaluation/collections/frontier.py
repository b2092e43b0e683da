"""Ranking of every choice of one repeat per fold at once, fold by fold, dropping pairs that no choice below can need.

A tile's queries and the gallery items that matter to some collection make *places*, T rows of W + 1 (the last is
padding, -inf). A *frontier* holds, for every choice of repeats of the first folds and every query, the sums so far of
the places that are left. Per place, the least and the greatest of the repeats of the folds to come bound all
collections below; a place whose upper bound is less than the k-th largest lower bound is left out.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dmlbench.evaluation.collections.members import Member
from dmlbench.evaluation.collections.pruning import Kept
from dmlbench.evaluation.metrics.table import DEFAULT_METRICS, asked_scores, query_scores
from dmlbench.evaluation.search.candidates import Keys, floor_below, kth_bound, pack, padded_place, settle
from dmlbench.evaluation.search.similarity import FloatRows
from dmlbench.evaluation.task import RetrievalTask, fit_width
from dmlbench.types import IntArray

_ENTRIES = 2**20  # sums held at a time for one fold: 4 MiB, near a core's own cache


@dataclass(frozen=True)
class Places:
    """Pairs of a tile's queries and the gallery items that some collection can need.

    Attributes:
        folds: [fold][repeat] where exact similarities come from.
        part: [T] queries.
        column: [T, W + 1] gallery index, ascending, -1 where padded.
        relevant: [T, W + 1] whether the item is of the query's class.
        value: [fold][repeat] float32 [T, W + 1], -inf where padded.
        k: first places of a ranking that the scores need.
        slack: sums further apart than this are in the right order, however they were added up.
    """

    folds: list[list[Member]]
    part: IntArray
    column: IntArray
    relevant: NDArray[np.bool_]
    value: list[list[FloatRows]]
    k: int
    slack: float


@dataclass(frozen=True)
class _Frontier:
    """Sums over the first folds.

    Attributes:
        choice: [R] repeats of these folds as one number.
        flat: [R, W'] position in a flattened [T, W + 1].
        total: [R, W'] float32.
    """

    choice: IntArray
    flat: IntArray
    total: FloatRows


def score_frontiers(
    folds: list[list[Member]],
    part: IntArray,
    task: RetrievalTask,
    kept: Kept,
    *,
    recall_at: Sequence[int],
    out: NDArray[np.float64],
) -> None:
    """Write the scores of the queries ``part`` [T] into ``out`` [choices, names, Q].

    Args:
        folds: [fold][repeat] where exact similarities come from.
        part: queries.
        task: labels and depth.
        kept: the pairs that some collection can need.
        recall_at: the K of R@K.
        out: what is written to.
    """
    for choice, row, ranked in rank_choices(_places(folds, part, task, kept)):
        query = part[row]
        scores = query_scores(
            fit_width(ranked, task.k), task.positives[query], asked_scores(DEFAULT_METRICS, recall_at)
        )
        for at, values in enumerate(scores.values()):
            out[choice, at, query] = values


def _places(folds: list[list[Member]], part: IntArray, task: RetrievalTask, kept: Kept) -> Places:
    """Pairs by row, padded to one width."""
    target, (height, width) = padded_place(kept.count)
    width += 1  # the last place of every row is padding
    target += np.repeat(np.arange(height), kept.count)
    column = np.full(height * width, -1, dtype=np.int64)
    column[target] = kept.column
    values = []
    for value in kept.value:
        full = np.full(height * width, -np.inf, dtype=np.float32)
        full[target] = value
        values.append(full.reshape(height, width))
    ends = list(itertools.accumulate(map(len, folds), initial=0))
    by_fold = [values[a:b] for a, b in itertools.pairwise(ends)]
    columns_left = column.reshape(height, width)
    return Places(folds, part, columns_left, task.relevant(part, columns_left), by_fold, task.k, kept.slack)


def rank_choices(places: Places) -> Iterator[tuple[IntArray, IntArray, NDArray[np.bool_]]]:
    """Relevance by rank of every choice of one repeat per fold.

    Yields:
        choice [R] (repeats as digits, the last fold's changing fastest), row of the tile [R], relevant [R, C] by rank.
        Every choice and row occurs once.
    """
    height, width = places.column.shape
    start = _Frontier(
        np.zeros(height, dtype=np.int64),
        np.arange(height * width).reshape(height, width),
        np.zeros((height, width), dtype=np.float32),
    )
    known = [[np.full(height * width, np.nan) for _ in fold] for fold in places.value]
    yield from _extend(places, _bounds_to_come(places.value), known, start, fold=0)


def _bounds_to_come(value: list[list[FloatRows]]) -> list[tuple[FloatRows, FloatRows] | None]:
    """Per fold, (least, greatest) sum of later folds' similarities, flattened; None after the last."""
    result: list[tuple[FloatRows, FloatRows] | None] = [None]
    for fold in value[:0:-1]:
        least, greatest = np.minimum.reduce(fold).reshape(-1), np.maximum.reduce(fold).reshape(-1)
        if result[0] is not None:
            least, greatest = least + result[0][0], greatest + result[0][1]
        result.insert(0, (least, greatest))
    return result


def _extend(
    places: Places,
    to_come: list[tuple[FloatRows, FloatRows] | None],
    known: list[list[NDArray[np.float64]]],
    frontier: _Frontier,
    *,
    fold: int,
) -> Iterator[tuple[IntArray, IntArray, NDArray[np.bool_]]]:
    """Add every repeat of ``fold`` to every row of the frontier, a few rows at a time, and go on with the next fold."""
    repeats = len(places.value[fold])
    step = max(1, _ENTRIES // (repeats * max(frontier.flat.shape[1], places.k)))
    for start in range(0, len(frontier.choice), step):
        rows = slice(start, start + step)
        part = _Frontier(frontier.choice[rows], frontier.flat[rows], frontier.total[rows])
        grown = _grown(places, to_come[fold], part, fold=fold)
        if fold + 1 < len(places.value):
            yield from _extend(places, to_come, known, grown, fold=fold + 1)
        else:
            yield _ranked(places, known, grown)


def _grown(places: Places, to_come: tuple[FloatRows, FloatRows] | None, parent: _Frontier, *, fold: int) -> _Frontier:
    """The frontier after ``fold``: repeats times as many rows, each with what its bounds leave."""
    flat = parent.flat
    repeats = len(places.value[fold])
    total = np.empty((repeats, *flat.shape), dtype=np.float32)
    for repeat, value in enumerate(places.value[fold]):
        np.take(value.reshape(-1), flat, out=total[repeat], mode="clip")
        total[repeat] += parent.total
    lower, upper = total, total
    if to_come is not None:
        lower, upper = total + np.take(to_come[0], flat), total + np.take(to_come[1], flat)
    choice = (parent.choice * repeats + np.arange(repeats)[:, None]).reshape(-1)
    lower, upper, total = (x.reshape(len(choice), -1) for x in (lower, upper, total))
    kept = np.flatnonzero(upper >= floor_below(kth_bound(lower, places.k), places.slack))
    height, width = total.shape
    count = np.diff(np.searchsorted(kept, np.arange(height + 1) * width))
    target, shape = padded_place(count)
    last_place = places.column.shape[1] - 1  # of the query's row: padding
    of_query = flat[:, 0] // places.column.shape[1] * places.column.shape[1]
    new_flat = np.repeat(np.tile(of_query + last_place, repeats), shape[1])
    new_total = np.full(shape[0] * shape[1], -np.inf, dtype=np.float32)
    new_flat[target] = np.take(flat.reshape(-1), kept % flat.size)
    new_total[target] = np.take(total.reshape(-1), kept)
    return _Frontier(choice, new_flat.reshape(shape), new_total.reshape(shape))


def _ranked(
    places: Places, known: list[list[NDArray[np.float64]]], leaf: _Frontier
) -> tuple[IntArray, IntArray, NDArray[np.bool_]]:
    """Choice [R], row of the tile [R], relevance by rank [R, C] of a frontier after the last fold."""
    width = places.column.shape[1]
    keys: Keys = pack(leaf.total, leaf.flat)  # places of a row ascend with the gallery index: they may order ties
    relevant = np.take(places.relevant.reshape(-1), leaf.flat)

    def exact(rows: IntArray, flat: IntArray) -> NDArray[np.float64]:
        """Sums over folds, in their order, of the members' exact similarities."""
        total = np.zeros(len(rows))
        choice = leaf.choice[rows]
        for fold in range(len(places.value)):
            later = int(np.prod([len(value) for value in places.value[fold + 1 :]], dtype=np.int64))
            digit = choice // later % len(places.value[fold])
            for repeat, member in enumerate(places.folds[fold]):
                chosen = np.flatnonzero(digit == repeat)
                held, place = known[fold][repeat], flat[chosen]
                new = np.unique(place[np.isnan(held[place])])
                if len(new):
                    held[new] = member.exact(places.part)(new // width, places.column.reshape(-1)[new])
                total[chosen] += held[place]
        return total

    _, marks = settle(keys, exact, k=places.k, slack=places.slack, relevant=relevant)
    assert marks is not None  # relevance was passed
    return leaf.choice, leaf.flat[:, 0] // width, marks
