"""Parts that poolings share: checks, projected pixels, weighted sums, initialization."""

from typing import Literal

import torch
from torch import Tensor, nn

from dmlbench.models.projection import Projection
from dmlbench.types import ConfigError

Variant = Literal["official", "paper"]


def check_odd(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1 or size % 2 == 0:
            raise ConfigError(f"{name}: got {size}, expected an odd positive number.")


def check_width(features: Tensor, expected: int) -> None:
    """Check C of a map, or D of projected features, against what the pooling was built for."""
    if features.shape[1] != expected:
        raise ConfigError(
            f"pooling: got {features.shape[1]} channels, expected {expected}. Set num_channels to the last map's, and "
            "embedding_size (or feature_size, width) to the projection's."
        )


def project_pixels(x: Tensor, project: Projection, width: int) -> Tensor:
    """Projected pixels [B, HW, D] of a map [B, C, H, W]; D must be ``width``."""
    features = project(x)  # [B, D, H, W]
    check_width(features, width)
    rows: Tensor = features.flatten(2).transpose(1, 2)
    return rows


def reduced_width(num_channels: int, channel_reduction: int) -> int:
    if not 1 <= channel_reduction <= num_channels:
        raise ConfigError(f"channel_reduction: got {channel_reduction}, expected 1 to {num_channels}, the channels.")
    return num_channels // channel_reduction


def at_least_float32(x: Tensor) -> Tensor:
    """x, or its float32 copy if it is half precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def convolve(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """layer(x) in autocast's type if that is on, else in the layer's own type."""
    if not torch.is_autocast_enabled(x.device.type):
        x = x.to(layer.weight.dtype)
    convolved: Tensor = layer(x)
    return convolved


def weighted_sum(x: Tensor, weights: Tensor) -> Tensor:
    """sum_j weights_j x_j: [B, C, H, W] and [B, H, W] to [B, C], in float32 at least."""
    with torch.autocast(x.device.type, enabled=False):
        rows = at_least_float32(x).flatten(2)
        return torch.bmm(rows, weights.flatten(1)[:, :, None].to(rows.dtype))[:, :, 0]


def shares(weights: Tensor) -> Tensor:
    """Weights [B, H, W] >= 0 divided by their sum; equal shares where all are 0."""
    total = weights.sum(dim=(1, 2), keepdim=True)
    some = total > 0
    uniform = 1.0 / (weights.shape[1] * weights.shape[2])
    return torch.where(some, weights / torch.where(some, total, 1.0), uniform)


def start_glorot(module: nn.Module) -> None:
    """Initialize convolutions and linear layers as Keras does: Glorot uniform weights and zero biases."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
