"""Ranking of a shortlist by a distance: the nearest items by unit vectors, in the order of the distance.

Of a list whose values belong together (``rematched``) the items behind the shortlist follow by unit vectors.

Letters: Q queries, T of them in a tile, N items of the shortlist, k places that matter, W numbers of a row.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dmlbench.evaluation.search.candidates import PADDING, Keys, to_device, to_host
from dmlbench.evaluation.search.pairwise import PairwiseSearch
from dmlbench.evaluation.search.scan import (
    halved_where_full,
    moved_to,
    nearest_columns,
    num_threads,
    over_threads,
    single_threaded_products,
    tiles_on_host,
)
from dmlbench.evaluation.search.unit_vectors import BackEnd, UnitSearch, unit_search
from dmlbench.types import ConfigError, EmbeddingSet, IntArray, RunError

if TYPE_CHECKING:
    from pytorch_metric_learning.distances import BaseDistance

Result = TypeVar("Result")


def check_shortlist(shortlist: int, distance: "BaseDistance | None", *, k: int, num_gallery: int) -> None:
    """
    Raises:
        ConfigError: the distance offers no shortlist (``shortlist_rows``), or the shortlist is shorter than the places
            that the scores need.
    """
    if not hasattr(distance, "shortlist_rows"):
        named = "the distance of unit vectors" if distance is None else type(distance).__name__
        raise ConfigError(
            f"shortlist ({shortlist}) needs a distance with cheap rows to make a shortlist by, which {named} has not; "
            "set evaluation.shortlist=null, which ranks the whole gallery"
        )
    needed = min(k, num_gallery)
    if shortlist < needed:
        raise ConfigError(
            f"shortlist ({shortlist}) is below {needed}, the first places that the scores need (the largest class or "
            f"recall_at); set evaluation.shortlist to {needed} or more, or to null for the whole gallery"
        )


def reranked(
    search: PairwiseSearch,
    queries: EmbeddingSet,
    gallery: EmbeddingSet | None,
    finish: Callable[[IntArray, Keys], Result],
    *,
    wanted: IntArray,
    num_items: int,
    back_end: BackEnd,
) -> Iterator[tuple[IntArray, Result]]:
    """``finish(queries [T], candidates [T, N])`` of shortlists, tile by tile in the order of ``wanted``.

    The shortlist of a query are its ``num_items`` nearest gallery items by exact search among the distance's
    ``shortlist_rows`` as unit vectors, ties by gallery index.
    """
    short = _search_among(
        search.distance.shortlist_rows, queries, gallery,
        back_end=back_end, tile_bytes=search.free_bytes, device=search.device,
    )  # fmt: skip
    size = min(num_items, search.num_gallery)
    threads = search.plan(size, len(wanted)).threads

    def work(item: tuple[int, IntArray]) -> Keys:
        query, columns = item
        return search.keys_of(query, columns[columns >= 0])[0]

    for part, columns in nearest_columns(short, size, wanted=wanted):
        keys = np.full(columns.shape, PADDING)
        with single_threaded_products():
            pairs = list(zip(part.tolist(), columns, strict=True))
            for place, found in enumerate(over_threads(work, pairs, threads=threads)):
                keys[place, : len(found)] = found
            result = finish(part, keys)
        yield part, result


def ranks_lists(distance: object) -> bool:
    """Whether a distance ranks the first ``num_neighbors`` of lists again that its ``center_rows`` made."""
    return hasattr(distance, "reranked_similarities")


def rematched(
    queries: EmbeddingSet,
    gallery: EmbeddingSet | None,
    distance: "BaseDistance",
    k: int,
    *,
    wanted: IntArray,
    tile_bytes: int,
    back_end: BackEnd = "auto",
    device: torch.device | None = None,
) -> Iterator[tuple[IntArray, IntArray, NDArray[np.float64]]]:
    """(queries [T], gallery items [T, k] nearest first or -1, values of the re-ranked ones [T, K <= k]), tile by tile.

    The list of a query is that of exact search among the distance's ``center_rows`` as unit vectors, ties by gallery
    index. Its first ``num_neighbors`` are put into the order of ``reranked_similarities`` in float64, ties as they
    were; what these values separate by rounding alone may depend on the device. The others stay where they are.

    Args:
        queries: rows [Q, W].
        gallery: rows, or None: the queries are searched among themselves.
        distance: which ``ranks_lists``.
        k: places that matter; all ``num_neighbors`` are compared also where it is less.
        wanted: queries, in the order in which they come.
        tile_bytes: bound of the memory taken beyond the sets.
        back_end: of the first search.
        device: where it runs, and where values are computed; None is where the rows lie.

    Raises:
        RunError: the sets cannot be searched, or the distance gives NaN.
    """
    device = device or queries.rows.device
    short = _search_among(
        distance.center_rows, queries, gallery, back_end=back_end, tile_bytes=tile_bytes // 2, device=device
    )
    num_listed = min(distance.num_neighbors, short.num_gallery)
    depth = min(max(k, num_listed), short.num_gallery)
    reference = queries if gallery is None else gallery
    asked, items = (x.rows if (there := moved_to(device, x.rows)) is None else there for x in (queries, reference))

    def rows_at(rows: Tensor, places: IntArray) -> Tensor:
        (index,) = to_device(rows.device, places)
        return rows[index].to(device, torch.float64)

    def compare(item: tuple[IntArray, IntArray]) -> tuple[IntArray, NDArray[np.float64]]:
        """The items [T, N] of the queries [T] in their new order, and their values."""
        part, columns = item
        ordered, values = columns.copy(), np.full(columns.shape, -np.inf)

        def work(start: int, stop: int) -> None:
            (known,) = to_device(device, columns[start:stop] >= 0)
            neighbors = rows_at(items, columns[start:stop].clip(min=0))
            value = distance.reranked_similarities(rows_at(asked, part[start:stop]), neighbors, known)
            (found,) = to_host(value.masked_fill(~known, -torch.inf))
            if np.isnan(found).any():
                raise RunError(f"{type(distance).__name__} gave NaN for finite embeddings; embed the images again")
            order = np.argsort(-found, axis=1, kind="stable")
            ordered[start:stop] = np.take_along_axis(columns[start:stop], order, 1)
            values[start:stop] = np.take_along_axis(found, order, 1)

        with torch.inference_mode(), torch.autocast(device.type, enabled=False):
            halved_where_full(work, 0, len(part), device=device)
        return ordered, values

    threads = num_threads() if tiles_on_host(device) else 1
    # neighbors as they are, in float64, as unit vectors and while these are made
    size = max(1, tile_bytes // (2 * threads * 4 * 8 * num_listed * items.shape[1]))
    for part, columns in nearest_columns(short, depth, wanted=wanted):
        lists = [(part[i : i + size], columns[i : i + size, :num_listed]) for i in range(0, len(part), size)]
        with single_threaded_products():
            found = list(over_threads(compare, lists, threads=threads))
        first, values = (np.concatenate(x) for x in zip(*found, strict=True))
        columns[:, : first.shape[1]] = first
        yield part, columns[:, :k], values[:, :k]


def _search_among(
    make_rows: Callable[[Tensor], Tensor], queries: EmbeddingSet, gallery: EmbeddingSet | None, *,
    back_end: BackEnd, tile_bytes: int, device: torch.device,
) -> UnitSearch:  # fmt: skip
    """Exact search among other rows of the same images, as unit vectors."""
    cheap = [None if x is None else EmbeddingSet(make_rows(x.rows), x.labels, x.ids) for x in (queries, gallery)]
    assert cheap[0] is not None
    return unit_search(cheap[0], cheap[1], back_end=back_end, tile_bytes=tile_bytes, device=device)
