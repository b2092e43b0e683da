"""What is to be evaluated: the settings, and what labels and ids alone say of a retrieval."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dmlbench.evaluation.embeddings.sets import check_sets, ids_of, labels_of, self_columns
from dmlbench.evaluation.metrics.clustering import kmeans_library
from dmlbench.evaluation.metrics.ranking import positives_per_query
from dmlbench.evaluation.metrics.table import (
    DEFAULT_METRICS,
    DEFAULT_RECALL_AT,
    Score,
    asked_scores,
    depth,
    score_names,
)
from dmlbench.evaluation.search.top_k import ExactSimilarity, Keys, column_of, settle
from dmlbench.evaluation.search.unit_vectors import TILE_BYTES, BackEnd, check_tile_bytes
from dmlbench.types import ConfigError, EmbeddingSet, IntArray, RunError

_RERANK = "rerank@"


@dataclass(frozen=True)
class EvaluationSpec:
    """How to evaluate.

    Attributes:
        recall_at: values of K for R@K, increasing.
        back_end: float32 pass of the search; every choice gives the same scores.
        tile_bytes: bound of the memory taken beyond the embeddings; no influence on the scores.
        metrics: what to compute, names of ``dmlbench.evaluation.metrics.table``; "recall_at_k" is for every K.
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
        asked_scores(self.metrics, self.recall_at)
        check_tile_bytes(self.tile_bytes)
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
    def scores(self) -> tuple[Score, ...]:
        """What is computed, in the order in which results list it."""
        return asked_scores(self.metrics, self.recall_at)

    @property
    def kmeans(self) -> str:
        """Library and seed of the clusters of nmi and ami, as results name them."""
        return f"{kmeans_library()}, seed {self.kmeans_seed}"

    def replaced(self, **changes: Any) -> "EvaluationSpec":
        """The same but for ``changes``, checked likewise."""
        return dataclasses.replace(self, **changes)

    @property
    def score_names(self) -> tuple[str, ...]:
        """Names of the scores, in the order in which results list them."""
        return score_names(self.scores)


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

    def relevant_by_rank(
        self, queries: IntArray, keys: Keys, exact: ExactSimilarity, *, slack: float
    ) -> NDArray[np.bool_]:
        """Whether the items at the first min(k, N) places are of the queries' classes.

        Args:
            queries: [T].
            keys: their candidates [T, C].
            exact: float64 similarities of pairs, to order what float32 cannot.
            slack: float32 values further apart than this are in the right order.
        """
        found = self.relevant(queries, column_of(keys))
        _, relevant = settle(keys, exact, k=self.k, slack=slack, relevant=found)
        assert relevant is not None  # it was passed
        return fit_width(relevant, min(self.k, len(self.gallery_labels)))


def retrieval_task(
    queries: EmbeddingSet,
    gallery: EmbeddingSet,
    scores: Sequence[Score],
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
    k = depth(positives, len(gallery), scores)
    return RetrievalTask(query_labels, gallery_labels, own, positives, valid, k)


def rerank_of(search: str) -> int | None:
    """The N of "rerank@N", None of "exact": what ``EvaluationSpec.search`` was made from."""
    return int(search.removeprefix(_RERANK)) if search.startswith(_RERANK) else None


def fit_width(relevant: NDArray[np.bool_], k: int) -> NDArray[np.bool_]:
    """The first k places of ``relevant`` [Q, C], filled up with False: [Q, k]."""
    kept = relevant[:, :k]
    return np.pad(kept, ((0, 0), (0, k - kept.shape[1])))
