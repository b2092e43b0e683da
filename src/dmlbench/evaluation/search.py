"""Exact nearest-neighbor search among unit vectors, with results that no back end, tile or thread count can change.

Rows are compared by ``similarity.exact_similarities``; equal values are ordered by gallery index. A float32 matrix
product does almost all of the work: what it separates by more than twice its proven rounding error is decided, and only
what is nearer is computed again.

Letters: Q queries, N gallery items, D dimensions, k items wanted, T queries of a tile.
"""

import importlib.util
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dmlbench.evaluation.candidates import Candidates, ExactSimilarity, merge, narrow_again, narrow_on_device, settle
from dmlbench.evaluation.similarity import (
    FastProduct,
    FloatRows,
    exact_similarities,
    fast_product,
    strict_float32_products,
    unit_rows,
)
from dmlbench.types import ConfigError, EmbeddingSet, IntArray, Neighbors, RunError

BackEnd = Literal["auto", "torch", "faiss"]

TILE_BYTES = 256 * 2**20
MIN_TILE_BYTES = 4096
_BYTES_PER_ENTRY = 16  # of a tile: similarities, the copy that is partitioned, the mask and the positions found
_FAISS_EXTRA = 8  # neighbors asked beyond k, so that near ties at rank k seldom need a second search
_MIN_TILE_ROWS = 64  # fewer rows than this make the matrix product slow: narrow the gallery tile instead

logger = logging.getLogger(__name__)


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


def _tile_shape(num_queries: int, num_gallery: int, tile_bytes: int) -> tuple[int, int]:
    """Rows and columns of a tile within ``tile_bytes``: the whole gallery's width where that leaves enough queries."""
    entries = tile_bytes // _BYTES_PER_ENTRY
    rows = entries // num_gallery
    if rows < _MIN_TILE_ROWS:
        rows = min(_MIN_TILE_ROWS, isqrt(entries))
    rows = max(1, min(rows, num_queries))
    return rows, min(num_gallery, max(1, entries // rows))


def check_tile_bytes(tile_bytes: int) -> None:
    """Raises ConfigError for a tile memory that holds next to nothing."""
    if tile_bytes < MIN_TILE_BYTES:
        raise ConfigError(f"tile_bytes ({tile_bytes}) is below {MIN_TILE_BYTES}; raise it ({TILE_BYTES} is usual)")


def resolve_back_end(back_end: BackEnd, device: torch.device) -> Literal["torch", "faiss"]:
    """The float32 pass to use: "auto" is faiss on a CPU that has it (1.7 times as fast on CUB's 5,924 x 5,924 x 512).

    Raises:
        ConfigError: faiss is asked for and is not installed.
    """
    if back_end not in ("auto", "torch", "faiss"):
        raise ConfigError(f"back_end '{back_end}' is unknown; known: auto, torch, faiss")
    if back_end == "torch" or (back_end == "auto" and device.type != "cpu"):
        return "torch"
    if importlib.util.find_spec("faiss") is not None:
        return "faiss"
    if back_end == "auto":
        return "torch"
    raise ConfigError(
        "back_end=faiss needs the module faiss; install dmlbench[faiss-cpu] or dmlbench[faiss-gpu], "
        "or use back_end=auto, which gives the same numbers without it"
    )


def _faiss_candidates(
    query: FloatRows, gallery: FloatRows, own_column: IntArray, k: int, slack: float
) -> tuple[Candidates, NDArray[np.bool_]]:
    """Candidates by ``faiss.knn`` and, per query [Q], whether they are known to be complete.

    Faiss orders ties against the index and cuts them at its k, so a query is complete only if the last neighbor that
    faiss returned lies below the threshold.
    """
    import faiss

    wanted = min(len(gallery), k + 1 + _FAISS_EXTRA)
    value, column = faiss.knn(query, gallery, wanted, metric=faiss.METRIC_INNER_PRODUCT)
    last = value[:, -1].copy()
    value[column == own_column[:, None]] = -np.inf
    candidates = narrow_again(Candidates(column, value), k, slack=slack)
    lowest = np.where(np.isfinite(candidates.value), candidates.value, np.inf).min(axis=1, initial=np.inf)
    return candidates, (last < lowest) | (wanted == len(gallery))


@dataclass(frozen=True)
class UnitSearch:
    """Unit rows of queries and gallery, ready to be searched.

    Attributes:
        query: [Q, D] float32 unit rows, on the CPU.
        gallery: [N, D] likewise; may be the same array.
        own_column: [Q] gallery index that a query must not find, or -1.
        product: float32 operands that rank as the unit rows do.
        device: where the float32 products run.
        back_end: which float32 pass.
        tile_bytes: memory of a similarity tile with its temporary copies.
    """

    query: FloatRows
    gallery: FloatRows
    own_column: IntArray
    product: FastProduct
    device: torch.device
    back_end: Literal["torch", "faiss"]
    tile_bytes: int

    @property
    def slack(self) -> float:
        """Float32 similarities further apart than this are in the right order."""
        return 2 * self.product.error

    def tiles(self, k: int, *, wanted: IntArray) -> Iterator[tuple[IntArray, Candidates]]:
        """Candidates for the k nearest of the queries ``wanted`` [W], tile by tile: (queries [T], candidates)."""
        rows, _ = _tile_shape(len(wanted), len(self.gallery), self.tile_bytes)
        on_device = torch.from_numpy(self.product.gallery).to(self.device) if self.back_end == "torch" else None
        for start in range(0, len(wanted), rows):
            part = wanted[start : start + rows]
            if on_device is not None:
                yield part, self._dense(part, k, on_device)
                continue
            query = self.product.query[part]
            candidates, complete = _faiss_candidates(query, self.product.gallery, self.own_column[part], k, self.slack)
            if complete.all():
                yield part, candidates
                continue
            yield part[complete], Candidates(candidates.column[complete], candidates.value[complete])
            # More ties at rank k than faiss was asked for: these queries look at the whole gallery.
            logger.debug("%d of %d queries have many near ties; searching them densely", (~complete).sum(), len(part))
            yield part[~complete], self._dense(part[~complete], k, torch.from_numpy(self.product.gallery))

    def _dense(self, part: IntArray, k: int, gallery: Tensor) -> Candidates:
        """Candidates of the queries ``part`` [T] by a matrix product with one gallery tile after the other."""
        _, columns = _tile_shape(len(part), len(gallery), self.tile_bytes)
        query = torch.from_numpy(self.product.query[part]).to(gallery.device)
        kept: Candidates | None = None
        for start in range(0, len(gallery), columns):
            with strict_float32_products():
                similarity = query @ gallery[start : start + columns].T  # [T, columns]
            own = self.own_column[part] - start
            hit = np.flatnonzero((own >= 0) & (own < similarity.shape[1]))
            similarity[
                torch.from_numpy(hit).to(gallery.device), torch.from_numpy(own[hit]).to(gallery.device)
            ] = -torch.inf
            found = narrow_on_device(similarity, k, self.slack)
            shifted = Candidates(np.where(found.column < 0, -1, found.column + start), found.value)
            kept = merge(kept, shifted, k, self.slack)
        assert kept is not None  # an empty gallery was refused before
        return kept

    def exact(self, part: IntArray) -> ExactSimilarity:
        """``exact_similarities`` of pairs whose first member counts within the tile ``part`` [T]."""
        return lambda rows, columns: exact_similarities(self.query, self.gallery, part[rows], columns)


def unit_search(
    queries: EmbeddingSet, gallery: EmbeddingSet | None, *, back_end: BackEnd = "auto", tile_bytes: int = TILE_BYTES
) -> UnitSearch:
    """Check and normalize two sets (or one, searched within itself); products run where ``queries.rows`` lies.

    Raises:
        RunError: empty sets, widths that differ, NaN, an id twice in the gallery.
        ConfigError: faiss is asked for and missing; too small a tile memory.
    """
    check_tile_bytes(tile_bytes)
    check_sets(queries, queries if gallery is None else gallery)
    own = self_columns(ids_of(queries), ids_of(queries if gallery is None else gallery))
    unit_query = unit_rows(queries.rows)
    unit_gallery = unit_query if gallery is None else unit_rows(gallery.rows)
    device = queries.rows.device
    product = fast_product(unit_query, unit_gallery)
    return UnitSearch(unit_query, unit_gallery, own, product, device, resolve_back_end(back_end, device), tile_bytes)


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
        tile_bytes: memory of a similarity tile.

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
    for part, candidates in search.tiles(k, wanted=np.arange(len(search.query))):
        column, _ = settle(candidates, search.exact(part), k=k, slack=search.slack)
        index[part] = column[:, :k]
        pairs = search.exact(part)(np.repeat(np.arange(len(part)), k), column[:, :k].reshape(-1))
        similarity[part] = pairs.reshape(len(part), k)
    distance = np.sqrt(np.maximum(0.0, 2.0 - 2.0 * similarity))
    return Neighbors(torch.from_numpy(index), torch.from_numpy(distance))
