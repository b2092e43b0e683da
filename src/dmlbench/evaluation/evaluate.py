"""The scores of a set of embeddings: from rows, labels and ids to every metric of ``dmlbench.evaluation.metrics``."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dmlbench.evaluation.clustering import cluster_scores, kmeans_library
from dmlbench.evaluation.metrics import (
    CLUSTER_METRICS,
    DEFAULT_METRICS,
    DEFAULT_RECALL_AT,
    check_metrics,
    check_recall_at,
    depth,
    mean_scores,
    positives_per_query,
    query_score_names,
    query_scores,
    score_names,
)
from dmlbench.evaluation.pairwise import distance_tiles, ranks_like_unit_vectors
from dmlbench.evaluation.search import (
    TILE_BYTES,
    BackEnd,
    check_sets,
    check_tile_bytes,
    ids_of,
    labels_of,
    self_columns,
    settle,
    unit_search,
)
from dmlbench.types import ConfigError, EmbeddingSet, IntArray, RunError

if TYPE_CHECKING:
    from pytorch_metric_learning.distances import BaseDistance

_DEEP_BYTES = 128  # per query and place of a deep ranking: candidates, their order, and the sums of the scores

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvaluationSpec:
    """How to evaluate.

    Attributes:
        recall_at: values of K for R@K, increasing.
        back_end: float32 pass of the search; every choice gives the same scores.
        tile_bytes: memory of a similarity tile with its temporary copies; no influence on the scores.
        metrics: what to compute, names of ``dmlbench.evaluation.metrics.METRICS``; "recall_at_k" is for every K.
        kmeans_seed: decides where the clusters of nmi and ami begin.
    """

    recall_at: tuple[int, ...] = DEFAULT_RECALL_AT
    back_end: BackEnd = "auto"
    tile_bytes: int = TILE_BYTES
    metrics: tuple[str, ...] = DEFAULT_METRICS
    kmeans_seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "recall_at", tuple(self.recall_at))  # a configuration gives a list
        object.__setattr__(self, "metrics", tuple(self.metrics))
        check_recall_at(self.recall_at)
        check_tile_bytes(self.tile_bytes)
        check_metrics(self.metrics)
        if not 0 <= self.kmeans_seed < 2**31:
            raise ConfigError(f"kmeans_seed ({self.kmeans_seed}) must lie in [0, 2^31), the seeds that faiss takes")

    @property
    def score_names(self) -> tuple[str, ...]:
        """Names of the scores, in the order in which results list them."""
        return score_names(self.recall_at, self.metrics)


@dataclass(frozen=True)
class Evaluation:
    """Scores as fractions in [0, 1] (ami may fall below 0; class distances lie in [0, 2]).

    Attributes:
        scores: mean over the queries that have a positive, by name; then the scores of the whole set.
        per_query: [Q] by name; NaN for a query without a positive.
        n_query: queries given.
        n_gallery: gallery items searched (the queries, where no gallery was given).
        n_skipped_queries: queries without a positive, left out of the means.
        kmeans: library and seed of the clusters of nmi and ami, or None.
    """

    scores: dict[str, float]
    per_query: dict[str, NDArray[np.float64]]
    n_query: int
    n_gallery: int
    n_skipped_queries: int
    kmeans: str | None = None


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


def retrieval_task(
    queries: EmbeddingSet,
    gallery: EmbeddingSet,
    *,
    recall_at: Sequence[int],
    metrics: Sequence[str] = DEFAULT_METRICS,
) -> RetrievalTask:
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
    k = depth(positives, len(gallery), recall_at=recall_at, metrics=metrics)
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
        ConfigError: the back end is missing; a metric of classes or clusters is asked for with a distance that unit
            vectors do not have.
    """
    spec = spec or EvaluationSpec()
    reference = queries if gallery is None else gallery
    recall_at, metrics = spec.recall_at, spec.metrics
    task = retrieval_task(queries, reference, recall_at=recall_at, metrics=metrics)
    if distance is None or ranks_like_unit_vectors(distance):
        tiles = _unit_tiles(queries, gallery, spec, task)
    else:
        _refuse_cluster_metrics(spec, distance)
        tiles = distance_tiles(queries, reference, task, distance, tile_bytes=spec.tile_bytes)

    per_query = {name: np.full(len(queries), np.nan) for name in query_score_names(recall_at, metrics)}
    if per_query:
        for part, relevant in tiles:
            scores = query_scores(relevant, task.positives[part], recall_at=recall_at, metrics=metrics)
            for name, values in scores.items():
                per_query[name][part] = values
    if task.n_skipped_queries:
        logger.info(
            "%d of %d queries have no positive in the gallery and are skipped", task.n_skipped_queries, len(queries)
        )
    of_the_set = cluster_scores(queries, gallery, metrics=metrics, kmeans_seed=spec.kmeans_seed)
    clustered = f"{kmeans_library()}, seed {spec.kmeans_seed}" if {"nmi", "ami"} & set(metrics) else None
    return Evaluation(
        mean_scores(per_query) | of_the_set,
        per_query,
        len(queries),
        len(reference),
        task.n_skipped_queries,
        kmeans=clustered,
    )


def _refuse_cluster_metrics(spec: EvaluationSpec, distance: "BaseDistance") -> None:
    asked = [metric for metric in spec.metrics if metric in CLUSTER_METRICS]
    if asked:
        raise ConfigError(
            f"{', '.join(asked)} compare unit vectors, which {type(distance).__name__} does not; "
            "leave them out of evaluation.metrics"
        )


def fit_width(relevant: NDArray[np.bool_], k: int) -> NDArray[np.bool_]:
    """The first k places of ``relevant`` [Q, C], filled up with False: [Q, k]."""
    kept = relevant[:, :k]
    return np.pad(kept, ((0, 0), (0, k - kept.shape[1])))


def _unit_tiles(
    queries: EmbeddingSet, gallery: EmbeddingSet | None, spec: EvaluationSpec, task: RetrievalTask
) -> Iterator[tuple[IntArray, NDArray[np.bool_]]]:
    """(queries [T], relevance by rank [T, k]) by exact search among unit vectors."""
    width = min(task.k, len(task.gallery_labels))
    # Faiss keeps a heap of k per query: for much of the gallery, sorting all of it is many times as fast.
    back_end = "torch" if spec.back_end == "auto" and 8 * width > len(task.gallery_labels) else spec.back_end
    search = unit_search(queries, gallery, back_end=back_end, tile_bytes=spec.tile_bytes)
    rows = max(1, spec.tile_bytes // (_DEEP_BYTES * width))  # deep rankings outgrow the tile they come from
    for start in range(0, len(task.valid), rows):
        for part, candidates in search.tiles(task.k, wanted=task.valid[start : start + rows]):
            found = task.relevant(part, candidates.column)
            _, relevant = settle(candidates, search.exact(part), k=task.k, slack=search.slack, relevant=found)
            assert relevant is not None  # it was passed
            yield part, fit_width(relevant, width)
