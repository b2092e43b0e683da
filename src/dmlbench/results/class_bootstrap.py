"""Bootstrap over test classes: would a difference hold on other classes of the same kind?"""

import numpy as np
from numpy.typing import NDArray
from scipy.stats import bootstrap


def class_bootstrap(differences: NDArray[np.float64], labels: NDArray[np.int64]) -> tuple[float, float]:
    """95 % percentile interval of a mean over queries, with the queries' classes drawn with replacement.

    A sample's mean is over all queries of its classes, so larger classes count for more, as in the score itself.

    Args:
        differences: of two configs' scores of each query [Q].
        labels: of the queries [Q].

    Source: Field and Welsh, Bootstrapping clustered data, JRSS B 2007, section 3.1 (the cluster bootstrap).
    """
    _, class_of = np.unique(labels, return_inverse=True)
    sums, sizes = np.bincount(class_of, weights=differences), np.bincount(class_of)
    if len(sums) == 1:
        return float(differences.mean()), float(differences.mean())
    found = bootstrap(
        (sums, sizes), lambda sums, sizes, axis: sums.sum(axis) / sizes.sum(axis), paired=True, vectorized=True,
        n_resamples=10_000, batch=100, method="percentile", random_state=np.random.default_rng(0),
    )  # fmt: skip
    return float(found.confidence_interval.low), float(found.confidence_interval.high)
