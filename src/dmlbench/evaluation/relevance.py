"""Which gallery items are relevant to which queries, from labels and ids alone."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dmlbench.evaluation.embeddings.sets import ids_of, labels_of, own_columns
from dmlbench.evaluation.metrics.table import Score, depth
from dmlbench.evaluation.search.candidates import ExactSimilarity, Keys, column_of, marked, settle
from dmlbench.types import EmbeddingSet, IntArray, RunError


@dataclass(frozen=True)
class Relevance:
    """Relevant items of every query, and how many places of a ranking the scores need.

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

    def p_at_1_by_chance(self) -> tuple[float, float]:
        """Mean and standard deviation of P@1 over random rankings."""
        searched = len(self.gallery_labels) - (self.own_column[self.valid] >= 0)
        share = self.positives[self.valid] / searched
        return float(share.mean()), float(np.sqrt((share * (1 - share)).sum()) / len(share))

    def relevant(self, queries: IntArray, columns: IntArray) -> NDArray[np.bool_]:
        """Whether gallery items ``columns`` [T, C] match the labels of ``queries`` [T]; False at padding (-1)."""
        return (self.gallery_labels[columns] == self.query_labels[queries, None]) & (columns >= 0)

    def relevant_by_rank(
        self, queries: IntArray, keys: Keys, exact: ExactSimilarity, *, slack: float
    ) -> NDArray[np.bool_]:
        """Whether the items at the first min(k, N) places match the labels of ``queries`` [T].

        Args:
            queries: [T].
            keys: their candidates [T, C].
            exact: float64 similarities of pairs.
            slack: float32 values further apart than this are in the right order.
        """
        found = self.relevant(queries, column_of(keys))
        ordered = settle(keys | found, exact, k=self.k, slack=slack, by_mark=True)
        return marked(ordered)[:, : self.k]


def relevance_of(
    queries: EmbeddingSet,
    gallery: EmbeddingSet,
    scores: Sequence[Score],
) -> Relevance:
    """Check two sets against each other and count the positives.

    Raises:
        RunError: no query has a positive, an id has two labels, or the sets cannot be searched.
    """
    own = own_columns(queries, gallery)
    query_labels, gallery_labels = labels_of(queries), labels_of(gallery)
    held = np.flatnonzero(own >= 0)
    differs = held[query_labels[held] != gallery_labels[own[held]]]
    if len(differs):
        first = differs[0]
        raise RunError(
            f"row id {ids_of(queries)[first]} has label {query_labels[first]} as a query and "
            f"{gallery_labels[own[first]]} in the gallery; embed both from one table"
        )
    positives = positives_per_query(query_labels, gallery_labels, own)
    valid = np.flatnonzero(positives > 0)
    if len(valid) == 0:
        raise RunError(
            f"none of the {len(queries)} queries has another item of its class among the {len(gallery)} gallery "
            "items; a score needs classes with at least two images"
        )
    k = depth(positives, len(gallery), scores)
    return Relevance(query_labels, gallery_labels, own, positives, valid, k)


def positives_per_query(query_labels: IntArray, gallery_labels: IntArray, own_column: IntArray) -> IntArray:
    """R [Q]: gallery items of each query's class, without the query itself (``own_column`` [Q], else -1)."""
    classes, counts = np.unique(gallery_labels, return_counts=True)
    place = np.minimum(np.searchsorted(classes, query_labels), len(classes) - 1)
    found = np.where(classes[place] == query_labels, counts[place], 0)
    return (found - (own_column >= 0)).astype(np.int64)
