"""Shortlists (``evaluation.shortlist=N``, of AVSL): a distance ranks only N items that cheap rows propose.

A distance offers shortlists by ``shortlist_rows(rows) -> Tensor``: rows [N, d] to compare as unit vectors.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from dmlbench.evaluation.search.candidates import PADDING, Keys
from dmlbench.evaluation.search.pairwise import PairwiseSearch
from dmlbench.evaluation.search.scan import nearest_columns, over_threads, single_threaded_products
from dmlbench.evaluation.search.unit_vectors import BackEnd, unit_search
from dmlbench.types import ConfigError, EmbeddingSet, IntArray

if TYPE_CHECKING:
    from pytorch_metric_learning.distances import BaseDistance

Result = TypeVar("Result")


def check_shortlist(shortlist: int, distance: "BaseDistance | None", *, k: int, num_gallery: int) -> None:
    """Raises ConfigError if the distance offers no shortlist, or the scores need more than ``shortlist`` places."""
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
    short = unit_search(cheap, cheap_gallery, back_end=back_end, tile_bytes=search.free_bytes, device=search.device)
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
