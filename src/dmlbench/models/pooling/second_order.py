"""Attention from products between features: GSoP (covariances) and SOLAR (self-attention)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dmlbench.models.pooling import base
from dmlbench.models.pooling.base import Pooled, Variant, WeightedPooling
from dmlbench.models.pooling.gem import Gem
from dmlbench.models.projection import Projection
from dmlbench.types import ConfigError, check_positive

_ROW_FILTERS = 4  # outputs per row of a covariance matrix (GSoP)


class _BatchNorm(nn.BatchNorm2d):
    """Batch norm that gives the bias, its limit, for a single value per channel in training, where torch raises."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features, eps=1e-3, momentum=0.01)  # Keras' defaults, which the GSP study's code keeps

    def forward(self, x: Tensor) -> Tensor:
        if self.training and x.numel() == x.shape[1]:
            return (x - x) * self.weight[:, None, None] + self.bias[:, None, None]
        return super().forward(x)


class _CovarianceHead(nn.Module):
    """From a covariance [B, n, n] to weights [B, out_features] in (0, 1): batch norm, filters for each row, sigmoid."""

    def __init__(self, size: int, out_features: int, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation
        self.norm = _BatchNorm(size)
        self.rows = nn.Conv2d(size, _ROW_FILTERS * size, (size, 1), groups=size)
        self.out = nn.Conv2d(_ROW_FILTERS * size, out_features, 1)

    def forward(self, covariance: Tensor) -> Tensor:
        hidden = self.rows(self.norm(covariance[:, :, :, None]))  # [B, 4 n, 1, 1]
        return torch.sigmoid(self.out(self.activation(hidden))).flatten(1)


class Gsop(WeightedPooling):
    """mean_j max(c * y_j, s_j relu(y_j)) for y = project(x): global second-order attention over channels and pixels.

    Both attentions reduce relu(y) to ``attention_dim`` channels Z (convolution, batch norm, relu) and read a matrix of
    second moments: c from Z Z' [A, A] between channels, s from Z'Z [n, n] between the n = H W pixels.

    ``official``, the code of the GSP study, neither centers nor averages: it divides by n^2 and D^2. ``paper`` uses
    covariances, centered and divided by n and A, has no relu before the one between pixels, and resizes maps to
    ``map_size`` (and the attention back). Like the study, both end in average pooling, without a residual connection.

    Side output: "weights" [B, H, W], s_j / sum_j s_j.

    Source: Gao et al., Global Second-order Pooling Convolutional Networks, CVPR 2019 (fusion by maximum);
    ZilinGao/Global-Second-order-Pooling-Convolutional-Networks; yetigurbuz/generalized-sum-pooling (tensorflow).
    """

    def __init__(
        self, embedding_size: int, map_size: tuple[int, int], *, attention_dim: int = 128, variant: Variant = "official"
    ) -> None:
        super().__init__()
        height, width = map_size
        check_positive(attention_dim=attention_dim, map_height=height, map_width=width)
        self.embedding_size = embedding_size
        self.map_size = (height, width)
        self.variant = variant
        self.channel_reduce = nn.Conv2d(embedding_size, attention_dim, 1)
        self.channel_norm = _BatchNorm(attention_dim)
        self.channel_head = _CovarianceHead(attention_dim, embedding_size, nn.Identity())
        self.pixel_reduce = nn.Conv2d(embedding_size, attention_dim, 1)
        self.pixel_norm = _BatchNorm(attention_dim)
        self.pixel_head = _CovarianceHead(height * width, height * width, nn.ReLU())
        base.start_glorot(self)

    def forward(self, x: Tensor, project: Projection) -> Pooled:
        features = project(x)  # [B, D, H, W]
        base.check_width(features, self.embedding_size)
        if self.variant == "official" and tuple(features.shape[2:]) != self.map_size:
            raise ConfigError(
                f"gsop: got a map of {tuple(features.shape[2:])}, expected {self.map_size}. Keep the size of the "
                "images or choose variant=paper."
            )
        with torch.autocast(x.device.type, enabled=False):
            positive = F.relu(features)
            channels = self._channel_attention(positive)  # [B, D]
            pixels = self._pixel_attention(positive)  # [B, H, W]
            scaled = torch.maximum(features * channels[:, :, None, None], positive * pixels[:, None])
        return Pooled(scaled.mean(dim=(2, 3)), {"weights": base.shares(pixels)})

    def _channel_attention(self, positive: Tensor) -> Tensor:
        reduced = F.relu(self.channel_norm(self.channel_reduce(positive))).flatten(2)  # [B, A, n]
        if self.variant == "official":
            moments = torch.bmm(reduced, reduced.transpose(1, 2)) / reduced.shape[2] ** 2
        else:
            moments = _covariance(reduced)
        return self.channel_head(moments)

    def _pixel_attention(self, positive: Tensor) -> Tensor:
        size = positive.shape[2:]
        reduced = self.pixel_norm(self.pixel_reduce(positive))
        if self.variant == "official":
            rows = F.relu(reduced).flatten(2).transpose(1, 2)  # [B, n, A]
            weights = self.pixel_head(torch.bmm(rows, rows.transpose(1, 2)) / self.embedding_size**2)
            return weights.view(-1, *size)
        rows = _resize(reduced, self.map_size).flatten(2).transpose(1, 2)  # [B, n, A]
        weights = self.pixel_head(_covariance(rows)).view(-1, *self.map_size)
        return _resize(weights, (size[0], size[1]))


def _resize(x: Tensor, size: tuple[int, int]) -> Tensor:
    """Adaptive average pooling, skipped if the size fits, as its gradient is slow on a GPU."""
    return x if tuple(x.shape[-2:]) == size else F.adaptive_avg_pool2d(x, size)


def _covariance(rows: Tensor) -> Tensor:
    """Covariances [B, n, n] of n rows [B, n, k]."""
    centered = rows - rows.mean(dim=2, keepdim=True)
    return torch.bmm(centered, centered.transpose(1, 2)) / rows.shape[2]


class Solar(WeightedPooling):
    """GeM pooling of x_j + T (sum_i A_ji v_i) + t: second-order attention between all pairs of pixels.

        A = softmax over i of q_j'k_i / sqrt(C / channel_reduction),   q, k = relu(batch norm(convolution of x))

    v and T are 1 x 1 convolutions. The variant ``paper`` starts T at 0 (so that it starts as GeM) and the others
    He-normal, as the authors' code does (tonyngjichun/SOLAR); ``official``, the code of the GSP study, starts all
    Glorot uniform. The paper's second-order loss is not part of a pooling.

    Convolutions follow autocast; norms, softmax and sums are float32.
    Side output: "weights" [B, H, W], mean_j A_ji: the attention to pixel i.

    Source: Ng et al., SOLAR: Second-Order Loss and Attention for Image Retrieval, ECCV 2020;
    yetigurbuz/generalized-sum-pooling (tensorflow).
    """

    def __init__(
        self,
        num_channels: int,
        *,
        channel_reduction: int = 1,
        power: float = 3.0,
        learn_power: bool = True,
        variant: Variant = "official",
    ) -> None:
        super().__init__()
        width = base.reduced_width(num_channels, channel_reduction)
        self.query = nn.Conv2d(num_channels, width, 1)
        self.query_norm = _BatchNorm(width)
        self.key = nn.Conv2d(num_channels, width, 1)
        self.key_norm = _BatchNorm(width)
        self.value = nn.Conv2d(num_channels, width, 1)
        self.out = nn.Conv2d(width, num_channels, 1)
        self.gem = Gem(power=power, learn_power=learn_power)
        base.start_glorot(self)
        if variant == "paper":
            for layer in (self.query, self.key, self.value):
                nn.init.kaiming_normal_(layer.weight)
            nn.init.zeros_(self.out.weight)

    def forward(self, x: Tensor, project: Projection) -> Pooled:
        enhanced, weights = self._attend(x)
        return Pooled(self.gem(enhanced, project).embedding, {"weights": weights})

    def contributions(self, x: Tensor, project: Projection) -> Tensor:
        return self.gem.contributions(self._attend(x)[0], project)

    def _attend(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The enhanced map [B, C, H, W] and the attention to each pixel [B, H, W]."""
        base.check_width(x, self.query.in_channels)
        batch, _, height, width = x.shape
        query, key, value = base.convolve(self.query, x), base.convolve(self.key, x), base.convolve(self.value, x)
        wide = self.query_norm.weight.dtype
        with torch.autocast(x.device.type, enabled=False):
            query = F.relu(self.query_norm(query.to(wide))).flatten(2)  # [B, c, n]
            key = F.relu(self.key_norm(key.to(wide))).flatten(2)
            scores = torch.bmm(query.transpose(1, 2), key) * query.shape[1] ** -0.5
            attention = scores.softmax(dim=2)  # [B, n, n], rows sum to 1
            seen = torch.bmm(value.to(wide).flatten(2), attention.transpose(1, 2))  # [B, c, n]
        enhanced = base.at_least_float32(x) + base.convolve(self.out, seen.view(batch, -1, height, width))
        return enhanced, attention.mean(dim=1).view(batch, height, width)
