"""The table of metrics: names, labels, formulas and what each reads.

R is the number of relevant gallery items of a query (itself not counted), rel(r) whether the item at rank r is
relevant, P(r) the share of relevant items among the nearest r. A name that ends in ``_at_k`` stands for every K of
``recall_at``; with a number, as in ``ndcg_at_10``, for that K.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dmlbench.evaluation.metrics.clustering import WholeSet
from dmlbench.types import ConfigError, IntArray, closest

MUSGRAVE = "Musgrave et al., A Metric Learning Reality Check, ECCV 2020, section 3.2"
TEH = "code of Teh et al., ProxyNCA++, ECCV 2020 (euwern/proxynca_pp, folder evaluation, at commit 217233d2)"
ROTH = "Roth et al., Revisiting Training Strategies and Generalization Performance in Deep Metric Learning, ICML 2020"


@dataclass(frozen=True)
class Metric:
    """Definition of a metric. ``TABLE`` in the module ``registry`` contains all metrics.

    Attributes:
        name: name of the metric in configurations. A name that ends in ``_at_k`` has a parameter K.
        label: name of the metric in printed tables; ``{k}`` stands for the value of K.
        formula: description of the computation, for the documentation.
        source: the paper or code that defines the metric.
        reads: the data that ``score`` gets: "nearest" (the nearest items of each query), "ranking" (the whole ranking
            of each query), "clusters" (k-means clusters of the set) or "distances" (distances between images of the
            set).
        score: function that computes the metric. Its arguments are the data selected by ``reads``, and K. It returns
            one score per query [Q], or one score for the whole set.
        places: how many nearest items of a query the metric needs: "K", "R" (the number of positives of the query), or
            a number.
        better: "higher" if higher scores are better; None if the metric has no direction.
        percent: whether tables print the score in percent.
    """

    name: str
    label: str
    formula: str
    source: str
    reads: Literal["nearest", "ranking", "clusters", "distances"]
    score: Callable[[Any, int], Any]
    places: int | Literal["R", "K"] = "K"
    better: Literal["higher"] | None = "higher"
    percent: bool = True

    @property
    def takes_k(self) -> bool:
        return self.name.endswith("_at_k")

    @property
    def is_of_queries(self) -> bool:
        """Whether the metric gives one score per query. Metrics such as ``nmi`` give one score for the whole set."""
        return self.reads in ("nearest", "ranking")


@dataclass(frozen=True)
class Ranking:
    """Relevance by rank, and the sums over it that several metrics share."""

    relevant: NDArray[np.bool_]  # [Q, k] nearest first, False beyond the end of the gallery
    positives: IntArray  # R [Q], relevant gallery items (the query itself not counted), at least 1 each

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


def _ndcg(ranking: Ranking, k: int) -> NDArray[np.float64]:
    width = min(k, max(ranking.relevant.shape[1], int(ranking.positives.max())))
    gain = 1 / np.log2(np.arange(2, width + 2))
    found = np.where(ranking.relevant[:, :width], gain[: ranking.relevant.shape[1]], 0.0)
    return np.cumsum(found, axis=1)[:, -1] / np.cumsum(gain)[np.minimum(ranking.positives, width) - 1]


TABLE: tuple[Metric, ...] = (
    Metric(
        "p_at_1", "P@1", "rel(1)", MUSGRAVE, "nearest",
        lambda ranking, _: ranking.relevant[:, 0], places=1,
    ),
    Metric(
        "recall_at_k", "R@{k}", "whether any of the nearest K items is relevant",
        "Jegou et al., Product Quantization for Nearest Neighbor Search, TPAMI 2011, as DML papers use it", "nearest",
        lambda ranking, k: ranking.at(ranking.hits, k) > 0,
    ),
    Metric(
        "precision_at_k", "P@{k}", "P(K); divides by K even if the gallery has fewer items",
        "Manning et al., Introduction to Information Retrieval, 2008, section 8.4", "nearest",
        lambda ranking, k: ranking.at(ranking.hits, k) / k,
    ),
    Metric(
        "r_precision", "R-precision", "P(R)", MUSGRAVE, "nearest",
        lambda ranking, _: ranking.at_r(ranking.hits) / ranking.positives, places="R",
    ),
    Metric(
        "map_at_r", "MAP@R", "(1/R) sum_{r <= R} rel(r) P(r)", MUSGRAVE, "nearest",
        lambda ranking, _: ranking.at_r(ranking.precision_sum) / ranking.positives, places="R",
    ),
    Metric(
        "map_at_k", "MAP@{k}", "(1/min(R, K)) sum_{r <= K} rel(r) P(r)",
        "Weyand et al., Google Landmarks Dataset v2, CVPR 2020, equation 2", "nearest",
        lambda ranking, k: ranking.at(ranking.precision_sum, k) / np.minimum(ranking.positives, k),
    ),
    Metric(
        "ndcg_at_k", "NDCG@{k}", "sum_{r <= K} rel(r) / log2(r + 1), divided by that of a perfect ranking",
        "Jarvelin and Kekalainen, Cumulated Gain-Based Evaluation of IR Techniques, TOIS 2002, with binary gains",
        "nearest", _ndcg,
    ),
    Metric(
        "map", "MAP", "(1/R) sum_r rel(r) P(r) over the whole ranking (pytorch-metric-learning: over its first k)",
        "Manning et al., Introduction to Information Retrieval, 2008, section 8.4", "ranking",
        lambda ranking, _: ranking.precision_sum[:, -1] / ranking.positives,
    ),
    Metric(
        "oodml_map_at_1000", "mAP@1000 (ooDML)",
        "(1/(R + 1)) sum_{r <= 1000} rel(r) P(r): the divisor counts the query, too, so even a "
        "perfect ranking stays below 1; queries without a positive are left out",
        "Milbich et al., Characterizing Generalization under Out-of-Distribution Shifts in Deep Metric Learning, "
        "NeurIPS 2021, and metrics/mAP_1000.py of its code at commit 65156380", "nearest",
        lambda ranking, _: ranking.at(ranking.precision_sum, 1000) / (ranking.positives + 1), places=1000,
    ),
    Metric(
        "nmi", "NMI", "mutual information of classes and k-means clusters, divided by their entropies' mean",
        "Manning et al., Introduction to Information Retrieval, 2008, section 16.3", "clusters",
        lambda whole, _: whole.mutual_information["nmi"],
    ),
    Metric(
        "ami", "AMI", "adjusted mutual information of classes and k-means clusters (may fall below 0)",
        "Vinh et al., Information Theoretic Measures for Clusterings Comparison, JMLR 2010", "clusters",
        lambda whole, _: whole.mutual_information["ami"],
    ),
    Metric(
        "raw_nmi", "NMI (raw, geometric)",
        "mutual information of classes and k-means clusters of unnormalized rows, divided by the geometric mean of "
        "their entropies", TEH, "clusters", lambda whole, _: whole.raw_nmi,
    ),
    Metric(
        "raw_recall_at_k", "R@{k} (raw)",
        "whether any of the K nearest items is relevant, by the Euclidean distance of unnormalized rows", TEH,
        "distances", lambda whole, k: (whole.raw_first_hits < k).mean(),
    ),
    Metric(
        "intra_class_distance", "intra-class distance", "mean cosine distance within classes, in [0, 2]", ROTH,
        "distances",
        lambda whole, _: whole.class_distances[0], better=None, percent=False,
    ),
    Metric(
        "inter_class_distance", "inter-class distance", "mean cosine distance between class means, in [0, 2]", ROTH,
        "distances", lambda whole, _: whole.class_distances[1], better=None, percent=False,
    ),
)  # fmt: skip
"""Every metric, in the order in which results list them."""

METRICS = {metric.name: metric for metric in TABLE}
DEFAULT_RECALL_AT = (1, 2, 4, 8)
DEFAULT_METRICS = ("p_at_1", "recall_at_k", "r_precision", "map_at_r")


@dataclass(frozen=True)
class Score:
    """A metric with its K, if it takes one."""

    metric: Metric
    k: int = 0

    @property
    def name(self) -> str:
        return f"{self.metric.name[:-1]}{self.k}" if self.metric.takes_k else self.metric.name

    @property
    def label(self) -> str:
        return self.metric.label.format(k=self.k)

    @property
    def scale(self) -> float:
        """Factor in printed tables."""
        return 100.0 if self.metric.percent else 1.0


def score_named(name: str) -> Score:
    """The score of a name such as ``map_at_r`` or ``recall_at_10``; ConfigError for an unknown one."""
    if name in METRICS and not METRICS[name].takes_k:
        return Score(METRICS[name])
    family, _, k = name.rpartition("_at_")
    metric = METRICS.get(f"{family}_at_k")
    if metric is None or not re.fullmatch("[1-9][0-9]{0,8}", k):
        hint = closest(name, list(METRICS))
        raise ConfigError(f"'{name}' is not a score: {hint} _at_k needs a number for k, as in recall_at_10.")
    return Score(metric, int(k))


def score_labeled(label: str) -> Score | None:
    """The score with a printed label such as R@10, or None."""
    for metric in TABLE:
        pattern = re.escape(metric.label).replace(re.escape("{k}"), "([1-9][0-9]*)")
        if match := re.fullmatch(pattern, label):
            return Score(metric, int(match[1]) if metric.takes_k else 0)
    return None


def scores_of(metrics: Sequence[str], recall_at: Sequence[int] = DEFAULT_RECALL_AT) -> tuple[Score, ...]:
    """All scores that ``metrics`` name, each once, in the order of the table; ConfigError for wrong names or Ks."""
    values = list(recall_at)
    if any(not isinstance(k, Integral) or not 1 <= k < 10**9 for k in values) or values != sorted(set(values)):
        raise ConfigError(
            f"recall_at: got {values}, expected increasing whole numbers from 1 to 999,999,999, such as [1, 2, 4, 8]."
        )
    if not metrics:
        raise ConfigError(f"metrics: got none, expected at least one of {', '.join(METRICS)}.")
    if len(set(metrics)) < len(metrics):
        raise ConfigError(f"metrics: got {', '.join(metrics)}, expected each name once.")
    if not values and (of_k := [name for name in metrics if name in METRICS and METRICS[name].takes_k]):
        raise ConfigError(f"recall_at: got none, but metrics has {', '.join(of_k)}. Add a K, or leave the metric out.")
    found: set[Score] = set()
    for name in metrics:
        metric = METRICS.get(name)
        found |= {Score(metric, k) for k in values} if metric and metric.takes_k else {score_named(name)}
    return tuple(sorted(found, key=_order))


def _order(score: Score) -> tuple[int, int]:
    return TABLE.index(score.metric), score.k


def score_names(scores: Iterable[Score]) -> tuple[str, ...]:
    return tuple(score.name for score in scores)


def in_table_order(names: Iterable[str]) -> list[str]:
    """Names of scores, each once, in the order of the table."""
    return [score.name for score in sorted({score_named(name) for name in names}, key=_order)]


def of_queries(scores: Sequence[Score]) -> tuple[Score, ...]:
    return tuple(score for score in scores if score.metric.is_of_queries)


def depth(positives: IntArray, num_gallery: int, scores: Sequence[Score]) -> int:
    """First places k of a ranking that the scores need, for ``positives`` R [Q]; a gallery may end before."""
    needed = {"R": int(positives.max())}
    k = 1
    for score in of_queries(scores):
        places = num_gallery if score.metric.reads == "ranking" else needed.get(str(score.metric.places))
        k = max(k, places or (score.k if score.metric.takes_k else min(int(score.metric.places), num_gallery)))
    return k


def query_scores(
    relevant: NDArray[np.bool_], positives: IntArray, scores: Sequence[Score]
) -> dict[str, NDArray[np.float64]]:
    """Per-query scores [Q] by name, of relevance by rank [Q, k] (k >= ``depth``) and positives R [Q] (see ``Ranking``).

    Scores of the whole set are left out.
    """
    ranking = Ranking(relevant, positives)
    return {one.name: np.asarray(one.metric.score(ranking, one.k), np.float64) for one in of_queries(scores)}


def mean_scores(per_query: Mapping[str, NDArray[np.float64]]) -> dict[str, float]:
    """Means over the queries that have a score (NaN: skipped)."""
    return {name: float(np.mean(values[~np.isnan(values)])) for name, values in per_query.items()}


def set_scores(whole: WholeSet, scores: Sequence[Score]) -> dict[str, float]:
    return {score.name: float(score.metric.score(whole, score.k)) for score in scores if not score.metric.is_of_queries}
