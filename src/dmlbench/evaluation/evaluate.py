"""The scores of a set of embeddings: from rows, labels and ids to every metric of ``dmlbench.evaluation.metrics``."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dmlbench.evaluation.by_distance import rank_by_distance, refuse_what_unit_vectors_have
from dmlbench.evaluation.candidates import Keys, column_of, settle
from dmlbench.evaluation.clustering import cluster_scores, kmeans_library
from dmlbench.evaluation.metrics import (
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
from dmlbench.evaluation.pairwise import ranks_like_unit_vectors
from dmlbench.evaluation.rerank import check_rerank
from dmlbench.evaluation.resume import ResumableScores
from dmlbench.evaluation.search import TILE_BYTES, BackEnd, check_tile_bytes, unit_search
from dmlbench.evaluation.sets import check_sets, ids_of, labels_of, self_columns
from dmlbench.types import ConfigError, EmbeddingSet, IntArray, RunError

if TYPE_CHECKING:
    from pytorch_metric_learning.distances import BaseDistance

logger = logging.getLogger(__name__)

_RERANK = "rerank@"


@dataclass(frozen=True)
class EvaluationSpec:
    """How to evaluate.

    Attributes:
        recall_at: values of K for R@K, increasing.
        back_end: float32 pass of the search; every choice gives the same scores.
        tile_bytes: bound of the memory taken beyond the embeddings; no influence on the scores.
        metrics: what to compute, names of ``dmlbench.evaluation.metrics.METRICS``; "recall_at_k" is for every K.
        kmeans_seed: decides where the clusters of nmi and ami begin.
        rerank: N, with a distance that offers it: it ranks the N nearest items by its cheap rows instead of all.
    """

    recall_at: tuple[int, ...] = DEFAULT_RECALL_AT
    back_end: BackEnd = "auto"
    tile_bytes: int = TILE_BYTES
    metrics: tuple[str, ...] = DEFAULT_METRICS
    kmeans_seed: int = 0
    rerank: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "recall_at", tuple(self.recall_at))  # a configuration gives a list
        object.__setattr__(self, "metrics", tuple(self.metrics))
        check_recall_at(self.recall_at)
        check_tile_bytes(self.tile_bytes)
        check_metrics(self.metrics)
        if not 0 <= self.kmeans_seed < 2**31:
            raise ConfigError(f"kmeans_seed ({self.kmeans_seed}) must lie in [0, 2^31), the seeds that faiss takes")
        if self.rerank is not None and self.rerank < 1:
            raise ConfigError(f"rerank ({self.rerank}) must be at least 1, or null for the whole gallery")
        if self.rerank is not None and "map" in self.metrics:
            raise ConfigError(
                f"map needs the whole ranking, and rerank ({self.rerank}) gives the first places only; "
                "leave map out of evaluation.metrics, or set evaluation.rerank=null"
            )

    @property
    def search(self) -> str:
        """How the ranking is found, as results name it."""
        return "exact" if self.rerank is None else f"{_RERANK}{self.rerank}"

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
        search: "exact", or "rerank@N" where only N items of each query were ranked.
    """

    scores: dict[str, float]
    per_query: dict[str, NDArray[np.float64]]
    n_query: int
    n_gallery: int
    n_skipped_queries: int
    kmeans: str | None = None
    search: str = "exact"


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


def rerank_of(search: str) -> int | None:
    """The N of "rerank@N", None of "exact": what ``EvaluationSpec.search`` was made from."""
    return int(search.removeprefix(_RERANK)) if search.startswith(_RERANK) else None


def evaluate(
    queries: EmbeddingSet,
    gallery: EmbeddingSet | None = None,
    spec: EvaluationSpec | None = None,
    *,
    distance: "BaseDistance | None" = None,
    partial: Path | None = None,
    progress: bool = False,
) -> Evaluation:
    """Rank the gallery for every query and score the ranking.

    A query never finds the gallery item with its own row id. Queries without a positive are skipped and counted.

    With the Euclidean distance of unit vectors (``distance`` None, or one that ranks alike) rows are normalized to
    float32 unit rows once, the ranking is that of their float64 inner products with ties by gallery index, and the
    scores are bit-equal for every back end, tile size, thread count and device. So they are with a distance that bounds
    its float32 error (see ``pairwise``): float64 arithmetic on the float32 rows decides. With any other distance
    its matrix in float64 decides (in the distance's own precision if it has parameters); what that distance separates
    by rounding alone may depend on the tile.

    Args:
        queries: rows [Q, D]; the products run on the device of these rows.
        gallery: rows [N, D], or None: the queries are searched among themselves.
        spec: what to compute; None is ``EvaluationSpec()``.
        distance: the model's distance, larger is nearer if ``is_inverted``; one with parameters runs where these lie.
        partial: file by which an interrupted search by ``distance`` goes on, to the very same scores, if it is of the
            same embeddings and settings. It stays, complete, for the caller to remove. Unit vectors need none.
        progress: whether to show a bar, with a ``distance``.

    Raises:
        RunError: no query has a positive; empty sets, widths that differ, NaN, repeated gallery ids, or an id with two
            labels.
        ConfigError: the back end is missing; a metric of classes or clusters or a back end is asked for that unit
            vectors alone have; a shortlist that the distance does not offer, or too short a one.
    """
    spec = spec or EvaluationSpec()
    reference = queries if gallery is None else gallery
    recall_at, metrics = spec.recall_at, spec.metrics
    task = retrieval_task(queries, reference, recall_at=recall_at, metrics=metrics)
    own = None if distance is None or ranks_like_unit_vectors(distance) else distance
    if spec.rerank is not None:
        check_rerank(spec.rerank, own, k=task.k, num_gallery=len(reference))
    if own is None:
        known = ResumableScores(None, query_score_names(recall_at, metrics), len(queries), fingerprint="")
        tiles = _unit_tiles(queries, gallery, spec, task)
    else:
        refuse_what_unit_vectors_have(spec, own)
        known, tiles = rank_by_distance(queries, gallery, task, spec, own, partial=partial, progress=progress)
    per_query = known.per_query
    if per_query:
        for part, relevant in tiles:
            scores = query_scores(relevant, task.positives[part], recall_at=recall_at, metrics=metrics)
            for name, values in scores.items():
                per_query[name][part] = values
            known.advance()
        known.save()
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
        search=spec.search,
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
    search = unit_search(queries, gallery, back_end=spec.back_end, tile_bytes=spec.tile_bytes)

    def by_rank(part: IntArray, keys: Keys) -> NDArray[np.bool_]:
        found = task.relevant(part, column_of(keys))
        _, relevant = settle(keys, search.exact(part), k=task.k, slack=search.slack, relevant=found)
        assert relevant is not None  # it was passed
        return fit_width(relevant, width)

    yield from search.ranked(task.k, by_rank, wanted=task.valid)
