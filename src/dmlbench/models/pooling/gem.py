"""Generalized-mean pooling (GeM): between average (power 1) and maximum (power to infinity), with a learned power."""

import torch
from torch import Tensor, nn

from dmlbench.models.pooling.base import Pooled, Pooling, check_width
from dmlbench.models.projection import Projection
from dmlbench.types import ConfigError, check_positive


def generalized_mean(x: Tensor, power: Tensor, epsilon: float) -> Tensor:
    """(mean_j max(x_j, epsilon)^power)^(1 / power) per channel: x [B, C, H, W] to [B, C]; power [1 or C, 1, 1].

    Computed from ratios to a channel's largest value: large powers of small values would be 0, where the root's slope
    is infinite.
    """
    x = x.clamp(min=epsilon)
    largest = x.detach().amax(dim=(2, 3), keepdim=True)  # [B, C, 1, 1]
    mean = (x / largest).pow(power).mean(dim=(2, 3), keepdim=True)
    return (largest * mean.pow(1.0 / power)).flatten(1)


def power_shares(x: Tensor, power: Tensor, epsilon: float) -> Tensor:
    """Share [B, H, W] of each location in a channel's sum of powers, on average over the channels."""
    x = x.clamp(min=epsilon)
    powers = (x / x.amax(dim=(2, 3), keepdim=True)).pow(power)  # [B, C, H, W]
    return (powers / powers.sum(dim=(2, 3), keepdim=True)).mean(dim=1)


class Gem(Pooling):
    """project((mean_j max(x_j, epsilon)^power)^(1 / power)), per channel, in float32.

    Source: Radenovic et al., Fine-tuning CNN Image Retrieval with No Human Annotation, 2018, equation 3.
    """

    def __init__(
        self,
        *,
        num_channels: int | None = None,
        power: float = 3.0,
        learn_power: bool = True,
        per_channel: bool = False,
        epsilon: float = 1e-6,
    ) -> None:
        super().__init__()
        check_positive(power=power, epsilon=epsilon)
        if per_channel and num_channels is None:
            raise ConfigError("num_channels: got null, expected the number of channels with per_channel=true.")
        self.epsilon = epsilon
        size = num_channels if per_channel and num_channels is not None else 1
        self.power = nn.Parameter(torch.full((size, 1, 1), float(power)), requires_grad=learn_power)

    def forward(self, x: Tensor, project: Projection) -> Pooled:
        if len(self.power) > 1:
            check_width(x, len(self.power))
        with torch.autocast(x.device.type, enabled=False):
            pooled = generalized_mean(x.to(self.power.dtype), self.power, self.epsilon)
        return Pooled(project(pooled))

    def contributions(self, x: Tensor, project: Projection) -> Tensor:
        return power_shares(x.to(self.power.dtype), self.power, self.epsilon)
