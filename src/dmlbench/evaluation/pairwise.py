"""Ranking by any distance of pytorch-metric-learning, through its own matrix of pairs.

Letters: T queries of a tile, k places that matter.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from dmlbench.types import EmbeddingSet, IntArray, RunError

if TYPE_CHECKING:
    from pytorch_metric_learning.distances import BaseDistance

    from dmlbench.evaluation.evaluate import RetrievalTask


def ranks_like_unit_vectors(distance: "BaseDistance") -> bool:
    """Whether ``distance`` orders pairs as the Euclidean distance of unit vectors does: then the exact search serves.

    Asked of the exact type: a subclass may compute anything.
    """
    from pytorch_metric_learning.distances import CosineSimilarity, DotProductSimilarity, LpDistance

    if not distance.normalize_embeddings or distance.p != 2:
        return False
    if type(distance) is LpDistance:
        return distance.power > 0
    return type(distance) in (CosineSimilarity, DotProductSimilarity)


def distance_tiles(
    queries: EmbeddingSet,
    gallery: EmbeddingSet,
    task: "RetrievalTask",
    distance: "BaseDistance",
    *,
    tile_bytes: int,
) -> Iterator[tuple[IntArray, NDArray[np.bool_]]]:
    """(queries [T], relevance by rank [T, k or the gallery's size]) by the distance's own matrix, tiled on both axes.

    Raises:
        RunError: the distance gives NaN.
    """
    state = [x for x in (*distance.parameters(), *distance.buffers()) if x.is_floating_point()]
    device = queries.rows.device
    dtype = state[0].dtype if state else torch.float64
    entries = tile_bytes // 32  # float64 values, their sorted copies and positions
    columns = max(1, min(len(gallery), entries))
    rows = max(1, min(len(task.valid), entries // columns))
    sign = -1.0 if distance.is_inverted else 1.0
    reference = gallery.rows.to(device, dtype)
    for start in range(0, len(task.valid), rows):
        part = task.valid[start : start + rows]
        query = queries.rows[torch.from_numpy(part).to(device)].to(dtype)
        kept_value = np.empty((len(part), 0))
        kept_column = np.empty((len(part), 0), dtype=np.int64)
        for first in range(0, len(gallery), columns):
            with torch.inference_mode():
                matrix = distance(query, reference[first : first + columns])  # [T, columns]
            value = sign * matrix.to("cpu", torch.float64).numpy()
            if np.isnan(value).any():
                raise RunError(f"{type(distance).__name__} gave NaN for finite embeddings; its state is damaged")
            column = np.broadcast_to(np.arange(first, first + value.shape[1]), value.shape)
            value = np.where(column == task.own_column[part, None], np.inf, value)
            kept_value = np.concatenate([kept_value, value], axis=1)
            kept_column = np.concatenate([kept_column, column], axis=1)
            # columns ascend, so a stable sort puts ties in the order of the gallery
            order = np.argsort(kept_value, axis=1, kind="stable")[:, : task.k + 1]
            kept_value = np.take_along_axis(kept_value, order, axis=1)
            kept_column = np.take_along_axis(kept_column, order, axis=1)
        relevant = task.relevant(part, kept_column) & (kept_column != task.own_column[part, None])
        yield part, relevant[:, : task.k]
