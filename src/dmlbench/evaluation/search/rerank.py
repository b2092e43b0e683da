"""The nearest gallery items by any distance, and candidate lists by cosine in the order of another distance.

A ``Reranker`` (``rerank=diml``) orders the first places of the whole ranking. A shortlist (``evaluation.shortlist=N``,
AVSL) is all that a distance ranks; it offers ``shortlist_rows(rows) -> Tensor``: rows [N, d] to be unit vectors.

Letters: Q queries, T of them in a tile, k places that matter, K neighbors that are reranked, W numbers of a row.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dmlbench.evaluation.search.candidates import PADDING, Keys, to_device, to_host
from dmlbench.evaluation.search.pairwise import PairwiseSearch, search_by
from dmlbench.evaluation.search.scan import halved_where_full, moved_to, over_threads, single_threaded_products
from dmlbench.evaluation.search.unit_vectors import TILE_BYTES, BackEnd, UnitSearch
from dmlbench.types import ConfigError, EmbeddingSet, IntArray, Neighbors, RunError

if TYPE_CHECKING:
    from pytorch_metric_learning.distances import BaseDistance

Result = TypeVar("Result")


@runtime_checkable
class Reranker(Protocol):
    """A distance that reranks candidate lists. It does not define a pairwise distance.

    Attributes:
        num_neighbors: K, how many of the nearest by ``center_rows`` are reranked; the others stay behind them.
        grid_size: cells a side of the last map, which rows of W numbers hold.
        description: in notes of tables.
    """

    num_neighbors: int
    grid_size: int

    @property
    def description(self) -> str: ...

    def center_rows(self, rows: Tensor) -> Tensor:
        """Rows [N, D] whose cosine makes the candidate lists, of rows [N, W]."""

    def reranked_similarities(self, queries: Tensor, neighbors: Tensor, known: Tensor) -> Tensor:
        """Similarities [T, K] of queries [T, W] to neighbors [T, K, W]; ``known`` [T, K] is False at padding."""


def rerank_nearest(
    queries: EmbeddingSet, gallery: EmbeddingSet | None, reranker: Reranker, k: int, *, wanted: IntArray,
    tile_bytes: int, back_end: BackEnd = "auto", device: torch.device | None = None,
) -> Iterator[tuple[IntArray, IntArray, NDArray[np.float64]]]:  # fmt: skip
    """Rerank the exact neighbors by ``center_rows`` as unit vectors, ties as they were; ``wanted`` are the queries.

    The first ``num_neighbors`` are compared in float64, even if k is less. Values that differ by rounding alone may
    depend on the device. ``tile_bytes`` bounds the memory beyond the sets.

    Yields:
        (queries [T], gallery items [T, k] nearest first or -1, similarities of the reranked ones [T, at most k]).
    """
    device = device or queries.rows.device
    centers = replace(queries, rows=reranker.center_rows(queries.rows))
    gallery_centers = gallery and replace(gallery, rows=reranker.center_rows(gallery.rows))
    short = UnitSearch(centers, gallery_centers, back_end=back_end, tile_bytes=tile_bytes // 2, device=device)
    num_listed = min(reranker.num_neighbors, short.num_gallery)
    depth = min(max(k, num_listed), short.num_gallery)
    reference = queries if gallery is None else gallery
    asked, items = (x.rows if (there := moved_to(device, x.rows)) is None else there for x in (queries, reference))

    def rows_at(rows: Tensor, places: IntArray) -> Tensor:
        (index,) = to_device(rows.device, places)
        return rows[index].to(device, torch.float64)

    def compare(item: tuple[IntArray, IntArray]) -> tuple[IntArray, NDArray[np.float64]]:
        """The items [T, K] of the queries [T] in their new order, and their similarities."""
        part, columns = item
        ordered, values = columns.copy(), np.full(columns.shape, -np.inf)

        def work(start: int, stop: int) -> None:
            (known,) = to_device(device, columns[start:stop] >= 0)
            neighbors = rows_at(items, columns[start:stop].clip(min=0))
            value = reranker.reranked_similarities(rows_at(asked, part[start:stop]), neighbors, known)
            (found,) = to_host(value.masked_fill(~known, -torch.inf))
            if np.isnan(found).any():
                raise RunError(f"{type(reranker).__name__} returned NaN for finite embeddings. Embed the images again.")
            order = np.argsort(-found, axis=1, kind="stable")
            ordered[start:stop] = np.take_along_axis(columns[start:stop], order, 1)
            values[start:stop] = np.take_along_axis(found, order, 1)

        with torch.inference_mode(), torch.autocast(device.type, enabled=False):
            halved_where_full(work, 0, len(part), device=device)
        return ordered, values

    threads = short.threads
    # neighbors as they are, in float64, as unit vectors and while these are made
    size = max(1, tile_bytes // (2 * threads * 4 * 8 * num_listed * items.shape[1]))
    for part, columns in short.nearest(depth, wanted=wanted):
        lists = [(part[i : i + size], columns[i : i + size, :num_listed]) for i in range(0, len(part), size)]
        with single_threaded_products():
            found = list(over_threads(compare, lists, threads=threads))
        first, values = (np.concatenate(x) for x in zip(*found, strict=True))
        columns[:, : first.shape[1]] = first
        yield part, columns[:, :k], values[:, :k]


def check_shortlist(shortlist: int, distance: "BaseDistance | None", *, k: int, num_gallery: int) -> None:
    """Raise ConfigError if the distance offers no shortlist, or the scores need more than ``shortlist`` places."""
    if not hasattr(distance, "shortlist_rows"):
        named = "the distance of unit vectors" if distance is None else type(distance).__name__
        raise ConfigError(
            f"evaluation.shortlist: got {shortlist}, but {named} does not support shortlists. Set "
            "evaluation.shortlist=null to rank the whole gallery."
        )
    needed = min(k, num_gallery)
    if shortlist < needed:
        raise ConfigError(
            f"evaluation.shortlist: got {shortlist}, expected at least {needed} places for these scores (the largest "
            "class or recall_at), or null for the whole gallery."
        )


def rank_shortlists(
    search: PairwiseSearch,
    queries: EmbeddingSet,
    gallery: EmbeddingSet | None,
    finish: Callable[[IntArray, Keys], Result],
    *,
    wanted: IntArray,
    num_items: int,
    back_end: BackEnd,
) -> Iterator[tuple[IntArray, Result]]:
    """Apply ``finish(queries [T], candidates [T, N])`` to shortlists, tile by tile in the order of ``wanted``.

    The shortlist of a query is its ``num_items`` nearest gallery items by ``shortlist_rows`` as unit vectors, ties by
    gallery index.
    """
    cheap = replace(queries, rows=search.distance.shortlist_rows(queries.rows))
    cheap_gallery = gallery and replace(gallery, rows=search.distance.shortlist_rows(gallery.rows))
    short = UnitSearch(cheap, cheap_gallery, back_end=back_end, tile_bytes=search.free_bytes, device=search.device)
    size = min(num_items, search.num_gallery)
    threads = search.threads

    def work(item: tuple[int, IntArray]) -> Keys:
        query, columns = item
        return search.keys_of(query, columns[columns >= 0])[0]

    for part, columns in short.nearest(size, wanted=wanted):
        keys = np.full(columns.shape, PADDING)
        with single_threaded_products():
            pairs = list(zip(part.tolist(), columns, strict=True))
            for place, found in enumerate(over_threads(work, pairs, threads=threads)):
                keys[place, : len(found)] = found
            result = finish(part, keys)
        yield part, result


def nearest(
    queries: EmbeddingSet,
    gallery: EmbeddingSet | None,
    k: int,
    *,
    distance: "BaseDistance | None" = None,
    tile_bytes: int = TILE_BYTES,
) -> Neighbors:
    """The k nearest gallery items of every query, ties by gallery index.

    Args:
        gallery: rows to search; None searches the queries. A query never finds the item with its own row id.
        k: neighbors per query, at most the items that every query may find.
        distance: None, and one that ranks alike, is the Euclidean distance of unit vectors.
        tile_bytes: bound of the memory taken beyond the sets and the result.

    Returns:
        index [Q, k] int64 into the gallery and distance [Q, k] float64, both on the CPU: sqrt(2 - 2 s) of unit vectors,
        else the distance's own values; NaN behind the items that a reranker compares.
    """
    wanted = np.arange(len(queries))
    if isinstance(distance, Reranker):
        found = rerank_nearest(queries, gallery, distance, k, wanted=wanted, tile_bytes=tile_bytes)
        _, indices, values = zip(*found, strict=True)
        behind = ((0, 0), (0, indices[0].shape[1] - values[0].shape[1]))
        value = np.pad(np.concatenate(values), behind, constant_values=np.nan)
        return Neighbors(torch.from_numpy(np.concatenate(indices)), torch.from_numpy(value))
    search = search_by(distance, queries, gallery, tile_bytes=tile_bytes)
    available = search.num_gallery - int((search.own_column >= 0).any())
    if not 1 <= k <= available:
        raise ConfigError(f"k: got {k}, expected 1 to {available}, the gallery items that every query may find.")
    index = np.concatenate([columns for _, columns in search.nearest(k, wanted=wanted)])
    value = search.exact(wanted)(np.repeat(wanted, k), index.reshape(-1)).reshape(index.shape)
    if isinstance(search, UnitSearch):
        value = np.sqrt(np.maximum(0.0, 2.0 - 2.0 * value))
    elif not search.distance.is_inverted:
        value = -value
    return Neighbors(torch.from_numpy(index), torch.from_numpy(value))
