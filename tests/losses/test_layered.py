"""AVSL's objective: recorded values, the cosine form of ProxyAnchor, and PML's losses on the model's distance."""

import functools

import pytest
import torch
from numpy.testing import assert_allclose
from pytorch_metric_learning import losses, miners
from pytorch_metric_learning.losses import ProxyAnchorLoss
from small_models import avsl_distance, avsl_rows, randn

from dmlbench.losses.layered import LayeredLoss, LayeredProxyAnchor, proxy_anchor_of_distances

L, R = 3, 6


def sample(**options):
    distance = avsl_distance(L, R, top_k=3, **options)
    return distance, avsl_rows(distance, 8).requires_grad_(), torch.arange(8) % 4


def test_proxy_anchor_of_distances_is_the_recorded_one(golden_tensors):
    golden = golden_tensors("avsl", "pa_")
    distances = golden["distances"].requires_grad_(True)
    same = golden["labels"][:, None] == torch.arange(5)
    loss = proxy_anchor_of_distances(distances, same, alpha=16, margins=(1.8, 2.2))
    loss.backward()
    assert_allclose(loss.item(), golden["loss"], rtol=1e-12)
    assert_allclose(distances.grad, golden["grad"], rtol=1e-10, atol=1e-14)


def test_proxy_anchor_of_cosines_is_the_same_with_other_numbers():
    x = randn(9, 5)
    labels = torch.tensor([0, 0, 1, 2, 2, 2, 4, 4, 1])
    reference = ProxyAnchorLoss(num_classes=6, embedding_size=5, margin=0.1, alpha=32).double()
    unit, proxies = (torch.nn.functional.normalize(v.detach(), dim=1) for v in (x, reference.proxies))
    squared = (unit[:, None] - proxies[None]).square().sum(-1)
    ours = proxy_anchor_of_distances(squared, labels[:, None] == torch.arange(6), alpha=16, margins=(1.8, 2.2))
    assert_allclose(float(ours), float(reference(x, labels)), rtol=1e-12)


def test_layered_proxy_anchor_is_the_sum_of_its_parts_and_detaches_nodes():
    distance, rows, labels = sample()
    loss = LayeredProxyAnchor(4, distance, level_weights=(0.5, 1.0, 2.0), final_weight=3.0).double()
    value = loss(rows, labels)
    e, c = distance.levels(rows.detach())
    p = torch.nn.functional.normalize(loss.proxies.detach(), dim=-1)
    same = labels[:, None] == torch.arange(4)
    expected = 0.0
    for level, weight in enumerate((0.5, 1.0, 2.0)):
        d = (e[:, None, level] - p[None, :, level]).square().sum(-1)
        expected += weight * float(proxy_anchor_of_distances(d, same, alpha=16, margins=(1.8, 2.2)))
    certainty = torch.stack(
        [torch.full((4, R), float(c[:, level].mean()), dtype=torch.float64) for level in range(L)], 1
    )
    with torch.no_grad():
        d = distance(rows, distance.pack(p, certainty))
    expected += 3 * float(proxy_anchor_of_distances(d, same, alpha=16, margins=(1.8, 2.2)))
    assert_allclose(float(value), expected, rtol=1e-12)

    value.backward()
    with_final = rows.grad.clone(), loss.proxies.grad.clone()
    assert distance.alpha.grad.abs().sum() > 0
    distance, rows, labels = sample()
    alone = LayeredProxyAnchor(4, distance, level_weights=(0.5, 1.0, 2.0), final_weight=0.0).double()
    alone.load_state_dict(loss.state_dict())
    alone(rows, labels).backward()
    embeddings = slice(0, L * R)  # the certainties get the final part's gradient, where they can learn
    assert_allclose(with_final[0][:, embeddings], rows.grad[:, embeddings], rtol=1e-12)
    assert_allclose(with_final[1], alone.proxies.grad, rtol=1e-12)


def test_many_classes_are_compared_with_those_of_the_batch():
    distance, rows, labels = sample()
    every = LayeredProxyAnchor(9, distance, max_classes=4).double()
    few = LayeredProxyAnchor(4, distance, max_classes=4).double()
    with torch.no_grad():
        few.proxies.copy_(every.proxies[:4])
    assert_allclose(float(every(rows, labels)), float(few(rows, labels)), rtol=1e-12)


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(losses.ContrastiveLoss, neg_margin=1.0),
        functools.partial(losses.TripletMarginLoss, margin=0.2),
        functools.partial(losses.MultiSimilarityLoss, base=1.0),
        functools.partial(losses.MarginLoss, beta=1.2, margin=0.2, learn_beta=True),
    ],
)
def test_losses_of_pairs_run_on_every_level_and_on_the_whole(make):
    distance, rows, labels = sample()
    loss = LayeredLoss(make, distance, level_weights=(1.0, 2.0, 0.5), final_weight=0.25).double()
    value = loss(rows, labels)
    expected = sum(
        w * make(distance=distance.level(level)).double()(rows, labels) for level, w in enumerate((1.0, 2.0, 0.5))
    )
    expected = expected + 0.25 * make(distance=distance.of_detached_nodes()).double()(rows, labels)
    assert_allclose(float(value.detach()), float(expected.detach()), rtol=1e-12)
    value.backward()
    assert distance.alpha.grad.abs().sum() > 0
    assert not any(name.endswith(("alpha", "edges")) and "distance" in name for name in loss.state_dict())


def test_each_term_mines_by_its_own_distance():
    distance, rows, labels = sample()
    make, mine = functools.partial(losses.TripletMarginLoss, margin=0.2), miners.BatchHardMiner
    loss = LayeredLoss(make, distance, miner=mine)
    expected = 0.0
    for d in [*(distance.level(level) for level in range(L)), distance.of_detached_nodes()]:
        expected = expected + make(distance=d)(rows, labels, mine(distance=d)(rows, labels))
    assert_allclose(float(loss(rows, labels).detach()), float(expected.detach()), rtol=1e-12)


def test_what_infers_nothing_has_no_final_part():
    distance, rows, labels = sample(inference="concat")
    loss = LayeredProxyAnchor(4, distance).double()
    loss(rows, labels).backward()
    assert loss.final_weight == 0
    assert distance.alpha.grad is None
