"""Compiled choice of the gallery items that some collection can need, one query at a time, from a core's own cache.

It needs numba. Letters: M members, fold by fold; T queries of a tile, W columns multiplied at a time, C columns held of
each query, F folds, S choices.

A *reach* of a choice is a value that at least k items' sums reach. What is less than a choice's reach (less the slack)
is not among its k nearest. The reach of some items that are near on average is close to that of all, and the least
reach of all choices leaves few items that no choice needs. Which of these are relevant by rank depends only on how many
irrelevant ones lie above each relevant one: with a_0 <= a_1 <= .., place j + a_j is relevant and the others are not.
"""

import numpy as np

from dmlbench.evaluation.search.similarity import FloatRows
from dmlbench.machine_code import compiled
from dmlbench.types import IntArray

LOWEST = np.finfo(np.float32).min
_BISECTIONS = 48
_BLOCK = 16  # columns of which the largest is found first


@compiled
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


@compiled
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


@compiled
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


@compiled
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


@compiled
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


@compiled
def hold_near_one(
    tile: FloatRows,
    start: int,
    k: int,
    slack: float,
    reach: FloatRows,
    count: IntArray,
    column: IntArray,
    value: FloatRows,
) -> bool:
    """``hold_near`` of a single member: M, F and S are 1, and columns are held in any order."""
    width, capacity = tile.shape[2], value.shape[2]
    maxima = np.empty(min(width, max(2 * k, width // _BLOCK)), np.float32)  # of every len(maxima)-th column
    for row in range(len(count)):
        one, held = tile[0, row], value[0, row]
        maxima[:] = -np.inf
        for first in range(0, width, len(maxima)):
            for i in range(min(len(maxima), width - first)):
                maxima[i] = one[first + i] if one[first + i] > maxima[i] else maxima[i]
        if reach[row, 0] == LOWEST:
            reach[row, 0] = _reach(maxima, k)
        floor = max(np.float32(reach[row, 0] - slack), LOWEST)
        found = count[row]
        for group in range(len(maxima)):
            if maxima[group] >= floor:
                for i in range(group, width, len(maxima)):
                    if one[i] >= floor:
                        if found == capacity:
                            return False
                        column[row, found], held[found] = start + i, one[i]
                        found += 1
        if found > count[row] > 0:
            reach[row, 0] = max(reach[row, 0], _reach(held[:found], k))
            floor = max(np.float32(reach[row, 0] - slack), LOWEST)
            left = 0
            for i in range(found):
                column[row, left], held[left] = column[row, i], held[i]
                left += held[i] >= floor
            found = left
        count[row] = found
    return True
