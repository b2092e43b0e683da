"""The Fréchet distance of Gaussians fitted to two sets of features."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import scipy.linalg
from numpy.typing import ArrayLike, NDArray

from dmlbench.types import DataError, check_choice

Float = NDArray[np.float64]
Variant = Literal["exact_eig", "oodml", "pytorch_fid"]
VARIANTS = get_args(Variant)

_OODML_RIDGE = 1e-8
_PYTORCH_FID_RIDGE = 1e-6


@dataclass(frozen=True)
class Gaussian:
    """A normal distribution with mean [d] and covariance ``factor.T @ factor`` of any rank, ``factor`` [r, d]."""

    mean: Float
    factor: Float

    @property
    def total_variance(self) -> float:
        return float((self.factor**2).sum())


def gaussian_of_rows(rows: Float) -> Gaussian:
    """Fit mean and unbiased covariance to rows [n, d], n >= 2; the factor has min(n, d) rows."""
    mean = rows.mean(axis=0)
    centered = (rows - mean) / np.sqrt(len(rows) - 1)
    if len(rows) <= rows.shape[1]:
        return Gaussian(mean, centered)
    return Gaussian(mean, scipy.linalg.qr(centered, mode="r", check_finite=False)[0][: rows.shape[1]])


def gaussian_of_moments(mean: Float, covariance: Float) -> Gaussian:
    """Factor a covariance [d, d] of any rank by pivoted Cholesky."""
    lower, pivots, rank, _ = scipy.linalg.lapack.dpstrf(covariance, lower=1)
    factor = np.zeros((rank, len(mean)))
    factor[:, pivots - 1] = np.tril(lower)[:, :rank].T
    return Gaussian(mean, factor)


def distance_of_gaussians(a: Gaussian, b: Gaussian, *, by_squares: bool = False) -> float:
    """||mean_a - mean_b||^2 + tr(S_a + S_b - 2 (S_a S_b)^(1/2)), rounded to 0 within the rounding error.

    The trace of the root is the sum of the singular values of F_a F_b^T, with S = F^T F. ``by_squares`` takes roots of
    eigenvalues instead: several times faster, and off by up to 1e-8 of the largest singular value.
    """
    product = a.factor @ b.factor.T
    if by_squares:
        root = float(np.sqrt(np.linalg.eigvalsh(product @ product.T).clip(0)).sum())
    else:
        root = float(np.linalg.svd(product, compute_uv=False).sum())
    variance = a.total_variance + b.total_variance
    squared = float(((a.mean - b.mean) ** 2).sum()) + variance - 2 * root
    rounding = len(a.mean) * np.finfo(np.float64).eps * variance
    return squared if squared > rounding else 0.0


def frechet_distance(a: ArrayLike, b: ArrayLike, *, variant: Variant = "exact_eig") -> float:
    """Compute the squared Fréchet distance between two sets of features, as FID does.

    Each set is modeled as a Gaussian with the mean and the unbiased covariance of the set.

    Args:
        a: the first set [n, d] with n >= 2. A row is the feature vector of an image or the mean vector of a class.
        b: the second set, [m, d] with m >= 2.
        variant: how to compute the matrix square root of the product of the covariances. "exact_eig" computes only the
            trace of this root, from singular values. "oodml" does the same, but within the product, it adds 1e-8 to the
            covariances' diagonals, as ooDML's public code does. With "oodml", the distance of two equal sets is
            therefore slightly below 0. "pytorch_fid" uses scipy's ``sqrtm``. If the result is not finite, "pytorch_fid"
            adds 1e-6 to the diagonals of the covariances and computes the root again.

    Raises:
        DataError: d differs between the sets, a set has fewer than two rows, or a number is not finite.

    Source: M. Heusel et al., "GANs Trained by a Two Time-Scale Update Rule Converge to a Local Nash Equilibrium",
        NeurIPS 2017; T. Milbich et al., "Characterizing Generalization under Out-Of-Distribution Shifts in Deep Metric
        Learning", NeurIPS 2021, eq. 1; variants: ooDML's public code and mseitzer/pytorch-fid.
    """
    check_choice("variant", variant, VARIANTS)
    first, second = _checked(a, "first"), _checked(b, "second")
    if first.shape[1] != second.shape[1]:
        raise DataError(
            f"features: got {first.shape[1]} and {second.shape[1]} dimensions, expected the same. Use one network for "
            "both."
        )
    if variant == "pytorch_fid":
        covariances = [np.atleast_2d(np.cov(rows, rowvar=False)) for rows in (first, second)]
        matrix_root: Any = scipy.linalg.sqrtm(covariances[0] @ covariances[1])
        if not np.isfinite(matrix_root).all():
            lift = _PYTORCH_FID_RIDGE * np.eye(first.shape[1])
            matrix_root = scipy.linalg.sqrtm((covariances[0] + lift) @ (covariances[1] + lift))
        difference = first.mean(axis=0) - second.mean(axis=0)
        return float(difference @ difference + sum(map(np.trace, covariances)) - 2 * np.trace(matrix_root).real)
    gaussians = gaussian_of_rows(first), gaussian_of_rows(second)
    if variant == "exact_eig":
        return distance_of_gaussians(*gaussians)
    ridge = np.sqrt(_OODML_RIDGE) * np.eye(first.shape[1])
    lifted = [np.concatenate([g.factor, ridge]) for g in gaussians]
    root = np.linalg.svd(lifted[0] @ lifted[1].T, compute_uv=False).sum()
    difference = gaussians[0].mean - gaussians[1].mean
    return float(difference @ difference + sum(g.total_variance for g in gaussians) - 2 * root)


def _checked(features: ArrayLike, which: str) -> Float:
    rows = np.asarray(features, dtype=np.float64)
    if rows.ndim != 2 or rows.shape[1] == 0 or len(rows) < 2:
        raise DataError(f"{which} set of features: got shape {list(rows.shape)}, expected two or more rows [n, d].")
    if not np.isfinite(rows).all():
        bad = int(np.flatnonzero(~np.isfinite(rows).all(axis=1))[0])
        raise DataError(f"{which} set of features: got NaN or infinity in row {bad}, expected finite numbers.")
    return rows
