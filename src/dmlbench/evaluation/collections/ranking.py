"""Ranking of the gallery by sums of fold models' similarities.

Letters: M models, T queries of a tile, W gallery items of a block, n items that some sum may need, S sums of F models
each, C items that bound what every sum needs, k places that matter.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dmlbench.evaluation.search.candidates import (
    FloatRows,
    Found,
    Tile,
    Workspace,
    by_row,
    floor_below,
    kth_bound,
    marked,
    pack,
    settle,
    to_device,
    to_host,
)
from dmlbench.evaluation.search.scan import Search
from dmlbench.types import IntArray

_TOGETHER = 8  # queries of a tile whose similarities are read while they are in a core's own cache
_RANKED = 2**18  # items of some sums that are put in order together

_workspace = Workspace()


class Near(NamedTuple):
    """Items that some sum of models may need, query by query.

    Attributes:
        value: [M, n] float32 similarities.
        column: [n] gallery items, ascending for each query.
        counts: [T] items of each query.
        reach: [T, S] values that the sums of at least k items reach.
    """

    value: FloatRows
    column: IntArray
    counts: IntArray
    reach: FloatRows


def largest_on_average(value: Tile, sums: IntArray, count: int) -> tuple[FloatRows, Tile]:
    """``value`` [M, T, W] of ``count`` items [M, T, C] large on average, and a bound [T, W] of all ``sums`` [S, F]."""
    if isinstance(value, Tensor):
        average, bound = _middle_and_upper(value, sums)
        nearest = average.topk(min(count, average.shape[1]), dim=1, sorted=False).indices
        return to_host(value.gather(2, nearest.expand(len(value), -1, -1)))[0], bound
    middle, upper = to_host(*_middle_and_upper(torch.from_numpy(value), sums))
    height, width = middle.shape
    place = np.argpartition(middle, -min(count, width), axis=1)[:, -count:]
    return np.take(value.reshape(len(value), -1), place + np.arange(height)[:, None] * width, axis=1), upper


def reached_by(some: FloatRows, sums: IntArray, k: int) -> FloatRows:
    """Values [T, S] that every sum of at least k of the items ``some`` [M, T, C] reaches; -inf if there are fewer."""
    return np.concatenate([kth_bound(total, k) for total in _totals(some, sums)], axis=1)


def select(value: Tile, largest: Tile, first_column: int, reach: FloatRows, *, slack: float) -> Near:
    """Items of a block of the gallery that may be among the k nearest by any sum of similarities.

    Args:
        value: [M, T, W] similarities to the block, -inf for the query itself.
        largest: [T, W] bound of every sum.
        first_column: gallery item of the block's first column.
        reach: [T, S] values that at least k items reach, here or in blocks before.
        slack: sums further apart than this are in the right order.
    """
    floor = floor_below(reach.min(axis=1, keepdims=True), slack)
    flat = value.reshape(len(value), -1)
    if isinstance(largest, Tensor) and isinstance(flat, Tensor):
        place = torch.nonzero((largest >= to_device(largest.device, floor)[0]).flatten())[:, 0]
        item, near = to_host(place, torch.as_tensor(flat)[:, place])
    else:
        item = np.flatnonzero(largest >= floor)
        near = np.asarray(flat[:, item])
    counts, column = by_row(item, largest.shape)
    return Near(near, column + first_column, counts, reach)


def joined(blocks: Sequence[Near]) -> Near:
    """Concatenate the items of all blocks, query by query."""
    if len(blocks) == 1:
        return blocks[0]
    value, column, counts, _ = zip(*blocks, strict=True)
    order = np.argsort(np.concatenate([np.repeat(np.arange(len(count)), count) for count in counts]), kind="stable")
    return Near(np.concatenate(value, axis=1)[:, order], np.concatenate(column)[order], sum(counts), blocks[-1].reach)


def rank(
    models: Sequence[Search],
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
        models: [M] source of exact similarities.
        part: [T] queries.
        near: candidates for the k nearest.
        sums: [S, F] the models of every sum.
        relevant: [n] whether an item of ``near`` is of the query's class.
        k: places that matter.
        slack: sums further apart than this are in the right order.
    """
    ranked = np.zeros((len(sums), len(part), k), dtype=bool)
    query = np.repeat(np.arange(len(part)), near.counts)
    totals = zip(_totals(near.value, sums), near.reach.T, strict=True)
    at_once = max(1, _RANKED // max(1, len(query)))
    for start in range(0, len(sums), at_once):
        some = sums[start : start + at_once]
        counts, keys = [], []
        for total, reach in itertools.islice(totals, len(some)):
            item = np.flatnonzero(total >= np.repeat(floor_below(reach, slack), near.counts))
            counts.append(np.bincount(query[item], minlength=len(part)))
            keys.append(pack(total[item], item) | relevant[item])
        exact = functools.partial(_exact_sums, models, part, near, query, np.repeat(some, len(part), axis=0))
        rows = Found(np.concatenate(counts), np.concatenate(keys)).padded()
        settled = settle(rows, exact, k=k, slack=slack, by_mark=True)[:, :k]
        ranked[start : start + len(some), :, : settled.shape[1]] = marked(settled).reshape(len(some), len(part), -1)
    return ranked


def _exact_sums(
    models: Sequence[Search],
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


def _middle_and_upper(value: Tensor, sums: IntArray) -> tuple[Tensor, Tensor]:
    """Twice the middle and the upper end [T, W] of the range of all ``sums`` [S, F] of ``value`` [M, T, W]."""
    if len(value) == 1:
        return value[0], value[0]
    middle, upper = torch.zeros(2, *value.shape[1:], device=value.device)
    step = _TOGETHER if value.device.type == "cpu" else len(upper)
    for start in range(0, len(upper), step):
        rows = slice(start, start + step)
        for fold in sums.T:
            repeats = value[fold.min() : fold.max() + 1, rows]
            middle[rows] += repeats.amin(0)
            upper[rows] += repeats.amax(0)
        middle[rows] += upper[rows]
    return middle, upper


def _totals(value: FloatRows, sums: IntArray) -> Iterator[FloatRows]:
    """Every sum of ``value`` [M, ..], valid until the next; a prefix shared with the sum before is not added again."""
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
