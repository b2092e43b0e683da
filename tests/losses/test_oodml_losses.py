"""ArcFace, ProxyAnchor and multi-similarity as ooDML's code computes them, against values that it gave.

Recorded by running criteria/arcface.py, criteria/oproxy.py and criteria/multisimilarity.py of
Confusezius/Characterizing_Generalization_in_DeepMetricLearning e8a4171c with the defaults of its parameters.py on the
normalized rows below, in float64; gradients are of one row before it is normalized.
"""

import math

import pytest
import torch
from torch import Tensor, nn

from dmlbench.losses.arcface import ArcFace
from dmlbench.losses.initialization import init_class_vectors
from dmlbench.losses.multi_similarity_oodml import MultiSimilarityOodml
from dmlbench.losses.proxy_anchor import ProxyAnchor

LABELS = torch.tensor([0, 0, 1, 1, 0, 0, 2, 2])  # class 0 was drawn twice
ROWS = (0.7 * torch.arange(64, dtype=torch.float64)).sin().view(8, 8)
ROWS = ROWS + 0.5 * (1.3 * torch.arange(8, dtype=torch.float64)).cos()
NEAR_ROWS = 1 + 0.15 * (2.3 * torch.arange(48, dtype=torch.float64)).sin().view(6, 8)  # negatives as near as positives
VECTORS = (1.1 * torch.arange(40, dtype=torch.float64)).cos().view(5, 8)


def arcface() -> ArcFace:
    loss = ArcFace(5, 8, margin=math.degrees(0.5), scale=16, clamp_negative=True)
    loss.W.data = VECTORS.T.clone()
    return loss


def proxy_anchor() -> ProxyAnchor:
    loss = ProxyAnchor(5, 8, positive_mean="images")
    loss.proxies.data = VECTORS.clone()
    return loss


@pytest.mark.parametrize(
    ("loss", "rows", "labels", "row", "value", "tolerance", "gradient"),
    [
        (arcface(), ROWS, LABELS, 4, 11.541216959, 1e-8,
         [-0.389583143, -0.592263694, -0.194446867, 0.381567638, 0.522662558, 0.089096195, -0.422559926, -0.425545423]),
        (proxy_anchor(), ROWS, LABELS, 4, 24.960606756, 1e-8,
         [0.000511225, -0.000689555, -0.00052921, 0.000655333, 0.001356953, 0.000621079, -0.001044112, -0.002177955]),
        (MultiSimilarityOodml(), ROWS, LABELS, 4, 1.122850128, 1e-8,
         [-0.037938965, -0.023550252, 0.00896914, 0.014671862, -0.005670509, -0.010989971, 0.01461443, 0.034768378]),
        (MultiSimilarityOodml(), NEAR_ROWS, torch.arange(6) // 2, 0, 0.8035932600604467, 1e-12,
         [-0.003867038, -0.000357487, 0.005948282, -0.005964034, 0.003603978, 0.00276642, -0.005685503, 0.006414682]),
    ],
    ids=["arcface", "proxy_anchor", "multi_similarity", "multi_similarity, an anchor is its own positive"],
)  # fmt: skip
def test_values_and_gradients_are_those_of_the_public_code(
    loss: nn.Module, rows: Tensor, labels: Tensor, row: int, value: float, tolerance: float, gradient: list[float]
) -> None:
    x = rows.clone().requires_grad_()
    found = loss(x, labels)
    assert found.item() == pytest.approx(value, abs=tolerance)
    assert torch.autograd.grad(found, x)[0][row].tolist() == pytest.approx(gradient, abs=2e-9)


# Initial class vectors


@pytest.mark.parametrize(
    ("init", "std", "mean_square"), [("he_normal", None, 2 / 400), ("kaiming_uniform_a5", None, 1 / 300),
                                     ("normal", 0.125, 1 / 64)],
)  # fmt: skip
@pytest.mark.parametrize("class_dim", [0, 1])
def test_schemes_have_the_variance_that_they_name(
    init: str, std: float | None, mean_square: float, class_dim: int
) -> None:
    torch.manual_seed(0)
    vectors = torch.empty((400, 100) if class_dim == 0 else (100, 400))
    init_class_vectors(vectors, init, std, class_dim=class_dim)
    assert vectors.square().mean().item() == pytest.approx(mean_square, rel=0.02)
    assert abs(vectors.mean().item()) < 0.02 * mean_square**0.5
    if init == "kaiming_uniform_a5":  # torch.nn.Linear's
        assert vectors.abs().max() <= 0.1
        linear = nn.Linear(100, 400)
        assert vectors.abs().max().item() == pytest.approx(linear.weight.abs().max().item(), rel=1e-3)


def test_he_normal_is_torch_s_kaiming_normal_over_classes() -> None:
    vectors, theirs = torch.empty(7, 5), torch.empty(7, 5)
    torch.manual_seed(3)
    init_class_vectors(vectors, "he_normal")
    torch.manual_seed(3)
    nn.init.kaiming_normal_(theirs, mode="fan_out")
    assert torch.equal(vectors, theirs)
