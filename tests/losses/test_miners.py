"""Distance-weighted triplets and switched negatives: how often, what they are, and what is refused."""

import pytest
import torch
from pytorch_metric_learning.miners import DistanceWeightedMiner, TripletMarginMiner

from dmlbench.losses.margin_oodml import MarginOodml
from dmlbench.losses.miners import DistanceWeighted, RandomPositiveHardestNegative, SwitchedNegatives

LABELS = torch.arange(24) % 4


def embeddings() -> torch.Tensor:
    return torch.randn(24, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("variant", ["official", "paper"])
@pytest.mark.parametrize("rho", [0.0, 0.4, 1.0])
def test_switched_negatives_are_a_share_rho_and_of_the_anchors_class(rho: float, variant: str) -> None:
    torch.manual_seed(0)
    every_triplet = TripletMarginMiner(margin=10.0)
    miner = SwitchedNegatives(every_triplet, switch_probability=rho, variant=variant)
    anchor, positive, negative = miner(embeddings(), LABELS)
    switched = LABELS[anchor] == LABELS[negative]
    assert len(anchor) == 24 * 5 * 18
    assert switched.double().mean().item() == pytest.approx(rho, abs=0.03)
    assert (negative != anchor).all()
    assert (LABELS[anchor] == LABELS[positive]).all()
    assert torch.equal(positive == anchor, switched if variant == "official" else torch.zeros_like(switched))
    if rho == 1.0:
        counts = torch.bincount(negative[anchor == 0], minlength=24)
        assert set(counts.nonzero()[:, 0].tolist()) == {4, 8, 12, 16, 20}


def test_a_batch_without_triplets_stays_empty() -> None:
    for inner in (DistanceWeighted(), DistanceWeightedMiner()):
        miner = SwitchedNegatives(inner, switch_probability=1.0)
        assert [len(part) for part in miner(embeddings(), torch.arange(24))] == [0, 0, 0]
    assert [len(part) for part in DistanceWeighted()(embeddings(), torch.zeros(24))] == [0, 0, 0]
    some = DistanceWeighted()(embeddings()[:5], torch.tensor([0, 0, 0, 1, 2]))  # images 3 and 4 have no positive
    assert some[0].tolist() == [0, 1, 2]


# Against the code of ooDML, Confusezius/Characterizing_Generalization_in_DeepMetricLearning e8a4171c

# Probabilities of negatives by anchor (row) that inverse_sphere_distances of batchminer/distance.py gave for ROWS.
ROWS = [[1.0, 0, 0, 0, 0, 0], [0.95, 0.3, 0, 0, 0, 0], [0.3, 0.8, 0.2, 0, 0, 0], [0.1, 0.9, 0.6, 0.1, 0.3, 0],
        [-0.9, 0.1, 0.5, 0.2, 0.1, 0.6], [-0.2, -0.6, 0.4, 0.9, -0.3, 0.1]]  # fmt: skip
OFFICIAL = [
    [0.0, 0.0, 0.247564, 0.176633, 0.414856, 0.160947],
    [0.0, 0.0, 0.412266, 0.191272, 0.261357, 0.135105],
    [0.221996, 0.462588, 0.0, 0.0, 0.145076, 0.170339],
    [0.222862, 0.301978, 0.0, 0.0, 0.269213, 0.205946],
    [0.371388, 0.292767, 0.144833, 0.191012, 0.0, 0.0],
    [0.235583, 0.247451, 0.278047, 0.238918, 0.0, 0.0],
]


@pytest.mark.slow
def test_negatives_are_drawn_as_the_public_code_draws_them() -> None:
    torch.manual_seed(0)
    rows, labels = 3 * torch.tensor(ROWS), torch.arange(6) // 2  # whose lengths say nothing
    draws = 4000
    counts = torch.zeros(6, 6)
    for _ in range(draws):
        anchor, positive, negative = DistanceWeighted()(rows, labels)
        assert anchor.tolist() == list(range(6))  # one triplet for each image
        assert positive.tolist() == [1, 0, 3, 2, 5, 4]
        counts[anchor, negative] += 1
    assert torch.allclose(counts / draws, torch.tensor(OFFICIAL), atol=0.03)  # four standard errors


@pytest.mark.parametrize("spread", [1.0, 0.1])
def test_every_image_of_a_batch_in_512_dimensions_is_an_anchor(spread: float) -> None:
    """The public code gives 112 triplets of 112 images; pytorch-metric-learning's miner loses many."""
    torch.manual_seed(0)
    rows = torch.randn(112, 512) * spread / 512**0.5
    rows[:, 0] += 1
    rows[:2] = torch.eye(512)[0] * torch.tensor([[1.0], [-1.0]])  # opposite
    labels = torch.arange(112).roll(1) // 2
    anchor, positive, negative = DistanceWeighted()(rows, labels)
    assert len(anchor.unique()) == len(anchor) == 112
    assert (labels[anchor] == labels[positive]).all() and (anchor != positive).all()
    assert (labels[anchor] != labels[negative]).all()


@pytest.mark.parametrize(("distance", "loss", "push"), [(0.5, 0.3, 0.48412290859), (0.7, 0.1, 0.46837484511)])
def test_with_two_images_a_class_a_switched_triplet_pushes_them_apart(
    distance: float, loss: float, push: float
) -> None:
    """criteria/margin.py with batchminer/rho_distance.py, cp = 1, gave these losses and gradients of the first row.

    Its rows are unit vectors; here the gradient is of the row before it is normalized, its part along the tangent.
    """
    cosine = 1 - distance**2 / 2
    pair = torch.tensor([[1.0, 0.0], [cosine, (1 - cosine**2) ** 0.5]], dtype=torch.float64)
    rows = torch.block_diag(pair, pair).requires_grad_()  # two classes
    labels, margin = torch.arange(4) // 2, MarginOodml(2, margin=0.2, beta=0.6)
    found = {}
    for variant in ("official", "paper"):
        miner = SwitchedNegatives(DistanceWeighted(), switch_probability=1.0, variant=variant)
        value = margin(rows, labels, miner(rows, labels))
        found[variant] = (value.item(), *torch.autograd.grad(value, rows))
    assert found["official"][0] == pytest.approx(loss, abs=1e-6)
    assert found["official"][1][0].tolist() == pytest.approx([0, push, 0, 0], abs=1e-6)
    assert not found["paper"][1].abs().max() > 1e-6  # pull and push cancel


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


@pytest.mark.parametrize("miner", [DistanceWeighted(), RandomPositiveHardestNegative()])
def test_positives_are_drawn_evenly_from_the_other_images_of_the_class(miner: torch.nn.Module) -> None:
    torch.manual_seed(0)
    drawn = torch.stack([miner(embeddings(), LABELS)[1] for _ in range(500)])[:, 0]
    counts = torch.bincount(drawn, minlength=24)
    assert set(counts.nonzero()[:, 0].tolist()) == {4, 8, 12, 16, 20}
    assert counts.max() < 140  # 100 expected, standard deviation 9


def test_without_switching_the_triplets_are_the_miners() -> None:
    plain = TripletMarginMiner(margin=0.2)
    expected = plain(embeddings(), LABELS)
    actual = SwitchedNegatives(plain, switch_probability=0.0)(embeddings(), LABELS)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
