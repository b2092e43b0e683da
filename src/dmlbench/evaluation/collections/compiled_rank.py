"""Compiled ranking of every choice of one repeat per fold, one query at a time, from a core's own cache.

It needs numba, and finds what ``frontier`` finds, bit by bit. Letters: M members, fold by fold; T queries of a tile, C
columns held of each query, F folds, S choices.

Which places of a ranking are relevant depends only on how many irrelevant items lie above each relevant one: with these
numbers in order, a_0 <= a_1 <= .., places a_j + j are relevant and no others. So relevant items are compared with
irrelevant ones only, and exactly only where the two are near.
"""

import numpy as np
from numpy.typing import NDArray

from dmlbench.evaluation.collections.compiled_near import LOWEST
from dmlbench.evaluation.search.similarity import FloatRows
from dmlbench.machine_code import compiled
from dmlbench.types import IntArray

Counts = NDArray[np.int32]

WANTED = np.inf  # in place of an exact similarity: it is to be computed


@compiled
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
    first: Counts,
    hits: Counts,
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
    _, height, width = value.shape
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


@compiled
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


@compiled
def _extend(
    one: FloatRows,
    fold: int,
    floor: np.float32,
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


@compiled
def _count_above(total: FloatRows, lead: int, slack: np.float32, above: Counts, near: Counts) -> None:
    """Of each of the first ``lead`` items: how many others are above for certain, and how many possibly."""
    above[:lead] = 0
    near[:lead] = 0
    for j in range(lead, len(total)):
        low, high = total[j] - slack, total[j] + slack
        for p in range(lead):
            above[p] += np.int32(low > total[p])
            near[p] += np.int32(high >= total[p])


@compiled
def _may_be_within(p: int, total: FloatRows, lead: int, above: int, k: int, slack: float) -> bool:
    """Whether relevant item p can be among the first k places, by what is above it for certain."""
    limit = np.float32(total[p] + 2 * slack)
    for q in range(lead):
        above += total[q] > limit
    return above < k


@compiled
def _decide(
    p: int,
    items: IntArray,
    lead: int,
    total: FloatRows,
    slack: np.float32,
    member: IntArray,
    exact: NDArray[np.float64],
    row: int,
    column: IntArray,
    above: Counts,
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


@compiled
def fill_exact(
    left: FloatRows, right: FloatRows, query: IntArray, count: IntArray, column: IntArray, exact: NDArray[np.float64]
) -> None:
    """``similarity.exact_similarities`` of rows of ``left`` [Q, D], ``right`` [N, D] where ``exact`` is WANTED."""
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


@compiled
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


@compiled
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
