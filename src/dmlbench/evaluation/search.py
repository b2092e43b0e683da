"""Exact nearest-neighbor search among unit vectors, with results that no back end, tile or thread count can change.

Rows are compared by ``similarity.exact_similarities``; equal values are ordered by gallery index. A float32 matrix
product does almost all of the work: what it separates by more than twice its proven rounding error is decided, and only
what is nearer is computed again.

Letters: Q queries, N gallery items, D dimensions, k items wanted, T queries and W gallery items of a tile.
"""

import importlib.util
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import isqrt
from typing import Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dmlbench.evaluation.candidates import (
    LOWEST,
    MAX_GALLERY,
    PADDING,
    ExactSimilarity,
    Found,
    Keys,
    column_of,
    entries_above,
    floor_below,
    kth_bound,
    narrow_keys,
    narrow_on_device,
    pack,
    settle,
    value_of,
)
from dmlbench.evaluation.parallel import Workspace, num_threads, over_threads, single_threaded_products
from dmlbench.evaluation.similarity import (
    FastProduct,
    FloatRows,
    UnitRows,
    exact_similarities,
    fast_product,
    hold_unit_rows,
    strict_float32_products,
)
from dmlbench.types import ConfigError, EmbeddingSet, IntArray, Neighbors, RunError

BackEnd = Literal["auto", "torch", "faiss"]
Result = TypeVar("Result")

TILE_BYTES = 512 * 2**20
MIN_TILE_BYTES = 4096
_FAISS_EXTRA = 8  # neighbors asked beyond k, so that near ties at rank k seldom need a second search
_TILE_ENTRIES = 2**22  # similarities of a tile on a CPU: 16 MiB, what a last-level cache holds
_BYTES_PER_ENTRY = 10  # of a tile: similarity, mask, maxima of groups, room of the allocator
_BYTES_PER_CANDIDATE = 160  # key, its sorted copy, position, column, mark, terms of the scores
_WIDE = 8192  # galleries up to here are one tile wide
_MIN_TILE_ROWS = 64  # fewer rows than this make the matrix product slow: narrow the gallery tile instead

logger = logging.getLogger(__name__)
_workspace = Workspace()


def self_columns(query_ids: IntArray, gallery_ids: IntArray) -> IntArray:
    """Gallery index [Q] of the item with the query's own id, -1 where the gallery has none.

    Raises:
        RunError: an id occurs twice in the gallery.
    """
    order = np.argsort(gallery_ids, kind="stable")
    ordered = gallery_ids[order]
    twice = np.flatnonzero(ordered[1:] == ordered[:-1])
    if len(twice):
        raise RunError(f"row id {ordered[twice[0]]} occurs more than once in the gallery; ids must be unique")
    if len(ordered) == 0:
        return np.full(len(query_ids), -1, dtype=np.int64)
    place = np.minimum(np.searchsorted(ordered, query_ids), len(ordered) - 1)
    return np.where(ordered[place] == query_ids, order[place], -1).astype(np.int64)


def check_sets(queries: EmbeddingSet, gallery: EmbeddingSet) -> None:
    """Both sets hold finite rows of one width, with a label and an id each.

    Raises:
        RunError: what is wrong, naming the first row id at fault.
    """
    named = {"query": queries} if gallery is queries else {"query": queries, "gallery": gallery}
    for name, part in named.items():
        if part.rows.ndim != 2 or not len(part.rows) == len(part.labels) == len(part.ids):
            raise RunError(
                f"{name} set needs rows [N, D] with N labels and N ids; got rows {tuple(part.rows.shape)}, "
                f"{len(part.labels)} labels and {len(part.ids)} ids"
            )
        if len(part) == 0:
            raise RunError(f"the {name} set is empty; there is nothing to search")
        check_finite(part.rows, part.ids, what=f"{name} embedding")
    if queries.rows.shape[1] != gallery.rows.shape[1]:
        raise RunError(
            f"queries have {queries.rows.shape[1]} dimensions and the gallery has {gallery.rows.shape[1]}; "
            "embed both with the same model"
        )


def check_finite(rows: Tensor, ids: Tensor, *, what: str) -> None:
    """Raises RunError naming the first of ``ids`` [N] whose row of ``rows`` [N, D] holds a NaN or an infinity."""
    if bool(torch.isfinite(rows.sum(dim=1)).all()):  # one pass; a sum that overflows is looked at more closely
        return
    finite = torch.isfinite(rows).all(dim=1)
    if not bool(finite.all()):
        first = int(torch.nonzero(~finite)[0, 0])
        raise RunError(
            f"{what} of row id {int(ids[first])} holds NaN or infinity ({int((~finite).sum())} of {len(rows)} rows "
            "do); the model has diverged: lower the learning rate or clip the gradient"
        )


def ids_of(part: EmbeddingSet) -> IntArray:
    """Row ids [N] as int64 on the CPU."""
    return part.ids.detach().cpu().numpy().astype(np.int64)


def labels_of(part: EmbeddingSet) -> IntArray:
    """Labels [N] as int64 on the CPU."""
    return part.labels.detach().cpu().numpy().astype(np.int64)


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


def resolve_back_end(back_end: BackEnd) -> Literal["torch", "faiss"]:
    """The float32 pass to use: "auto" is "torch", the fastest everywhere; on a CPU its products are numpy's.

    Raises:
        ConfigError: faiss is asked for and is not installed.
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


def _faiss_candidates(
    query: FloatRows, gallery: FloatRows, own_column: IntArray, k: int, slack: float
) -> tuple[Keys, NDArray[np.bool_]]:
    """Candidates [T, C] by ``faiss.knn`` and, per query [T], whether they are known to be complete.

    Faiss orders ties against the index and cuts them at its k, so a query is complete only if the last neighbor that
    faiss returned lies below the floor.
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


@dataclass(frozen=True)
class UnitSearch:
    """Unit rows of queries and gallery, ready to be searched.

    Attributes:
        query: Q unit rows.
        gallery: N unit rows; may be the same object.
        own_column: [Q] gallery index that a query must not find, or -1.
        product: float32 product that ranks as the unit rows do.
        operand: [N, D] or [N, D + 1] the product's right side, or None: made anew for every tile.
        factor: [N] what the product's columns are multiplied by, or None: by nothing.
        device: where the float32 products run.
        on_host: whether numpy multiplies, tile by tile on one thread each; else torch does on ``device``.
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
    back_end: Literal["torch", "faiss"]
    free_bytes: int

    @property
    def slack(self) -> float:
        """Float32 similarities further apart than this are in the right order."""
        return 2 * self.product.error

    def ranked(
        self, k: int, finish: Callable[[IntArray, Keys], Result], *, wanted: IntArray
    ) -> Iterator[tuple[IntArray, Result]]:
        """``finish(queries [T], candidates [T, C])`` for the k nearest of the queries ``wanted`` [W], tile by tile.

        Yields:
            (queries [T], what ``finish`` gave), in the order of ``wanted``.
        """
        threads = num_threads() if self.on_host and self.back_end != "faiss" else 1
        rows, columns = self._tile_shape(len(wanted), k, threads)
        tiles = [wanted[start : start + rows] for start in range(0, len(wanted), rows)]
        right = self._on_device()

        def work(part: IntArray) -> tuple[IntArray, Result]:
            keys = self._by_faiss(part, k, columns) if self.back_end == "faiss" else self._dense(part, k, columns, right)
            return part, finish(part, keys)

        with single_threaded_products():
            yield from over_threads(work, tiles, threads=threads)

    def _tile_shape(self, num_queries: int, k: int, threads: int) -> tuple[int, int]:
        num_gallery = len(self.gallery)
        free = self.free_bytes // (2 * threads)  # half for the tile, half for its candidates
        entries = max(1, free // _BYTES_PER_ENTRY)
        rows, columns = _tile_shape(num_queries, num_gallery, min(entries, _TILE_ENTRIES) if self.on_host else entries)
        return max(1, min(rows, free // (_BYTES_PER_CANDIDATE * min(num_gallery, k + k // 4 + 8)))), columns

    def _on_device(self) -> Tensor | None:
        """The whole right side on the accelerator, or None."""
        if self.on_host or self.operand is None:
            return None
        return torch.from_numpy(self.operand).to(self.device)

    def _by_faiss(self, part: IntArray, k: int, columns: int) -> Keys:
        """Candidates [T, C] of the queries ``part`` [T]; where faiss cut near ties, by ``_dense``."""
        assert self.operand is not None  # ``unit_search`` chose this back end only then
        query = self.product.query(self.query.take(part))
        keys, complete = _faiss_candidates(query, self.operand, self.own_column[part], k, self.slack)
        if complete.all():
            return keys
        logger.debug("%d of %d queries have many near ties; searching them densely", (~complete).sum(), len(part))
        dense = self._dense(part[~complete], k, columns, None)
        result = np.full((len(part), max(keys.shape[1], dense.shape[1])), PADDING)
        result[complete, : keys.shape[1]] = keys[complete]
        result[~complete, : dense.shape[1]] = dense
        return result

    def _dense(self, part: IntArray, k: int, columns: int, right: Tensor | None) -> Keys:
        """Candidates [T, C] of the queries ``part`` [T] by a matrix product with one gallery tile after the other."""
        query = self.product.query(self.query.take(part))
        floor = np.full((len(part), 1), LOWEST)
        kept = np.empty((len(part), 0), dtype=np.uint64)
        for start in range(0, len(self.gallery), columns):
            stop = min(start + columns, len(self.gallery))
            own = self.own_column[part] - start
            if self.on_host:
                found = self._on_host(query, start, stop, own=own, k=k, floor=floor)
            else:
                tile = self._right(start, stop) if right is None else right[start:stop]
                found = self._elsewhere(query, tile, own=own, k=k, first_column=start)
            kept = np.concatenate([kept, found.padded()], axis=1) if start else found.padded()
            if stop < len(self.gallery) and kept.shape[1] >= 2 * k:
                kept, floor = narrow_keys(kept, k, slack=self.slack)
        return kept

    def _right(self, start: int, stop: int) -> FloatRows:
        """The product's right side of gallery items start .. stop - 1."""
        if self.operand is not None:
            return self.operand[start:stop]
        return self.product.gallery(self.gallery.part(start, stop))

    def similarities(self, part: IntArray, start: int, stop: int, *, out: FloatRows) -> None:
        """Float32 similarities of the queries ``part`` [T] to gallery items start .. stop - 1 into ``out`` [T, W]."""
        self._multiply(self.product.query(self.query.take(part)), start, stop, out=out)

    def _multiply(self, query: FloatRows, start: int, stop: int, *, out: FloatRows) -> None:
        if self.on_host:
            np.matmul(query, self._right(start, stop).T, out=out)
        else:
            out[...] = _product_on(self.device, query, self._right(start, stop)).cpu().numpy()
        if self.factor is not None:
            out *= self.factor[start:stop]

    def _on_host(
        self, query: FloatRows, start: int, stop: int, *, own: IntArray, k: int, floor: FloatRows
    ) -> Found:
        similarity = _workspace.array("similarity", (len(query), stop - start), np.float32)
        self._multiply(query, start, stop, out=similarity)
        exclude(similarity, own)
        if (floor == LOWEST).any():
            floor = np.maximum(floor, floor_below(kth_bound(similarity, k), self.slack))
        return entries_above(similarity, floor, first_column=start)

    def _elsewhere(
        self, query: FloatRows, right: Tensor | FloatRows, *, own: IntArray, k: int, first_column: int
    ) -> Found:
        """As ``_on_host`` on the device; queries are halved where its memory does not do."""
        try:
            similarity = _product_on(self.device, query, right)
            held = np.flatnonzero((own >= 0) & (own < similarity.shape[1]))
            place = (torch.from_numpy(held).to(self.device), torch.from_numpy(own[held]).to(self.device))
            similarity[place] = -torch.inf
            return narrow_on_device(similarity, k, slack=self.slack, first_column=first_column)
        except torch.OutOfMemoryError as error:
            if len(query) == 1:
                raise RunError(
                    f"{self.device} has no memory left for one query and {len(right)} gallery items; "
                    "lower tile_bytes, or evaluate on the CPU"
                ) from error
        similarity = None
        logger.warning("%s is out of memory for a tile of %d queries; halving it", self.device, len(query))
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        half = len(query) // 2
        first = self._elsewhere(query[:half], right, own=own[:half], k=k, first_column=first_column)
        second = self._elsewhere(query[half:], right, own=own[half:], k=k, first_column=first_column)
        return Found(np.concatenate([first.count, second.count]), np.concatenate([first.keys, second.keys]))

    def exact(self, part: IntArray) -> ExactSimilarity:
        """``exact_similarities`` of pairs whose first member counts within the tile ``part`` [T]."""
        return lambda rows, columns: exact_similarities(self.query, self.gallery, part[rows], columns)


def exclude(similarity: FloatRows, own: IntArray) -> None:
    """Put -inf at column ``own`` [T] of each row of ``similarity`` [T, W] that has such a column."""
    held = np.flatnonzero((own >= 0) & (own < similarity.shape[1]))
    similarity[held, own[held]] = -np.inf


def _product_on(device: torch.device, query: FloatRows, right: Tensor | FloatRows) -> Tensor:
    """The product [T, W] on ``device``, in float32 whatever is set outside."""
    left = torch.from_numpy(query).to(device)
    gallery = right if isinstance(right, Tensor) else torch.from_numpy(right).to(device)
    with strict_float32_products():
        return left @ gallery.T


def unit_search(
    queries: EmbeddingSet, gallery: EmbeddingSet | None, *, back_end: BackEnd = "auto", tile_bytes: int = TILE_BYTES
) -> UnitSearch:
    """Check and normalize two sets (or one, searched within itself); products run where ``queries.rows`` lies.

    Unit rows are held where they take at most a quarter of ``tile_bytes``. Else the product uses the rows as given
    where it can, and unit rows made anew for every tile where it cannot.

    Raises:
        RunError: empty sets, widths that differ, NaN, an id twice in the gallery.
        ConfigError: faiss is asked for and missing; too small a tile memory.
    """
    check_tile_bytes(tile_bytes)
    check_sets(queries, queries if gallery is None else gallery)
    own = self_columns(ids_of(queries), ids_of(queries if gallery is None else gallery))
    device = queries.rows.device
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
    on_host = device.type == "cpu"
    return UnitSearch(unit_query, unit_gallery, own, product, operand, factor, device, on_host, chosen, free)


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
        return settle(keys, search.exact(part), k=k, slack=search.slack)[0][:, :k]

    for part, column in search.ranked(k, finish, wanted=np.arange(len(search.query))):
        index[part] = column
        pairs = search.exact(part)(np.repeat(np.arange(len(part)), k), column.reshape(-1))
        similarity[part] = pairs.reshape(len(part), k)
    distance = np.sqrt(np.maximum(0.0, 2.0 - 2.0 * similarity))
    return Neighbors(torch.from_numpy(index), torch.from_numpy(distance))
