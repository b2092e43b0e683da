"""The scores of a set of embeddings: from rows, labels and ids to P@1, R@K, R-precision and MAP@R."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from dmlbench.evaluation.candidates import Keys, column_of, settle
from dmlbench.evaluation.metrics import (
    DEFAULT_RECALL_AT,
    check_recall_at,
    mean_scores,
    positives_per_query,
    query_scores,
    score_names,
)
from dmlbench.evaluation.search import (
    TILE_BYTES,
    BackEnd,
    check_tile_bytes,
    unit_search,
)
from dmlbench.evaluation.sets import check_sets, ids_of, labels_of, self_columns
from dmlbench.types import EmbeddingSet, IntArray, RunError

if TYPE_CHECKING:
    from pytorch_metric_learning.distances import BaseDistance

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvaluationSpec:
    """How to evaluate.

    Attributes:
        recall_at: values of K for R@K, increasing.
        back_end: float32 pass of the search; every choice gives the same scores.
        tile_bytes: bound of the memory taken beyond the embeddings; no influence on the scores.
    """

    recall_at: tuple[int, ...] = DEFAULT_RECALL_AT
    back_end: BackEnd = "auto"
    tile_bytes: int = TILE_BYTES

    def __post_init__(self) -> None:
        object.__setattr__(self, "recall_at", tuple(self.recall_at))  # a configuration gives a list
        check_recall_at(self.recall_at)
        check_tile_bytes(self.tile_bytes)


@dataclass(frozen=True)
class Evaluation:
    """Scores as fractions in [0, 1].

    Attributes:
        scores: mean over the queries that have a positive, by name.
        per_query: [Q] by name; NaN for a query without a positive.
        n_query: queries given.
        n_gallery: gallery items searched (the queries, where no gallery was given).
        n_skipped_queries: queries without a positive, left out of the means.
    """

    scores: dict[str, float]
    per_query: dict[str, NDArray[np.float64]]
    n_query: int
    n_gallery: int
    n_skipped_queries: int


@dataclass(frozen=True)
class RetrievalTask:
    """What labels and ids alone say of a retrieval, whatever the embeddings.

    Attributes:
        query_labels: [Q].
        gallery_labels: [N].
        own_column: [Q] gallery index of the query itself, or -1.
        positives: R [Q].
        valid: [V] queries with a positive, ascending.
        k: first places of a ranking that the scores need.
    """

    query_labels: IntArray
    gallery_labels: IntArray
    own_column: IntArray
    positives: IntArray
    valid: IntArray
    k: int

    @property
    def n_skipped_queries(self) -> int:
        return len(self.query_labels) - len(self.valid)

    def relevant(self, queries: IntArray, columns: IntArray) -> NDArray[np.bool_]:
        """Whether gallery items ``columns`` [T, C] are of the classes of ``queries`` [T]; False at padding (-1)."""
        return (self.gallery_labels[columns] == self.query_labels[queries, None]) & (columns >= 0)


def retrieval_task(queries: EmbeddingSet, gallery: EmbeddingSet, *, recall_at: Sequence[int]) -> RetrievalTask:
    """Check two sets against each other and count the positives.

    Raises:
        RunError: no query has a positive, an id has two labels, or the sets cannot be searched.
    """
    check_sets(queries, gallery)
    ids = ids_of(queries)
    own = self_columns(ids, ids_of(gallery))
    query_labels, gallery_labels = labels_of(queries), labels_of(gallery)
    held = np.flatnonzero(own >= 0)
    differs = held[query_labels[held] != gallery_labels[own[held]]]
    if len(differs):
        first = differs[0]
        raise RunError(
            f"row id {ids[first]} has label {query_labels[first]} as a query and {gallery_labels[own[first]]} in the "
            "gallery; embed both from one table"
        )
    positives = positives_per_query(query_labels, gallery_labels, own)
    valid = np.flatnonzero(positives > 0)
    if len(valid) == 0:
        raise RunError(
            f"none of the {len(queries)} queries has another item of its class among the {len(gallery)} gallery "
            "items; a score needs classes with at least two images"
        )
    k = max(int(positives.max()), *recall_at, 1)
    return RetrievalTask(query_labels, gallery_labels, own, positives, valid, k)


def evaluate(
    queries: EmbeddingSet,
    gallery: EmbeddingSet | None = None,
    spec: EvaluationSpec | None = None,
    *,
    distance: "BaseDistance | None" = None,
) -> Evaluation:
    """Rank the gallery for every query and score the ranking.

    A query never finds the gallery item with its own row id. Queries without a positive are skipped and counted.

    With the Euclidean distance of unit vectors (``distance`` None, or one that ranks alike) rows are normalized to
    float32 unit rows once, the ranking is that of their float64 inner products with ties by gallery index, and the
    scores are bit-equal for every back end, tile size, thread count and device. With any other distance the ranking is
    by ``distance(query, gallery)``, computed tile by tile in float64 (in the distance's own precision if it has
    parameters), ties by gallery index; what that distance separates by rounding alone may depend on the tile.

    Args:
        queries: rows [Q, D]; the products run on the device of these rows.
        gallery: rows [N, D], or None: the queries are searched among themselves.
        spec: what to compute; None is ``EvaluationSpec()``.
        distance: the model's distance, larger is nearer if ``is_inverted``.

    Raises:
        RunError: no query has a positive; empty sets, widths that differ, NaN, repeated gallery ids, or an id with two
            labels.
        ConfigError: the back end is missing.
    """
    spec = spec or EvaluationSpec()
    reference = queries if gallery is None else gallery
    task = retrieval_task(queries, reference, recall_at=spec.recall_at)
    if distance is None or ranks_like_unit_vectors(distance):
        tiles = _unit_tiles(queries, gallery, spec, task)
    else:
        tiles = _distance_tiles(queries, reference, spec, task, distance)

    per_query = {name: np.full(len(queries), np.nan) for name in score_names(spec.recall_at)}
    for part, relevant in tiles:
        for name, values in query_scores(relevant, task.positives[part], recall_at=spec.recall_at).items():
            per_query[name][part] = values
    if task.n_skipped_queries:
        logger.info(
            "%d of %d queries have no positive in the gallery and are skipped", task.n_skipped_queries, len(queries)
        )
    return Evaluation(mean_scores(per_query), per_query, len(queries), len(reference), task.n_skipped_queries)


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


def fit_width(relevant: NDArray[np.bool_], k: int) -> NDArray[np.bool_]:
    """The first k places of ``relevant`` [Q, C], filled up with False: [Q, k]."""
    kept = relevant[:, :k]
    return np.pad(kept, ((0, 0), (0, k - kept.shape[1])))


def _unit_tiles(
    queries: EmbeddingSet, gallery: EmbeddingSet | None, spec: EvaluationSpec, task: RetrievalTask
) -> Iterator[tuple[IntArray, NDArray[np.bool_]]]:
    """(queries [T], relevance by rank [T, k]) by exact search among unit vectors."""
    search = unit_search(queries, gallery, back_end=spec.back_end, tile_bytes=spec.tile_bytes)

    def by_rank(part: IntArray, keys: Keys) -> NDArray[np.bool_]:
        found = task.relevant(part, column_of(keys))
        _, relevant = settle(keys, search.exact(part), k=task.k, slack=search.slack, relevant=found)
        assert relevant is not None  # it was passed
        return fit_width(relevant, task.k)

    yield from search.ranked(task.k, by_rank, wanted=task.valid)


def _distance_tiles(
    queries: EmbeddingSet,
    gallery: EmbeddingSet,
    spec: EvaluationSpec,
    task: RetrievalTask,
    distance: "BaseDistance",
) -> Iterator[tuple[IntArray, NDArray[np.bool_]]]:
    """(queries [T], relevance by rank [T, k]) by the distance's own pairwise matrix, tiled on both axes."""
    state = [x for x in (*distance.parameters(), *distance.buffers()) if x.is_floating_point()]
    device = queries.rows.device
    dtype = state[0].dtype if state else torch.float64
    entries = spec.tile_bytes // 32  # float64 values, their sorted copies and positions
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
        yield part, fit_width(relevant, task.k)
