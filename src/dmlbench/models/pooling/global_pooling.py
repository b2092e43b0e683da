"""Global average pooling, global max pooling and their sum: the poolings that every other one is compared with."""

import torch
from torch import Tensor

from dmlbench.models.pooling.base import Pooled, Pooling
from dmlbench.models.projection import Projection


def _average(x: Tensor) -> Tensor:
    """[B, C, H, W] to [B, C], summed in float32 at least."""
    return x.mean(dim=(2, 3), dtype=torch.promote_types(x.dtype, torch.float32))


class Gap(Pooling):
    """Global average pooling: project(mean_j x_j).

    Public code projects every pixel and averages then; the projection is linear, so the cheap order gives the same.
    (With the projection's layer norm the order counts, and pooling comes first, as in ProxyNCA++.)
    """

    def forward(self, x: Tensor, project: Projection) -> Pooled:
        return Pooled(project(_average(x)))


class Gmp(Pooling):
    """Global max pooling: project(max_j x_j) per channel."""

    def forward(self, x: Tensor, project: Projection) -> Pooled:
        return Pooled(project(x.amax(dim=(2, 3))))


class GapGmp(Pooling):
    """The sum of both: project(mean_j x_j + max_j x_j), per channel.

    Source: GSP supplement, conventional setting.
    """

    def forward(self, x: Tensor, project: Projection) -> Pooled:
        return Pooled(project(_average(x) + x.amax(dim=(2, 3))))
