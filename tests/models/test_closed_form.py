"""Closed-form heads against scikit-learn and a naive computation in float64."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.decomposition import PCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch import Tensor

from dmlbench.models.closed_form import Moments, closed_form
from dmlbench.models.projection import Projection
from dmlbench.types import ConfigError, RunError

GENERATOR = torch.Generator().manual_seed(0)
LABELS = torch.arange(6).repeat_interleave(torch.tensor([10, 30, 15, 25, 18, 22]))
SPREAD = torch.randn(10, 10, generator=GENERATOR)
ROWS = (torch.randn(6, 10, generator=GENERATOR)[LABELS] + torch.randn(120, 10, generator=GENERATOR) @ SPREAD).double()
ROWS = F.normalize(ROWS)


def moments() -> Moments:
    found = Moments(10, 8)  # two classes have no image
    for part in torch.arange(120).split(7):
        found.add(ROWS[part], LABELS[part])
    return found


def fitted(form: str, size: int, shrinkage: float = 1e-3) -> Tensor:
    weight, bias = closed_form(moments(), form, size, shrinkage)  # type: ignore[arg-type]
    return ROWS @ weight.T + bias


def same_up_to_signs(rows: Tensor, expected: np.ndarray) -> None:
    other = torch.from_numpy(expected)
    torch.testing.assert_close(rows * (rows * other).sum(0).sign(), other, rtol=1e-8, atol=1e-10)


def test_pca_is_that_of_scikit_learn() -> None:
    same_up_to_signs(fitted("pca", 4), PCA(4, svd_solver="full").fit_transform(ROWS.numpy()))


def test_lda_has_the_directions_of_scikit_learn() -> None:
    rows = fitted("lda", 5, shrinkage=0.0)
    expected = LinearDiscriminantAnalysis(solver="svd").fit(ROWS.numpy(), LABELS.numpy()).transform(ROWS.numpy())
    same_up_to_signs(rows, expected * (rows.norm() / np.linalg.norm(expected)).item())


@pytest.mark.parametrize("form", ["learned_whitening", "lda"])
def test_whitening_and_lda_with_shrinkage_are_the_naive_computation(form: str) -> None:
    rows = ROWS.numpy()
    class_means = np.stack([rows[c == LABELS].mean(0) for c in range(6)])[LABELS]
    residuals = rows - class_means
    whitening = np.linalg.inv(np.linalg.cholesky(residuals.T @ residuals / 120 + 0.01 * np.eye(10)))
    centered = (rows - rows.mean(0)) @ whitening.T
    spread = centered if form == "learned_whitening" else (class_means - rows.mean(0)) @ whitening.T
    _, _, directions = np.linalg.svd(spread, full_matrices=False)
    same_up_to_signs(fitted(form, 4, 0.01), centered @ directions[:4].T)


def test_the_largest_entry_of_an_eigenvector_is_positive() -> None:
    weight, _ = closed_form(moments(), "pca", 10, 0.0)
    assert all(max(row, key=abs) > 0 for row in weight.tolist())


def test_a_head_is_fitted_in_place_and_starts_the_trained_one() -> None:
    head = Projection(10, 4, init="learned_whitening", shrinkage=0.01)
    weight = head.weight
    head.fit(moments())
    assert head.weight is weight
    assert head.normalize
    rows = 3.0 * ROWS.float()  # the head normalizes
    torch.testing.assert_close(head(rows).double(), fitted("learned_whitening", 4, 0.01), rtol=1e-4, atol=1e-5)


def test_the_average_of_projected_pixels_is_the_projected_normalized_average() -> None:
    head = Projection(10, 4, init="pca")
    head.fit(moments())
    maps = 5.0 * torch.rand(3, 10, 2, 7, generator=torch.Generator().manual_seed(0))
    pixels = head(maps)
    torch.testing.assert_close(pixels.mean(dim=(2, 3)), head(maps.mean(dim=(2, 3))))
    naive = torch.stack([(one / one.mean(dim=(1, 2)).norm()) for one in maps])
    torch.testing.assert_close(pixels, F.conv2d(naive, head.weight[:, :, None, None], head.bias))


def test_what_cannot_be_fitted_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"head.out_features: got 6 for lda, expected at most 5"):
        Projection(10, 6, init="lda").fit(moments())
    with pytest.raises(ConfigError, match=r"head.bias: got false with init=pca"):
        Projection(10, 4, init="pca", bias=False)
    with pytest.raises(ConfigError, match="out_features: got 12 for pca, expected at most 10"):
        Projection(10, 12, init="pca").fit(moments())
    lonely = Moments(10, 120)
    lonely.add(ROWS, torch.arange(120))
    with pytest.raises(RunError, match=r"head.shrinkage: got 0.0"):
        closed_form(lonely, "learned_whitening", 4, 0.0)


def test_identity_keeps_the_features() -> None:
    head = Projection(10, None, init="identity")
    assert head.out_features == 10
    torch.testing.assert_close(head(ROWS.float()), ROWS.float())
