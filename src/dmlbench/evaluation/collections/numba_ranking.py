"""``concatenated.rank_by_numpy`` in numba kernels, query by query and bit-equal.

Letters: M models, T queries of a tile, S sums of F models each, n items that some sum may need, k places that matter.

With a_0 <= a_1 <= .. the numbers of irrelevant items above each relevant one, the places a_j + j are relevant and no
others. So relevant items are compared with irrelevant ones only, and exactly only where the two are near.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba.core.types import voidptr
from numba.extending import intrinsic
from numpy.typing import NDArray

from dmlbench.evaluation.collections.concatenated import Near
from dmlbench.evaluation.search.candidates import LOWEST, FloatRows
from dmlbench.evaluation.search.scan import Search
from dmlbench.types import IntArray

_WANTED = np.inf  # in place of an exact similarity: it is to be computed
_LANES = 32  # numbers that a vector unit compares at a time


def _compiled(function: Any) -> Any:
    """``numba.njit`` without the GIL, cached next to the source or in the user's cache if either is writable."""
    try:
        return numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # numba finds no folder that can be written to
        return numba.njit(nogil=True)(function)


def is_cached() -> bool:
    """Whether an earlier process has left compiled kernels in numba's cache."""
    folder = _rank_tile.stats.cache_path
    return folder is not None and any(Path(folder).glob(f"{Path(__file__).stem}.*.nbc"))


def rank(
    models: Sequence[Search], part: IntArray, near: Near, sums: IntArray, relevant: NDArray[np.bool_], *, k: int,
    slack: float,
) -> NDArray[np.bool_]:  # fmt: skip
    """As ``rank_by_numpy``; ``slack`` may be rounded."""
    row = np.repeat(np.arange(len(part)), near.counts)
    # a query's relevant items lead; small types are sorted faster
    order = np.argsort(2 * row.astype(np.min_scalar_type(2 * len(part))) + ~relevant, kind="stable")
    lead = np.bincount(row[relevant], minlength=len(part))
    known = np.full(near.value.shape, np.nan)
    pending = np.ones((len(sums), len(part)), np.bool_)
    ranked = np.zeros((len(sums), len(part), k), np.bool_)
    rows = [model.held_rows() for model in models]
    # the arrays' addresses, for a list of them would be compiled anew for every number of models
    held = np.array([(0, 0, 0) if r is None else (r[0].ctypes.data, r[1].ctypes.data, r[0].shape[1]) for r in rows])
    while pending.any():
        _rank_tile(near, part, order, lead, sums, np.float32(slack), held, known, pending, ranked)
        for model, similarity in ((models[at], known[at]) for at, r in enumerate(rows) if r is None):
            item = np.flatnonzero(similarity == _WANTED)
            if len(item):
                similarity[item] = model.exact(part)(row[item], near.column[item])
    return ranked


@_compiled
def _rank_tile(
    tile: Near, part: IntArray, order: IntArray, lead: IntArray, sums: IntArray, slack: np.float32, held: IntArray,
    known: NDArray[np.float64], pending: NDArray[np.bool_], ranked: NDArray[np.bool_],
) -> None:  # fmt: skip
    """Rank a tile by every sum that is ``pending`` [S, T]; afterwards ``pending`` marks where a similarity was missing.

    The first ``lead`` [T] items of a query in ``order`` [n] are the relevant ones. ``known`` [M, n] are the exact
    similarities so far, NaN at first; ``_WANTED`` marks the missing ones. ``held`` [M, 3]: the addresses of a model's
    unit rows of queries (indexed by ``part`` [T]) and of the gallery, and their width; or 0.
    """
    models, width, k = len(known), tile.counts.max(), ranked.shape[2]
    near, total = np.empty((models, width), np.float32), np.zeros((sums.shape[1] + 1, width), np.float32)
    item, sum_of = np.empty(width, np.int64), np.empty(width + _LANES, np.float32)  # what a sum may need
    above, unsure = np.empty(width + _LANES, np.int32), np.empty(width + _LANES, np.int32)
    number = np.empty(k + 1, np.int64)
    stop = 0
    for row in range(len(lead)):
        start, stop = stop, stop + tile.counts[row]
        if not pending[:, row].any():
            continue
        items, size = order[start:stop], stop - start
        for model in range(models):
            one = tile.value[model]
            for i in range(size):
                near[model, i] = one[items[i]]
        query, before = part[row], -1
        for at in range(len(sums)):
            if not pending[at, row]:
                continue
            _add_up(near, sums, at, before, size, total)
            before = at
            of_all, floor = total[-1], max(tile.reach[row, at] - slack, LOWEST)
            num_all = num_items = 0
            for i in range(size):
                sum_of[num_all], item[num_all] = of_all[i], items[i]
                num_all += of_all[i] >= floor
                num_items = num_all if i < lead[row] else num_items
            _count_above(sum_of, num_items, num_all, slack, above, unsure)
            number[:] = 0
            missed = False
            for p in range(num_items):
                if unsure[p] > above[p] and above[p] < k:
                    own = _exact_sum(query, item[p], tile.column, sums[at], held, known)
                    missed |= np.isnan(own)
                    for j in range(num_items, num_all):
                        if sum_of[j] + slack >= sum_of[p] and not sum_of[j] - slack > sum_of[p]:
                            its = _exact_sum(query, item[j], tile.column, sums[at], held, known)
                            missed |= np.isnan(its)
                            above[p] += its > own or (its == own and item[j] < item[p])
                number[min(above[p], k)] += 1
            pending[at, row] = missed
            hits = 0
            for a in range(0 if missed else k):
                for _ in range(min(number[a], k - a - hits)):
                    ranked[at, row, a + hits] = True
                    hits += 1


@_compiled
def _add_up(value: FloatRows, sums: IntArray, at: int, before: int, size: int, total: FloatRows) -> None:
    """``total`` [F + 1, n]: the sum ``at`` of ``value`` [M, n], fold by fold, from where it differs from ``before``."""
    changed = before < 0
    for fold in range(sums.shape[1]):
        changed |= sums[at, fold] != sums[before, fold]
        if changed:
            old, new, one = total[fold], total[fold + 1], value[sums[at, fold]]
            for i in range(size):
                new[i] = old[i] + one[i]


@_compiled
def _count_above(
    total: FloatRows, lead: int, size: int, slack: np.float32, above: NDArray[np.int32], unsure: NDArray[np.int32]
) -> None:
    """For each of the first ``lead`` sums: how many of the others are above for certain, and how many possibly."""
    padded = (lead + _LANES - 1) // _LANES * _LANES  # an odd end would take longer than all else
    above[:padded] = 0
    unsure[:padded] = 0
    for j in range(lead, size):
        low, high = total[j] - slack, total[j] + slack
        for p in range(padded):
            above[p] += np.int32(low > total[p])
            unsure[p] += np.int32(high >= total[p])


@_compiled
def _exact_sum(
    query: int, item: int, column: IntArray, models: IntArray, held: IntArray, known: NDArray[np.float64]
) -> float:
    """Sum over folds, in their order, of exact similarities; NaN if one is missing."""
    total = 0.0
    for model in models:
        if np.isnan(known[model, item]):
            known[model, item] = _exact(held[model], query, column[item]) if held[model, 0] else _WANTED
        if known[model, item] == _WANTED:
            total = np.nan
        total += known[model, item]
    return total


@_compiled
def _exact(held: IntArray, query: int, column: int) -> float:
    """``unit_vectors.exact_similarities`` of two rows."""
    width = held[2]
    x, y = _row(held[0], query, width), _row(held[1], column, width)
    terms = np.zeros(width + 1)  # a row may have no columns
    for d in range(width):
        terms[d] = np.float64(x[d]) * np.float64(y[d])
    while width > 1:
        half = (width + 1) // 2
        for d in range(width - half):
            terms[d] += terms[half + d]
        width = half
    return terms[0]


@_compiled
def _row(address: int, number: int, width: int) -> NDArray[np.float32]:
    """Row ``number`` of a C-ordered float32 array at ``address``."""
    return numba.carray(_pointer(address + 4 * width * number), (width,), np.float32)  # type: ignore[call-arg]


@intrinsic
def _pointer(_: Any, address: Any) -> Any:
    return voidptr(address), lambda context, builder, _, arguments: builder.inttoptr(
        arguments[0], context.get_value_type(voidptr)
    )
