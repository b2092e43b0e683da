"""Compiled ranking of the gallery by sums of fold models' similarities, query by query; it needs numba.

It finds what ``plain_select`` and ``plain_rank`` find, bit by bit. Letters: M models, T queries and W gallery items of
a tile, S sums of F models each, C items that some sum may need, k places that matter.

A *reach* of a sum is a value that at least k items reach: what lies below it (less the slack) is not among the k
nearest, and the reach of the items that are near on average is close to that of all. Which places of a ranking are
relevant depends only on how many irrelevant items lie above each relevant one: with these numbers in order,
a_0 <= a_1 <= .., the places a_j + j are relevant and no others. So relevant items are compared with irrelevant ones
only, and exactly only where the two are near.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dmlbench.evaluation.collections.models import FoldModel, Near
from dmlbench.evaluation.search.similarity import FloatRows
from dmlbench.machine_code import compiled
from dmlbench.types import IntArray

_LOWEST = np.finfo(np.float32).min
_WANTED = np.inf  # in place of an exact similarity: it is to be computed
_BISECTIONS = 48
_GROUP = 16  # items of which the largest is found first
_LANES = 32  # numbers that a vector unit compares at a time


def compiled_select(
    value: FloatRows, sums: IntArray, first_column: int, reach: FloatRows, *, k: int, slack: float
) -> Near:
    """As ``plain_select``; items come in any order, and ``slack`` may be rounded."""
    models, height, width = value.shape
    column, count = np.empty((height, width), np.int32), np.empty(height, np.int64)
    reach = np.broadcast_to(reach, (height, len(sums))).copy()
    _select(value, sums, np.float32(slack), k, column, count, reach)
    size = int(count.max(initial=0))
    near = Near(np.empty((models, height, size), np.float32), np.empty((height, size), np.int64), reach)
    _gather(value, column, count, first_column, near)
    return near


def compiled_rank(
    models: Sequence[FoldModel],
    part: IntArray,
    near: Near,
    sums: IntArray,
    relevant: NDArray[np.bool_],
    *,
    k: int,
    slack: float,
) -> NDArray[np.bool_]:
    """As ``plain_rank``."""
    _, height, width = near.value.shape
    pending = np.ones((len(sums), height), np.bool_)
    ranked = np.zeros((len(sums), height, k), np.bool_)
    step = -(-height // 4)  # exact similarities take half as much memory as ``near``
    for first in range(0, height, step):
        rows = slice(first, first + step)
        known = np.full((len(models), len(part[rows]), width), np.nan)
        while pending[:, rows].any():
            _rank(near, sums, np.float32(slack), relevant, first, known, pending, ranked)
            for model, similarity in zip(models, known, strict=True):
                held = model.held_rows()
                if held is not None:
                    _fill(*held, part[rows], near.column[rows], similarity)
                else:
                    row, place = np.nonzero(similarity == _WANTED)
                    if len(row):
                        similarity[row, place] = model.exact(part[rows])(row, near.column[rows][row, place])
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
def _select(
    value: FloatRows,
    sums: IntArray,
    slack: np.float32,
    k: int,
    column: NDArray[np.int32],
    count: IntArray,
    reach: FloatRows,
) -> None:
    """Write which columns of ``value`` some sum may need (``column`` [T, W], ``count`` [T]), and raise ``reach``."""
    size = value.shape[2]
    ends = np.append(sums[0], len(value))  # first model of each fold
    lower, upper = np.empty(size, np.float32), np.empty(size, np.float32)
    least, most = np.empty(size, np.float32), np.empty(size, np.float32)
    maxima = np.empty(min(size, max(2 * k, size // _GROUP)), np.float32)
    chosen = np.empty(min(size, 4 * k), np.int32)
    near = np.empty((len(value), len(chosen)), np.float32)
    total = np.zeros((len(ends), len(chosen)), np.float32)
    for row in range(value.shape[1]):
        bound = upper
        if len(value) == 1:
            bound = value[0, row]
            _maxima(bound, maxima)
            reach[row, 0] = max(reach[row, 0], _reach(maxima, k))
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
                one = value[model, row]
                for i in range(found):
                    near[model, i] = one[chosen[i]]
            for at in range(len(sums)):
                _add_up(near, sums, at, at - 1, found, total)
                reach[row, at] = max(reach[row, at], _reach(total[-1, :found], k))
            _maxima(upper, maxima)
        count[row] = _not_below(bound, maxima, max(reach[row].min() - slack, _LOWEST), column[row])


@compiled
def _gather(value: FloatRows, column: NDArray[np.int32], count: IntArray, first_column: int, near: Near) -> None:
    """Fill ``near`` with the columns ``column`` [T, W] of ``value``, as many as ``count`` [T]."""
    near.column[:] = -1
    for row in range(len(count)):
        number, places = count[row], column[row]
        for i in range(number):
            near.column[row, i] = first_column + places[i]
        for model in range(len(value)):
            one, held = value[model, row], near.value[model, row]
            for i in range(number):
                held[i] = one[places[i]]
            held[number:] = -np.inf


@compiled
def _rank(
    tile: Near,
    sums: IntArray,
    slack: np.float32,
    relevant: NDArray[np.bool_],
    first: int,
    known: NDArray[np.float64],
    pending: NDArray[np.bool_],
    ranked: NDArray[np.bool_],
) -> None:
    """Rank a tile by every sum that is ``pending`` [S, T], which then says where a similarity was missed.

    ``known`` [M, .., C] are the exact similarities so far of the queries from ``first`` on, NaN at first; in place of
    one that is missed, ``_WANTED`` is written.
    """
    column = tile.column
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
            for i in range(width):
                if column[row, i] >= 0 and relevant[row, i] == wanted:
                    order[size], column_of[size] = i, column[row, i]
                    size += 1
            num_relevant = size if wanted else num_relevant
        for model in range(models):
            one = tile.value[model, row]
            for i in range(size):
                near[model, i] = one[order[i]]
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
def _fill(left: FloatRows, right: FloatRows, query: IntArray, column: IntArray, known: NDArray[np.float64]) -> None:
    """``similarity.exact_similarities`` of rows of ``left`` [Q, D], ``right`` [N, D] where ``known`` is wanted."""
    terms = np.empty(left.shape[1] + 1, np.float64)
    for row in range(len(query)):
        x = left[query[row]]
        for i in range(column.shape[1]):
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
