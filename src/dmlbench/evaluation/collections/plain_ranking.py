"""Ranking of the gallery by sums of fold models' similarities, as array operations on the host.

Letters: M models, T queries of a tile, W gallery items of a block, n items that some sum may need, S sums of F models
each, C items that bound what every sum needs, k places that matter.
"""

import functools
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from dmlbench.evaluation.collections.models import FoldModel, Near
from dmlbench.evaluation.search.parallel import Workspace
from dmlbench.evaluation.search.similarity import FloatRows
from dmlbench.evaluation.search.top_k import Found, Keys, floor_below, kth_bound, marked, pack, padded_place, settle
from dmlbench.types import IntArray

_TOGETHER = 8  # queries of a tile whose similarities are read while they are in a core's own cache
# of float32 numbers whose last bit marks relevant items: the largest one without a mark, and their parts
FARTHEST = 0x7F7FFFFE
_VALUE, _SIGN = np.uint32(2**32 - 2), np.uint32(2**31)

_workspace = Workspace()


def largest_on_average(value: FloatRows, sums: IntArray, count: int) -> tuple[FloatRows, FloatRows]:
    """``value`` of ``count`` items [M, T, C] that are large on average, and the bound [T, W] that no sum exceeds.

    Args:
        value: [M, T, W] similarities.
        sums: [S, F] the models of every sum.
        count: C, less where the block has less.
    """
    middle, upper = _middle_and_upper(value, sums)
    return _largest(value, middle, count), upper


def reached_by(some: FloatRows, sums: IntArray, k: int) -> FloatRows:
    """Values [T, S] that every sum of at least k of the items ``some`` [M, T, C] reaches; -inf if there are fewer."""
    return np.concatenate([kth_bound(total, k) for total in _totals(some, sums)], axis=1)


def larger(reach: FloatRows, other: FloatRows) -> FloatRows:
    """Of what is reached [T, S], the larger."""
    return np.maximum(reach, other)


def select(value: FloatRows, largest: FloatRows, first_column: int, reach: FloatRows, *, slack: float) -> Near:
    """What may be among the k nearest items by any sum of similarities, of a block of the gallery.

    Args:
        value: [M, T, W] similarities to the block, -inf for the query itself.
        largest: [T, W] what no sum exceeds.
        first_column: gallery item of the block's first column.
        reach: [T, S] values that at least k items reach, here or in blocks before.
        slack: sums further apart than this are in the right order.
    """
    flat, edges = value.reshape(len(value), -1), np.arange(len(largest) + 1) * largest.shape[1]
    item = np.flatnonzero(largest >= floor_below(reach.min(axis=1, keepdims=True), slack))
    count = np.diff(np.searchsorted(item, edges))
    return Near(flat[:, item], item - np.repeat(edges[:-1] - first_column, count), count, reach)


def joined(value: Sequence[FloatRows], order: IntArray) -> FloatRows:
    """``value`` [M, n] of several blocks in one, in the ``order`` [n] of the queries."""
    return np.concatenate(value, axis=1)[:, order]


def rank(
    models: Sequence[FoldModel],
    part: IntArray,
    near: Near,
    sums: IntArray,
    relevant: NDArray[np.bool_],
    *,
    k: int,
    slack: float,
) -> NDArray[np.bool_]:
    """Relevance by rank [S, T, k] of every sum of similarities.

    Args:
        models: [M] where exact similarities come from.
        part: [T] queries.
        near: what may be among the k nearest.
        sums: [S, F] the models of every sum.
        relevant: [n] whether an item of ``near`` is of the query's class.
        k: places that matter.
        slack: sums further apart than this are in the right order.
    """
    ranked = np.zeros((len(sums), len(part), k), dtype=bool)
    query = np.repeat(np.arange(len(part)), near.counts)
    waiting: list[tuple[IntArray, ...]] = []  # rankings that float32 values do not decide: sum, query, count, keys
    for number, (total, reach) in enumerate(zip(_totals(near.value, sums), near.reach.T, strict=True)):
        item = np.flatnonzero(total >= np.repeat(floor_below(reach, slack), near.counts))
        count = np.bincount(query[item], minlength=len(part))
        place, shape = padded_place(count)
        bits = np.full(shape, FARTHEST, np.uint32)
        bits.reshape(-1)[place] = ((total[item].view(np.uint32) & _VALUE) | relevant[item]) ^ _SIGN
        ordered = np.sort(bits.view(np.float32), axis=1)  # the nearest first
        marks = (ordered.view(np.uint32) & 1).astype(bool)
        ranked[number, :, : shape[1]] = marks[:, :k]
        unsure = ((marks[:, 1:] != marks[:, :-1]) & (ordered[:, 1:] - ordered[:, :-1] <= slack)).any(axis=1)
        item, rows = item[unsure[query[item]]], np.flatnonzero(unsure)
        keys = pack(total[item], item) | relevant[item]
        waiting.append((np.full(len(rows), number), rows, count[rows], keys))
        if number + 1 == len(sums) or sum(len(held[-1]) for held in waiting) >= len(query):
            settle_unsure(
                models, part, near, sums, ranked, *map(np.concatenate, zip(*waiting, strict=True)), slack=slack
            )
            waiting.clear()
    return ranked


def settle_unsure(
    models: Sequence[FoldModel],
    part: IntArray,
    near: Near,
    sums: IntArray,
    ranked: NDArray[np.bool_],
    which: IntArray,
    rows: IntArray,
    count: IntArray,
    keys: Keys,
    *,
    slack: float,
) -> None:
    """Put exact rankings into ``ranked`` [S, T, k] for pairs of sum ``which`` [m] and query ``rows`` [m], of which
    ``count`` [m] items matter: ``keys``, whose columns are items of ``near``, relevant ones marked."""
    query = np.repeat(np.arange(len(part)), near.counts)
    exact = functools.partial(_exact_sums, models, part, near, query, sums[which])
    k = ranked.shape[2]
    settled = settle(Found(count, keys).padded(), exact, k=k, slack=slack, by_mark=True)[:, :k]
    ranked[which, rows, : settled.shape[1]] = marked(settled)


def _exact_sums(
    models: Sequence[FoldModel],
    part: IntArray,
    near: Near,
    query: IntArray,
    sums: IntArray,
    at: IntArray,
    item: IntArray,
) -> NDArray[np.float64]:
    """Exact sums [m] of ``sums[at]`` [m, F] for items ``item`` [m] of ``near``, which are of queries ``query`` [n]."""
    total = np.zeros(len(item))
    for chosen in sums[at].T:  # what several sums need is computed once
        asked, place = np.unique(chosen * len(query) + item, return_inverse=True)
        number, asked = np.divmod(asked, len(query))
        parts = np.split(asked, np.searchsorted(number, range(1, len(models))))
        exact = [
            model.exact(part)(query[some], near.column[some])
            for model, some in zip(models, parts, strict=True)
            if len(some)
        ]
        total += np.concatenate(exact)[place]
    return total


def _middle_and_upper(value: FloatRows, sums: IntArray) -> tuple[FloatRows, FloatRows]:
    """Of what every sum of ``value`` [M, T, W] lies between: twice the middle, which stands for the average, and the
    upper end [T, W]. The next call overwrites them."""
    if len(value) == 1:
        return value[0], value[0]
    lower, upper = (_workspace.array(name, value.shape[1:], np.float32) for name in ("lower", "upper"))
    one = _workspace.array("one", (_TOGETHER, upper.shape[1]), np.float32)
    for start in range(0, len(upper), _TOGETHER):
        rows = slice(start, start + _TOGETHER)
        for bound, total in ((np.minimum, lower[rows]), (np.maximum, upper[rows])):
            for number, fold in enumerate(sums.T):
                out = one[: len(total)] if number else total
                bound.reduce(value[fold.min() : fold.max() + 1, rows], axis=0, out=out)
                if number:
                    total += out
        lower[rows] += upper[rows]
    return lower, upper


def _largest(value: FloatRows, middle: FloatRows, count: int) -> FloatRows:
    """``value`` [M, T, W] of the ``count`` items [M, T, C] whose ``middle`` [T, W] is largest: they do for a bound."""
    height, width = middle.shape
    place = np.argpartition(middle, -min(count, width), axis=1)[:, -count:]
    return np.take(value.reshape(len(value), -1), place + np.arange(height)[:, None] * width, axis=1)


def _totals(value: FloatRows, sums: IntArray) -> Iterator[FloatRows]:
    """Every sum of ``value`` [M, ..], fold by fold, valid until the next; what both have in common is added once."""
    before: list[int] = []
    totals: list[FloatRows] = []
    for models in sums.tolist():
        same = next((fold for fold, model in enumerate(before) if model != models[fold]), 0)
        del totals[same:]
        for fold in range(same, len(models)):
            one = value[models[fold]]
            out = _workspace.array(f"total of {fold}", one.shape, np.float32)
            totals.append(np.add(totals[-1], one, out=out) if fold else one)
        before = models
        yield totals[-1]
