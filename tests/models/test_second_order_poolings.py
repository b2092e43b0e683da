"""GSoP and SOLAR against recorded values of the GSP study's code, in training and inference, and naive loops."""

import math

import pytest
import torch
from small_models import drawn, randn
from torch import Tensor, nn

from dmlbench.models.pooling.base import Variant
from dmlbench.models.pooling.gem import Gem
from dmlbench.models.pooling.second_order import Gsop, Solar
from dmlbench.models.projection import Projection


def naive_norm(layer: nn.Module, x: Tensor, *, training: bool) -> Tensor:
    """Batch norm of [B, C, ...] channel by channel, with the batch's biased variance or the running statistics."""
    channels = []
    for channel in range(x.shape[1]):
        values = x[:, channel]
        mean = values.mean() if training else layer.get_buffer("running_mean")[channel]
        variance = (values - mean).square().mean() if training else layer.get_buffer("running_var")[channel]
        normal = (values - mean) / torch.sqrt(variance + 1e-3)
        channels.append(normal * layer.get_parameter("weight")[channel] + layer.get_parameter("bias")[channel])
    return torch.stack(channels, dim=1)


def naive_convolution(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """1 x 1, of [B, C, n]."""
    assert layer.bias is not None
    return torch.einsum("oc,bcn->bon", layer.weight[:, :, 0, 0], x) + layer.bias[:, None]


def naive_moments(rows: Tensor, *, official: bool, divisor: int) -> Tensor:
    """Of the rows of one image [n, k]."""
    if not official:
        rows = torch.stack([row - row.mean() for row in rows])
        divisor = rows.shape[1]
    return torch.stack([torch.stack([(a * b).sum() / divisor for b in rows]) for a in rows])


def naive_head(head: nn.Module, moments: Tensor, *, rectify: bool, training: bool) -> Tensor:
    moments = naive_norm(head.norm, moments, training=training)
    filters, bias = head.get_parameter("rows.weight")[:, 0, :, 0], head.get_parameter("rows.bias")
    hidden = torch.stack(
        [(moments[:, out // 4] * filters[out]).sum(dim=1) + bias[out] for out in range(len(filters))], dim=1
    )
    hidden = hidden.clamp(min=0) if rectify else hidden
    logits = hidden @ head.get_parameter("out.weight")[:, :, 0, 0].T + head.get_parameter("out.bias")
    return 1 / (1 + torch.exp(-logits))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("variant", ["official", "paper"])
def test_gsop_equals_a_naive_loop_on_a_map_that_is_not_square(variant: Variant, training: bool) -> None:
    pooling = drawn(Gsop(5, (3, 4), attention_dim=6, variant=variant)).train(training)
    x, official = randn(2, 5, 3, 4), variant == "official"
    flat = x.flatten(2)
    positive = flat.clamp(min=0)
    reduced = naive_norm(pooling.channel_norm, naive_convolution(pooling.channel_reduce, positive), training=training)
    reduced = reduced.clamp(min=0)
    moments = torch.stack([naive_moments(image, official=official, divisor=12**2) for image in reduced])
    channels = naive_head(pooling.channel_head, moments, rectify=False, training=training)
    reduced = naive_norm(pooling.pixel_norm, naive_convolution(pooling.pixel_reduce, positive), training=training)
    reduced = reduced.clamp(min=0) if official else reduced
    moments = torch.stack([naive_moments(image.T, official=official, divisor=5**2) for image in reduced])
    pixels = naive_head(pooling.pixel_head, moments, rectify=True, training=training)
    expected = torch.maximum(flat * channels[:, :, None], positive * pixels[:, None]).mean(dim=2)
    pooled = pooling(x, nn.Identity())
    torch.testing.assert_close(pooled.embedding, expected, atol=1e-12, rtol=1e-10)
    shares = pixels / pixels.sum(dim=1, keepdim=True)
    torch.testing.assert_close(pooled.side["weights"].flatten(1), shares, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("channel_reduction", [1, 2])
def test_solar_equals_a_naive_loop_on_a_map_that_is_not_square(channel_reduction: int, training: bool) -> None:
    pooling = drawn(Solar(5, channel_reduction=channel_reduction)).train(training)
    x = randn(2, 5, 3, 4) + 1
    flat = x.flatten(2)
    query = naive_norm(pooling.query_norm, naive_convolution(pooling.query, flat), training=training).clamp(min=0)
    key = naive_norm(pooling.key_norm, naive_convolution(pooling.key, flat), training=training).clamp(min=0)
    value = naive_convolution(pooling.value, flat)
    weights, seen = torch.zeros(2, 12, dtype=x.dtype), torch.zeros_like(value)
    for image in range(2):
        for row in range(12):
            scores = [(query[image, :, row] @ key[image, :, i]).item() for i in range(12)]
            terms = [math.exp(score / math.sqrt(5 // channel_reduction)) for score in scores]
            for i in range(12):
                weights[image, i] += terms[i] / sum(terms) / 12
                seen[image, :, row] += terms[i] / sum(terms) * value[image, :, i]
    enhanced = (flat + naive_convolution(pooling.out, seen)).view_as(x)
    pooled = pooling(x, nn.Identity())
    expected = pooling.gem(enhanced, nn.Identity()).embedding
    torch.testing.assert_close(pooled.embedding, expected, atol=1e-10, rtol=1e-8)
    torch.testing.assert_close(pooled.side["weights"].flatten(1), weights, atol=1e-12, rtol=1e-10)
    shares = torch.zeros(2, 12, dtype=x.dtype)  # of GeM over the enhanced map
    for image in range(2):
        for channel in enhanced[image].flatten(1):
            powers = [max(value.item(), 1e-6) ** pooling.gem.power.item() for value in channel]
            shares[image] += torch.tensor([power / sum(powers) / 5 for power in powers], dtype=x.dtype)
    torch.testing.assert_close(pooling.contributions(x, nn.Identity()).flatten(1), shares, atol=1e-10, rtol=1e-8)


def test_solar_of_the_paper_starts_as_gem() -> None:
    x = randn(2, 5, 3, 4, seed=4).float().abs()
    project = Projection(5, 4)
    expected = Gem()(x, project).embedding
    assert torch.equal(Solar(5, variant="paper")(x, project).embedding, expected)
    assert not torch.allclose(Solar(5)(x, project).embedding, expected)


@pytest.mark.parametrize("name", ["gsop", "solar"])
def test_running_statistics_change_in_training_only(name: str) -> None:
    pooling: Gsop | Solar = Gsop(5, (3, 4), attention_dim=6) if name == "gsop" else Solar(5)
    x = randn(2, 5, 3, 4, seed=5).float()

    def statistics() -> dict[str, Tensor]:
        return {key: tensor.clone() for key, tensor in pooling.named_buffers()}

    start = statistics()
    pooling.eval()(x, nn.Identity())
    assert all(torch.equal(start[key], value) for key, value in statistics().items())
    pooling.train()(x, nn.Identity())
    changed = statistics()
    assert all(not torch.equal(start[key], value) for key, value in changed.items())
    if isinstance(pooling, Solar):
        mean = pooling.query(x).mean(dim=(0, 2, 3))
        assert torch.allclose(changed["query_norm.running_mean"], 0.01 * mean, atol=1e-6)
    assert set(start) <= set(pooling.state_dict())


def test_a_single_value_per_channel_becomes_the_bias_in_training() -> None:
    solar = drawn(Solar(3))
    before = {key: value.clone() for key, value in solar.named_buffers()}
    norm = solar.query_norm.train()
    x = randn(1, 3, 1, 1, seed=6).requires_grad_()
    out = norm(x)
    assert torch.allclose(out.flatten(), norm.bias)
    assert not torch.autograd.grad(out.sum(), x)[0].any()
    assert all(torch.equal(before[key], value) for key, value in solar.named_buffers())


def test_gsop_of_the_paper_takes_maps_of_another_size() -> None:
    x = torch.rand(2, 3, 5, 6)
    project = Projection(3, 4)
    pooled = Gsop(4, (2, 3), attention_dim=6, variant="paper")(x, project)
    assert pooled.embedding.shape == (2, 4) and pooled.side["weights"].shape == (2, 5, 6)
