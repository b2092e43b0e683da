"""DeLF and CBAM: learned attention over pixels and channels."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dmlbench.models.pooling import base
from dmlbench.models.pooling.base import Pooled, Variant, WeightedPooling
from dmlbench.models.projection import Projection
from dmlbench.types import check_positive


class Delf(WeightedPooling):
    """project(sum_j a_j x_j) with a_j = softplus(v'relu(U x_j + b) + c) from two convolutions.

    The variant ``paper`` sums over the pixels as written, ``official``, the code of the GSP study, takes the mean. The
    first convolution follows autocast, scores and sums are float32. Side output: "weights" [B, H, W], a_j / sum_j a_j.

    Source: Noh et al., Large-Scale Image Retrieval with Attentive Deep Local Features, ICCV 2017, equation 1; settings
    and the start of the layers as in yetigurbuz/generalized-sum-pooling (tensorflow).
    """

    def __init__(
        self, num_channels: int, *, num_filters: int = 512, conv_size: int = 1, variant: Variant = "official"
    ) -> None:
        super().__init__()
        check_positive(num_filters=num_filters)
        base.check_odd(conv_size=conv_size)
        self.variant = variant
        self.hidden = nn.Conv2d(num_channels, num_filters, conv_size, padding=conv_size // 2)
        self.score = nn.Conv2d(num_filters, 1, 1)
        base.start_glorot(self)

    def forward(self, x: Tensor, project: Projection) -> Pooled:
        base.check_width(x, self.hidden.in_channels)
        hidden = F.relu(base.convolve(self.hidden, x))
        with torch.autocast(x.device.type, enabled=False):
            attention = F.softplus(self.score(hidden.to(self.score.weight.dtype)))[:, 0]  # [B, H, W]
            pooled = base.weighted_sum(x, attention)
            if self.variant == "official":
                pooled = pooled / (x.shape[2] * x.shape[3])
        return Pooled(project(pooled), {"weights": base.shares(attention)})


class Cbam(WeightedPooling):
    """project(mean_j s_j y_j), where y = c * x is the map scaled per channel and s weights its pixels.

        c = sigmoid(M(max_j x_j) + M(mean_j x_j)),   M(u) = V relu(U u)
        s = sigmoid(conv([max over channels of y, mean over channels of y]))

    Side output: "weights" [B, H, W], s_j / sum_j s_j.

    Source: Woo et al., CBAM: Convolutional Block Attention Module, ECCV 2018, equations 1 to 3; followed by average
    pooling as in yetigurbuz/generalized-sum-pooling (tensorflow), which has no biases either.
    """

    def __init__(self, num_channels: int, *, channel_reduction: int = 1, conv_size: int = 3) -> None:
        super().__init__()
        base.check_odd(conv_size=conv_size)
        width = base.reduced_width(num_channels, channel_reduction)
        self.reduce = nn.Linear(num_channels, width, bias=False)
        self.expand = nn.Linear(width, num_channels, bias=False)
        self.spatial = nn.Conv2d(2, 1, conv_size, padding=conv_size // 2, bias=False)  # of maximum and mean
        base.start_glorot(self)

    def forward(self, x: Tensor, project: Projection) -> Pooled:
        base.check_width(x, self.reduce.in_features)
        with torch.autocast(x.device.type, enabled=False):
            x = x.to(self.spatial.weight.dtype)
            summaries = torch.stack([x.amax(dim=(2, 3)), x.mean(dim=(2, 3))])  # [2, B, C]
            channels = torch.sigmoid(self.expand(F.relu(self.reduce(summaries))).sum(dim=0))  # [B, C]
            scaled = x * channels[:, :, None, None]
            pixels = torch.stack([scaled.amax(dim=1), scaled.mean(dim=1)], dim=1)  # [B, 2, H, W]
            attention = torch.sigmoid(self.spatial(pixels))[:, 0]  # [B, H, W]
            pooled = base.weighted_sum(scaled, attention) / (x.shape[2] * x.shape[3])
        return Pooled(project(pooled), {"weights": base.shares(attention)})
