"""Switched negatives: how often, what they are, and what is refused."""

import pytest
import torch
from pytorch_metric_learning.losses import ContrastiveLoss, MarginLoss, MultiSimilarityLoss, TripletMarginLoss
from pytorch_metric_learning.miners import DistanceWeightedMiner, MultiSimilarityMiner, TripletMarginMiner

from dmlbench.losses.margin_oodml import MarginOodml
from dmlbench.losses.miners import RandomPositiveHardestNegative, SwitchedNegatives
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


# Anchors and negatives recorded from gedml 0.2.2, HardSelector (core/selectors/hard_selector.py), which zbr17/AVSL
# fd2686e4 names in link_margin.yaml: 12 random unit vectors of 4 dimensions, one class of a single image.
HARD_LABELS = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 4])
HARD_NEGATIVES = {
    0.5: [4, 11, 5, 7, 0, 2, 2, 3, 0, 3, 11],
    1.0: [4, 7, 4, 7, 0, 2, 2, 1, 0, 3, 11],
    3.0: [4, 5, 4, 4, 0, 0, 0, 1, 0, 0, 0],  # the floor is the largest distance within a class, 1.86
}


@pytest.mark.parametrize("cutoff", HARD_NEGATIVES)
def test_hardest_negatives_are_those_of_the_public_code_of_avsl(cutoff: float) -> None:
    rows = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    anchors, positives, negatives = RandomPositiveHardestNegative(cutoff=cutoff)(rows, HARD_LABELS)
    assert anchors.tolist() == list(range(11))
    assert negatives.tolist() == HARD_NEGATIVES[cutoff]
    assert (HARD_LABELS[positives] == HARD_LABELS[anchors]).all()
    assert (positives != anchors).all()


def test_the_positive_beside_the_hardest_negative_is_drawn_evenly_from_the_class() -> None:
    torch.manual_seed(0)
    miner = RandomPositiveHardestNegative()
    drawn = torch.stack([miner(embeddings(), LABELS)[1] for _ in range(500)])[:, 0]
    counts = torch.bincount(drawn, minlength=24)
    assert set(counts.nonzero()[:, 0].tolist()) == {4, 8, 12, 16, 20}
    assert counts.max() < 140  # 100 expected, standard deviation 9


def test_hardest_negatives_need_two_classes_and_a_cutoff_of_at_least_0() -> None:
    one_class = RandomPositiveHardestNegative()(embeddings(), torch.zeros(24, dtype=torch.int64))
    assert [len(part) for part in one_class] == [0, 0, 0]
    with pytest.raises(ConfigError, match="cutoff: got -1"):
        RandomPositiveHardestNegative(cutoff=-1)
