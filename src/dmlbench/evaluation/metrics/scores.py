"""Retrieval scores of single queries, from which of their first neighbors are relevant.

All scores are fractions in [0, 1]; a query's R is the number of relevant gallery items (itself not counted).
"""

from collections.abc import Mapping, Sequence
from numbers import Integral

import numpy as np
from numpy.typing import NDArray

from dmlbench.types import ConfigError, IntArray, closest

DEFAULT_RECALL_AT = (1, 2, 4, 8)
DEFAULT_METRICS = ("p_at_1", "recall_at_k", "r_precision", "map_at_r")
DISTANCE_METRICS = ("intra_class_distance", "inter_class_distance")
CLUSTER_METRICS = ("nmi", "ami", *DISTANCE_METRICS)
METRICS = (*DEFAULT_METRICS, "map", "oodml_map_at_1000", *CLUSTER_METRICS)
"""Every metric, in the order in which results list them. "recall_at_k" is one score for every value of ``recall_at``;
those of ``CLUSTER_METRICS`` are scores of the whole set, the others means over queries."""

_OODML_DEPTH = 1000


def score_names(recall_at: Sequence[int], metrics: Sequence[str] = DEFAULT_METRICS) -> tuple[str, ...]:
    """Names of all scores of an evaluation, in the order in which results list them."""
    names: list[str] = []
    for metric in METRICS:
        if metric in metrics:
            names += [f"recall_at_{k}" for k in recall_at] if metric == "recall_at_k" else [metric]
    return tuple(names)


def query_score_names(recall_at: Sequence[int], metrics: Sequence[str] = DEFAULT_METRICS) -> tuple[str, ...]:
    """Names of the scores that every query has, likewise."""
    return score_names(recall_at, [metric for metric in metrics if metric not in CLUSTER_METRICS])


def check_metrics(metrics: Sequence[str]) -> None:
    """Raises ConfigError for an unknown or repeated name, or none at all."""
    if not metrics:
        raise ConfigError(f"metrics is empty; name at least one of {', '.join(METRICS)}")
    for metric in metrics:
        if metric not in METRICS:
            hint = (
                "write recall_at_k and set recall_at" if metric.startswith("recall_at_") else closest(metric, METRICS)
            )
            raise ConfigError(f"metrics has '{metric}', which is unknown: {hint}")
    if len(set(metrics)) < len(metrics):
        raise ConfigError(f"metrics ({', '.join(metrics)}) names one twice; name each once")


def depth(positives: IntArray, num_gallery: int, *, recall_at: Sequence[int], metrics: Sequence[str]) -> int:
    """First places of a ranking that the scores need, k; a gallery may end before.

    Args:
        positives: R [Q].
        num_gallery: gallery items.
        recall_at: the values of K.
        metrics: what is computed.
    """
    k = max(int(positives.max()), *recall_at, 1)
    if "oodml_map_at_1000" in metrics:
        k = max(k, min(_OODML_DEPTH, num_gallery))
    return max(k, num_gallery) if "map" in metrics else k


def check_recall_at(recall_at: Sequence[int]) -> None:
    """Raises ConfigError unless the values are positive, increasing whole numbers."""
    values = list(recall_at)
    if any(not isinstance(k, Integral) or k < 1 for k in values) or values != sorted(set(values)):
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
    relevant: NDArray[np.bool_],
    positives: IntArray,
    *,
    recall_at: Sequence[int],
    metrics: Sequence[str] = DEFAULT_METRICS,
) -> dict[str, NDArray[np.float64]]:
    """Scores [Q] of every query.

    - p_at_1: whether the nearest item is relevant;
    - recall_at_K: whether any of the nearest K is relevant (K beyond the gallery means the whole gallery);
    - r_precision: share of relevant items among the nearest R;
    - map_at_r: (1/R) sum_{r <= R} rel(r) P(r), where P(r) = (relevant items among the nearest r) / r;
    - map: (1/R) sum_r rel(r) P(r) over the whole ranking, the average precision of information retrieval (what
      pytorch-metric-learning calls so ends at its k);
    - oodml_map_at_1000: (1/(R + 1)) sum_{r <= 1000} rel(r) P(r). The divisor counts the query to its class, so that
      even a perfect ranking stays below 1. Its authors count a query without a positive as 0; here it is left out of
      the mean, as of every other.

    Args:
        relevant: [Q, k] by rank, nearest first, False beyond the end of the gallery; k >= ``depth``, or the gallery's
            end.
        positives: R [Q], at least 1 each.
        recall_at: the values of K.
        metrics: what to compute; those of ``CLUSTER_METRICS`` are no scores of a query and are passed over.

    Source: Musgrave et al., A Metric Learning Reality Check, ECCV 2020, section 3.2 (MAP@R, R-precision); Milbich et
    al., Characterizing Generalization under Out-of-Distribution Shifts in Deep Metric Learning, NeurIPS 2021, and
    ``metrics/mAP_1000.py`` of its code at commit 65156380 (mAP@1000).
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
    scores["map"] = precision_sum[:, -1] / positives
    scores["oodml_map_at_1000"] = precision_sum[:, min(_OODML_DEPTH, width) - 1] / (positives + 1)
    return {name: scores[name] for name in query_score_names(recall_at, metrics)}


def mean_scores(per_query: Mapping[str, NDArray[np.float64]]) -> dict[str, float]:
    """Means over the queries that have a score (NaN marks a skipped one): one average at the end, in float64."""
    return {name: float(np.mean(values[~np.isnan(values)])) for name, values in per_query.items()}
