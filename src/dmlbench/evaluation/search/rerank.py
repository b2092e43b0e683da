"""Ranking of a shortlist by a distance: the nearest items by unit vectors, in the order of the distance.

Letters: Q queries, T of them in a tile, N items of the shortlist, k places that matter.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from dmlbench.evaluation.search.pairwise_search import PairwiseSearch
from dmlbench.evaluation.search.parallel import over_threads, single_threaded_products
from dmlbench.evaluation.search.scan import ScanState
from dmlbench.evaluation.search.top_k import PADDING, Keys, column_of, settle
from dmlbench.evaluation.search.unit_vectors import BackEnd, unit_search
from dmlbench.types import ConfigError, EmbeddingSet, IntArray

if TYPE_CHECKING:
    from pytorch_metric_learning.distances import BaseDistance

Result = TypeVar("Result")


def check_rerank(rerank: int, distance: "BaseDistance | None", *, k: int, num_gallery: int) -> None:
    """
    Raises:
        ConfigError: the distance offers no shortlist (``shortlist_rows``), or the shortlist is shorter than the places
            that the scores need.
    """
    if not hasattr(distance, "shortlist_rows"):
        named = "the distance of unit vectors" if distance is None else type(distance).__name__
        raise ConfigError(
            f"rerank ({rerank}) needs a distance with cheap rows to make a shortlist by, which {named} has not; "
            "set evaluation.rerank=null, which ranks the whole gallery"
        )
    needed = min(k, num_gallery)
    if rerank < needed:
        raise ConfigError(
            f"rerank ({rerank}) is below {needed}, the first places that the scores need (the largest class or "
            f"recall_at); set evaluation.rerank to {needed} or more, or to null for the whole gallery"
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
    state: ScanState,
) -> Iterator[tuple[IntArray, Result]]:
    """``finish(queries [T], candidates [T, N])`` of shortlists, tile by tile in the order of ``wanted``.

    The shortlist of a query are its ``num_items`` nearest gallery items by exact search among the distance's
    ``shortlist_rows`` as unit vectors, ties by gallery index. ``state.done`` counts the queries.
    """
    of = search.similarity.distance.shortlist_rows

    def cheap(part: EmbeddingSet) -> EmbeddingSet:
        return EmbeddingSet(of(part.rows), part.labels, part.ids)

    short = unit_search(
        cheap(queries),
        None if gallery is None else cheap(gallery),
        back_end=back_end,
        tile_bytes=search.free_bytes,
        device=search.device,
    )
    size = min(num_items, search.num_gallery)

    def shortlist(part: IntArray, keys: Keys) -> IntArray:
        return column_of(settle(keys, short.exact(part), k=size, slack=short.slack)[:, :size])

    def work(item: tuple[int, IntArray]) -> Keys:
        query, columns = item
        return search.keys_of(query, columns[columns >= 0])

    threads = search.plan(size, len(wanted)).threads
    for part, columns in short.ranked(size, shortlist, wanted=wanted):
        with single_threaded_products():
            rows = list(over_threads(work, list(zip(part.tolist(), columns, strict=True)), threads=threads))
            keys = np.full((len(rows), max(row.shape[1] for row in rows)), PADDING)
            for place, row in enumerate(rows):
                keys[place, : row.shape[1]] = row
            result = finish(part, keys)
        state.done += len(part)
        yield part, result
