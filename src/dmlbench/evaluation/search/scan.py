"""The scan of the gallery for every query, tile by tile: of all similarities, or of half of them within one set.

It serves every similarity (``Similarities``), and can go on where it was stopped. By half of the similarities means
that a tile above the diagonal serves its columns as queries, too: rows are taken block by block, a block is compared
with itself and everything behind it, and entries that may be among the k nearest of a later row wait for it, so that a
block's candidates are complete when its turn comes.

Letters: N gallery items, T queries of a tile or block, W columns of a tile, k places that matter, M entries.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from dmlbench.evaluation.search.back_ends import exclude
from dmlbench.evaluation.search.on_device import entries_of_columns, halved_where_full
from dmlbench.evaluation.search.parallel import Workspace, over_threads, single_threaded_products
from dmlbench.evaluation.search.similarity import FloatRows
from dmlbench.evaluation.search.top_k import (
    LOWEST,
    PADDING,
    Found,
    Keys,
    Tile,
    TopK,
    floor_below,
    kth_bound,
    narrow_keys,
    pack,
)
from dmlbench.types import IntArray

Result = TypeVar("Result")

_KEPT = 3  # times k: candidates of a waiting row before they are narrowed
BYTES_PER_WAITING = 64  # and place: keys, rows, their sorted copies

_workspace = Workspace()


class Similarities(Protocol):
    """Float32 similarities of queries and gallery items, as the scan asks for them."""

    @property
    def own_column(self) -> IntArray:
        """[Q] gallery index that a query must not find, or -1."""
        ...

    @property
    def num_gallery(self) -> int:
        """N."""
        ...

    @property
    def slack(self) -> float:
        """Similarities further apart than this are in the right order."""
        ...

    @property
    def device(self) -> torch.device:
        """Where they are computed,"""
        ...

    @property
    def on_host(self) -> bool:
        """and whether tiles are arrays on the host; else they are tensors on ``device``, and stay there."""
        ...

    def similarities(self, part: IntArray, start: int, stop: int, *, out: Tile) -> None:
        """Similarities of the queries ``part`` [T] to gallery items start .. stop - 1 into ``out`` [T, W]."""
        ...


@dataclass(frozen=True)
class ScanPlan:
    """How a scan is shared out.

    Attributes:
        rows: queries of a tile or rows of a block.
        columns: gallery items of a tile.
        threads: that share the tiles.
        by_half: whether the queries are the gallery, similarities are the same for both sides, and half serve.
        candidates: in place of the scan of a tile: its queries [T] to their keys [T, C]; not by half.
    """

    rows: int
    columns: int
    threads: int
    by_half: bool = False
    candidates: Callable[[IntArray], Keys] | None = None


@dataclass
class Waiting:
    """Candidates of a later block: row of the block [M] and key [M], in parts."""

    rows: list[IntArray] = field(default_factory=list)
    keys: list[Keys] = field(default_factory=list)

    def __len__(self) -> int:
        return sum(map(len, self.keys))

    def padded(self, height: int) -> Keys:
        """[T, C], ``height`` rows."""
        if not self.keys:
            return np.empty((height, 0), dtype=np.uint64)
        row, keys = np.concatenate(self.rows), np.concatenate(self.keys)
        order = np.argsort(row.astype(np.uint16), kind="stable")  # short numbers are sorted by their digits
        return Found(np.bincount(row, minlength=height), keys[order]).padded()


@dataclass
class ScanState:
    """How far a scan has come; with a copy of it another one can go on.

    Attributes:
        done: queries that are ranked; blocks, where the scan is by half.
        waiting: candidates of every block that the blocks done have left.
    """

    done: int = 0
    waiting: list[Waiting] = field(default_factory=list)


def scan(
    source: Similarities,
    k: int,
    finish: Callable[[IntArray, Keys], Result],
    *,
    wanted: IntArray,
    plan: ScanPlan,
    state: ScanState | None = None,
) -> Iterator[tuple[IntArray, Result]]:
    """``finish(queries [T], candidates [T, C])`` for the k nearest of the queries ``wanted`` [W], tile by tile.

    Args:
        source: what is scanned.
        k: places that matter.
        finish: what to make of candidates.
        wanted: queries, ascending.
        plan: how the work is shared out.
        state: where to continue; kept up to date, so that a copy taken while a result is held continues after it.

    Yields:
        (queries [T], what ``finish`` gave), in the order of ``wanted``.
    """
    state = ScanState() if state is None else state
    with single_threaded_products():
        if plan.by_half:
            yield from _by_half(source, k, finish, wanted, plan, state)
            return
        left = wanted[state.done :]
        tiles = [left[start : start + plan.rows] for start in range(0, len(left), plan.rows)]

        def work(part: IntArray) -> tuple[IntArray, Result]:
            if plan.candidates is not None:
                return part, finish(part, plan.candidates(part))
            return part, finish(part, candidates(source, part, k, columns=plan.columns))

        for part, result in over_threads(work, tiles, threads=plan.threads):
            state.done += len(part)
            yield part, result


def candidates(source: Similarities, part: IntArray, k: int, *, columns: int) -> Keys:
    """What may be among the k nearest of the queries ``part`` [T], ``columns`` gallery items at a time: [T, C]."""
    top = TopK(np.full((len(part), 1), LOWEST), k, slack=source.slack)
    _over_tiles(source, part, 0, columns, lambda tile, start: top.add(tile, first_column=start))
    return top.keys


def _over_tiles(
    source: Similarities, part: IntArray, first: int, columns: int, take: Callable[[Tile, int], None]
) -> None:
    """``take`` of the similarities [T, W] of the queries ``part`` [T] to the gallery from ``first`` on, in tiles of
    ``columns`` items, and of each tile's first item. Tiles on a device that has no memory for them are halved."""

    def work(start: int, stop: int) -> None:
        shape = (len(part), stop - start)
        tile: Tile
        if source.on_host:
            tile = _workspace.array("similarity", shape, np.float32)
        else:
            tile = torch.empty(shape, dtype=torch.float32, device=source.device)
        source.similarities(part, start, stop, out=tile)
        exclude(tile, source.own_column[part] - start)
        take(tile, start)

    for start in range(first, source.num_gallery, columns):
        halved_where_full(work, start, min(start + columns, source.num_gallery), device=source.device)


def _by_half(
    source: Similarities,
    k: int,
    finish: Callable[[IntArray, Keys], Result],
    wanted: IntArray,
    plan: ScanPlan,
    state: ScanState,
) -> Iterator[tuple[IntArray, Result]]:
    size, rows, slack = source.num_gallery, plan.rows, source.slack
    floor = np.full(size, LOWEST)  # rises; whichever value a thread meets is right
    starts = list(range(0, size, rows))
    waiting = state.waiting = state.waiting or [Waiting() for _ in starts]
    is_wanted = np.zeros(size, dtype=bool)
    is_wanted[wanted] = True

    def work(start: int) -> tuple[Keys, list[tuple[IntArray, Keys]]]:
        """Candidates [T, C] of a block, and (index [M], ascending; key [M]) of later rows, per tile."""
        part = np.arange(start, min(start + rows, size))
        top = TopK(floor[part, None], k, slack=slack)
        later = []

        def take(tile: Tile, left: int) -> None:
            found = top.found_in(tile, first_column=left)
            first, right = max(left, start + len(part)), left + tile.shape[1]
            if first < right:
                index, keys = _of_columns(tile[:, first - left :], floor[first:right], k, slack=slack, first_row=start)
                later.append((index + first, keys))
            top.add_found(found)

        _over_tiles(source, part, start, plan.columns, take)
        return top.keys, later

    first = state.done
    for number, (own, later) in enumerate(over_threads(work, starts[first:], threads=plan.threads), start=first):
        for index, keys in later:
            _distribute(index, keys, waiting, rows)
        for place in range(number + 1, len(starts)):
            _narrow(waiting[place], floor[starts[place] : starts[place] + rows], k, slack=slack)
        known, waiting[number] = waiting[number].padded(len(own)), Waiting()
        state.done = number + 1
        inside = np.flatnonzero(is_wanted[starts[number] : starts[number] + rows])
        if len(inside):
            keys = np.concatenate([known, own], axis=1)[inside]
            if keys.shape[1] >= 2 * k:
                keys, _ = narrow_keys(keys, k, slack=slack)
            yield starts[number] + inside, finish(starts[number] + inside, keys)


def _of_columns(similarity: Tile, floor: FloatRows, k: int, *, slack: float, first_row: int) -> tuple[IntArray, Keys]:
    """Entries of ``similarity`` [T, W] that may be among the k largest of their column, by column: (column, key)."""
    if isinstance(similarity, Tensor):
        row, column, value = entries_of_columns(similarity, floor, k, slack=slack)
        return column, pack(value, row + first_row)
    if (floor == LOWEST).any() and len(similarity) >= k:
        size = max(1, len(similarity) // (2 * k))
        groups = len(similarity) // size
        maxima = similarity[: groups * size].reshape(size, groups, -1).max(axis=0)
        floor = np.maximum(floor, floor_below(kth_bound(np.ascontiguousarray(maxima.T), k)[:, 0], slack))
    mask = np.greater_equal(similarity, floor, out=_workspace.array("mask", similarity.shape, np.bool_))
    height, width = mask.shape
    flat = np.flatnonzero(mask)
    row = np.repeat(np.arange(height), np.diff(np.searchsorted(flat, np.arange(height + 1) * width)))
    column = flat - row * width
    order = np.argsort(column.astype(np.uint16 if width < 2**16 else np.uint32), kind="stable")
    row, column = row[order], column[order]
    return column, pack(similarity[row, column], row + first_row)


def _distribute(index: IntArray, keys: Keys, waiting: list[Waiting], rows: int) -> None:
    """Hand entries, ``index`` [M] ascending, to the blocks of ``rows`` rows that they belong to."""
    edges = np.searchsorted(index, np.arange(len(waiting) + 1) * rows)
    for place, (start, stop) in enumerate(itertools.pairwise(edges)):
        if start < stop:
            waiting[place].rows.append(index[start:stop] - place * rows)
            waiting[place].keys.append(keys[start:stop])


def _narrow(block: Waiting, floor: FloatRows, k: int, *, slack: float) -> None:
    """Drop candidates that others rule out, where there are many; raises ``floor`` [T]."""
    if len(block) < _KEPT * k * len(floor):
        return
    keys = block.padded(len(floor))
    if keys.shape[1] < k:
        return
    left, reached = narrow_keys(keys, k, slack=slack)
    np.maximum(floor, reached[:, 0], out=floor)
    row, place = np.nonzero(left < PADDING)
    block.rows, block.keys = [row], [left[row, place]]
