"""Bootstrap over test classes: would a difference hold on other classes of the same kind?"""

import numpy as np
from numpy.typing import NDArray

_SAMPLES = 10_000


def class_bootstrap(
    differences: NDArray[np.float64], labels: NDArray[np.int64], *, level: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """Percentile interval of a mean over queries, with the queries' classes drawn with replacement.

    A sample's mean is over all queries of its classes, so larger classes count for more, as in the score itself.

    Args:
        differences: of two configs' scores of each query [Q].
        labels: of the queries [Q].
        level: coverage in (0, 1).

    Source: Field and Welsh, Bootstrapping clustered data, JRSS B 2007, section 3.1 (the cluster bootstrap).
    """
    _, class_of = np.unique(labels, return_inverse=True)
    sums = np.bincount(class_of, weights=differences)
    sizes = np.bincount(class_of)
    generator = np.random.default_rng(seed)
    drawn = generator.integers(len(sums), size=(_SAMPLES, len(sums)))
    means = sums[drawn].sum(1) / sizes[drawn].sum(1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
