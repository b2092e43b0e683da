"""Global average pooling (GAP), global max pooling (GMP) and their sum."""

import torch
from torch import Tensor

from dmlbench.models.pooling.base import Pooled, Pooling
from dmlbench.models.projection import Projection


def _average(x: Tensor) -> Tensor:
    return x.mean(dim=(2, 3), dtype=torch.promote_types(x.dtype, torch.float32))


def uniform_shares(x: Tensor) -> Tensor:
    """[B, H, W], rows sum to 1."""
    batch, _, height, width = x.shape
    return torch.full((batch, height, width), 1.0 / (height * width), device=x.device)


def share_of_largest(x: Tensor, k: int) -> Tensor:
    """Shares [B, H, W] of the channels' k largest values that lie at each location; rows sum to 1."""
    batch, channels, height, width = x.shape
    chosen = x.flatten(2).topk(k, dim=2).indices  # [B, C, k]
    counts = torch.zeros(batch, height * width, device=x.device)
    counts.scatter_add_(1, chosen.flatten(1), torch.ones_like(chosen, dtype=counts.dtype).flatten(1))
    return (counts / (channels * k)).view(batch, height, width)


class Gap(Pooling):
    """Global average pooling: project(mean_j x_j).

    The projection is linear, so that averaging first is equal to averaging projected pixels, and cheaper. With the
    projection's layer norm the order counts: ProxyNCA++ also averages first.
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
    """GAP + GMP: project(mean_j x_j + max_j x_j), per channel.

    Source: GSP supplement, conventional setting.
    """

    def forward(self, x: Tensor, project: Projection) -> Pooled:
        return Pooled(project(_average(x) + x.amax(dim=(2, 3))))

    def contributions(self, x: Tensor, project: Projection) -> Tensor:
        return (uniform_shares(x) + share_of_largest(x, 1)) / 2
