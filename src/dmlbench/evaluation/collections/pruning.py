"""Pairs of queries and gallery items that some collection of fold models can need, by bounds over the repeats.

Letters: T queries of a tile, N gallery items, W of them multiplied at a time, M pairs that are left.
"""

import itertools
from dataclasses import dataclass
from math import prod

import numpy as np

from dmlbench.evaluation.collections.members import Member, PairTile
from dmlbench.evaluation.search.back_ends import exclude
from dmlbench.evaluation.search.candidates import floor_below, kth_bound, padded_place
from dmlbench.evaluation.search.parallel import Workspace
from dmlbench.evaluation.search.similarity import FloatRows
from dmlbench.evaluation.task import RetrievalTask
from dmlbench.types import IntArray

_workspace = Workspace()


@dataclass(frozen=True)
class Kept:
    """Pairs that the bounds leave, query by query, by gallery index.

    Attributes:
        count: [T] pairs of each query.
        column: [M] gallery index.
        lower: [M] sum over folds of the least similarity of any repeat.
        upper: [M] sum over folds of the greatest one.
        value: [members, M] float32 similarities, the members fold by fold.
        slack: sums further apart than this are in the right order, however they were added up.
    """

    count: IntArray
    column: IntArray
    lower: FloatRows
    upper: FloatRows
    value: FloatRows
    slack: float


def prune(folds: list[list[Member]], part: IntArray, task: RetrievalTask, columns: int, *, most: int) -> Kept | None:
    """Multiply every member's rows, ``columns`` at a time, then drop the pairs that no collection can need.

    Per pair, the sum over folds of the least similarity of any repeat bounds every collection from below, and that of
    the greatest from above. A pair whose upper bound is less than the k-th largest lower bound (less the slack) is a
    candidate of no collection.

    Returns:
        What is left; None where that is more than ``most`` pairs of more than one query.
    """
    reach = np.full((len(part), 1), -np.inf, dtype=np.float32)
    kept: list[Kept] = []
    slack = 0.0
    num_gallery = len(task.gallery_labels)
    for start in range(0, num_gallery, columns):
        found, reach = _kept_of(folds, part, task, start, min(start + columns, num_gallery), reach, slack)
        slack = found.slack
        kept.append(found)
        if sum(len(tile.column) for tile in kept) > most // 2:
            merged, reach = _merged(kept, task.k)
            kept = [merged]
            if len(part) > 1 and len(merged.column) > most:
                return None
    return _merged(kept, task.k)[0]


def _kept_of(
    folds: list[list[Member]],
    part: IntArray,
    task: RetrievalTask,
    start: int,
    stop: int,
    reach: FloatRows,
    slack: float,
) -> tuple[Kept, FloatRows]:
    """What is left of gallery items start .. stop - 1; what k lower bounds reach, which rises with every tile.

    The slack grows, too: it is that of all tiles so far, and is taken off anew.
    """
    shape = (len(part), stop - start)
    values = _workspace.array("similarity", (sum(map(len, folds)), *shape), np.float32)
    out = iter(values)
    tiles = [[member.tile(part, start, stop, out=next(out)) for member in fold] for fold in folds]
    for tile in itertools.chain.from_iterable(tiles):
        exclude(tile.value, task.own_column[part] - start)
    slack = max(slack, sum_slack(tiles))
    lower, upper = _bounds(tiles)
    reach = np.maximum(reach, kth_bound(lower, task.k))
    flat = np.flatnonzero(upper >= floor_below(reach, slack))
    count = np.diff(np.searchsorted(flat, np.arange(shape[0] + 1) * shape[1]))
    column = flat - np.repeat(np.arange(shape[0]) * shape[1], count)
    value = np.stack([np.take(member.reshape(-1), flat) for member in values])
    return Kept(count, column + start, lower.reshape(-1)[flat], upper.reshape(-1)[flat], value, slack), reach


def sum_slack(tiles: list[list[PairTile]]) -> float:
    """Sums over folds that are further apart than this are in the right order, for every choice of repeats."""
    error = sum(max(tile.error for tile in fold) for fold in tiles)
    largest = sum(max(tile.largest for tile in fold) for fold in tiles)
    # each of the F - 1 float32 additions, in whichever order, rounds a sum of at most ``largest``
    return 2 * (error + 1.01 * (len(tiles) - 1) * largest * 2.0**-24)


def _bounds(tiles: list[list[PairTile]]) -> tuple[FloatRows, FloatRows]:
    """Sums over folds of the least and of the greatest similarity of any repeat: [T, W] each."""
    shape = tiles[0][0].value.shape
    sums = []
    for name, extreme in (("least", np.minimum), ("greatest", np.maximum)):
        total, one = (_workspace.array(f"{name} {part}", shape, np.float32) for part in ("sum", "fold"))
        for fold, members in enumerate(tiles):
            into = one if fold else total
            extreme(members[0].value, members[-1].value, out=into)
            for tile in members[1:-1]:
                extreme(into, tile.value, out=into)
            if fold:
                total += one
        sums.append(total)
    return sums[0], sums[1]


def _merged(kept: list[Kept], k: int) -> tuple[Kept, FloatRows]:
    """The pairs of all gallery tiles so far, by row, that the bounds of all leave; what k lower bounds reach."""
    everything = kept[0] if len(kept) == 1 else _by_row(kept)
    target, shape = padded_place(everything.count)
    padded = np.full(prod(shape), -np.inf, dtype=np.float32)
    padded[target] = everything.lower
    reach = kth_bound(padded.reshape(shape), k)
    floor = floor_below(reach, everything.slack)
    left = np.flatnonzero(everything.upper >= np.repeat(floor[:, 0], everything.count))
    edges = np.cumsum(everything.count)
    count = np.diff(np.searchsorted(left, edges), prepend=0)
    column, lower, upper = (getattr(everything, name)[left] for name in ("column", "lower", "upper"))
    value = np.take(everything.value, left, axis=1)
    return Kept(count, column, lower, upper, value, everything.slack), reach


def _by_row(kept: list[Kept]) -> Kept:
    """Pairs of several gallery tiles, query by query."""
    height = len(kept[0].count)
    # short numbers are sorted by their digits, in no time
    row = np.concatenate([np.repeat(np.arange(height, dtype=np.uint16), tile.count) for tile in kept])
    order = np.argsort(row, kind="stable")
    column, lower, upper = (
        np.concatenate([getattr(tile, name) for tile in kept])[order] for name in ("column", "lower", "upper")
    )
    count = np.sum([tile.count for tile in kept], axis=0)
    value = np.concatenate([tile.value for tile in kept], axis=1)[:, order]
    return Kept(count, column, lower, upper, value, kept[-1].slack)
