"""Paired differences: scipy's paired t interval and the closed form over folds."""

import numpy as np
import pytest
from scipy import stats

from dmlbench.results.paired import paired_difference
from dmlbench.types import RunError


def test_of_one_fold_is_the_paired_t_interval() -> None:
    rng = np.random.default_rng(0)
    a = rng.normal(0.6, 0.1, 5)
    b = a + rng.normal(0.02, 0.01, 5)
    found = paired_difference({(0, r): a[r] for r in range(5)}, {(0, r): b[r] for r in range(5)})
    expected = stats.ttest_rel(b, a).confidence_interval(0.95)
    assert found.interval == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert found.difference == pytest.approx(b.mean() - a.mean(), abs=1e-15)
    assert found.n_pairs == 5


def test_what_fold_and_seed_do_to_both_configs_does_not_widen_the_interval() -> None:
    rng = np.random.default_rng(1)
    shared = {(f, r): 0.5 + 0.1 * f + rng.normal(0, 0.05) for f in range(4) for r in range(3)}
    own = {key: rng.normal(0.03, 0.002) for key in shared}
    found = paired_difference(shared, {key: shared[key] + own[key] for key in shared})
    deviations = [np.var([own[f, r] for r in range(3)], ddof=1) for f in range(4)]
    half = stats.t.ppf(0.975, 8) * np.sqrt(sum(deviations)) / (4 * np.sqrt(3))
    mean = np.mean(list(own.values()))
    assert found.interval == pytest.approx((mean - half, mean + half), abs=1e-12)
    assert found.second - found.first == pytest.approx(mean, abs=1e-12)


def test_folds_weigh_alike_whatever_their_number_of_pairs() -> None:
    first = {(0, 0): 0.0, (0, 1): 0.0, (1, 0): 0.0}
    found = paired_difference(first, {(0, 0): 0.1, (0, 1): 0.3, (1, 0): 0.4})
    assert found.difference == pytest.approx(0.3)
    assert found.interval is None


def test_of_single_pairs_is_the_paired_t_interval_over_folds() -> None:
    rng = np.random.default_rng(2)
    a, b = rng.normal(0.5, 0.1, (2, 4))
    found = paired_difference({(f, 0): a[f] for f in range(4)}, {(f, 0): b[f] for f in range(4)})
    expected = stats.ttest_rel(b, a).confidence_interval(0.95)
    assert found.interval == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert found.over == "folds"
    assert paired_difference({(0, 0): 0.1}, {(0, 0): 0.2}).interval is None


def test_runs_without_a_partner_are_refused_by_name() -> None:
    with pytest.raises(RunError, match=r"fold0_rep1, fold2_rep0"):
        paired_difference({(0, 0): 0.1, (0, 1): 0.1}, {(0, 0): 0.1, (2, 0): 0.1})
    with pytest.raises(RunError, match="all"):
        paired_difference({}, {})
