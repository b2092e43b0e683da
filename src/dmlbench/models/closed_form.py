"""Closed-form linear heads: PCA, LDA and learned whitening, from sums over labeled rows in float64."""

from typing import Literal

import torch
from torch import Tensor

from dmlbench.types import RunError

ClosedForm = Literal["pca", "lda", "learned_whitening"]


class Moments:
    """Sums of rows and their products, by class, from which means and covariances follow."""

    def __init__(self, num_features: int, num_classes: int) -> None:
        self._products = torch.zeros(num_features, num_features, dtype=torch.float64)
        self._sums = torch.zeros(num_classes, num_features, dtype=torch.float64)
        self._counts = torch.zeros(num_classes, dtype=torch.float64)

    def add(self, rows: Tensor, labels: Tensor) -> None:
        """Add rows [B, C] of classes [B]."""
        rows = rows.to("cpu", torch.float64)
        self._products += rows.T @ rows
        self._sums.index_add_(0, labels, rows)
        self._counts += torch.bincount(labels, minlength=len(self._counts))

    @property
    def num_classes(self) -> int:
        return int((self._counts > 0).sum())

    @property
    def mean(self) -> Tensor:
        return self._sums.sum(0) / self._counts.sum()

    @property
    def total(self) -> Tensor:
        """Covariance [C, C] of all rows."""
        return self._products / self._counts.sum() - torch.outer(self.mean, self.mean)

    @property
    def between(self) -> Tensor:
        """Covariance [C, C] of the class means, weighted by the classes' sizes."""
        means = self._sums / self._counts.clamp(min=1)[:, None]
        return (means.T * self._counts) @ means / self._counts.sum() - torch.outer(self.mean, self.mean)

    @property
    def within(self) -> Tensor:
        """Covariance [C, C] of rows around the means of their classes."""
        return self.total - self.between


def closed_form(moments: Moments, form: ClosedForm, out_features: int, shrinkage: float) -> tuple[Tensor, Tensor]:
    """Weight [D, C] and bias [D] in float64 of y = W (x - mean).

    With S = within-class covariance + ``shrinkage`` I = L L^T and W0 = L^-1:
    pca: W has the first eigenvectors of the total covariance T;
    learned_whitening: W = V^T W0, V the first eigenvectors of W0 T W0^T;
    lda: W = V^T W0, V the first eigenvectors of W0 B W0^T, B the between-class covariance.
    Eigenvectors are signed so that their largest entry is positive.

    Source: Radenovic et al., Fine-tuning CNN Image Retrieval with No Human Annotation, 2018, section 3.4, after
        Mikolajczyk & Matas, Improving Descriptors for Fast Tree Matching by Optimal Linear Projection, 2007.
    """
    if form == "pca":
        weight = _first_eigenvectors(moments.total, out_features)
    else:
        noise = shrinkage * torch.eye(len(moments.mean), dtype=torch.float64)
        factor, failed = torch.linalg.cholesky_ex(moments.within + noise)
        if failed:
            raise RunError(
                f"head.shrinkage: got {shrinkage}, but the within-class covariance is singular. Raise head.shrinkage."
            )
        whitening = torch.linalg.solve_triangular(factor, torch.eye(len(factor), dtype=torch.float64), upper=False)
        spread = moments.between if form == "lda" else moments.total
        weight = _first_eigenvectors(whitening @ spread @ whitening.T, out_features) @ whitening
    return weight, -weight @ moments.mean


def _first_eigenvectors(symmetric: Tensor, count: int) -> Tensor:
    """Eigenvectors [count, C] of the largest eigenvalues, the largest first."""
    vectors = torch.linalg.eigh(symmetric).eigenvectors.T.flip(0)[:count]
    largest = vectors.gather(1, vectors.abs().argmax(dim=1, keepdim=True))
    return vectors * largest.sign()
