"""Exact nearest-neighbor search among unit vectors, with results that no back end, tile or thread count can change.

Rows are compared by ``similarity.exact_similarities``; equal values are ordered by gallery index. A float32 matrix
product does almost all of the work: what it separates by more than twice its proven rounding error is decided, and only
what is nearer is computed again.

Letters: Q queries, N gallery items, D dimensions, k items wanted, T queries and W gallery items of a tile.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import isqrt
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from dmlbench.evaluation.embeddings.sets import check_sets, ids_of, self_columns
from dmlbench.evaluation.search.back_ends import (
    BackEnd,
    exclude,
    faiss_candidates,
    faiss_finds,
    moved_to,
    resolve_back_end,
)
from dmlbench.evaluation.search.on_device import (
    BF16_ROUNDING,
    floor_below,
    halved_where_full,
    has_bf16,
    kth_bound,
    tiles_on_host,
    to_device,
    to_host,
)
from dmlbench.evaluation.search.parallel import num_threads
from dmlbench.evaluation.search.scan import BYTES_PER_WAITING, ScanPlan, candidates, scan
from dmlbench.evaluation.search.similarity import (
    FastProduct,
    FloatRows,
    UnitRows,
    exact_similarities,
    fast_product,
    hold_unit_rows,
)
from dmlbench.evaluation.search.top_k import (
    LOWEST,
    MAX_GALLERY,
    PADDING,
    ExactSimilarity,
    Found,
    Keys,
    Tile,
    TopK,
    column_of,
    pack,
    settle,
)
from dmlbench.types import ConfigError, EmbeddingSet, IntArray, Neighbors, RunError

Result = TypeVar("Result")

TILE_BYTES = 512 * 2**20
MIN_TILE_BYTES = 4096
_TILE_ENTRIES = 2**23  # similarities of a tile on a CPU: 32 MiB; smaller ones make numpy arrange the gallery more often
_DEVICE_ENTRIES = 2**31 - 1  # that torch finds non-zero ones among
_BYTES_PER_ENTRY = 10  # of a tile: similarity, mask, maxima of groups, room of the allocator
BYTES_PER_CANDIDATE = 160  # key, its sorted copy, position, column, mark, terms of the scores
_WIDE = 8192  # galleries up to here are one tile wide
_NUM_BLOCKS = 16  # of a scan by half: half of a block's square is computed for nothing, a share of 1/16 in all
_MIN_BLOCK = 256  # fewer rows make the matrix product slow
# keeping a candidate of a later row takes as long as about so many multiplications (measured for one and two threads)
_GAIN = 60_000
_THINNED = 16  # times fewer items than a tile has must be left by bf16 numbers, for their float32 values take longer
_MIN_TILE_ROWS = 64  # fewer rows than this make the matrix product slow: narrow the gallery tile instead

logger = logging.getLogger(__name__)


def _tile_shape(num_queries: int, num_gallery: int, entries: int) -> tuple[int, int]:
    """Rows and columns of a tile of at most ``entries``: the gallery's width where that leaves enough rows."""
    if num_gallery <= _WIDE and entries // num_gallery >= min(_MIN_TILE_ROWS, num_queries):
        return max(1, min(num_queries, entries // num_gallery)), num_gallery
    rows = max(1, min(num_queries, isqrt(entries)))
    return rows, max(1, min(num_gallery, entries // rows))


def check_tile_bytes(tile_bytes: int) -> None:
    """Raises ConfigError for a tile memory that holds next to nothing."""
    if tile_bytes < MIN_TILE_BYTES:
        raise ConfigError(f"tile_bytes ({tile_bytes}) is below {MIN_TILE_BYTES}; raise it ({TILE_BYTES} is usual)")


@dataclass(frozen=True)
class UnitSearch:
    """Unit rows of queries and gallery, ready to be searched.

    Attributes:
        query: Q unit rows.
        gallery: N unit rows; may be the same object.
        own_column: [Q] gallery index that a query must not find, or -1.
        product: float32 product that ranks as the unit rows do.
        operand: [N, D] or [N, D + 1] the product's right side, or None: computed for every tile.
        factor: [N] what the product's columns are multiplied by, or None: by nothing.
        device: where the float32 products run.
        on_host: whether products run on the CPU, tile by tile on one thread each; else on ``device``.
        in_bf16: whether products of bf16 numbers make a shortlist on ``device``, whose float32 values count.
        back_end: which float32 pass.
        free_bytes: memory for tiles and candidates.
    """

    query: UnitRows
    gallery: UnitRows
    own_column: IntArray
    product: FastProduct
    operand: FloatRows | None
    factor: FloatRows | None
    device: torch.device
    on_host: bool
    in_bf16: bool
    back_end: Literal["torch", "faiss"]
    free_bytes: int

    @property
    def num_gallery(self) -> int:
        """N."""
        return len(self.gallery)

    @property
    def slack(self) -> float:
        """Float32 similarities further apart than this are in the right order."""
        return 2 * self.product.error

    def plan(self, k: int, num_wanted: int) -> ScanPlan:
        """How the scan for the k nearest of ``num_wanted`` queries is shared out.

        By half where these products, and keeping what the other half would tell, take less time than all products. One
        thread alone hands candidates on, for which the others wait.
        """
        size, threads = len(self.gallery), num_threads() if self.on_host and self.back_end != "faiss" else 1
        rows = min(max(size // _NUM_BLOCKS, _MIN_BLOCK), int(_TILE_ENTRIES**0.5))
        by_half = (
            self.gallery is self.query
            and self.product.mean is None  # products relative to a mean tell of the query only
            and self.on_host
            and self.back_end == "torch"
            and 4 * num_wanted >= 3 * size
            and size * self.gallery.width >= _GAIN * threads * k
            and rows >= 2 * k
            and BYTES_PER_WAITING * k * size <= self.free_bytes // 4
        )
        if by_half:
            entries = min(_TILE_ENTRIES, self.free_bytes // (2 * threads * _BYTES_PER_ENTRY))
            return ScanPlan(rows, max(1, min(size, entries // rows)), threads, by_half=True)
        rows, columns = self._tile_shape(num_wanted, k, threads)
        if self.back_end == "faiss" and faiss_finds(k, size, self.device):
            return ScanPlan(rows, columns, threads, candidates=lambda part: self._by_faiss(part, k, columns))
        if self.in_bf16:
            return ScanPlan(rows, columns, threads, candidates=lambda part: self._by_bf16(part, k, columns))
        return ScanPlan(rows, columns, threads)

    def ranked(
        self, k: int, finish: Callable[[IntArray, Keys], Result], *, wanted: IntArray
    ) -> Iterator[tuple[IntArray, Result]]:
        """See ``scan``."""
        return scan(self, k, finish, wanted=wanted, plan=self.plan(k, len(wanted)))

    def _tile_shape(self, num_queries: int, k: int, threads: int) -> tuple[int, int]:
        num_gallery = len(self.gallery)
        free = self.free_bytes // (2 * threads)  # half for the tile, half for its candidates
        entries = max(1, free // _BYTES_PER_ENTRY)
        entries = min(entries, _TILE_ENTRIES if self.on_host else _DEVICE_ENTRIES)
        rows, columns = _tile_shape(num_queries, num_gallery, entries)
        if not self.on_host:  # where the queries go, too, in float32 and bf16
            rows = min(rows, free // (8 * self.gallery.width))
        return max(1, min(rows, free // (BYTES_PER_CANDIDATE * min(num_gallery, k + k // 4 + 8)))), columns

    def _by_faiss(self, part: IntArray, k: int, columns: int) -> Keys:
        """Candidates [T, C] of the queries ``part`` [T]; where faiss cut near ties, by all products."""
        assert self.operand is not None  # ``unit_search`` chose this back end only then
        query = self.product.query(self.query.take(part))
        keys, complete = faiss_candidates(query, self.operand, self.own_column[part], k, self.slack, self.device)
        if complete.all():
            return keys
        logger.debug("%d of %d queries have many near ties; searching them densely", (~complete).sum(), len(part))
        rest = part[~complete]
        dense = candidates(self, rest, k, columns=columns)
        result = np.full((len(part), max(keys.shape[1], dense.shape[1])), PADDING)
        result[complete, : keys.shape[1]] = keys[complete]
        result[~complete, : dense.shape[1]] = dense
        return result

    def _by_bf16(self, part: IntArray, k: int, columns: int) -> Keys:
        """Candidates [T, C] of the queries ``part`` [T]: those of a product of bf16 numbers, with float32 values.

        With numbers rounded by u = 2^-8 of them, a product x.y of rows errs by at most 2 u + u^2 of |x||y|, and by u
        where it is rounded itself; its sums are in float32. Tiles that this cannot thin out are computed in float32.
        """
        top = TopK(np.full((len(part), 1), LOWEST), k, slack=self.slack)
        assert self.factor is None  # ``unit_search`` sets it on a CPU alone
        error = 1.02 * 3 * BF16_ROUNDING * self.product.largest + 3 * self.product.error
        left = self.product.query(self.query.take(part))  # once for all tiles; on the device only as long as a tile

        def work(start: int, stop: int) -> None:
            right = self._right(start, stop)
            (query,) = to_device(self.device, left)
            tile = query.bfloat16() @ right.bfloat16().T
            exclude(tile, self.own_column[part] - start)
            (known,) = to_device(self.device, top.floor)
            mask = tile.float() >= torch.maximum(floor_below(kth_bound(tile, k), 2 * error), known - error)
            del tile
            if _THINNED * int(mask.count_nonzero()) > mask.numel():
                del mask
                similarity = torch.mm(query, right.T)
                exclude(similarity, self.own_column[part] - start)
                top.add(similarity, first_column=start)
                return
            row, column = torch.nonzero(mask, as_tuple=True)
            step = max(1, self.free_bytes // (32 * query.shape[1]))
            parts = zip(row.split(step), column.split(step), strict=True)
            values = torch.cat([(query[rows] * right[columns]).sum(1) for rows, columns in parts])
            rows, columns, value = to_host(row, column, values)
            top.add_found(Found(np.bincount(rows, minlength=len(part)), pack(value, columns + start)))

        for start in range(0, len(self.gallery), columns):
            halved_where_full(work, start, min(start + columns, len(self.gallery)), device=self.device)
        return top.keys

    def _right(self, start: int, stop: int) -> Tensor:
        """The product's right side of gallery items start .. stop - 1, where the product runs."""
        if self._operand_there is not None:
            return self._operand_there[start:stop]
        held = (
            self.product.gallery(self.gallery.part(start, stop)) if self.operand is None else self.operand[start:stop]
        )
        return to_device(self.device, held)[0]

    @cached_property
    def _operand_there(self) -> Tensor | None:
        """The operand where the product runs, if it has room for it."""
        return moved_to(self.device, self.operand)

    def similarities(self, part: IntArray, start: int, stop: int, *, out: Tile) -> None:
        """Float32 similarities of the queries ``part`` [T] to gallery items start .. stop - 1 into ``out`` [T, W]."""
        (query,) = to_device(self.device, self.product.query(self.query.take(part)))
        there = out if isinstance(out, Tensor) else torch.from_numpy(out)  # torch's product is faster than numpy's
        if there.device == self.device:
            torch.mm(query, self._right(start, stop).T, out=there)
        else:
            there.copy_(query @ self._right(start, stop).T)
        if self.factor is not None:
            there *= torch.from_numpy(self.factor[start:stop]).to(there.device)

    def exact(self, part: IntArray) -> ExactSimilarity:
        """``exact_similarities`` of pairs whose first member counts within the tile ``part`` [T]."""
        return lambda rows, columns: exact_similarities(self.query, self.gallery, part[rows], columns)


def unit_search(
    queries: EmbeddingSet,
    gallery: EmbeddingSet | None,
    *,
    back_end: BackEnd = "auto",
    tile_bytes: int = TILE_BYTES,
    device: torch.device | None = None,
) -> UnitSearch:
    """Check and normalize two sets (or one, searched within itself); products run on ``device``, and without one where
    ``queries.rows`` lies.

    Unit rows are held where they take at most a quarter of ``tile_bytes``. Else the product uses the rows as given
    where it can, and unit rows computed for every tile where it cannot.

    Raises:
        RunError: empty sets, widths that differ, NaN, an id twice in the gallery.
        ConfigError: faiss is asked for and missing; too small a tile memory.
    """
    check_tile_bytes(tile_bytes)
    check_sets(queries, queries if gallery is None else gallery)
    own = self_columns(ids_of(queries), ids_of(queries if gallery is None else gallery))
    device = device or queries.rows.device
    chosen = resolve_back_end(back_end)
    free = tile_bytes

    def hold(rows: Tensor) -> UnitRows:
        nonlocal free
        unit = hold_unit_rows(rows, within_bytes=free - 3 * tile_bytes // 4)
        free -= 0 if unit.held is None else unit.held.nbytes
        return unit

    unit_gallery = hold(queries.rows if gallery is None else gallery.rows)
    unit_query = unit_gallery if gallery is None else hold(queries.rows)
    if len(unit_gallery) > MAX_GALLERY:
        raise RunError(f"the gallery has {len(unit_gallery)} rows, more than {MAX_GALLERY}; search it in parts")
    product = fast_product(unit_query, unit_gallery)
    operand, factor = unit_gallery.held, None
    if product.mean is not None:
        size = 4 * len(unit_gallery) * (unit_gallery.width + 1)
        operand = product.gallery(operand) if operand is not None and free - size >= tile_bytes // 4 else None
        free -= 0 if operand is None else size
    elif operand is None and device.type == "cpu":
        operand, factor = unit_gallery.as_given() or (None, None)
    if (operand is None or factor is not None) and chosen == "faiss":
        logger.info("the gallery does not fit into tile_bytes (%d) at once; searching without faiss", tile_bytes)
        chosen = "torch"
    on_host = tiles_on_host(device)
    return UnitSearch(
        unit_query, unit_gallery, own, product, operand, factor, device, on_host, has_bf16(device), chosen, free
    )


def nearest(
    queries: EmbeddingSet,
    gallery: EmbeddingSet | None,
    k: int,
    *,
    back_end: BackEnd = "auto",
    tile_bytes: int = TILE_BYTES,
) -> Neighbors:
    """The k nearest gallery items of every query by Euclidean distance of unit vectors, ties by gallery index.

    Args:
        queries: rows to look for, of any length (they are normalized).
        gallery: rows to search; None searches the queries. A query never finds the item with its own row id.
        k: neighbors per query, in [1, items that every query may find].
        back_end: float32 pass; every choice gives the same result.
        tile_bytes: bound of the memory taken beyond the sets and the result.

    Returns:
        index [Q, k] int64 into the gallery and distance [Q, k] float64, sqrt(2 - 2 s), both on the CPU.

    Raises:
        ConfigError: k out of range, or the back end is missing.
        RunError: the sets cannot be searched (see ``unit_search``).
    """
    search = unit_search(queries, gallery, back_end=back_end, tile_bytes=tile_bytes)
    available = len(search.gallery) - int((search.own_column >= 0).any())
    if not 1 <= k <= available:
        raise ConfigError(f"k ({k}) must lie in [1, {available}], the gallery items that every query may find")
    index = np.empty((len(search.query), k), dtype=np.int64)
    similarity = np.empty((len(search.query), k))

    def finish(part: IntArray, keys: Keys) -> IntArray:
        return column_of(settle(keys, search.exact(part), k=k, slack=search.slack)[:, :k])

    for part, column in search.ranked(k, finish, wanted=np.arange(len(search.query))):
        index[part] = column
        pairs = search.exact(part)(np.repeat(np.arange(len(part)), k), column.reshape(-1))
        similarity[part] = pairs.reshape(len(part), k)
    distance = np.sqrt(np.maximum(0.0, 2.0 - 2.0 * similarity))
    return Neighbors(torch.from_numpy(index), torch.from_numpy(distance))
