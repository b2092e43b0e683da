"""Average, max, generalized-mean and k-max pooling against recorded values of public code and naive loops."""

import pytest
import torch
from torch import nn

from dmlbench.models.pooling.gem import Gem
from dmlbench.models.pooling.k_max import KMax
from dmlbench.models.projection import Projection


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


def test_gem_is_average_for_power_one_and_near_max_for_a_large_power() -> None:
    x = torch.rand(2, 3, 4, 5, generator=torch.Generator().manual_seed(2)) + 0.1
    assert torch.allclose(Gem(power=1.0)(x, nn.Identity()).embedding, x.mean(dim=(2, 3)), atol=1e-6)
    assert torch.allclose(Gem(power=80.0)(x, nn.Identity()).embedding, x.amax(dim=(2, 3)), rtol=0.05)


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
