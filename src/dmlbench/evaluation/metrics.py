"""Retrieval scores of single queries, from which of their first neighbors are relevant.

All scores are fractions in [0, 1]; a query's R is the number of relevant gallery items (itself not counted).
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from dmlbench.types import ConfigError, IntArray

DEFAULT_RECALL_AT = (1, 2, 4, 8)


def score_names(recall_at: Sequence[int]) -> tuple[str, ...]:
    """Names of the scores that ``query_scores`` gives, in the order in which tables show them."""
    return ("p_at_1", *(f"recall_at_{k}" for k in recall_at), "r_precision", "map_at_r")


def check_recall_at(recall_at: Sequence[int]) -> None:
    """Raises ConfigError unless the values are positive, increasing whole numbers."""
    values = list(recall_at)
    if any(k < 1 for k in values) or values != sorted(set(values)):
        raise ConfigError(f"recall_at ({values}) must be increasing whole numbers of at least 1, such as [1, 2, 4, 8]")


def positives_per_query(query_labels: IntArray, gallery_labels: IntArray, own_column: IntArray) -> IntArray:
    """R [Q]: gallery items of each query's class, minus the query itself only where the gallery holds it.

    Args:
        query_labels: [Q].
        gallery_labels: [N].
        own_column: [Q] gallery index of the query itself, -1 where the gallery does not hold it.
    """
    classes, counts = np.unique(gallery_labels, return_counts=True)
    place = np.minimum(np.searchsorted(classes, query_labels), len(classes) - 1)
    found = np.where(classes[place] == query_labels, counts[place], 0)
    return (found - (own_column >= 0)).astype(np.int64)


def query_scores(
    relevant: NDArray[np.bool_], positives: IntArray, *, recall_at: Sequence[int]
) -> dict[str, NDArray[np.float64]]:
    """Scores [Q] of every query.

    - p_at_1: whether the nearest item is relevant;
    - recall_at_K: whether any of the nearest K is relevant (K beyond the gallery means the whole gallery);
    - r_precision: share of relevant items among the nearest R;
    - map_at_r: (1/R) sum_{r <= R} rel(r) * (relevant items among the nearest r) / r.

    Args:
        relevant: [Q, k] by rank, nearest first, False beyond the end of the gallery; k >= every R and every K, or
            the gallery's end.
        positives: R [Q], at least 1 each.
        recall_at: the values of K.

    Source: Musgrave et al., A Metric Learning Reality Check, ECCV 2020, section 3.2 (MAP@R, R-precision).
    """
    width = relevant.shape[1]
    hits = np.cumsum(relevant, axis=1)  # [Q, k]
    precision = np.where(relevant, hits / np.arange(1, width + 1), 0.0)
    # cumsum adds from left to right, so the sum up to R has the same bits for every k
    precision_sum = np.cumsum(precision, axis=1)
    last = np.minimum(positives, width)[:, None] - 1

    def up_to_r(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.take_along_axis(values, last, axis=1)[:, 0] / positives

    scores = {"p_at_1": relevant[:, 0].astype(np.float64)}
    for k in recall_at:
        scores[f"recall_at_{k}"] = (hits[:, min(k, width) - 1] > 0).astype(np.float64)
    scores["r_precision"] = up_to_r(hits.astype(np.float64))
    scores["map_at_r"] = up_to_r(precision_sum)
    return scores


def mean_scores(per_query: Mapping[str, NDArray[np.float64]]) -> dict[str, float]:
    """Means over the queries that have a score (NaN marks a skipped one): one average at the end, in float64."""
    return {name: float(np.mean(values[~np.isnan(values)])) for name, values in per_query.items()}
