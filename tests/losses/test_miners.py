"""Switched negatives: how often, what they are, and what is refused."""

import pytest
import torch
from pytorch_metric_learning.losses import ContrastiveLoss, MarginLoss, MultiSimilarityLoss, TripletMarginLoss
from pytorch_metric_learning.miners import DistanceWeightedMiner, MultiSimilarityMiner, TripletMarginMiner

from dmlbench.losses.margin_oodml import MarginOodml
from dmlbench.losses.miners import SwitchedNegatives
from dmlbench.losses.objective import Objective
from dmlbench.types import ConfigError, ModelOutput

LABELS = torch.arange(24) % 4


def embeddings() -> torch.Tensor:
    return torch.randn(24, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("rho", [0.0, 0.4, 1.0])
def test_share_of_switched_negatives_is_rho_and_they_are_other_images_of_the_anchors_class(rho: float) -> None:
    torch.manual_seed(0)
    miner = SwitchedNegatives(TripletMarginMiner(margin=10.0), switch_probability=rho)  # every triplet
    anchor, positive, negative = miner(embeddings(), LABELS)
    switched = LABELS[anchor] == LABELS[negative]
    assert len(anchor) == 24 * 5 * 18
    assert switched.double().mean().item() == pytest.approx(rho, abs=0.03)
    assert (negative != anchor).all()
    assert (LABELS[anchor] == LABELS[positive]).all()
    if rho == 1.0:
        counts = torch.bincount(negative[anchor == 0], minlength=24)
        assert set(counts.nonzero()[:, 0].tolist()) == {4, 8, 12, 16, 20}


def test_without_switching_the_triplets_are_the_miners() -> None:
    plain = TripletMarginMiner(margin=0.2)
    expected = plain(embeddings(), LABELS)
    actual = SwitchedNegatives(plain, switch_probability=0.0)(embeddings(), LABELS)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_a_batch_without_triplets_stays_empty() -> None:
    miner = SwitchedNegatives(DistanceWeightedMiner(), switch_probability=1.0)
    assert [len(part) for part in miner(embeddings(), torch.arange(24))] == [0, 0, 0]


def test_what_cannot_be_switched_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"switch_probability \(1.5\)"):
        SwitchedNegatives(TripletMarginMiner(), switch_probability=1.5)
    with pytest.raises(ConfigError, match="MultiSimilarityMiner gives pairs"):
        SwitchedNegatives(MultiSimilarityMiner())(embeddings(), LABELS)
    miner = SwitchedNegatives(DistanceWeightedMiner())
    with pytest.raises(ConfigError, match="MultiSimilarityLoss cannot take a pair of one class as negative"):
        Objective(MultiSimilarityLoss(), miner)


@pytest.mark.parametrize("loss", [TripletMarginLoss(), MarginLoss(), MarginOodml(4), ContrastiveLoss()])
def test_losses_of_triplets_and_lists_of_pairs_take_switched_negatives(loss) -> None:
    torch.manual_seed(0)
    objective = Objective(loss, SwitchedNegatives(TripletMarginMiner(margin=10.0), switch_probability=1.0))
    x = embeddings().requires_grad_()
    objective(ModelOutput(x), LABELS, step=1)["loss"].backward()
    assert torch.isfinite(x.grad).all()
    assert x.grad.abs().sum() > 0
