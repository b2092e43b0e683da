"""Global average pooling, global max pooling and their sum: the poolings that every other one is compared with."""

import torch
from torch import Tensor

from dmlbench.models.pooling.base import Pooled, Pooling
from dmlbench.models.projection import Projection


def _average(x: Tensor) -> Tensor:
    """[B, C, H, W] to [B, C], summed in float32 at least."""
    return x.mean(dim=(2, 3), dtype=torch.promote_types(x.dtype, torch.float32))


def uniform_shares(x: Tensor) -> Tensor:
    """[B, H, W], rows sum to 1."""
    batch, _, height, width = x.shape
    return torch.full((batch, height, width), 1.0 / (height * width), device=x.device)


def share_of_largest(x: Tensor, k: int) -> Tensor:
    """[B, H, W]: how many of the channels' k largest values lie at each location, as a share; rows sum to 1."""
    batch, channels, height, width = x.shape
    chosen = x.flatten(2).topk(k, dim=2).indices  # [B, C, k]
    counts = torch.zeros(batch, height * width, device=x.device)
    counts.scatter_add_(1, chosen.flatten(1), torch.ones_like(chosen, dtype=counts.dtype).flatten(1))
    return (counts / (channels * k)).view(batch, height, width)


class Gap(Pooling):
    """Global average pooling: project(mean_j x_j).

    Public code projects every pixel and averages then; the projection is linear, so the cheap order gives the same.
    (With the projection's layer norm the order counts, and pooling comes first, as in ProxyNCA++.)
    """

    def forward(self, x: Tensor, project: Projection) -> Pooled:
        return Pooled(project(_average(x)))

    def contributions(self, x: Tensor, project: Projection) -> Tensor:
        return uniform_shares(x)


class Gmp(Pooling):
    """Global max pooling: project(max_j x_j) per channel."""

    def forward(self, x: Tensor, project: Projection) -> Pooled:
        return Pooled(project(x.amax(dim=(2, 3))))

    def contributions(self, x: Tensor, project: Projection) -> Tensor:
        return share_of_largest(x, 1)


class GapGmp(Pooling):
    """The sum of both: project(mean_j x_j + max_j x_j), per channel.

    Source: GSP supplement, conventional setting.
    """

    def forward(self, x: Tensor, project: Projection) -> Pooled:
        return Pooled(project(_average(x) + x.amax(dim=(2, 3))))

    def contributions(self, x: Tensor, project: Projection) -> Tensor:
        return (uniform_shares(x) + share_of_largest(x, 1)) / 2
