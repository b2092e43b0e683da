"""The bootstrap over classes against a loop and a closed form."""

import numpy as np
from scipy.stats import norm

from dmlbench.results.class_bootstrap import class_bootstrap


def test_the_interval_is_that_of_a_loop_over_samples() -> None:
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 7, 60)
    differences = rng.normal(size=60)
    drawn = np.random.default_rng(0).integers(7, size=(10_000, 7))
    means = [np.concatenate([differences[labels == c] for c in sample]).mean() for sample in drawn]
    np.testing.assert_allclose(class_bootstrap(differences, labels), np.quantile(means, [0.025, 0.975]), atol=1e-12)


def test_it_has_the_width_of_class_means_not_of_queries() -> None:
    rng = np.random.default_rng(2)
    of_class = rng.normal(size=400)
    labels = np.repeat(np.arange(400), 5)
    low, high = class_bootstrap(np.repeat(of_class, 5), labels)
    expected = 2 * norm.ppf(0.975) * of_class.std() / 20
    assert abs((high - low) / expected - 1) < 0.05


def test_equal_scores_have_no_width() -> None:
    assert class_bootstrap(np.zeros(6), np.array([0, 0, 1, 1, 2, 2])) == (0.0, 0.0)
    assert class_bootstrap(np.array([1.0, 2.0]), np.array([3, 3])) == (1.5, 1.5)
