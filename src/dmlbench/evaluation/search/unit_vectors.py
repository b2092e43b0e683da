"""Exact nearest-neighbor search among unit vectors; no back end, tile or thread count changes the results.

Rows are compared by ``unit_rows.exact_similarities``, ties by gallery index. A float32 product decides what it
separates by more than twice its proven rounding error; only nearer pairs are computed exactly.

Letters: Q queries, N gallery items, D dimensions, k items wanted, T queries and W gallery items of a tile.
"""

import importlib.util
import logging
from functools import cached_property
from math import isqrt
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dmlbench.evaluation.embeddings.sets import own_columns
from dmlbench.evaluation.search.candidates import PADDING, Found, Keys, Tile, floor_below, pack, to_device
from dmlbench.evaluation.search.scan import BYTES_PER_CANDIDATE, BYTES_PER_WAITING, ScanPlan, Search, moved_to
from dmlbench.evaluation.search.unit_rows import (
    FloatRows,
    UnitRows,
    exact_similarities,
    fast_product,
    hold_unit_rows,
)
from dmlbench.types import ConfigError, EmbeddingSet, IntArray, check_choice

BackEnd = Literal["auto", "torch", "faiss"]

TILE_BYTES = 512 * 2**20
MIN_TILE_BYTES = 4096
_TILE_ENTRIES = 2**23  # similarities of a tile on a CPU: 32 MiB; smaller ones make the product arrange rows more often
_DEVICE_ENTRIES = 2**31 - 1  # that torch finds non-zero ones among
_BYTES_PER_ENTRY = 10  # of a tile: similarity, mask, maxima of groups, room of the allocator
_WIDE = 8192  # galleries up to here are one tile wide
_MIN_TILE_ROWS = 64  # fewer rows than this make the matrix product slow: narrow the gallery tile instead
_BLOCK_ROWS = 512  # of a scan by half; of more, turning a tile over takes long
_GAIN = 25_000  # twice the multiplications that take as long as keeping a candidate of a later row (measured)
_FAISS_EXTRA = 8  # neighbors asked beyond k, so that near ties at rank k seldom need a second search

logger = logging.getLogger(__name__)


def check_tile_bytes(tile_bytes: int) -> None:
    if tile_bytes < MIN_TILE_BYTES:
        raise ConfigError(f"tile_bytes ({tile_bytes}) is below {MIN_TILE_BYTES}; raise it ({TILE_BYTES} is usual)")


def check_back_end(back_end: BackEnd) -> None:
    """Raise ConfigError for an unknown back end, and for faiss if it is not installed."""
    check_choice("back_end", back_end, get_args(BackEnd))
    if back_end == "faiss" and importlib.util.find_spec("faiss") is None:
        raise ConfigError(
            "back_end=faiss needs the module faiss; install dmlbench[faiss-cpu] or dmlbench[faiss-gpu], "
            "or use back_end=auto, which gives the same numbers without it"
        )


class UnitSearch(Search):
    """Unit rows of queries and gallery.

    Rows are held where they take at most a quarter of ``tile_bytes``, else computed for every tile.

    Args:
        queries: rows [Q, D].
        gallery: rows [N, D], or None: the queries are searched among themselves.
        back_end: of the float32 pass. "auto" is "torch", the fastest wherever we measured; faiss searches on a CPU.
        tile_bytes: bound of the memory beyond the sets.
        device: where the float32 products run; None: the device of the queries.
    """

    def __init__(
        self,
        queries: EmbeddingSet,
        gallery: EmbeddingSet | None,
        *,
        back_end: BackEnd = "auto",
        tile_bytes: int = TILE_BYTES,
        device: torch.device | None = None,
    ) -> None:
        check_tile_bytes(tile_bytes)
        check_back_end(back_end)
        reference = queries if gallery is None else gallery
        self.own_column = own_columns(queries, reference)
        self.num_gallery = len(reference)
        super().__init__(device or queries.rows.device, tile_bytes)
        self.gallery = self._held(reference.rows, tile_bytes)
        self.query = self.gallery if gallery is None else self._held(queries.rows, tile_bytes)
        self.product = fast_product(self.query, self.gallery)
        self.slack = 2 * self.product.error
        # the product's right side [N, D] or [N, D + 1], or None: computed for every tile
        self.operand = self.gallery.held
        if self.product.mean is not None and self.operand is not None:
            size = 4 * self.num_gallery * (self.gallery.width + 1)
            fits = self.free_bytes - size >= tile_bytes // 4
            self.operand = self.product.gallery(self.operand) if fits else None
            self.free_bytes -= size if fits else 0
        self.by_faiss = back_end == "faiss" and self.on_host and self.operand is not None
        if back_end == "faiss" and not self.by_faiss:
            logger.info("torch searches: faiss would need a CPU and more tile_bytes than %d", tile_bytes)

    def _held(self, rows: Tensor, tile_bytes: int) -> UnitRows:
        unit = hold_unit_rows(rows, within_bytes=self.free_bytes - 3 * tile_bytes // 4)
        self.free_bytes -= 0 if unit.held is None else unit.held.nbytes
        return unit

    def plan(self, k: int, num_wanted: int) -> ScanPlan:
        """By half where those products, and keeping the candidates of later rows, are faster than all products."""
        size = self.num_gallery
        threads = 1 if self.by_faiss else self.threads
        free = self.free_bytes // (2 * threads)  # half for the tile, half for its candidates
        entries = min(max(1, free // _BYTES_PER_ENTRY), _TILE_ENTRIES if self.on_host else _DEVICE_ENTRIES)
        rows = min(size // 8 + 1, _BLOCK_ROWS)  # half of a block's square is computed for nothing
        by_half = (
            self.gallery is self.query
            and self.product.mean is None  # products relative to a mean tell of the query only
            and self.on_host
            and not self.by_faiss
            and 4 * num_wanted >= 3 * size
            and size * self.gallery.width >= _GAIN * k
            and rows >= 2 * k
            and entries >= rows**2
            and BYTES_PER_WAITING * k * size <= self.free_bytes // 4
        )
        if by_half:
            return ScanPlan(rows, min(size, entries // rows), threads, by_half=True)
        rows, columns = _tile_shape(num_wanted, size, entries)
        if not self.on_host:  # where the queries go, too
            rows = min(rows, free // (4 * self.gallery.width))
        rows = min(rows, free // (BYTES_PER_CANDIDATE * min(size, k + k // 4 + 8)))
        return ScanPlan(max(1, rows), columns, threads)

    def candidates(self, part: IntArray, k: int, *, columns: int) -> Keys:
        """See ``Search``; where faiss cut near ties, by all products."""
        if not self.by_faiss or self.operand is None:
            return super().candidates(part, k, columns=columns)
        query = self.product.query(self.query.take(part))
        keys, complete = _faiss_candidates(query, self.operand, self.own_column[part], k, self.slack)
        if complete.all():
            return keys
        dense = super().candidates(part[~complete], k, columns=columns)
        result = np.full((len(part), max(keys.shape[1], dense.shape[1])), PADDING)
        result[complete, : keys.shape[1]] = keys[complete]
        result[~complete, : dense.shape[1]] = dense
        return result

    @cached_property
    def _operand_there(self) -> Tensor | None:
        """The operand on ``device``, if it fits."""
        return moved_to(self.device, None if self.operand is None else torch.from_numpy(self.operand))

    def similarities(self, part: IntArray, start: int, stop: int, *, out: Tile) -> None:
        (query,) = to_device(self.device, self.product.query(self.query.take(part)))
        if self._operand_there is not None:
            right = self._operand_there[start:stop]
        elif self.operand is not None:
            (right,) = to_device(self.device, self.operand[start:stop])
        else:
            (right,) = to_device(self.device, self.product.gallery(self.gallery.part(start, stop)))
        there = out if isinstance(out, Tensor) else torch.from_numpy(out)  # torch's product is faster than numpy's
        if there.device == self.device:
            torch.mm(query, right.T, out=there)
        else:
            there.copy_(query @ right.T)

    def bounded_similarities(self, part: IntArray, start: int, stop: int, *, out: Tile) -> tuple[float, float]:
        self.similarities(part, start, stop, out=out)
        return self.product.error, self.product.largest

    def held_rows(self) -> tuple[FloatRows, FloatRows] | None:
        if self.query.held is None or self.gallery.held is None:
            return None
        return self.query.held, self.gallery.held

    def exact_pairs(self, queries: IntArray, columns: IntArray) -> NDArray[np.float64]:
        return exact_similarities(self.query, self.gallery, queries, columns)


def _tile_shape(num_queries: int, num_gallery: int, entries: int) -> tuple[int, int]:
    """Rows and columns of a tile of at most ``entries``: the gallery's width where that leaves enough rows."""
    if num_gallery <= _WIDE and entries // num_gallery >= min(_MIN_TILE_ROWS, num_queries):
        return max(1, min(num_queries, entries // num_gallery)), num_gallery
    rows = max(1, min(num_queries, isqrt(entries)))
    return rows, max(1, min(num_gallery, entries // rows))


def _faiss_candidates(
    query: FloatRows, gallery: FloatRows, own_column: IntArray, k: int, slack: float
) -> tuple[Keys, NDArray[np.bool_]]:
    """Candidates [T, C] by faiss and, per query [T], whether they are known to be complete.

    Faiss orders ties against the index and cuts them at its k, so a query is complete only if the last neighbor that
    faiss returned is below the floor.
    """
    import faiss

    wanted = min(len(gallery), k + 1 + _FAISS_EXTRA)
    value, column = faiss.knn(query, gallery, wanted, metric=faiss.METRIC_INNER_PRODUCT)
    other = column != own_column[:, None]
    complete = np.full(len(query), wanted == len(gallery))
    if not complete.all():
        # without the query itself at least k of the k + 1 + extra neighbors are left, in descending order
        place = np.argmax(np.cumsum(other, axis=1) == k, axis=1)[:, None]
        complete |= (value[:, -1:] < floor_below(np.take_along_axis(value, place, axis=1), slack))[:, 0]
    return Found(other.sum(axis=1), pack(value[other], column[other])).padded(), complete
