"""Hyperbolic head, HIST, Smooth-AP, SupAP, ROADMAP, SiMix and HIER equal their public code and naive loops."""

import math

import numpy as np
import pytest
import torch
from pytorch_metric_learning.distances import CosineSimilarity
from torch import Tensor
from torch.nn.functional import normalize

from dmlbench.hyperbolic import PoincareDistance, riemannian, to_ball
from dmlbench.losses.average_precision import Roadmap, SmoothAp, SupAp
from dmlbench.losses.hier import HierarchicalRegularizer, _gumbel, ancestor_losses, draw_triplets
from dmlbench.losses.hist import Hist
from dmlbench.losses.pairwise_cross_entropy import PairwiseCrossEntropy
from dmlbench.losses.recall_at_k import RecallAtKSurrogate
from dmlbench.types import ModelOutput

# the public code adds 1e-5 to the denominators of Moebius additions
NEARLY = {"rtol": 1e-4, "atol": 1e-6}


@pytest.fixture
def recorded(golden_tensors):
    return lambda case: golden_tensors("losses_2022", f"{case}_")


@pytest.fixture
def settings(golden_meta):
    return golden_meta("losses_2022")


@pytest.mark.parametrize("case", ["h0", "h1", "h2"])
def test_pairwise_cross_entropy_and_hyperbolic_distance(recorded, settings, case: str) -> None:
    record, given = recorded(case), settings[case]
    x = record["x"].requires_grad_()
    distance: CosineSimilarity | PoincareDistance = CosineSimilarity()
    points = x
    if given["curvature"]:
        distance = PoincareDistance(given["curvature"])
        points = to_ball(x, curvature=given["curvature"], clip_radius=given["clip_radius"])
        torch.testing.assert_close(points, record["points"], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(distance(points, points), record["distances"], **NEARLY)
    loss = PairwiseCrossEntropy(distance, temperature=given["temperature"])(points, record["labels"])
    (gradient,) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(loss, record["loss"], **NEARLY)
    torch.testing.assert_close(gradient, record["grad"], rtol=1e-3, atol=1e-4)


def test_the_order_of_classes_does_not_change_pairwise_cross_entropy(recorded) -> None:
    record, loss = recorded("h2"), PairwiseCrossEntropy(CosineSimilarity(), temperature=0.1)
    mixed = [3, 0, 9, 6, 4, 10, 1, 7, 2, 5, 11, 8]  # images of a class stay in their order
    value = loss(record["x"][mixed], record["labels"][mixed])
    torch.testing.assert_close(value, record["loss"], **NEARLY)


def test_pairwise_cross_entropy_of_classes_of_different_sizes_equals_a_naive_loop() -> None:
    torch.manual_seed(0)
    x = normalize(torch.randn(7, 4, dtype=torch.float64))
    classes = [[0, 3, 5], [1, 2], [4, 6]]
    labels = torch.tensor([0, 1, 1, 0, 2, 0, 2])
    s = x @ x.T / 0.2
    expected = 0.0
    for i in range(3):
        for j in range(3):
            terms = []
            for a in classes:
                if i != j and max(i, j) < len(a):
                    shared = sum(math.exp(s[a[i], b[j]]) for b in classes if j < len(b))
                    own = sum(math.exp(s[a[i], b[i]]) for b in classes if i < len(b) and b is not a)
                    terms.append(math.log(shared + own) - float(s[a[i], a[j]]))
            expected += sum(terms) / max(len(terms), 1)
    assert float(PairwiseCrossEntropy(CosineSimilarity())(x, labels)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("case", ["t0", "t1"])
def test_hist(recorded, settings, case: str) -> None:
    record, given = recorded(case), settings[case]
    x, labels = record["x"].requires_grad_(), record["labels"]
    classes, size = record["means"].shape
    loss = Hist(classes, size, **given).double()
    names = {name: name.removeprefix("network.") for name, _ in loss.named_parameters()}
    for name, parameter in loss.named_parameters():
        parameter.data.copy_(record[names[name]])
    value = loss(x, labels)
    value.backward()
    torch.testing.assert_close(value, record["loss"], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(x.grad, record["grad"], rtol=1e-7, atol=1e-10)
    for name, parameter in loss.named_parameters():
        torch.testing.assert_close(parameter.grad, record[f"grad_{names[name]}"], rtol=1e-7, atol=1e-10)
    alone = Hist(classes, size, **given, tuplet_weight=0).double()
    alone.load_state_dict(loss.state_dict())
    torch.testing.assert_close(alone(x, labels), record["distribution_loss"], rtol=1e-9, atol=1e-12)
    quarter = Hist(classes, size, **given, tuplet_weight=0.25).double()
    quarter.load_state_dict(loss.state_dict())
    torch.testing.assert_close(quarter(x, labels), 0.75 * record["distribution_loss"] + 0.25 * record["loss"])


OF_RANKS = {
    "smooth_ap": SmoothAp(),
    "smooth_ap_0.1": SmoothAp(temperature=0.1),
    "sup_ap": SupAp(),
    "sup_ap_continuous": SupAp(temperature=0.05, slope=10, margin=0.1, offset=None),
    "roadmap": Roadmap(),
}


@pytest.mark.parametrize("case", ["a0", "a1"])
@pytest.mark.parametrize("name", OF_RANKS)
def test_losses_of_average_precision(recorded, case: str, name: str) -> None:
    record = recorded(case)
    x = record["x"].requires_grad_()
    value = OF_RANKS[name](x, record["labels"])
    (gradient,) = torch.autograd.grad(value, x)
    assert record[name] > 0
    torch.testing.assert_close(value, record[name], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gradient, record[f"grad_{name}"], rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("case", ["a0", "a1"])
def test_roadmap_weighs_its_parts_and_passes_its_settings_on(recorded, case: str) -> None:
    record = recorded(case)
    cosines = normalize(record["x"]) @ normalize(record["x"]).T
    same = record["labels"][:, None] == record["labels"]
    positive = (0.8 - cosines[same & ~torch.eye(len(same), dtype=torch.bool)]).clamp(min=0)
    negative = (cosines[~same] - 0.2).clamp(min=0)
    calibration = sum(terms[terms > 0].mean() for terms in (positive, negative))
    roadmap = Roadmap(
        positive_margin=0.8, negative_margin=0.2, ap_weight=0.5, calibration_weight=3.0, temperature=0.05, slope=10,
        margin=0.1, offset=None,
    )  # fmt: skip
    expected = 0.5 * record["sup_ap_continuous"] + 3 * calibration
    torch.testing.assert_close(roadmap(record["x"], record["labels"]), expected)


def test_a_cold_smooth_ap_is_one_minus_average_precision() -> None:
    torch.manual_seed(1)
    x, labels = torch.randn(10, 4, dtype=torch.float64), torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 3])
    cosines = normalize(x) @ normalize(x).T
    scores = []
    for query in range(10):
        order = cosines[query].argsort(descending=True)
        hits = (labels[order] == labels[query]).double()
        scores.append(float((hits.cumsum(0) / torch.arange(1, 11) * hits).sum() / hits.sum()))
    assert float(SmoothAp(temperature=1e-9)(x, labels)) == pytest.approx(1 - np.mean(scores), abs=1e-12)


@pytest.mark.parametrize("case", ["r0", "r1"])
def test_simix(recorded, monkeypatch, case: str) -> None:
    record = recorded(case)
    x, labels = record["x"].requires_grad_(), record["labels"]
    shares = dict(
        zip(zip(record["first"].tolist(), record["second"].tolist(), strict=True), record["shares"], strict=True)
    )
    pairs = torch.stack(torch.where((labels[:, None] == labels).triu(1)), 1).tolist()
    # the public code lists the mixtures of a class in another order, and mixes x_3 with x_0 before x_2 with x_0
    drawn = torch.stack([shares[tuple(pair)] for pair in pairs])[:, None]
    monkeypatch.setattr(torch, "rand", lambda *size, **__: drawn.reshape(size))
    value = RecallAtKSurrogate(k_temperatures=[1] * 5, simix=True)(x, labels)
    (gradient,) = torch.autograd.grad(value, x)
    torch.testing.assert_close(value, record["loss"], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gradient, record["grad"], rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("case", ["g0", "g1"])
def test_hier(recorded, settings, case: str, monkeypatch) -> None:
    record = recorded(case)
    x = record["x"].requires_grad_()
    loss = HierarchicalRegularizer(1.0, x.shape[1], num_proxies=len(record["lcas"]), **settings[case]).double()
    loss.proxies.data.copy_(record["lcas"])
    calls = iter(range(2))

    def recorded_triplets(similarities: Tensor, num_neighbors: int, per_point: int) -> tuple[list[Tensor], Tensor]:
        at = next(calls)
        check_triplets(similarities, num_neighbors, [record[f"{at}_{letter}"] for letter in "ijk"])
        noise = iter([record[f"{at}_noise0"], record[f"{at}_noise1"]])
        monkeypatch.setattr("dmlbench.losses.hier._gumbel", lambda *_: next(noise))
        triplets = [record[f"{at}_{letter}"] for letter in "ijk"]
        return triplets, torch.ones(len(triplets[0]), dtype=torch.float64)

    monkeypatch.setattr("dmlbench.losses.hier.draw_triplets", recorded_triplets)
    z = riemannian(to_ball(x, curvature=0.1, clip_radius=2.3), 0.1)
    value = loss(ModelOutput(z, {}), record["labels"], lambda *_: torch.zeros(()))
    value.backward()
    torch.testing.assert_close(value, record["loss"], **NEARLY)
    torch.testing.assert_close(x.grad, record["grad"], rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(loss.proxies.grad, record["grad_lcas"], rtol=1e-3, atol=1e-5)


def check_triplets(similarities: Tensor, num_neighbors: int, triplets: list[Tensor]) -> None:
    """Ours and the recorded ones are triplets of the same relation, and ours are all of its kinds."""
    ours, counted = draw_triplets(similarities, num_neighbors, 400)
    drawn = {tuple(t) for t, used in zip(torch.stack(ours, 1).tolist(), counted, strict=True) if used}
    for place in (1, 2):
        pairs = {(t[0], t[place]) for t in drawn}
        of_public = {(t[0], t[place]) for t in torch.stack(triplets, 1).tolist()}
        assert of_public <= pairs
    related, other = ({(t[0], t[place]) for t in drawn} for place in (1, 2))
    assert not related & other and all((j, i) in related or not _counts(drawn, j) for i, j in related)
    anchors = {i for i, _ in related}
    assert all(len({j for a, j in related | other if a == i}) == len(similarities) for i in anchors)


def _counts(drawn: set[tuple[int, ...]], point: int) -> bool:
    return any(t[0] == point for t in drawn)


def test_ancestors_that_agree_cost_nothing() -> None:
    distances = torch.rand(4, 3, dtype=torch.float64).requires_grad_()
    noise = torch.zeros(1, 3, dtype=torch.float64)
    noise[0, 1] = 100.0
    triplets = [torch.tensor([0]), torch.tensor([1]), torch.tensor([2])]
    assert not ancestor_losses(distances, triplets, [noise, noise], temperature=0.1, margin=0.1).any()


def test_images_without_related_ones_cost_nothing() -> None:
    loss = HierarchicalRegularizer(0.5, 3, num_proxies=2, num_neighbors=2)
    value = loss(ModelOutput(torch.zeros(2, 3, requires_grad=True), {}), torch.tensor([0, 1]), lambda *_: None)
    assert float(value) == 0


def test_a_point_without_relatives_does_not_lower_the_mean_over_triplets(monkeypatch) -> None:
    seen: list[Tensor] = []

    def ones(distances: Tensor, triplets: list[Tensor], noise: list[Tensor], **options: float) -> Tensor:
        seen.extend(noise)
        return torch.ones(len(triplets[0]))

    monkeypatch.setattr("dmlbench.losses.hier.ancestor_losses", ones)
    loss = HierarchicalRegularizer(1.0, 3, num_proxies=5, num_neighbors=3, triplets_per_point=7)
    similarities = torch.tensor([[9.0, 8, 7, 0], [8, 9, 7, 0], [7, 8, 9, 0], [3, 2, 1, 9]])  # the last is alone
    assert float(loss._of_points(similarities, torch.rand(4, 5))) == 1
    assert [noise.shape for noise in seen] == [(4 * 7, 5)] * 2
    assert not torch.equal(*seen)  # both ancestors are drawn independently


def test_related_and_other_points_are_drawn_evenly_and_independently() -> None:
    torch.manual_seed(0)
    similarities = torch.block_diag(torch.ones(3, 3), torch.ones(3, 3)).double()
    (anchor, related, other), counted = draw_triplets(similarities, 3, 4000)
    assert counted.all()
    pairs = torch.zeros(6, 6, dtype=torch.float64)
    pairs.index_put_((related[anchor == 0], other[anchor == 0]), torch.tensor(1 / 4000).double(), accumulate=True)
    expected = torch.zeros(6, 6, dtype=torch.float64)
    expected[1:3, [0, 3, 4, 5]] = 1 / 8  # 0 is related to 1 and 2; as in the public code, the other may be 0 itself
    torch.testing.assert_close(pairs, expected, atol=0.02, rtol=0)


def test_noise_is_gumbels_and_proxies_start_at_nine_tenths_of_the_clip_radius() -> None:
    torch.manual_seed(0)
    noise = _gumbel(torch.zeros(1, 200, dtype=torch.float64), 500)
    assert float(noise.mean()) == pytest.approx(np.euler_gamma, abs=0.02)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, rel=0.03)
    start = HierarchicalRegularizer(1.0, 100, num_proxies=200, clip_radius=4.0).proxies
    assert float(start.norm(dim=1).square().mean().sqrt()) == pytest.approx(0.9 * 4, rel=0.02)
