"""Search of a set within itself by half of the products: a tile above the diagonal serves its columns as queries, too.

Queries are taken block by block. A block is multiplied with itself and everything behind it; entries that may be among
the k nearest of a later row are kept for it, so that a block's candidates are complete when its turn comes.

It serves every similarity that is the same for both sides (``SymmetricSearch``), and can go on where it was stopped.

Letters: N rows, T rows of a block, W columns of a tile, D dimensions, k places that matter, M entries.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np

from dmlbench.evaluation.search.back_ends import exclude
from dmlbench.evaluation.search.candidates import (
    LOWEST,
    PADDING,
    Found,
    Keys,
    entries_above,
    floor_below,
    kth_bound,
    narrow_keys,
    pack,
)
from dmlbench.evaluation.search.parallel import Workspace, num_threads, over_threads, single_threaded_products
from dmlbench.evaluation.search.similarity import FloatRows
from dmlbench.types import IntArray

Result = TypeVar("Result")

_NUM_BLOCKS = 16  # half of a block's square is computed for nothing: a share of 1/16 in all
_MIN_BLOCK = 256  # fewer rows make the matrix product slow
_TILE_ENTRIES = 2**23
_BYTES_PER_ENTRY = 10
_KEPT = 3  # times k: candidates of a waiting row before they are narrowed
BYTES_PER_WAITING = 64  # and place: keys, rows, their sorted copies
# keeping a candidate of a later row takes as long as about so many multiplications (measured for one and two threads)
_GAIN = 50_000

_workspace = Workspace()


class SymmetricSearch(Protocol):
    """A set within itself, and a float32 similarity that is the same for (i, j) and (j, i)."""

    @property
    def own_column(self) -> IntArray:
        """[N] the row that a row must not find, or -1."""
        ...

    @property
    def slack(self) -> float:
        """Similarities further apart than this are in the right order."""
        ...

    @property
    def free_bytes(self) -> int:
        """Memory for tiles and candidates."""
        ...

    def similarities(self, part: IntArray, start: int, stop: int, *, out: FloatRows) -> None:
        """Similarities of the rows ``part`` [T] to the rows start .. stop - 1 into ``out`` [T, W]."""
        ...


def halves_pay(k: int, num_wanted: int, *, size: int, width: int, free_bytes: int, threads: int) -> bool:
    """Whether half of the products, and keeping what the other half would tell, takes less time than all products.

    Args:
        k: places that matter.
        num_wanted: rows of the set whose neighbors are asked for.
        size: N.
        width: D.
        free_bytes: memory for tiles and candidates.
        threads: that share the products; one of them alone hands candidates on, for which the others wait.
    """
    return (
        4 * num_wanted >= 3 * size
        and size * width >= _GAIN * threads * k
        and _block_rows(size) >= 2 * k
        and BYTES_PER_WAITING * k * size <= free_bytes // 4
    )


def _block_rows(size: int) -> int:
    return min(max(size // _NUM_BLOCKS, _MIN_BLOCK), int(_TILE_ENTRIES**0.5))


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
class HalvesState:
    """How far a search has come; with a copy of it another one can go on.

    Attributes:
        done: blocks whose rows are ranked.
        waiting: candidates of every block that the blocks done have left.
    """

    done: int = 0
    waiting: list[Waiting] = field(default_factory=list)


@dataclass(frozen=True)
class _Block:
    """What the products of a block with itself and everything behind it leave.

    Attributes:
        keys: [T, C] candidates of its own rows.
        later: (index [M], ascending; key [M]) of later rows, per tile.
    """

    keys: Keys
    later: list[tuple[IntArray, Keys]]


def ranked_by_halves(
    search: SymmetricSearch,
    k: int,
    finish: Callable[[IntArray, Keys], Result],
    *,
    wanted: IntArray,
    shape: tuple[int, int] | None = None,
    threads: int | None = None,
    state: HalvesState | None = None,
) -> Iterator[tuple[IntArray, Result]]:
    """As ``UnitSearch.ranked``, by half of the similarities.

    Args:
        search: what is searched.
        k: places that matter.
        finish: of (queries [T], candidates [T, C]).
        wanted: queries [W], ascending.
        shape: rows of a block and columns of its tiles; None is that of unit vectors.
        threads: how many; None is torch's setting.
        state: where to go on from; kept up to date: a copy taken while a block's result is held goes on behind it.
    """
    size, threads = len(search.own_column), num_threads() if threads is None else threads
    rows, columns = shape or _unit_shape(search, threads)
    floor = np.full(size, LOWEST)  # rises; whichever value a thread meets is right
    starts = list(range(0, size, rows))
    state = HalvesState() if state is None else state
    waiting = state.waiting = state.waiting or [Waiting() for _ in starts]
    is_wanted = np.zeros(size, dtype=bool)
    is_wanted[wanted] = True

    def work(start: int) -> _Block:
        return _multiplied(search, start, min(start + rows, size), columns=columns, k=k, floor=floor)

    first = state.done
    with single_threaded_products():
        for number, block in enumerate(over_threads(work, starts[first:], threads=threads), start=first):
            for index, keys in block.later:
                _distribute(index, keys, waiting, rows)
            for place in range(number + 1, len(starts)):
                _narrow(waiting[place], floor[starts[place] : starts[place] + rows], k, slack=search.slack)
            known, waiting[number] = waiting[number].padded(len(block.keys)), Waiting()
            state.done = number + 1
            inside = np.flatnonzero(is_wanted[starts[number] : starts[number] + rows])
            if len(inside):
                keys = np.concatenate([known, block.keys], axis=1)[inside]
                if keys.shape[1] >= 2 * k:
                    keys, _ = narrow_keys(keys, k, slack=search.slack)
                yield starts[number] + inside, finish(starts[number] + inside, keys)


def _unit_shape(search: SymmetricSearch, threads: int) -> tuple[int, int]:
    size = len(search.own_column)
    rows = _block_rows(size)
    entries = min(_TILE_ENTRIES, search.free_bytes // (2 * threads * _BYTES_PER_ENTRY))
    return rows, max(1, min(size, entries // rows))


def _multiplied(search: SymmetricSearch, start: int, stop: int, *, columns: int, k: int, floor: FloatRows) -> _Block:
    """Rows start .. stop - 1 with themselves and all later ones, ``columns`` at a time."""
    part = np.arange(start, stop)
    own_floor = floor[start:stop, None].copy()
    kept = np.empty((len(part), 0), dtype=np.uint64)
    later = []
    for left in range(start, len(search.own_column), columns):
        right = min(left + columns, len(search.own_column))
        similarity = _workspace.array("similarity", (len(part), right - left), np.float32)
        search.similarities(part, left, right, out=similarity)
        exclude(similarity, search.own_column[part] - left)
        if (own_floor == LOWEST).any():
            own_floor = np.maximum(own_floor, floor_below(kth_bound(similarity, k), search.slack))
        kept = np.concatenate([kept, entries_above(similarity, own_floor, first_column=left).padded()], axis=1)
        if right < len(search.own_column) and kept.shape[1] >= 2 * k:
            kept, own_floor = narrow_keys(kept, k, slack=search.slack)
        first = max(left, stop)
        if first < right:
            part_above = similarity[:, first - left :]
            index, keys = _of_columns(part_above, floor[first:right], k, slack=search.slack, first_row=start)
            later.append((index + first, keys))
    return _Block(kept, later)


def _of_columns(
    similarity: FloatRows, floor: FloatRows, k: int, *, slack: float, first_row: int
) -> tuple[IntArray, Keys]:
    """Entries of ``similarity`` [T, W] that may be among the k largest of their column, by column: (column, key)."""
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
