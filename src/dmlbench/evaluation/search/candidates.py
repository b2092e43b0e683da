"""Candidates for the k nearest gallery items, and their exact order: float32 values propose, float64 values decide.

A candidate is one 64-bit *key*: the float32 similarity in the upper half, mapped so that larger similarities give
smaller numbers, and twice the gallery index in the lower half (the lowest bit is free for a mark). Sorting keys sorts
by similarity, nearest first, ties by gallery index. Keys are settled on the host for tiles of any device.

Letters: T queries of a tile, W columns, C candidates of a query, k places that matter.
"""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dmlbench.types import IntArray

FloatRows = NDArray[np.float32]
Keys = NDArray[np.uint64]

PADDING = np.uint64(2**64 - 2)  # sorts behind every candidate and carries no mark
LOWEST = np.finfo(np.float32).min  # a floor that all but -inf, which marks the query itself, reach

Tile = FloatRows | Tensor
"""Similarities [T, W], on the host or on an accelerator."""

ExactSimilarity = Callable[[IntArray, IntArray], NDArray[np.float64]]
"""Float64 similarities [M] of M pairs (row of the tile [M], column [M])."""


class Workspace(threading.local):
    """Arrays that a thread reuses, because the system clears fresh memory page by page."""

    def __init__(self) -> None:
        self._arrays: dict[str, NDArray] = {}

    def array(self, name: str, shape: tuple[int, ...], dtype: type) -> NDArray:
        """An uninitialized array; asking for the same ``name`` again invalidates the former one."""
        size = int(np.prod(shape))
        held = self._arrays.get(name)
        if held is None or held.size < size or held.dtype != dtype:
            held = self._arrays[name] = np.empty(size, dtype=dtype)
        return held[:size].reshape(shape)


_workspace = Workspace()


def to_host(*tensors: Tensor) -> list[NDArray[Any]]:
    return [tensor.cpu().numpy() for tensor in tensors]


def to_device(device: torch.device, *arrays: NDArray[Any]) -> list[Tensor]:
    """Copies on ``device``; on a CPU the tensors share the arrays' memory."""
    return [torch.from_numpy(array).to(device) for array in arrays]


def pack(value: FloatRows, column: IntArray) -> Keys:
    """Keys of similarities and gallery indices of any shape; padding where the similarity is -inf."""
    bits = value.view(np.uint32).astype(np.uint64)
    negative = bits >= 2**31
    # floats of one sign are ordered as their bits are; the larger a positive one, the smaller its key
    upper = np.where(negative, bits, np.uint64(2**31 - 1) - bits)
    keys = (upper << np.uint64(32)) | (column.astype(np.uint64) << np.uint64(1))
    keys[bits == 0xFF800000] = PADDING
    return keys


def value_of(keys: Keys) -> FloatRows:
    """Float32 similarities of keys; -inf for padding."""
    upper = keys >> np.uint64(32)
    bits = np.where(upper >= 2**31, upper, np.uint64(2**31 - 1) - upper).astype(np.uint32)
    bits[keys >= PADDING] = 0xFF800000
    return bits.view(np.float32)


def column_of(keys: Keys) -> IntArray:
    """Gallery indices of keys; -1 for padding."""
    column = ((keys & np.uint64(2**32 - 1)) >> np.uint64(1)).astype(np.int64)
    column[keys >= PADDING] = -1
    return column


def marked(keys: Keys) -> NDArray[np.bool_]:
    return (keys & np.uint64(1)).astype(bool)


class Found(NamedTuple):
    """Entries of a tile, by row."""

    counts: IntArray  # [T] entries of each row
    keys: Keys  # [M] their keys, row by row

    def padded(self) -> Keys:
        """[T, C] with C the largest count."""
        result = np.full((len(self.counts), int(self.counts.max(initial=0))), PADDING)
        first = np.cumsum(self.counts) - self.counts
        place = np.arange(len(self.keys)) + np.repeat(np.arange(len(result)) * result.shape[1] - first, self.counts)
        result.reshape(-1)[place] = self.keys
        return result


def entries_above(similarity: Tile, floor: FloatRows, *, first_column: int = 0) -> Found:
    """Entries of ``similarity`` [T, W], whose column 0 is item ``first_column``, that are at least ``floor`` [T, 1]."""
    if isinstance(similarity, Tensor):
        flat = torch.nonzero((similarity >= to_device(similarity.device, floor)[0]).flatten())[:, 0]
        place, value = to_host(flat, similarity.flatten()[flat])
    else:
        mask = np.greater_equal(similarity, floor, out=_workspace.array("mask", similarity.shape, np.bool_))
        place = np.flatnonzero(mask)
        value = similarity.reshape(-1)[place]
    count, column = by_row(place, similarity.shape)
    return Found(count, pack(value, column + first_column))


def by_row(place: IntArray, shape: tuple[int, ...]) -> tuple[IntArray, IntArray]:
    """Counts per row [T] and columns [M] of ascending places [M] in a flattened [T, W]."""
    height, width = shape
    count = np.diff(np.searchsorted(place, np.arange(height + 1) * width))
    return count, place - np.repeat(np.arange(height) * width, count)


def floor_below(kth: FloatRows, slack: float) -> FloatRows:
    """Float32 floors at least ``slack`` below ``kth``, and above -inf."""
    # float32 minus float32 rounds; nextafter keeps the floor on the safe side
    floor = np.nextafter(kth - np.float32(slack), np.float32(-np.inf), dtype=np.float32)
    return np.maximum(floor, LOWEST)


def kth_bound(similarity: Tile, k: int) -> FloatRows:
    """Values [T, 1] that at least k entries of each row of ``similarity`` [T, W] reach; close to the k-th largest.

    The k-th largest of the maxima of groups of columns, which is many times faster than partitioning. -inf if k > W.
    """
    height, width = similarity.shape
    if k > width:
        return np.full((height, 1), -np.inf, dtype=np.float32)
    size = next((size for size in (16, 8, 4, 2) if width // size >= 2 * k), 1)
    groups = width // size
    grouped = similarity[:, : groups * size].reshape(height, size, groups)
    if isinstance(grouped, Tensor):
        return to_host(grouped.amax(1).topk(k, dim=1).values[:, -1:])[0]
    maxima = grouped.max(axis=1) if size > 1 else similarity
    return np.sort(maxima, axis=1)[:, groups - k, None]  # numpy sorts float32 faster than it partitions


class TopK:
    """Candidates for the k nearest of T queries, tile by tile of the gallery."""

    def __init__(self, num_rows: int, k: int, *, slack: float) -> None:
        self.keys: Keys = np.empty((num_rows, 0), dtype=np.uint64)  # [T, C] so far
        self.floor = np.full((num_rows, 1), LOWEST)  # similarity below which nothing counts
        self._k, self._slack = k, slack
        self._lock = threading.Lock()

    def add(self, similarity: Tile, *, first_column: int) -> None:
        """Add a tile [T, W] whose column 0 is item ``first_column``; -inf marks what a query must not find."""
        floor = self.floor
        if (floor == LOWEST).any():
            floor = np.maximum(floor, floor_below(kth_bound(similarity, self._k), self._slack))
        found = entries_above(similarity, floor, first_column=first_column).padded()
        with self._lock:
            self.keys = np.concatenate([self.keys, found], axis=1) if self.keys.size else found
            self.floor = np.maximum(self.floor, floor)
            if self.keys.shape[1] >= 2 * self._k:
                self._narrow()

    def _narrow(self) -> None:
        kth = value_of(np.partition(self.keys, self._k - 1, axis=1)[:, self._k - 1 : self._k])
        self.floor = np.maximum(self.floor, floor_below(kth, self._slack))
        mask = value_of(self.keys) >= self.floor
        self.keys = Found(mask.sum(axis=1), self.keys[mask]).padded()


def order_exactly(keys: Keys, exact: ExactSimilarity, *, k: int, slack: float, by_mark: bool = False) -> Keys:
    """Order candidates by (exact similarity descending, column), padding last; near ones are computed exactly.

    Args:
        keys: [T, C] that contain the k nearest of every row.
        k: places that matter; the order beyond may be that of the float32 values.
        slack: values further apart than this are in the right order.
        by_mark: only the order between marked (relevant) and other candidates has to be right: no score needs more.
    """
    if keys.size == 0:
        return keys
    ordered = np.sort(keys, axis=1)
    row, place = _undecided(ordered, k=k, slack=slack, by_mark=by_mark)
    if len(row):
        chosen = ordered[row, place]
        column = column_of(chosen)
        # entries that follow each other in a row are put in order together
        run = np.cumsum((np.diff(row, prepend=-1) != 0) | (np.diff(place, prepend=-1) != 1))
        ordered[row, place] = chosen[np.lexsort((column, -exact(row, column), run))]
    return ordered


def _undecided(ordered: Keys, *, k: int, slack: float, by_mark: bool) -> tuple[IntArray, IntArray]:
    """(row [M], place [M]) of sorted keys [T, C] that the float32 values cannot put in order.

    These are the entries that lie within ``slack`` of one with the other mark (without marks: of their neighbor) and
    may be among the k first, or lie near such ones. All entries between two of them are included, so sorting each
    stretch by exact similarities is enough.
    """
    keys, width = ordered.reshape(-1), ordered.shape[1]
    ends = np.ones(ordered.shape, dtype=bool)  # of runs of equal marks
    if by_mark:
        odd = marked(ordered)
        np.not_equal(odd[:, 1:], odd[:, :-1], out=ends[:, :-1])
    last = np.flatnonzero(ends)
    first = np.append(0, last[:-1] + 1)
    above, below, kth = (value_of(some) for some in (keys[last[:-1]], keys[first[1:]], ordered[:, :k][:, -1]))
    with np.errstate(invalid="ignore"):  # padding less padding
        # the upper halves of near values differ little, and those of equal ones not at all
        run = np.flatnonzero(above.astype(np.float64) - below <= slack)  # whose last is near the next one's first
    row, place = np.divmod(last[run], width)
    run = run[(below[run] >= kth[row].astype(np.float64) - slack) & (place < width - 1)]
    above, below = above[run].astype(np.float64), below[run].astype(np.float64)
    count = last[run + 1] + 1 - first[run]
    flat = np.arange(count.sum()) + np.repeat(first[run] - (np.cumsum(count) - count), count)
    value = value_of(keys[flat])
    undecided = (value >= np.repeat(above - slack, count)) & (value <= np.repeat(below + slack, count))
    row, place = np.divmod(np.unique(flat[undecided]), width)
    return row, place
