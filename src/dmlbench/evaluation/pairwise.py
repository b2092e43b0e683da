"""Ranking by any distance of pytorch-metric-learning, through its own matrix of pairs.

Letters: Q queries, T of them in a tile, N gallery items, W of them in a tile, D dimensions, k places that matter.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from dmlbench.evaluation.sets import check_sets
from dmlbench.types import EmbeddingSet, IntArray, RunError

if TYPE_CHECKING:
    from pytorch_metric_learning.distances import BaseDistance

    from dmlbench.evaluation.evaluate import RetrievalTask

_BYTES_PER_PAIR = 80  # of a tile: the distance's float64 matrix, its own steps, its sign, sorted copies and positions
_BYTES_PER_NUMBER = 32  # of its rows: float64, normalized, and what the distance makes of them


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


class PairwiseSimilarity:
    """A distance between two sets, larger being nearer whatever its sign, in the precision that its values decide in.

    That is float64, or the precision of the distance's own parameters. What the distance separates by rounding alone
    may depend on which pairs are computed together.

    Args:
        queries: rows [Q, D]; the distance is computed on their device.
        gallery: rows [N, D].
        distance: larger is nearer if ``is_inverted``.

    Raises:
        RunError: the sets cannot be searched.
    """

    def __init__(self, queries: EmbeddingSet, gallery: EmbeddingSet, distance: "BaseDistance") -> None:
        check_sets(queries, gallery)
        state = [x for x in (*distance.parameters(), *distance.buffers()) if x.is_floating_point()]
        self._distance = distance
        self._dtype = state[0].dtype if state else torch.float64
        self._queries = queries.rows
        self._gallery = gallery.rows

    def __call__(self, part: IntArray, columns: slice | IntArray) -> NDArray[np.float64]:
        """Similarities [T, W] of the queries ``part`` [T] to the gallery items ``columns`` [W].

        Raises:
            RunError: the distance gives NaN or infinity.
        """
        device = self._queries.device
        index = columns if isinstance(columns, slice) else torch.from_numpy(columns).to(self._gallery.device)
        query = self._queries[torch.from_numpy(part).to(device)].to(self._dtype)
        with torch.inference_mode():
            matrix = self._distance(query, self._gallery[index].to(device, self._dtype))
        value = (1.0 if self._distance.is_inverted else -1.0) * matrix.to("cpu", torch.float64).numpy()
        if not np.isfinite(value).all():
            raise RunError(
                f"{type(self._distance).__name__} gave NaN or infinity for finite embeddings; its state is damaged"
            )
        return value


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
        RunError: the distance gives NaN or infinity.
    """
    similarity = PairwiseSimilarity(queries, gallery, distance)
    width = gallery.rows.shape[1]
    columns = max(1, min(len(gallery), tile_bytes // (4 * _BYTES_PER_NUMBER * width)))
    pairs = tile_bytes // (2 * _BYTES_PER_PAIR)
    at_once = min(len(gallery), columns + task.k + 1)  # pairs of a query, with those kept of former tiles
    rows = max(1, min(len(task.valid), pairs // at_once, tile_bytes // (4 * _BYTES_PER_NUMBER * width)))
    for start in range(0, len(task.valid), rows):
        part = task.valid[start : start + rows]
        kept_value = np.empty((len(part), 0))
        kept_column = np.empty((len(part), 0), dtype=np.int64)
        for first in range(0, len(gallery), columns):
            value = -similarity(part, slice(first, first + columns))  # ascending: nearest first
            column = np.broadcast_to(np.arange(first, first + value.shape[1]), value.shape)
            value[column == task.own_column[part, None]] = np.inf
            kept_value = np.concatenate([kept_value, value], axis=1)
            kept_column = np.concatenate([kept_column, column], axis=1)
            # columns ascend, so a stable sort puts ties in the order of the gallery
            order = np.argsort(kept_value, axis=1, kind="stable")[:, : task.k + 1]
            kept_value = np.take_along_axis(kept_value, order, axis=1)
            kept_column = np.take_along_axis(kept_column, order, axis=1)
        relevant = task.relevant(part, kept_column) & (kept_column != task.own_column[part, None])
        yield part, relevant[:, : task.k]
