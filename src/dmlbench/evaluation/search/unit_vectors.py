"""Exact nearest-neighbor search among unit vectors; no back end, tile or thread count changes the results.

Rows are compared by ``unit_rows.exact_similarities``, ties by gallery index. A float32 product decides what it
separates by more than twice its proven rounding error; only nearer pairs are computed exactly.

Letters: Q queries, N gallery items, D dimensions, k items wanted, T queries and W gallery items of a tile.
"""

import importlib.util
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import isqrt
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dmlbench.evaluation.embeddings.sets import own_columns
from dmlbench.evaluation.search.candidates import (
    PADDING,
    Bounds,
    ExactSimilarity,
    Found,
    Keys,
    Tile,
    floor_below,
    pack,
    to_device,
)
from dmlbench.evaluation.search.scan import (
    BYTES_PER_CANDIDATE,
    BYTES_PER_WAITING,
    ScanPlan,
    candidates,
    moved_to,
    num_threads,
    parts_of,
    scan,
    single_threaded_products,
    tiles_on_host,
)
from dmlbench.evaluation.search.unit_rows import (
    FastProduct,
    FloatRows,
    UnitRows,
    exact_similarities,
    fast_product,
    hold_unit_rows,
)
from dmlbench.types import ConfigError, EmbeddingSet, IntArray

BackEnd = Literal["auto", "torch", "faiss"]
Result = TypeVar("Result")

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
_FAISS_GPU_LIMIT = 2048  # neighbors that faiss finds on a GPU

logger = logging.getLogger(__name__)


def check_tile_bytes(tile_bytes: int) -> None:
    if tile_bytes < MIN_TILE_BYTES:
        raise ConfigError(f"tile_bytes ({tile_bytes}) is below {MIN_TILE_BYTES}; raise it ({TILE_BYTES} is usual)")


def resolve_back_end(back_end: BackEnd) -> Literal["torch", "faiss"]:
    """The float32 pass to use; "auto" is "torch", the fastest wherever we measured.

    Raises:
        ConfigError: faiss is requested and not installed.
    """
    if back_end not in ("auto", "torch", "faiss"):
        raise ConfigError(f"back_end '{back_end}' is unknown; known: auto, torch, faiss")
    if back_end != "faiss":
        return "torch"
    if importlib.util.find_spec("faiss") is None:
        raise ConfigError(
            "back_end=faiss needs the module faiss; install dmlbench[faiss-cpu] or dmlbench[faiss-gpu], "
            "or use back_end=auto, which gives the same numbers without it"
        )
    return "faiss"


@dataclass(frozen=True)
class UnitSearch:
    """Unit rows of queries and gallery, ready to be searched.

    Attributes:
        query: Q unit rows.
        gallery: N unit rows; may be the same object.
        own_column: [Q] gallery index that a query must not find, or -1.
        product: float32 product that ranks as the unit rows do.
        operand: [N, D] or [N, D + 1] the product's right side, or None: computed for every tile.
        device: where the float32 products run.
        on_host: whether products run on the CPU, tile by tile on one thread each; else on ``device``.
        back_end: which float32 pass.
        free_bytes: memory for tiles and candidates.
    """

    query: UnitRows
    gallery: UnitRows
    own_column: IntArray
    product: FastProduct
    operand: FloatRows | None
    device: torch.device
    on_host: bool
    back_end: Literal["torch", "faiss"]
    free_bytes: int

    @property
    def num_gallery(self) -> int:
        return len(self.gallery)

    @property
    def slack(self) -> float:
        return 2 * self.product.error

    def plan(self, k: int, num_wanted: int) -> ScanPlan:
        """By half where those products, and keeping the candidates of later rows, are faster than all products."""
        size = len(self.gallery)
        threads = num_threads() if self.on_host and self.back_end == "torch" else 1
        free = self.free_bytes // (2 * threads)  # half for the tile, half for its candidates
        entries = min(max(1, free // _BYTES_PER_ENTRY), _TILE_ENTRIES if self.on_host else _DEVICE_ENTRIES)
        rows = min(size // 8 + 1, _BLOCK_ROWS)  # half of a block's square is computed for nothing
        by_half = (
            self.gallery is self.query
            and self.product.mean is None  # products relative to a mean tell of the query only
            and self.on_host
            and self.back_end == "torch"
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

    def ranked(
        self, k: int, finish: Callable[[IntArray, Keys], Result], *, wanted: IntArray
    ) -> Iterator[tuple[IntArray, Result]]:
        """See ``scan``."""
        plan = self.plan(k, len(wanted))
        if self.back_end == "torch" or not _faiss_finds(k, self.num_gallery, self.device):
            yield from scan(self, k, finish, wanted=wanted, plan=plan)
            return
        for part in parts_of(wanted, plan.rows):
            with single_threaded_products():
                result = finish(part, self._by_faiss(part, k, plan.columns))
            yield part, result

    def _by_faiss(self, part: IntArray, k: int, columns: int) -> Keys:
        """Candidates [T, C] of the queries ``part`` [T]; where faiss cut near ties, by all products."""
        assert self.operand is not None  # ``unit_search`` chose this back end only then
        query = self.product.query(self.query.take(part))
        keys, complete = _faiss_candidates(query, self.operand, self.own_column[part], k, self.slack, self.device)
        if complete.all():
            return keys
        logger.debug("%d of %d queries have many near ties; searching them densely", (~complete).sum(), len(part))
        dense = candidates(self, part[~complete], k, columns=columns)
        result = np.full((len(part), max(keys.shape[1], dense.shape[1])), PADDING)
        result[complete, : keys.shape[1]] = keys[complete]
        result[~complete, : dense.shape[1]] = dense
        return result

    @cached_property
    def _operand_there(self) -> Tensor | None:
        """The operand on ``device``, if it fits."""
        return moved_to(self.device, None if self.operand is None else torch.from_numpy(self.operand))

    def similarities(self, part: IntArray, start: int, stop: int, *, out: Tile) -> None:
        """Write float32 similarities of queries ``part`` [T] to items start .. stop - 1 into ``out`` [T, W]."""
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

    def bounded_similarities(self, part: IntArray, start: int, stop: int, *, out: Tile) -> Bounds:
        """See ``Search``."""
        self.similarities(part, start, stop, out=out)
        return Bounds(self.product.error, self.product.largest)

    def held_rows(self) -> tuple[FloatRows, FloatRows] | None:
        """Unit rows of the queries [Q, D] and the gallery [N, D], or None."""
        if self.query.held is None or self.gallery.held is None:
            return None
        return self.query.held, self.gallery.held

    def exact(self, part: IntArray) -> ExactSimilarity:
        """``exact_similarities`` of pairs (place in ``part`` [T], gallery index)."""
        return lambda rows, columns: exact_similarities(self.query, self.gallery, part[rows], columns)


def _tile_shape(num_queries: int, num_gallery: int, entries: int) -> tuple[int, int]:
    """Rows and columns of a tile of at most ``entries``: the gallery's width where that leaves enough rows."""
    if num_gallery <= _WIDE and entries // num_gallery >= min(_MIN_TILE_ROWS, num_queries):
        return max(1, min(num_queries, entries // num_gallery)), num_gallery
    rows = max(1, min(num_queries, isqrt(entries)))
    return rows, max(1, min(num_gallery, entries // rows))


def unit_search(
    queries: EmbeddingSet,
    gallery: EmbeddingSet | None,
    *,
    back_end: BackEnd = "auto",
    tile_bytes: int = TILE_BYTES,
    device: torch.device | None = None,
) -> UnitSearch:
    """Check and normalize two sets (or one, searched within itself). ``device`` defaults to that of ``queries.rows``.

    Unit rows are held where they take at most a quarter of ``tile_bytes``, else computed for every tile.

    Raises:
        RunError: empty sets, widths that differ, NaN, an id twice in the gallery.
        ConfigError: faiss is requested and missing, or ``tile_bytes`` is too small.
    """
    check_tile_bytes(tile_bytes)
    own = own_columns(queries, queries if gallery is None else gallery)
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
    product = fast_product(unit_query, unit_gallery)
    operand = unit_gallery.held
    if product.mean is not None and operand is not None:
        size = 4 * len(unit_gallery) * (unit_gallery.width + 1)
        operand = product.gallery(operand) if free - size >= tile_bytes // 4 else None
        free -= 0 if operand is None else size
    if operand is None and chosen == "faiss":
        logger.info("the gallery does not fit into tile_bytes (%d) at once; searching without faiss", tile_bytes)
        chosen = "torch"
    return UnitSearch(unit_query, unit_gallery, own, product, operand, device, tiles_on_host(device), chosen, free)


def _faiss_finds(k: int, num_gallery: int, device: torch.device) -> bool:
    if device.type == "cpu" or min(num_gallery, k + 1 + _FAISS_EXTRA) <= _FAISS_GPU_LIMIT:
        return True
    logger.info("faiss finds at most %d neighbors on a GPU and %d are needed; torch searches", _FAISS_GPU_LIMIT, k)
    return False


def _faiss_candidates(
    query: FloatRows, gallery: FloatRows, own_column: IntArray, k: int, slack: float, device: torch.device
) -> tuple[Keys, NDArray[np.bool_]]:
    """Candidates [T, C] by faiss on ``device`` and, per query [T], whether they are known to be complete.

    Faiss orders ties against the index and cuts them at its k, so a query is complete only if the last neighbor that
    faiss returned is below the floor. Tests cover the GPU only with a mock of faiss.
    """
    import faiss

    wanted = min(len(gallery), k + 1 + _FAISS_EXTRA)
    if device.type == "cpu":
        value, column = faiss.knn(query, gallery, wanted, metric=faiss.METRIC_INNER_PRODUCT)
    else:
        value, column = faiss.knn_gpu(
            _faiss_memory(), query, gallery, wanted, metric=faiss.METRIC_INNER_PRODUCT, device=device.index or 0
        )
    other = column != own_column[:, None]
    complete = np.full(len(query), wanted == len(gallery))
    if not complete.all():
        # without the query itself at least k of the k + 1 + extra neighbors are left, in descending order
        place = np.argmax(np.cumsum(other, axis=1) == k, axis=1)[:, None]
        complete |= (value[:, -1:] < floor_below(np.take_along_axis(value, place, axis=1), slack))[:, 0]
    return Found(other.sum(axis=1), pack(value[other], column[other])).padded(), complete


@lru_cache(maxsize=1)
def _faiss_memory() -> Any:
    import faiss

    return faiss.StandardGpuResources()
