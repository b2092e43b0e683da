"""AVSL's head and distance: against the recorded values of the public code, naive loops and its own properties."""

import math

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from small_models import avsl_distance, avsl_rows, randn

from dmlbench.models.avsl import AvslHead
from dmlbench.models.avsl_distance import AvslDistance
from dmlbench.types import ConfigError, RunError


@pytest.fixture(params=["c0", "c1"])
def recorded(golden, request):
    return golden("avsl", f"{request.param}_")


def head_of(recorded):
    """Head, distance and maps of a recorded case, in float64."""
    maps = [torch.from_numpy(recorded[f"map{level}"]) for level in range(3)]
    head = AvslHead([x.shape[1] for x in maps], level_size=16, top_k=4).double()
    distance = head.make_distance().double()
    with torch.no_grad():
        for level in range(3):
            head.weights[level].copy_(torch.from_numpy(recorded[f"conv{level}_weight"]))
            head.biases[level].copy_(torch.from_numpy(recorded[f"conv{level}_bias"]))
        for level in range(2):
            distance.alpha[level] = torch.from_numpy(recorded[f"prob_coef{level + 1}"])
            distance.beta[level] = torch.from_numpy(recorded[f"prob_bias{level + 1}"])
            distance.edges[level] = torch.from_numpy(recorded[f"link_prev_{level}to{level + 1}"]).T
        distance.updates.fill_(1)
    return head, distance, maps


def observe(distance, output):
    distance.observe([(output.side[f"lower_{n}"], output.side[f"higher_{n}"]) for n in (1, 2)])


def test_embeddings_maps_and_certainties_are_the_recorded_ones(recorded):
    head, distance, maps = head_of(recorded)
    output = head(maps)
    embeddings, certainties = distance.levels(output.embedding.detach())
    for level, activation in enumerate(head.activations(maps)):
        e = recorded[f"embed{level}"]
        assert_allclose(embeddings[:, level], e / np.linalg.norm(e, axis=1, keepdims=True), rtol=1e-12)
        assert_allclose(activation, recorded[f"cam{level}"], rtol=1e-12, atol=1e-12)
        assert_allclose(certainties[:, level], recorded[f"certainty{level}"], rtol=1e-10)


def test_edges_follow_a_batch_as_recorded(recorded):
    head, distance, maps = head_of(recorded)
    observe(distance, head(maps))
    for level in range(2):
        name = f"link_{level}to{level + 1}"
        assert_allclose(distance.edges[level], recorded[name].T, rtol=1e-10, atol=1e-12)
        expected = recorded[f"Wtilde_{level}to{level + 1}"].T
        found = distance.normalized_edges()[level]
        assert_allclose(found, expected if expected.shape == found.shape else expected.T, rtol=1e-8, atol=1e-12)


def test_distances_and_their_gradients_are_the_recorded_ones(recorded):
    head, distance, maps = head_of(recorded)
    output = head(maps)
    observe(distance, output)
    rows = output.embedding
    overall = distance.of_detached_nodes()(rows, rows)
    levels = [distance.level(level)(rows, rows) for level in range(3)]
    assert_allclose(overall.detach(), recorded["d_hat"], rtol=1e-9, atol=1e-12)
    for level in range(3):
        assert_allclose(levels[level].detach(), recorded[f"d_level{level}"], rtol=1e-9, atol=1e-12)
    total = (overall * torch.from_numpy(recorded["grad_out_d_hat"])).sum()
    total = total + sum(
        (d * torch.from_numpy(recorded[f"grad_out_d_level{level}"])).sum() for level, d in enumerate(levels)
    )
    total.backward()
    for level in range(3):
        assert_allclose(head.weights[level].grad, recorded[f"grad_conv{level}_weight"], rtol=1e-7, atol=1e-10)
        assert_allclose(head.biases[level].grad, recorded[f"grad_conv{level}_bias"], rtol=1e-7, atol=1e-10)
    for level in range(2):
        assert_allclose(distance.alpha.grad[level], recorded[f"grad_prob_coef{level + 1}"], rtol=1e-7, atol=1e-10)
        assert_allclose(distance.beta.grad[level], recorded[f"grad_prob_bias{level + 1}"], rtol=1e-7, atol=1e-10)


def test_evaluation_and_attribution_are_the_recorded_ones(recorded):
    head, distance, maps = head_of(recorded)
    output = head(maps)
    observe(distance, output)
    rows = output.embedding.detach()
    with torch.no_grad():
        assert_allclose(distance(rows, rows), recorded["d_hat_eval"], rtol=1e-9, atol=1e-12)
    size = len(rows)
    i, j = (x.reshape(-1) for x in torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij"))
    found = distance.attribute(rows[i], rows[j])
    assert_allclose(found.distance.detach().reshape(size, size), recorded["d_hat"], rtol=1e-9, atol=1e-12)
    for level in range(3):
        expected = recorded[f"lambda{level}"].reshape(size * size, -1)
        assert_allclose(found.sensitivities[:, level].detach(), expected, rtol=1e-8, atol=1e-12)
    for level in (1, 2):
        expected = recorded[f"P{level}"].reshape(size * size, -1)
        assert_allclose(found.reliabilities[:, level].detach(), expected, rtol=1e-9)


def trained(*, level_size=12, top_k=5, count=7, **options):
    distance = avsl_distance(level_size=level_size, top_k=top_k, **options)
    return distance, avsl_rows(distance, count)


def naive(distance, x, y):
    """Equations 1 and 6-9 of one pair, node by node."""
    (e,), (c,) = distance.levels(x[None])
    (f,), (d,) = distance.levels(y[None])
    alpha, beta = distance.alpha.detach(), distance.beta.detach()
    size = distance.level_size
    below = [float((e[0, i] - f[0, i]) ** 2) for i in range(size)]
    for level in range(1, distance.num_levels):
        here = []
        for i in range(size):
            edges = [(max(float(w), 0.0) if distance.variant == "official" else float(w), j)
                     for j, w in enumerate(distance.edges[level - 1, i])]  # fmt: skip
            kept = sorted(edges, reverse=True)[: distance.top_k]
            total = sum(w for w, _ in kept) + (1e-8 if distance.variant == "official" else 0)
            inferred = sum(w * below[j] for w, j in kept) / total
            eta = float(c[level, i] * d[level, i])
            exponent = distance.gain * (float(alpha[level - 1, i]) * eta + float(beta[level - 1, i]))
            p = 1 / (1 + math.exp(-exponent))
            here.append(p * float((e[level, i] - f[level, i]) ** 2) + (1 - p) * inferred)
        below = here
    return sum(below)


@pytest.mark.parametrize("variant", ["official", "paper"])
@pytest.mark.parametrize("num_levels", [2, 3, 4])
def test_matches_a_naive_loop(num_levels, variant):
    distance, rows = trained(num_levels=num_levels, variant=variant)
    expected = [[naive(distance, x, y) for y in rows[4:]] for x in rows[:4]]
    with torch.no_grad():
        assert_allclose(distance(rows[:4], rows[4:]), expected, rtol=1e-12)
    assert_allclose(distance(rows[:4], rows[4:]).detach(), expected, rtol=1e-12)
    assert_allclose(distance.pairwise_distance(rows[:3], rows[4:]).detach(), np.diag(expected)[:3], rtol=1e-12)


def test_gradients_of_distance_are_those_of_differences():
    distance, rows = trained(num_levels=3, level_size=4, top_k=2, count=3)
    rows.requires_grad_(True)
    assert torch.autograd.gradcheck(lambda x, *_: distance(x[:2], x), (rows, distance.alpha, distance.beta))


@pytest.mark.parametrize("num_levels", [2, 3, 4])
@pytest.mark.parametrize("inference", ["rectified", "reliable", "top", "concat"])
def test_the_distance_is_the_sum_of_sensitivities_times_nodes(inference, num_levels):
    distance, rows = trained(inference=inference, num_levels=num_levels)
    found = distance.attribute(rows[:3], rows[3:6])
    assert_allclose((found.sensitivities * found.nodes).sum((1, 2)).detach(), found.distance.detach(), rtol=1e-12)
    assert_allclose(found.distance.detach(), distance.pairwise_distance(rows[:3], rows[3:6]).detach(), rtol=1e-12)
    e, _ = distance.levels(rows)
    if inference == "rectified":
        assert_allclose(found.sensitivities.sum((1, 2)).detach(), [distance.level_size] * 3, rtol=1e-6)
        assert_allclose(found.rectified[:, -1].sum(1).detach(), found.distance.detach(), rtol=1e-12)
    if inference == "top":
        assert_allclose(found.distance.detach(), (e[:3, -1] - e[3:6, -1]).square().sum(1), rtol=1e-12)
    if inference == "concat":
        assert_allclose(found.distance.detach(), (e[:3] - e[3:6]).square().sum((1, 2)), rtol=1e-12)


def test_the_first_batch_of_edges_is_copied_and_later_ones_enter_with_their_share():
    generator = torch.Generator().manual_seed(1)
    distance = AvslDistance(2, 3, top_k=2, momentum=0.8).double()
    batches = [torch.rand(2, 2, 3, 4, generator=generator, dtype=torch.float64) for _ in range(2)]
    seen = [sum(high[b] @ low[b].T for b in range(2)) / 2 for low, high in batches]
    assert distance.observe([tuple(batches[0])]).tolist() == [[0.0, 0.0]]
    assert_allclose(distance.edges[0], seen[0], rtol=1e-12)
    change = distance.observe([tuple(batches[1])])
    assert_allclose(distance.edges[0], 0.8 * seen[0] + 0.2 * seen[1], rtol=1e-12)
    assert int(distance.updates) == 2
    difference = 0.2 * (seen[1] - seen[0]).abs()
    assert_allclose(change, [[difference.mean(), difference.max()]], rtol=1e-12)


def test_the_average_of_the_activation_maps_is_the_embedding():
    generator = torch.Generator().manual_seed(0)
    maps = [torch.rand(2, c, h, w, generator=generator) for c, h, w in ((5, 6, 4), (7, 3, 5), (3, 2, 3))]
    head = AvslHead([5, 7, 3], level_size=6, top_k=2)
    for level, activation in enumerate(head.activations(maps)):
        expected = head._embedding(maps[level], level)
        assert_allclose(activation.mean((2, 3)), expected.detach(), rtol=1e-4, atol=1e-5)


def test_ties_of_the_maximum_are_shared_in_the_paper_and_go_to_one_place_in_the_code():
    x = torch.tensor([[[[2.0, 1.0], [2.0, 0.0]]]])
    for variant, expected in (("official", [[10.0, 1.0], [2.0, 0.0]]), ("paper", [[6.0, 1.0], [6.0, 0.0]])):
        head = AvslHead([1, 1], num_levels=2, level_size=1, top_k=1, variant=variant)
        with torch.no_grad():
            head.weights[0].fill_(1.0)
        assert head._activation(x, 0)[0, 0].tolist() == expected


def test_the_certainty_of_the_paper_is_the_spread_of_the_unit_map():
    generator = torch.Generator().manual_seed(0)
    maps = [torch.rand(2, 3, 4, 2, generator=generator) for _ in range(2)]
    head = AvslHead([3, 3], num_levels=2, level_size=5, top_k=2, variant="paper")
    _, certainties = head.make_distance().levels(head(maps).embedding)
    for level, u in enumerate(head.activations(maps)):
        u = u.flatten(2).double()
        unit = u / u.norm(dim=2, keepdim=True)
        expected = (unit - unit.mean(2, keepdim=True)).square().mean(2).sqrt()
        assert_allclose(certainties[:, level].detach(), expected, rtol=1e-4)


@pytest.mark.parametrize(("variant", "size"), [("official", (3, 5)), ("paper", (3, 4))])
def test_maps_for_the_edges_are_averaged_to_one_size_and_of_unit_length(variant, size):
    lower, higher = randn(2, 3, 6, 4), randn(2, 4, 3, 5, seed=1)
    head = AvslHead([3, 4], num_levels=2, level_size=3, top_k=2, variant=variant).double()
    side = head([lower, higher]).side
    for name, u in zip(("lower_1", "higher_1"), head.activations([lower, higher]), strict=True):
        (height, width), (rows, columns) = u.shape[2:], size
        for b, i in np.ndindex(2, 3):
            expected = []
            for y, x in np.ndindex(size):  # cells of adaptive average pooling, which may overlap
                top, bottom = y * height // rows, math.ceil((y + 1) * height / rows)
                left, right = x * width // columns, math.ceil((x + 1) * width / columns)
                expected.append(float(u[b, i, top:bottom, left:right].mean()))
            assert_allclose(side[name][b, i], np.array(expected) / np.linalg.norm(expected), rtol=1e-10, atol=1e-12)


def test_a_learned_certainty_is_a_weighted_sum_of_the_unit_map():
    maps = [randn(2, 3, 4, 2), randn(2, 4, 2, 3, seed=1)]
    sizes = [(4, 2), (2, 3)]
    head = AvslHead([3, 4], num_levels=2, level_size=5, top_k=2, reliability="learned", map_sizes=sizes).double()
    _, certainties = head.make_distance().levels(head(maps).embedding.detach())
    for level, activation in enumerate(head.activations(maps)):
        weights = head.certainty_weights[level].detach()
        for b, i in np.ndindex(2, 5):
            u = activation[b, i].flatten().tolist()
            length = math.sqrt(sum(value**2 for value in u))
            expected = sum(float(w) * value / length for w, value in zip(weights, u, strict=True))
            assert_allclose(float(certainties[b, level, i]), expected, rtol=1e-10)


def test_learned_certainties_get_gradients_of_the_distance_and_the_network_does_not():
    generator = torch.Generator().manual_seed(0)
    maps = [torch.rand(3, 4, 2, 3, generator=generator).requires_grad_(True) for _ in range(2)]
    head = AvslHead([4, 4], num_levels=2, level_size=5, top_k=2, reliability="learned", map_sizes=[(2, 3)] * 2)
    distance = head.make_distance()
    output = head(maps)
    distance.observe([(output.side["lower_1"], output.side["higher_1"])])
    distance.of_detached_nodes()(output.embedding, output.embedding).sum().backward()
    assert head.certainty_weights[1].grad.abs().sum() > 0
    assert all(x.grad is None or x.grad.abs().sum() == 0 for x in [*maps, *head.weights])


def test_bad_values_are_named():
    for build, message in (
        (lambda: AvslDistance(3, 8, top_k=9), r"top_k: got 9, expected 1 to head.level_size \(8\)"),
        (lambda: AvslDistance(3, 8, top_k=2, momentum=1.0), "momentum"),
        (lambda: AvslHead([64], level_size=8, top_k=2), "num_levels: got 3, .* returns 1 .*out_indices"),
        (lambda: AvslHead([4] * 3, level_size=8, top_k=2)([torch.rand(1, 4, 1, 1)] * 3), "single location"),
    ):
        with pytest.raises(ConfigError, match=message):
            build()
    distance, rows = trained()
    with pytest.raises(RunError, match="got 70 numbers"):
        distance(rows[:, :70], rows)
    with pytest.raises(RunError, match="got device meta, expected cpu"):
        distance.tiles()(rows.to("meta"), rows)
    with pytest.raises(RunError, match="got 3 and 2"):
        distance.tiles().pairs(rows[:3], rows[:2])
    distance.updates.zero_()
    for use in (distance, distance.of_detached_nodes(), lambda x, y: distance.tiles()(x, y)):
        with pytest.raises(RunError, match="no edges yet"):
            use(rows, rows)
