"""The Fréchet distance against recorded values of public code, and against closed forms."""

import numpy as np
import pytest

from dmlbench.oodml import frechet_distance
from dmlbench.oodml.frechet import VARIANTS, distance_of_gaussians, gaussian_of_moments, gaussian_of_rows
from dmlbench.types import DataError


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("case", range(4))
def test_distance_of_the_public_implementations(golden, case: int, variant: str) -> None:
    stored = golden("ood_splits_fid", f"fid{case}_")
    found = frechet_distance(stored["a"], stored["b"], variant=variant)
    assert found == pytest.approx(float(stored[variant]), rel=1e-8, abs=1e-12)


def rows_with(mean: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Rows of exactly this mean and a diagonal covariance of these standard deviations."""
    d = len(mean)
    return np.concatenate([np.diag(scales), -np.diag(scales)]) * np.sqrt((2 * d - 1) / 2) + mean


def test_distance_of_diagonal_covariances_has_a_closed_form() -> None:
    means, scales = np.array([[1.0, -2, 0], [0.5, 1, 7]]), np.array([[1.0, 0.1, 3], [2, 0.3, 0]])
    expected = ((means[0] - means[1]) ** 2).sum() + ((scales[0] - scales[1]) ** 2).sum()
    assert frechet_distance(rows_with(means[0], scales[0]), rows_with(means[1], scales[1])) == pytest.approx(
        expected, rel=1e-14
    )


@pytest.mark.parametrize("shape", [(7, 50), (300, 20), (60, 60)])
def test_equal_sets_are_at_distance_0_and_order_does_not_matter(shape: tuple[int, int]) -> None:
    generator = np.random.default_rng(0)
    first, second = generator.normal(size=(2, *shape)) * 1e3 + 1e4
    assert frechet_distance(first, first) == 0
    assert frechet_distance(first, first[::-1]) == 0
    assert frechet_distance(first, second) == pytest.approx(frechet_distance(second, first), rel=1e-12)
    # a shift adds its squared length, whatever the covariances
    shift = generator.normal(size=shape[1]) * 100
    assert frechet_distance(first, first + shift) == pytest.approx(shift @ shift, rel=1e-10)


def test_covariances_give_what_rows_give_also_of_lower_rank() -> None:
    generator = np.random.default_rng(2)
    first, second = generator.normal(size=(2, 200, 12))
    first[:, 3] = 0  # a dead feature
    second[:, 7] = second[:, 6]
    by_moments = [gaussian_of_moments(rows.mean(axis=0), np.cov(rows, rowvar=False)) for rows in (first, second)]
    assert [len(gaussian.factor) for gaussian in by_moments] == [11, 11]
    by_rows = distance_of_gaussians(gaussian_of_rows(first), gaussian_of_rows(second))
    assert distance_of_gaussians(*by_moments) == pytest.approx(by_rows, rel=1e-7)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (np.zeros((1, 3)), np.zeros((4, 3)), r"first set of features: got shape \[1, 3\], expected two or more rows"),
        (np.zeros((4, 3)), np.zeros((4, 2)), "features: got 3 and 2 dimensions, expected the same"),
        (np.zeros(4), np.zeros((4, 2)), r"first set of features: got shape \[4\]"),
        (np.full((4, 2), np.nan), np.zeros((4, 2)), "first set of features: got NaN or infinity in row 0"),
    ],
)
def test_sets_that_have_no_distance_are_refused(first: np.ndarray, second: np.ndarray, message: str) -> None:
    with pytest.raises(DataError, match=message):
        frechet_distance(first, second)
