"""Compiled ranking of the gallery by sums of fold models' similarities, query by query; it needs numba.

It finds what ``concatenated.plain_ranking`` finds, bit by bit. Letters: M models, T queries of a tile, N gallery items,
S sums of F models each, C items that some sum may need, k places that matter.

A *reach* of a sum is a value that at least k items reach: what lies below it (less the slack) is not among the k
nearest, and the reach of the items that are near on average is close to that of all. Which places of a ranking are
relevant depends only on how many irrelevant items lie above each relevant one: with these numbers in order,
a_0 <= a_1 <= .., the places a_j + j are relevant and no others. So relevant items are compared with irrelevant ones
only, and exactly only where the two are near.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dmlbench.evaluation.collections.models import FoldModel
from dmlbench.evaluation.search.similarity import FloatRows
from dmlbench.machine_code import compiled
from dmlbench.types import IntArray

_LOWEST = np.finfo(np.float32).min
_WANTED = np.inf  # in place of an exact similarity: it is to be computed
_BISECTIONS = 48
_GROUP = 16  # items of which the largest is found first
_LANES = 32  # numbers that a vector unit compares at a time


class _Tile(NamedTuple):
    """What is ranked, and what is selected of it."""

    value: FloatRows  # [M, T, N] similarities
    sums: IntArray  # [S, F] all choices of one model per fold
    slack: np.float32  # sums further apart than this are in the right order
    relevant: NDArray[np.bool_]  # [T, N] whether an item is of the query's class
    column: NDArray[np.int32]  # [T, N] items that some sum may need, in any order
    number: IntArray  # [T] how many
    reach: FloatRows  # [T, S]


def compiled_ranking(
    models: Sequence[FoldModel],
    part: IntArray,
    value: FloatRows,
    sums: IntArray,
    relevant: NDArray[np.bool_],
    *,
    k: int,
    slack: float,
) -> NDArray[np.bool_]:
    """As ``plain_ranking``; ``sums`` are all choices of one model per fold, and ``slack`` may be rounded."""
    _, height, size = value.shape
    column, count = np.empty((height, size), np.int32), np.empty(height, np.int64)
    reach = np.empty((height, len(sums)), np.float32)
    tile = _Tile(value, sums, np.float32(slack), relevant, column, count, reach)
    _select(tile, k)
    most = max(1, int(count.max()))
    pending = np.ones((len(sums), height), np.bool_)
    ranked = np.zeros((len(sums), height, k), np.bool_)
    step = max(1, height * size // (8 * most))  # queries whose exact similarities take a quarter of ``value``
    for first in range(0, height, step):
        rows = slice(first, min(first + step, height))
        known = np.full((len(models), len(part[rows]), most), np.nan)
        while pending[:, rows].any():
            _rank(tile, first, known, pending, ranked)
            for model, similarity in zip(models, known, strict=True):
                held = model.held_rows()
                if held is not None:
                    _fill(*held, part[rows], count[rows], column[rows], similarity)
                else:
                    row, place = np.nonzero(similarity == _WANTED)
                    if len(row):
                        columns = column[row + first, place].astype(np.int64)
                        similarity[row, place] = model.exact(part)(row + first, columns)
    return ranked


@compiled
def _reach(value: FloatRows, k: int) -> np.float32:
    """A value that at least k of ``value`` [n] reach, and hardly more than that; the lowest if fewer are above -inf."""
    low, high, count = np.float32(np.inf), np.float32(-np.inf), 0
    for x in value:
        count += x > -np.inf
        low = x if x < low and x > -np.inf else low
        high = x if x > high else high
    if count < k:
        return _LOWEST
    for _ in range(_BISECTIONS):
        if count <= k + k // 8:
            break
        middle = np.float32(0.5) * low + np.float32(0.5) * high
        if middle <= low or middle >= high:
            break
        above = np.int32(0)
        for i in range(len(value)):
            above = np.int32(above + np.int32(value[i] >= middle))
        if above >= k:
            low, count = middle, int(above)
        else:
            high = middle
    return low


@compiled
def _maxima(value: FloatRows, maxima: FloatRows) -> None:
    """The largest of every G-th of ``value`` [n]: ``maxima`` [G]."""
    maxima[:] = -np.inf
    for start in range(0, len(value), len(maxima)):
        for i in range(min(len(maxima), len(value) - start)):
            maxima[i] = value[start + i] if value[start + i] > maxima[i] else maxima[i]


@compiled
def _not_below(value: FloatRows, maxima: FloatRows, floor: np.float32, found: NDArray[np.int32]) -> int:
    """Write the items whose ``value`` [n] reaches ``floor`` into ``found``, as many as it holds: their number."""
    size = 0
    for group in range(len(maxima)):
        if maxima[group] >= floor:
            for i in range(group, len(value), len(maxima)):
                if value[i] >= floor and size < len(found):
                    found[size] = i
                    size += 1
    return size


@compiled
def _select(tile: _Tile, k: int) -> None:
    """Write which items some sum may need (``column``, ``number``), and the sums' reaches."""
    value, sums, size = tile.value, tile.sums, tile.value.shape[2]
    ends = np.append(sums[0], len(value))  # first model of each fold
    lower, upper = np.empty(size, np.float32), np.empty(size, np.float32)
    least, most = np.empty(size, np.float32), np.empty(size, np.float32)
    maxima = np.empty(min(size, max(2 * k, size // _GROUP)), np.float32)
    chosen = np.empty(min(size, 4 * k), np.int32)
    near = np.empty((len(value), len(chosen)), np.float32)
    total = np.zeros((len(ends), len(chosen)), np.float32)
    for row in range(value.shape[1]):
        if len(value) == 1:
            upper[:] = value[0, row]
            _maxima(upper, maxima)
            tile.reach[row, 0] = _reach(maxima, k)
        else:
            for fold in range(len(ends) - 1):  # sums over folds of the least and the greatest similarity of any model
                least[:] = most[:] = value[ends[fold], row]
                for model in range(ends[fold] + 1, ends[fold + 1]):
                    one = value[model, row]
                    for i in range(size):
                        least[i] = one[i] if one[i] < least[i] else least[i]
                        most[i] = one[i] if one[i] > most[i] else most[i]
                for i in range(size):
                    lower[i] = lower[i] + least[i] if fold else least[i]
                    upper[i] = upper[i] + most[i] if fold else most[i]
            for i in range(size):
                least[i] = lower[i] + upper[i]  # twice their middle, which stands for the average
            _maxima(least, maxima)
            found = _not_below(least, maxima, _reach(maxima, min(2 * k, len(maxima))), chosen)
            for model in range(len(value)):
                for i in range(found):
                    near[model, i] = value[model, row, chosen[i]]
            for at in range(len(sums)):
                _add_up(near, sums, at, at - 1, found, total)
                tile.reach[row, at] = _reach(total[-1, :found], k)
            _maxima(upper, maxima)
        floor = max(tile.reach[row].min() - tile.slack, _LOWEST)
        tile.number[row] = _not_below(upper, maxima, floor, tile.column[row])


@compiled
def _rank(
    tile: _Tile, first: int, known: NDArray[np.float64], pending: NDArray[np.bool_], ranked: NDArray[np.bool_]
) -> None:
    """Rank what was selected by every sum that is ``pending`` [S, T], which then says where a similarity was missed.

    ``known`` [M, .., C] are the exact similarities so far of the queries from ``first`` on, NaN at first; in place of
    one that is missed, ``_WANTED`` is written.
    """
    sums, slack, column = tile.sums, tile.slack, tile.column
    (models, height, width), k = known.shape, ranked.shape[2]
    near, total = np.empty((models, width), np.float32), np.zeros((sums.shape[1] + 1, width), np.float32)
    order, column_of = np.empty(width, np.uint32), np.empty(width, np.int32)  # relevant items lead
    item, sum_of = np.empty(width, np.uint32), np.empty(width + _LANES, np.float32)  # what a sum may need of them
    above, unsure = np.empty(width + _LANES, np.int32), np.empty(width + _LANES, np.int32)
    number = np.empty(k + 1, np.int64)
    for row in range(first, first + height):
        if not pending[:, row].any():
            continue
        size = num_relevant = 0
        for wanted in (True, False):
            for i in range(tile.number[row]):
                if tile.relevant[row, column[row, i]] == wanted:
                    order[size], column_of[size] = i, column[row, i]
                    size += 1
            num_relevant = size if wanted else num_relevant
        for model in range(models):
            for i in range(size):
                near[model, i] = tile.value[model, row, column_of[i]]
        before = -1
        for at in range(len(sums)):
            if not pending[at, row]:
                continue
            _add_up(near, sums, at, before, size, total)
            before = at
            of_all, floor = total[-1], max(tile.reach[row, at] - slack, _LOWEST)
            num_all = num_items = 0
            for i in range(size):
                sum_of[num_all], item[num_all] = of_all[i], i
                num_all += of_all[i] >= floor
                num_items = num_all if i < num_relevant else num_items
            _count_above(sum_of, num_items, num_all, slack, above, unsure)
            number[:] = 0
            missed = False
            for p in range(num_items):
                if unsure[p] > above[p] and above[p] < k:
                    own = _exact_sum(order[item[p]], sums[at], known, row - first)
                    missed |= np.isnan(own)
                    for j in range(num_items, num_all):
                        if sum_of[j] + slack >= sum_of[p] and not sum_of[j] - slack > sum_of[p]:
                            its = _exact_sum(order[item[j]], sums[at], known, row - first)
                            missed |= np.isnan(its)
                            above[p] += its > own or (its == own and column_of[item[j]] < column_of[item[p]])
                number[min(above[p], k)] += 1
            pending[at, row] = missed
            hits = 0
            for a in range(0 if missed else k):
                for _ in range(min(number[a], k - a - hits)):
                    ranked[at, row, a + hits] = True
                    hits += 1


@compiled
def _add_up(value: FloatRows, sums: IntArray, at: int, before: int, size: int, total: FloatRows) -> None:
    """``total`` [F + 1, n]: the sum ``at`` of ``value`` [M, n], fold by fold, from where it differs from ``before``."""
    changed = before < 0
    for fold in range(sums.shape[1]):
        changed |= sums[at, fold] != sums[before, fold]
        if changed:
            old, new, one = total[fold], total[fold + 1], value[sums[at, fold]]
            for i in range(size):
                new[i] = old[i] + one[i]


@compiled
def _count_above(
    total: FloatRows, lead: int, size: int, slack: np.float32, above: NDArray[np.int32], unsure: NDArray[np.int32]
) -> None:
    """Of each of the first ``lead`` sums: how many of the others are above for certain, and how many possibly."""
    padded = (lead + _LANES - 1) // _LANES * _LANES  # an odd end would take longer than all else
    above[:padded] = 0
    unsure[:padded] = 0
    for j in range(lead, size):
        low, high = total[j] - slack, total[j] + slack
        for p in range(padded):
            above[p] += np.int32(low > total[p])
            unsure[p] += np.int32(high >= total[p])


@compiled
def _exact_sum(item: int, models: IntArray, known: NDArray[np.float64], row: int) -> float:
    """Sum over folds, in their order, of exact similarities; NaN if one is missed."""
    total = 0.0
    for model in models:
        if np.isnan(known[model, row, item]):
            known[model, row, item] = _WANTED
        if known[model, row, item] == _WANTED:
            total = np.nan
        total += known[model, row, item]
    return total


@compiled
def _fill(
    left: FloatRows,
    right: FloatRows,
    query: IntArray,
    count: IntArray,
    column: NDArray[np.int32],
    known: NDArray[np.float64],
) -> None:
    """``similarity.exact_similarities`` of rows of ``left`` [Q, D], ``right`` [N, D] where ``known`` is wanted."""
    terms = np.empty(left.shape[1] + 1, np.float64)
    for row in range(len(query)):
        x = left[query[row]]
        for i in range(count[row]):
            if known[row, i] == _WANTED:
                y, width = right[column[row, i]], left.shape[1]
                terms[0] = 0.0
                for d in range(width):
                    terms[d] = np.float64(x[d]) * np.float64(y[d])
                while width > 1:
                    half = (width + 1) // 2
                    for d in range(width - half):
                        terms[d] += terms[half + d]
                    width = half
                known[row, i] = terms[0]
