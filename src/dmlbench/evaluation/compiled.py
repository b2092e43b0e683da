"""Compiled ranking of every choice of one repeat per fold, one query at a time, from a core's own cache (needs numba).

It finds what ``pruning`` and ``frontier`` find, bit by bit. Letters: M members, fold by fold; T queries of a tile, W
columns multiplied at a time, C columns held of each query, F folds, S choices.

A *reach* of a choice is a value that at least k items' sums reach. What is less than a choice's reach (less the slack)
is not among its k nearest. The reach of some items that are near on average is close to that of all, and the least
reach of all choices leaves few items that no choice needs. Which of these are relevant by rank depends only on how many
irrelevant ones lie above each relevant one: with a_0 <= a_1 <= .., place j + a_j is relevant and the others are not.
"""

from collections.abc import Callable
from typing import TypeVar

import numba
import numpy as np
from numpy.typing import NDArray

from dmlbench.evaluation.similarity import FloatRows
from dmlbench.types import IntArray

Function = TypeVar("Function", bound=Callable[..., object])

LOWEST = np.finfo(np.float32).min
_BISECTIONS = 48
WANTED = np.inf  # in place of an exact similarity: it is to be computed


def _compiled(function: Function) -> Function:
    """Machine code of ``function``, kept beside the source or in the user's cache where either can be written to."""
    try:
        return numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # numba finds no folder that can be written to
        return numba.njit(nogil=True)(function)


@_compiled
def _reach(value: FloatRows, k: int) -> np.float32:
    """A value that at least k of ``value`` [n] reach, and hardly more than that; LOWEST if fewer are above -inf."""
    low, high, count = np.float32(np.inf), np.float32(-np.inf), 0
    for i in range(len(value)):
        x = value[i]
        finite = x > -np.inf
        count += finite
        low = x if finite and x < low else low
        high = x if x > high else high
    if count < k:
        return LOWEST
    for _ in range(_BISECTIONS):
        if count <= k + k // 8:
            break
        middle = np.float32(0.5) * low + np.float32(0.5) * high
        if middle <= low or middle >= high:
            break
        above = 0
        for i in range(len(value)):
            above += value[i] >= middle
        if above >= k:
            low, count = middle, above
        else:
            high = middle
    return low


@_compiled
def _bounds(value: FloatRows, row: int, size: int, ends: IntArray, bound: FloatRows) -> None:
    """Sums over folds of the least and of the greatest similarity of any repeat, of one query: ``bound`` [4, n]."""
    lower, upper, least, most = bound[0, :size], bound[1, :size], bound[2, :size], bound[3, :size]
    for fold in range(len(ends) - 1):
        one = value[ends[fold], row]
        for i in range(size):
            least[i] = most[i] = one[i]
        for member in range(ends[fold] + 1, ends[fold + 1]):
            one = value[member, row]
            for i in range(size):
                least[i] = one[i] if one[i] < least[i] else least[i]
                most[i] = one[i] if one[i] > most[i] else most[i]
        for i in range(size):
            lower[i] = lower[i] + least[i] if fold else least[i]
            upper[i] = upper[i] + most[i] if fold else most[i]


@_compiled
def _choice_reaches(
    value: FloatRows, row: int, size: int, ends: IntArray, later: IntArray, k: int, bound: FloatRows, reach: FloatRows
) -> None:
    """Raise the reach of every choice, ``reach`` [S], by the items of one query that are near on average."""
    middle = bound[2, :size]
    for i in range(size):
        middle[i] = bound[0, i] + bound[1, i]
    floor = _reach(middle, min(2 * k, size))
    chosen = np.empty(min(size, 4 * k), np.int64)
    count = 0
    for i in range(size):
        if middle[i] >= floor and count < len(chosen):
            chosen[count] = i
            count += 1
    folds = len(ends) - 1
    total = np.zeros((folds + 1, count), np.float32)
    for choice in range(len(reach)):
        for fold in range(folds):
            if choice % later[fold] == 0:  # another repeat of this fold
                member = ends[fold] + choice // later[fold] % (ends[fold + 1] - ends[fold])
                one = value[member, row]
                for i in range(count):
                    total[fold + 1, i] = total[fold, i] + one[chosen[i]]
        reach[choice] = max(reach[choice], _reach(total[folds], k))


@_compiled
def hold_near(
    tile: FloatRows,
    start: int,
    ends: IntArray,
    later: IntArray,
    k: int,
    slack: float,
    reach: FloatRows,
    count: IntArray,
    column: IntArray,
    value: FloatRows,
) -> bool:
    """Add what some choice may need of ``tile`` [M, T, W], whose column 0 is gallery item ``start``, to what is held.

    Args:
        tile: similarities, -inf for the query itself.
        ends: [F + 1] first member of each fold.
        later: [F] choices of the folds that follow.
        k: places that matter.
        slack: sums further apart than this are in the right order, even if a float32 sum with it is rounded.
        reach: [T, S] reach of every choice so far, LOWEST at first; raised.
        count: [T] items held; written.
        column: [T, C] their gallery indices, ascending; written.
        value: [M, T, C] their similarities; written.

    Returns:
        Whether C was enough.
    """
    members, height, width = tile.shape
    bound = np.empty((4, max(width, value.shape[2])), np.float32)
    near = np.empty(width + 1, np.int64)
    for row in range(height):
        _bounds(tile, row, width, ends, bound)
        if reach[row].min() == LOWEST:
            _choice_reaches(tile, row, width, ends, later, k, bound, reach[row])
        floor = max(np.float32(reach[row].min() - slack), LOWEST)
        found = 0
        for i in range(width):
            near[found] = i
            found += bound[1, i] >= floor
        before = count[row]
        if before + found > value.shape[2]:
            return False
        for i in range(found):
            column[row, before + i] = start + near[i]
        for member in range(members):
            one, held = tile[member, row], value[member, row]
            for i in range(found):
                held[before + i] = one[near[i]]
        count[row] = before + found
        if before and found:
            _hold_nearer(row, ends, later, k, slack, reach[row], count, column, value, bound)
    return True


@_compiled
def _hold_nearer(
    row: int,
    ends: IntArray,
    later: IntArray,
    k: int,
    slack: float,
    reach: FloatRows,
    count: IntArray,
    column: IntArray,
    value: FloatRows,
    bound: FloatRows,
) -> None:
    """Raise the reaches [S] of one query by all that is held, and drop what lies below."""
    size = count[row]
    _bounds(value, row, size, ends, bound)
    _choice_reaches(value, row, size, ends, later, k, bound, reach)
    floor = max(np.float32(reach.min() - slack), LOWEST)
    left = 0
    for i in range(size):
        if bound[1, i] >= floor:
            column[row, left] = column[row, i]
            for member in range(len(value)):
                value[member, row, left] = value[member, row, i]
            left += 1
    count[row] = left


@_compiled
def rank_choices(
    value: FloatRows,
    count: IntArray,
    column: IntArray,
    relevant: NDArray[np.bool_],
    ends: IntArray,
    later: IntArray,
    reach: FloatRows,
    depth: IntArray,
    positives: IntArray,
    slack: float,
    exact: NDArray[np.float64],
    undecided: NDArray[np.bool_],
    first: IntArray,
    hits: IntArray,
    precision: NDArray[np.float64],
) -> None:
    """Rank what is held of each query by every choice that is ``undecided``.

    Args:
        value: [M, T, C] similarities.
        count: [T] items of each query.
        column: [T, C] their gallery indices, any order.
        relevant: [T, C] whether they are of the query's class.
        ends: [F + 1] first member of each fold.
        later: [F] choices of the folds that follow.
        reach: [T, S] reach of every choice.
        depth: [T] places that matter.
        positives: [T] R.
        slack: sums further apart than this are in the right order.
        exact: [M, T, C] float64 similarities where known, else NaN; where one is missed, ``WANTED`` is written.
        undecided: [T, S] what to rank; written: whether a similarity was missed.
        first: [T, S] place of the nearest relevant item (from 0), at least ``depth`` if it is beyond; written.
        hits: [T, S] relevant items among the nearest R; written.
        precision: [T, S] sum of (hits up to a relevant item / its rank) over these; written.
    """
    members, height, width = value.shape
    folds, choices = len(ends) - 1, undecided.shape[1]
    to_come = np.zeros((folds + 1, width), np.float32)  # greatest sum of a fold and all that follow
    place = np.empty((folds + 1, width), np.int64)
    total = np.zeros((folds + 1, width), np.float32)
    size, split = np.zeros(folds + 1, np.int64), np.zeros(folds + 1, np.int64)  # items; relevant ones, which lead
    node = np.empty(folds, np.int64)
    above, near = np.empty(width, np.int32), np.empty(width, np.int32)
    number = np.empty(depth.max() + 1, np.int64)
    member = np.empty(folds, np.int64)
    width32 = np.float32(slack)
    for row in range(height):
        if not undecided[row].any():
            continue
        k, n = depth[row], count[row]
        for fold in range(folds - 1, -1, -1):
            for i in range(n):
                most = value[ends[fold], row, i]
                for m in range(ends[fold] + 1, ends[fold + 1]):
                    most = max(most, value[m, row, i])
                to_come[fold, i] = to_come[fold + 1, i] + most
        _relevant_first(relevant[row, :n], place[0], split)
        size[0] = n
        node[:] = -1
        for choice in range(choices):
            if not undecided[row, choice]:
                continue
            changed = False
            for fold in range(folds):
                changed |= node[fold] != choice // later[fold]
                if changed:
                    node[fold] = choice // later[fold]
                    member[fold] = ends[fold] + node[fold] % (ends[fold + 1] - ends[fold])
                    below = reach[row, node[fold] * later[fold] : (node[fold] + 1) * later[fold]].min()
                    floor = max(np.float32(below - slack), LOWEST)
                    _extend(value[member[fold], row], fold, floor, to_come[fold + 1], place, total, size, split)
            items, lead = place[folds, : size[folds]], split[folds]
            _count_above(total[folds, : size[folds]], lead, width32, above, near)
            number[: k + 1] = 0
            missed = False
            for p in range(lead):
                if near[p] > above[p] and _may_be_within(p, total[folds], lead, above[p], k, slack):
                    missed |= _decide(p, items, lead, total[folds], width32, member, exact, row, column[row], above)
                number[min(above[p], k)] += 1
            undecided[row, choice] = missed
            if not missed:
                first[row, choice], hits[row, choice], precision[row, choice] = _scores(number, k, positives[row])


@_compiled
def _relevant_first(relevant: NDArray[np.bool_], place: IntArray, split: IntArray) -> None:
    """Positions of relevant items, then of the others."""
    left = 0
    for wanted in (True, False):
        for i in range(len(relevant)):
            if relevant[i] == wanted:
                place[left] = i
                left += 1
        if wanted:
            split[0] = left


@_compiled
def _extend(
    one: FloatRows,
    fold: int,
    floor: float,
    to_come: FloatRows,
    place: IntArray,
    total: FloatRows,
    size: IntArray,
    split: IntArray,
) -> None:
    """Add a repeat of ``fold`` to the sums so far and keep what may reach ``floor``."""
    old, new, old_total, new_total = place[fold], place[fold + 1], total[fold], total[fold + 1]
    left = 0
    for start, stop, is_lead in ((0, split[fold], True), (split[fold], size[fold], False)):
        for i in range(start, stop):
            at = old[i]
            value = old_total[i] + one[at]
            new[left] = at
            new_total[left] = value
            left += value + to_come[at] >= floor
        if is_lead:
            split[fold + 1] = left
    size[fold + 1] = left


@_compiled
def _count_above(total: FloatRows, lead: int, slack: float, above: IntArray, near: IntArray) -> None:
    """Of each of the first ``lead`` items: how many others are above for certain, and how many possibly."""
    above[:lead] = 0
    near[:lead] = 0
    for j in range(lead, len(total)):
        low, high = total[j] - slack, total[j] + slack
        for p in range(lead):
            above[p] += np.int32(low > total[p])
            near[p] += np.int32(high >= total[p])


@_compiled
def _may_be_within(p: int, total: FloatRows, lead: int, above: int, k: int, slack: float) -> bool:
    """Whether relevant item p can be among the first k places, by what is above it for certain."""
    limit = np.float32(total[p] + 2 * slack)
    for q in range(lead):
        above += total[q] > limit
    return above < k


@_compiled
def _decide(
    p: int,
    items: IntArray,
    lead: int,
    total: FloatRows,
    slack: float,
    member: IntArray,
    exact: NDArray[np.float64],
    row: int,
    column: IntArray,
    above: IntArray,
) -> bool:
    """Count what is above item p among those too near to tell; True if an exact similarity is missed."""
    own = _exact_sum(items[p], member, exact, row)
    missed = np.isnan(own)
    more = 0
    for j in range(lead, len(items)):
        if total[j] + slack >= total[p] and not total[j] - slack > total[p]:
            other = _exact_sum(items[j], member, exact, row)
            missed |= np.isnan(other)
            more += other > own or (other == own and column[items[j]] < column[items[p]])
    above[p] += more
    return missed


@_compiled
def fill_exact(
    left: FloatRows, right: FloatRows, query: IntArray, count: IntArray, column: IntArray, exact: NDArray[np.float64]
) -> None:
    """``similarity.exact_similarities`` of unit rows ``left`` [Q, D], ``right`` [N, D] where ``exact`` [T, C] is WANTED."""
    terms = np.empty(left.shape[1] + 1, np.float64)
    for row in range(len(query)):
        x = left[query[row]]
        for i in range(count[row]):
            if exact[row, i] == WANTED:
                y = right[column[row, i]]
                width = len(x)
                terms[0] = 0.0
                for d in range(width):
                    terms[d] = np.float64(x[d]) * np.float64(y[d])
                while width > 1:
                    half = (width + 1) // 2
                    for d in range(width - half):
                        terms[d] += terms[half + d]
                    width = half
                exact[row, i] = terms[0]


@_compiled
def _exact_sum(item: int, member: IntArray, exact: NDArray[np.float64], row: int) -> float:
    """Sum over folds, in their order, of exact similarities; NaN if one is missed."""
    total = 0.0
    for m in member:
        if np.isnan(exact[m, row, item]):
            exact[m, row, item] = WANTED
        if exact[m, row, item] == WANTED:
            total = np.nan
        total += exact[m, row, item]
    return total


@_compiled
def _scores(number: IntArray, k: int, positives: int) -> tuple[int, int, float]:
    """First relevant place, hits and precision sum, from how many relevant items have a irrelevant ones above."""
    first, hits, precision = k, 0, 0.0
    for a in range(k):
        if number[a] and first == k:
            first = a
        for _ in range(number[a]):
            if a + hits >= positives:
                return first, hits, precision
            hits += 1
            precision += hits / (a + hits)
    return first, hits, precision
