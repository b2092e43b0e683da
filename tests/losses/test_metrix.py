"""Metrix: equal to the public code of the contrastive loss and to loops over the paper's equations, and resumable."""

import copy
import itertools

import numpy as np
import pytest
import torch
from pytorch_metric_learning import distances, losses, miners, reducers
from torch import Tensor, nn
from torch.nn.functional import normalize

from dmlbench.losses.metrix import Metrix, Pairs
from dmlbench.losses.objective import Objective
from dmlbench.losses.proxy_anchor import ProxyAnchor
from dmlbench.types import ConfigError, ModelOutput

PAIRS: tuple[Pairs, ...] = ("positive_negative", "anchor_negative")
LABELS = {
    "balanced": (0, 1, 2, 0, 1, 2, 0, 1, 2),
    "unbalanced": (0, 0, 0, 0, 1, 1, 2, 3, 3),  # class 2 has no pair
    "no_positives": (0, 1, 2, 3),
    "one_class": (2, 2, 2),
}
CLASSES = 6  # two of them never come


def batch(labels: str = "unbalanced", size: int = 5) -> tuple[Tensor, Tensor]:
    y = torch.tensor(LABELS[labels])
    generator = torch.Generator().manual_seed(3)
    return torch.randn(len(y), size, generator=generator, dtype=torch.float64) + 0.6, y


def wrapped(name: str) -> nn.Module:
    torch.manual_seed(1)
    made: dict[str, nn.Module] = {
        "contrastive": losses.ContrastiveLoss(0.1, 0.8),
        "contrastive_of_cosines": losses.ContrastiveLoss(0.9, 0.1, distance=distances.CosineSimilarity()),
        "contrastive_squared": losses.ContrastiveLoss(
            0.1, 0.8, distance=distances.LpDistance(power=2), reducer=reducers.MeanReducer()
        ),
        "multi_similarity": losses.MultiSimilarityLoss(3, 20, 0.4),
        "proxy_anchor": ProxyAnchor(CLASSES, 5, alpha=7.0),
    }
    return made[name].double()


OF_PAIRS = ("contrastive", "contrastive_of_cosines", "contrastive_squared", "multi_similarity")
NAMES = (*OF_PAIRS, "proxy_anchor")


def naive(
    loss: nn.Module, x: Tensor, y: Tensor, pairs: Pairs, share: float, k: int | None = None, mined=None
) -> Tensor:
    """Mixture by mixture, each made as a vector; ``mined`` has allowed (anchor, positive) and (anchor, negative)."""
    rows = list(normalize(x))
    of_proxies = isinstance(loss, ProxyAnchor)
    anchors = list(normalize(loss.proxies)) if of_proxies else rows
    classes = list(range(len(anchors))) if of_proxies else y.tolist()
    mixtures: list[list[Tensor]] = []  # cosines of an anchor
    for i, a in enumerate(anchors):
        own = [j for j in range(len(rows)) if y[j] == classes[i] and (of_proxies or i != j)]
        others = [j for j in range(len(rows)) if y[j] != classes[i]]
        if mined is not None:
            own, others = [j for j in own if (i, j) in mined[0]], [j for j in others if (i, j) in mined[1]]
        others = sorted(others, key=lambda j: -(a @ rows[j]).item())[:k]
        firsts = [rows[j] for j in own] if pairs == "positive_negative" else [a]
        made = [share * first + (1 - share) * rows[j] for first, j in itertools.product(firsts, others)]
        mixtures.append([a @ v / v.norm() for v in made])
    zero = x.sum() * 0
    if isinstance(loss, losses.ContrastiveLoss):
        flat = [s for of_anchor in mixtures for s in of_anchor]
        if isinstance(loss.distance, distances.CosineSimilarity):
            terms = [(loss.pos_margin - s, s - loss.neg_margin) for s in flat]
        else:
            d = [(2 - 2 * s) ** (loss.distance.power / 2) for s in flat]
            terms = [(z - loss.pos_margin, loss.neg_margin - z) for z in d]
        parts = [[share * p for p, _ in terms], [(1 - share) * n for _, n in terms]]
        every = loss.distance.power == 2  # whose reducer here is the plain mean
        kept = [[z if z > 0 else zero for z in part if every or z > 0] for part in parts]
        return zero + sum(torch.stack(part).mean() for part in kept if part)
    if isinstance(loss, losses.MultiSimilarityLoss):
        values = [
            (1 + share * sum(torch.exp(-loss.alpha * (s - loss.base)) for s in of_anchor)).log() / loss.alpha
            + (1 + (1 - share) * sum(torch.exp(loss.beta * (s - loss.base)) for s in of_anchor)).log() / loss.beta
            for of_anchor in mixtures
            if of_anchor
        ]
        return zero + sum(values) / len(x)
    assert isinstance(loss, ProxyAnchor)
    mixtures = [of_anchor for of_anchor in mixtures if of_anchor]
    pulled = [(1 + share * sum(torch.exp(-loss.alpha * (s - loss.margin)) for s in each)).log() for each in mixtures]
    pushed = [
        (1 + (1 - share) * sum(torch.exp(loss.alpha * (s + loss.margin)) for s in each)).log() for each in mixtures
    ]
    return zero + sum(pulled) / max(len(mixtures), 1) + sum(pushed) / CLASSES


def gradients(value: Tensor, x: Tensor, loss: nn.Module) -> list[Tensor]:
    inputs = [x, *loss.parameters()]
    return [
        torch.zeros_like(z) if g is None else g
        for z, g in zip(inputs, torch.autograd.grad(value, inputs, allow_unused=True), strict=True)
    ]


@pytest.mark.fast_sample(30)
@pytest.mark.parametrize("share", [0.0, 0.35, 0.8, 1.0])
@pytest.mark.parametrize("pairs", PAIRS)
@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("name", NAMES)
def test_equals_a_naive_loop(name: str, labels: str, pairs: Pairs, share: float) -> None:
    if pairs == "anchor_negative" and share == 1 and name.startswith("contrastive"):
        share = 0.97  # a distance has no gradient where both are the same
    x, y = batch(labels)
    loss = wrapped(name)
    x.requires_grad_()
    for k in (None, 2):
        found = Metrix(loss, num_hard_negatives=k).mixed_part(x, y, pairs, share)
        expected = naive(loss, x, y, pairs, share, k)
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)
        if found.requires_grad:
            for a, b in zip(gradients(found, x, loss), gradients(expected, x, loss), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
        else:
            assert found == 0


@pytest.mark.parametrize("pairs", PAIRS)
@pytest.mark.parametrize("miner", [miners.MultiSimilarityMiner(0.1), miners.TripletMarginMiner(0.2)])
@pytest.mark.parametrize("name", OF_PAIRS)
def test_a_miners_pairs_alone_are_mixed(name: str, miner, pairs: Pairs) -> None:
    x, y = batch()
    chosen = miner(x, y)
    a, p, b, n = chosen if len(chosen) == 4 else (chosen[0], chosen[1], chosen[0], chosen[2])
    mined = [set(zip(i.tolist(), j.tolist(), strict=True)) for i, j in ((a, p), (b, n))]
    found = Metrix(wrapped(name)).mixed_part(x, y, pairs, 0.4, chosen)
    assert found > 0
    torch.testing.assert_close(found, naive(wrapped(name), x, y, pairs, 0.4, mined=mined))
    assert not torch.isclose(found, naive(wrapped(name), x, y, pairs, 0.4))


def test_equals_the_papers_code_of_the_contrastive_loss(golden, golden_meta) -> None:
    recorded, cases = golden("metrix"), golden_meta("metrix")["cases"]
    assert len(cases) == 14
    for case in cases:
        x, y = (torch.tensor(recorded[f"{case['batch']}_{part}"]) for part in ("embeddings", "labels"))
        metrix = Metrix(losses.ContrastiveLoss(neg_margin=0.5), weight=case.get("weight", 1.0), variant="official")
        x.requires_grad_()
        mixed = metrix.mixed_part(x, y, case["pairs"], case["lambda"])
        if "error" in case:  # of a balanced batch the code has no anchors to mix
            assert (case["batch"], case["pairs"], mixed.item()) == ("b0", "anchor_negative", 0)
            continue
        for part, value in (("mixed", mixed), ("total", metrix.loss(x, y) + metrix.weight * mixed)):
            key = f"{case['batch']}_{case['pairs']}_{case['lambda']}_{part}"
            np.testing.assert_allclose(value.item(), recorded[key], rtol=1e-8)
            (gradient,) = torch.autograd.grad(value, x, retain_graph=True)
            np.testing.assert_allclose(gradient.numpy(), recorded[f"{key}_grad"], rtol=1e-8, atol=1e-12)


def test_float32_stays_finite_where_exponents_overflow_and_vectors_are_opposite() -> None:
    x = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [1.0, 1e-3], [-1.0, 0.0]], requires_grad=True)
    y = torch.tensor([0, 0, 1, 1])
    for loss in (losses.MultiSimilarityLoss(200, 200, 0.5), losses.ContrastiveLoss(), ProxyAnchor(2, 2, alpha=200.0)):
        for pairs, share in itertools.product(PAIRS, (0.0, 0.5, 1.0)):
            value = Metrix(loss).mixed_part(x, y, pairs, share)
            assert all(torch.isfinite(g).all() for g in (value, *torch.autograd.grad(value, x)))


@pytest.mark.parametrize("alpha", [2.0, 0.5])
def test_draws_are_of_the_beta_distribution_and_of_both_kinds_of_pairs(monkeypatch, alpha: float) -> None:
    x, y = batch()
    drawn: list[tuple[str, float]] = []

    def noted(self, embeddings, labels, pairs, share, indices_tuple=None) -> Tensor:
        drawn.append((pairs, share))
        return embeddings.new_zeros(())

    monkeypatch.setattr(Metrix, "mixed_part", noted)
    monkeypatch.setattr(losses.MultiSimilarityLoss, "forward", lambda self, x, *_: x.sum())  # fast
    torch.manual_seed(0)
    metrix = Metrix(losses.MultiSimilarityLoss(), alpha=alpha)
    for _ in range(2000):
        metrix(x, y)
    shares = np.array([share for _, share in drawn])
    assert shares.mean() == pytest.approx(0.5, abs=0.02)
    assert shares.var() == pytest.approx(1 / (8 * alpha + 4), abs=0.006)  # of Beta(alpha, alpha)
    assert np.mean([pairs == "anchor_negative" for pairs, _ in drawn]) == pytest.approx(0.5, abs=0.04)
    metrix.eval()
    metrix(x, y)
    assert (len(drawn), int(metrix.draws)) == (2000, 2000)


def test_total_is_the_loss_plus_weighted_mixtures_and_in_evaluation_the_loss(monkeypatch) -> None:
    x, y = batch()
    drawn: list[tuple[Pairs, float]] = []
    mixed_part = Metrix.mixed_part

    def noted(self, embeddings, labels, pairs, share, indices_tuple=None) -> Tensor:
        drawn.append((pairs, share))
        return mixed_part(self, embeddings, labels, pairs, share, indices_tuple)

    monkeypatch.setattr(Metrix, "mixed_part", noted)
    metrix = Metrix(wrapped("multi_similarity"), weight=0.7)
    total = metrix(x, y)
    torch.testing.assert_close(total, metrix.loss(x, y) + 0.7 * naive(metrix.loss, x, y, *drawn[0]))
    assert metrix.eval()(x, y) == metrix.loss(x, y)


def test_objective_knows_what_is_wrapped() -> None:
    x, y = batch()
    metrix = Metrix(ProxyAnchor(CLASSES, 5))
    with pytest.raises(ConfigError, match=r"ProxyAnchor compares images with class vectors, .* Set miner=null"):
        Objective(metrix, miners.MultiSimilarityMiner())
    objective = Objective(metrix)
    with pytest.raises(ConfigError, match="num_classes: got 6, but labels are"):
        objective.check_labels(torch.tensor([0, 6]))
    assert objective._plain_loss(x.float(), y) == metrix.loss(x.float(), y)
    assert objective(ModelOutput(x), y, step=1)["loss"] != metrix.loss(x.float(), y)


def steps(metrix: Metrix, start: int, stop: int) -> list[float]:
    x, y = batch("balanced")
    return [metrix(x * (1 + 0.1 * i) + 0.05 * i, y).item() for i in range(start, stop)]


@pytest.mark.parametrize("name", ["contrastive", "multi_similarity", "proxy_anchor"])
def test_resumes_exactly(name: str) -> None:
    expected = steps(whole := Metrix(wrapped(name)), 0, 6)
    assert len(set(expected)) == 6
    for stop in range(1, 6):
        first = Metrix(wrapped(name))
        first.load_state_dict({**first.state_dict(), "seed": whole.seed})
        assert steps(first, 0, stop) == expected[:stop]
        torch.manual_seed(99)
        again = Metrix(wrapped(name))
        again.load_state_dict(copy.deepcopy(first.state_dict()))
        assert steps(again, stop, 6) == expected[stop:]
