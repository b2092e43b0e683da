"""Reranking (``rerank=diml``): the first neighbors of every query, by cosine, in the order of a ``Reranker``.

Letters: Q queries, T of them in a tile, k places that matter, K neighbors that are reranked, W numbers of a row.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dmlbench.evaluation.search.candidates import to_device, to_host
from dmlbench.evaluation.search.scan import (
    halved_where_full,
    moved_to,
    nearest_columns,
    num_threads,
    over_threads,
    single_threaded_products,
    tiles_on_host,
)
from dmlbench.evaluation.search.unit_vectors import BackEnd, unit_search
from dmlbench.types import EmbeddingSet, IntArray, RunError


@runtime_checkable
class Reranker(Protocol):
    """A distance that reranks candidate lists. It does not define a pairwise distance.

    Attributes:
        num_neighbors: K, how many of the nearest by ``center_rows`` are reranked; the others stay behind them.
    """

    num_neighbors: int

    def center_rows(self, rows: Tensor) -> Tensor:
        """Rows [N, D] whose cosine makes the candidate lists, of rows [N, W]."""
        ...

    def reranked_similarities(self, queries: Tensor, neighbors: Tensor, known: Tensor) -> Tensor:
        """Similarities [T, K] of queries [T, W] to neighbors [T, K, W]; ``known`` [T, K] is False at padding."""
        ...


def rerank_nearest(
    queries: EmbeddingSet,
    gallery: EmbeddingSet | None,
    reranker: Reranker,
    k: int,
    *,
    wanted: IntArray,
    tile_bytes: int,
    back_end: BackEnd = "auto",
    device: torch.device | None = None,
) -> Iterator[tuple[IntArray, IntArray, NDArray[np.float64]]]:
    """Rerank the exact neighbors by ``center_rows`` as unit vectors, ties as they were.

    Values that differ by rounding alone may depend on the device.

    Args:
        queries: rows [Q, W].
        gallery: rows, or None: the queries are searched among themselves.
        reranker: compares the first ``num_neighbors`` in float64, even if k is less.
        k: places that matter.
        wanted: queries, in the order in which they are yielded.
        tile_bytes: bound of the memory beyond the sets.
        back_end: of the first search.
        device: where both searches run; None: the device of the rows.

    Yields:
        (queries [T], gallery items [T, k] nearest first or -1, similarities of the reranked ones [T, at most k]).

    Raises:
        RunError: the sets cannot be searched, or the reranker gives NaN.
    """
    device = device or queries.rows.device
    centers = replace(queries, rows=reranker.center_rows(queries.rows))
    gallery_centers = gallery and replace(gallery, rows=reranker.center_rows(gallery.rows))
    short = unit_search(centers, gallery_centers, back_end=back_end, tile_bytes=tile_bytes // 2, device=device)
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
                raise RunError(f"{type(reranker).__name__} gave NaN for finite embeddings; embed the images again")
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
