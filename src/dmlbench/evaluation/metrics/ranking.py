"""Relevance by rank, and the counts that metrics share."""

from collections.abc import Mapping
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dmlbench.types import IntArray


class Ranking:
    """Relevance by rank, and the sums over it that several metrics share.

    Attributes:
        relevant: [Q, k] nearest first, False beyond the end of the gallery.
        positives: R [Q], relevant gallery items (the query itself not counted), at least 1 each.
    """

    def __init__(self, relevant: NDArray[np.bool_], positives: IntArray) -> None:
        self.relevant = relevant
        self.positives = positives

    @cached_property
    def hits(self) -> NDArray[np.int32]:
        """[Q, k] relevant items among the nearest r."""
        return np.cumsum(self.relevant, axis=1, dtype=np.int32)

    @cached_property
    def precision_sum(self) -> NDArray[np.float64]:
        """[Q, k] sum over r' <= r of rel(r') P(r'), where P(r) = hits(r) / r."""
        precision = self.hits / np.arange(1, self.relevant.shape[1] + 1)
        precision *= self.relevant
        # cumsum adds from left to right, so the sum up to R has the same bits for every k
        return np.cumsum(precision, axis=1)

    def at(self, values: NDArray, k: int) -> NDArray:
        """``values`` [Q, k] at place k (from 1), or the last one if the gallery ends before."""
        return values[:, min(k, self.relevant.shape[1]) - 1]

    def at_r(self, values: NDArray) -> NDArray:
        """``values`` [Q, k] at each query's place R."""
        last = np.minimum(self.positives, self.relevant.shape[1])[:, None] - 1
        return np.take_along_axis(values, last, axis=1)[:, 0]


def positives_per_query(query_labels: IntArray, gallery_labels: IntArray, own_column: IntArray) -> IntArray:
    """R [Q]: gallery items of each query's class, without the query itself (``own_column`` [Q], else -1)."""
    classes, counts = np.unique(gallery_labels, return_counts=True)
    place = np.minimum(np.searchsorted(classes, query_labels), len(classes) - 1)
    found = np.where(classes[place] == query_labels, counts[place], 0)
    return (found - (own_column >= 0)).astype(np.int64)


def mean_scores(per_query: Mapping[str, NDArray[np.float64]]) -> dict[str, float]:
    """Means over the queries that have a score (NaN: skipped)."""
    return {name: float(np.mean(values[~np.isnan(values)])) for name, values in per_query.items()}
