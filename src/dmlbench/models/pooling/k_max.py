"""k-max pooling: the mean of each channel's k largest values."""

import torch
from torch import Tensor

from dmlbench.models.pooling.base import Pooled, Pooling
from dmlbench.models.pooling.global_pooling import share_of_largest
from dmlbench.models.projection import Projection
from dmlbench.types import ConfigError, check_at_least


class KMax(Pooling):
    """project((1 / k) sum of the k largest x_j), per channel: 1 <= k <= H W."""

    def __init__(self, k: int) -> None:
        super().__init__()
        check_at_least(1, k=k)
        self.k = k

    def forward(self, x: Tensor, project: Projection) -> Pooled:
        pixels = x.flatten(2)  # [B, C, HW]
        if self.k > pixels.shape[2]:
            raise ConfigError(f"k: got {self.k}, expected at most {pixels.shape[2]}, the map's pixels.")
        largest = pixels.topk(self.k, dim=2, sorted=False).values  # [B, C, k]
        return Pooled(project(largest.mean(dim=2, dtype=torch.promote_types(x.dtype, torch.float32))))

    def contributions(self, x: Tensor, project: Projection) -> Tensor:
        return share_of_largest(x, self.k)
