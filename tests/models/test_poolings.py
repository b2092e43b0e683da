"""Average, max, generalized-mean and k-max pooling against recorded values of public code and naive loops."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from dmlbench.models.pooling.base import Pooling
from dmlbench.models.pooling.gem import Gem
from dmlbench.models.pooling.global_pooling import Gap, GapGmp, Gmp
from dmlbench.models.pooling.k_max import KMax
from dmlbench.models.projection import Projection
from dmlbench.types import ConfigError

# Recorded name, pooling, and its weights by name in the order of the recorded ones; "" is the projection.
RECORDED: list[tuple[str, Callable[[], Pooling], tuple[str, ...]]] = [
    ("gap", Gap, ("",)),
    ("gmp", Gmp, ("",)),
    ("gap_gmp", GapGmp, ("",)),
    ("gemean", Gem, ("power", "")),
    ("gemean_perchannel", lambda: Gem(num_channels=8, per_channel=True), ("power", "")),
]


@pytest.mark.parametrize("kind", ["signed", "nonneg"])
@pytest.mark.parametrize(("name", "maker", "weights"), RECORDED, ids=[case[0] for case in RECORDED])
def test_pooling_equals_recorded_values(
    check_recorded: Callable[..., None], name: str, maker: Callable[[], Pooling], weights: tuple[str, ...], kind: str
) -> None:
    check_recorded(maker(), name, kind, weights)


def test_k_max_and_its_gradient_equal_a_naive_loop() -> None:
    x = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    out = KMax(7)(x, nn.Identity()).embedding
    out.sum().backward()
    for image in range(2):
        for channel in range(3):
            pixels = sorted(x[image, channel].flatten().tolist(), reverse=True)
            assert out[image, channel].item() == pytest.approx(sum(pixels[:7]) / 7, abs=1e-6)
            chosen = (x[image, channel] >= pixels[6]).float() / 7
            assert x.grad is not None and torch.allclose(x.grad[image, channel], chosen)


def test_k_max_is_max_for_one_and_average_for_all() -> None:
    x = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(1))
    project = Projection(3, 4)
    assert torch.allclose(KMax(1)(x, project).embedding, Gmp()(x, project).embedding, atol=1e-6)
    assert torch.allclose(KMax(20)(x, project).embedding, Gap()(x, project).embedding, atol=1e-6)


def test_k_max_beyond_the_map_names_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"k \(21\).*20 pixels"):
        KMax(21)(torch.zeros(1, 3, 4, 5), Projection(3, 4))
    with pytest.raises(ConfigError, match=r"k \(0\)"):
        KMax(0)


def test_gem_is_average_for_power_one_and_near_max_for_a_large_power() -> None:
    x = torch.rand(2, 3, 4, 5, generator=torch.Generator().manual_seed(2)) + 0.1
    assert torch.allclose(Gem(power=1.0)(x, nn.Identity()).embedding, x.mean(dim=(2, 3)), atol=1e-6)
    assert torch.allclose(Gem(power=80.0)(x, nn.Identity()).embedding, x.amax(dim=(2, 3)), rtol=0.05)


def test_gem_power_trains_only_if_asked() -> None:
    assert Gem().power.requires_grad and not Gem(learn_power=False).power.requires_grad


def test_gem_names_what_does_not_fit() -> None:
    with pytest.raises(ConfigError, match="num_channels"):
        Gem(per_channel=True)
    with pytest.raises(ConfigError, match=r"power \(0\) of gem"):
        Gem(power=0)
    with pytest.raises(ConfigError, match=r"8 powers.*3 channels"):
        Gem(num_channels=8, per_channel=True)(torch.rand(1, 3, 2, 2), Projection(3, 2))


POOLINGS = [Gap(), Gmp(), GapGmp(), Gem(), KMax(1)]


@pytest.mark.parametrize("pooling", POOLINGS, ids=lambda pooling: type(pooling).__name__)
@pytest.mark.parametrize("shape", [(1, 3, 1, 1), (2, 3, 2, 5)])
def test_maps_of_any_form_memory_format_and_precision_are_pooled(pooling: Pooling, shape: tuple[int, ...]) -> None:
    x = torch.rand(shape, generator=torch.Generator().manual_seed(3))
    project = Projection(3, 4)
    expected = pooling(x, project).embedding
    assert expected.shape == (shape[0], 4)
    last = pooling(x.contiguous(memory_format=torch.channels_last), project).embedding
    assert torch.allclose(last, expected, atol=1e-6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        narrow = pooling(x.bfloat16(), project).embedding
    assert narrow.dtype == torch.float32
    assert torch.allclose(narrow, expected, atol=0.02)


def test_poolings_without_state_have_started_and_observe_nothing() -> None:
    pooling = Gap()
    pooled = pooling(torch.rand(2, 3, 4, 4), Projection(3, 4))
    pooling.observe(pooled, step=1)
    assert pooling.started and pooling.provides == () and pooled.side == {}
    assert pooling.input_width(128) == pooling.output_width(128) == 128


@pytest.mark.parametrize("power", [3.0, 8.0, 40.0])
def test_gem_of_a_dead_channel_has_finite_gradients_at_any_power(power: float) -> None:
    x = torch.rand(2, 3, 4, 4)
    x[:, 1] = 0
    x.requires_grad_()
    pooling, project = Gem(power=power), Projection(3, 2)
    pooling(x, project).embedding.sum().backward()
    assert x.grad is not None and pooling.power.grad is not None
    assert torch.isfinite(x.grad).all()
    assert torch.isfinite(pooling.power.grad).all()
    assert (x.grad[:, [0, 2]] != 0).any()
