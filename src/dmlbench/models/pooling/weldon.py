"""WELDON pooling: the largest and the smallest values of every dimension, evidence for and against."""

import torch
from torch import Tensor

from dmlbench.models.pooling.base import Pooled, Variant, WeightedPooling
from dmlbench.models.projection import Projection
from dmlbench.types import ConfigError, check_at_least


class Weldon(WeightedPooling):
    """Per dimension of y = project(x): its k_max largest values and its k_min smallest ones, taken together.

    The variant ``paper`` is (1 / k_max) sum of the largest + (1 / k_min) sum of the smallest, as the authors' code
    divides (durandtibo/spatial-pooling.torch). ``official``, the code of the GSP study, leaves the sums undivided and
    takes every value that equals the k-th, so that ties count more than k times (equal features: H W times).
    Side output: "weights" [B, H, W], the share of the values taken, in all dimensions, that lie at a pixel.

    Source: Durand et al., WELDON: Weakly Supervised Learning of Deep Convolutional Neural Networks, CVPR 2016;
    yetigurbuz/generalized-sum-pooling (tensorflow).
    """

    def __init__(self, *, k_max: int = 3, k_min: int = 3, variant: Variant = "official") -> None:
        super().__init__()
        check_at_least(1, k_max=k_max)
        check_at_least(0, k_min=k_min)
        self.k_max = k_max
        self.k_min = k_min
        self.variant = variant

    def forward(self, x: Tensor, project: Projection) -> Pooled:
        batch, _, height, width = x.shape
        if max(self.k_max, self.k_min) > height * width:
            raise ConfigError(
                f"k_max, k_min: got {self.k_max} and {self.k_min}, expected at most {height * width}, the map's pixels."
            )
        values = project(x).flatten(2)  # [B, D, HW]
        pooled, taken = self._largest(values, self.k_max)
        if self.k_min > 0:
            smallest, taken_too = self._largest(-values, self.k_min)
            pooled, taken = pooled - smallest, taken + taken_too
        weights = taken / taken.sum(dim=1, keepdim=True)
        return Pooled(pooled, {"weights": weights.view(batch, height, width)})

    def _largest(self, values: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Sum or mean of the k largest of [B, D, n], [B, D], and how many of them lie at each pixel, [B, n]."""
        top = values.topk(k, dim=2)
        if self.variant == "paper":
            ones = torch.ones_like(top.values.flatten(1))
            return top.values.mean(dim=2), torch.zeros_like(values[:, 0]).scatter_add(1, top.indices.flatten(1), ones)
        mask = ~(values < top.values[:, :, -1:])  # with ties, and with NaN
        return torch.where(mask, values, 0.0).sum(dim=2), mask.sum(dim=1).to(values.dtype)
