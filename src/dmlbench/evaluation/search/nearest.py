"""The nearest gallery items of every query, by any distance."""

from typing import TYPE_CHECKING

import numpy as np
import torch

from dmlbench.evaluation.search.pairwise import search_by
from dmlbench.evaluation.search.rerank import Reranker, rerank_nearest
from dmlbench.evaluation.search.unit_vectors import TILE_BYTES, BackEnd, UnitSearch
from dmlbench.types import ConfigError, EmbeddingSet, Neighbors

if TYPE_CHECKING:
    from pytorch_metric_learning.distances import BaseDistance


def nearest(
    queries: EmbeddingSet,
    gallery: EmbeddingSet | None,
    k: int,
    *,
    distance: "BaseDistance | None" = None,
    back_end: BackEnd = "auto",
    tile_bytes: int = TILE_BYTES,
) -> Neighbors:
    """The k nearest gallery items of every query, ties by gallery index.

    Args:
        queries: rows [Q, D].
        gallery: rows to search; None searches the queries. A query never finds the item with its own row id.
        k: neighbors per query, at most the items that every query may find.
        distance: None, and one that ranks alike, is the Euclidean distance of unit vectors.
        back_end: float32 pass among unit vectors; does not change the result.
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
    search = search_by(distance, queries, gallery, back_end=back_end, tile_bytes=tile_bytes)
    available = search.num_gallery - int((search.own_column >= 0).any())
    if not 1 <= k <= available:
        raise ConfigError(f"k ({k}) must lie in [1, {available}], the gallery items that every query may find")
    index = np.concatenate([columns for _, columns in search.nearest(k, wanted=wanted)])
    value = search.exact(wanted)(np.repeat(wanted, k), index.reshape(-1)).reshape(index.shape)
    if isinstance(search, UnitSearch):
        value = np.sqrt(np.maximum(0.0, 2.0 - 2.0 * value))
    elif not search.distance.is_inverted:
        value = -value
    return Neighbors(torch.from_numpy(index), torch.from_numpy(value))
