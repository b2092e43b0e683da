"""The interface of poolings, and what they share: checks, projected pixels, weighted sums, initialization."""

from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from dmlbench.models.projection import Projection
from dmlbench.types import ConfigError, ModelOutput, check_positive

Variant = Literal["official", "paper"]
Pooled = ModelOutput
"""Output of a pooling: ``Pooled(embedding)``, or ``Pooled(embedding, {"weights": weights})`` with side outputs.

The embeddings [B, D] are not normalized. ``ModelOutput`` describes the side outputs.
"""


class Pooling(nn.Module):
    """Base class of poolings, which turn feature maps [B, C, H, W] into embeddings [B, D].

    Subclasses implement ``forward``.

    ``forward`` also gets the linear projection from C to D channels, because a pooling may project before or after it
    pools. Each training step calls ``forward``, then ``observe``, then the loss. Only ``observe`` may change the
    pooling's state.

    Attributes:
        provides: names of the side outputs that ``forward`` returns. GSP returns some of them only after its prototypes
            are initialized.
        needs: the input that the pooling expects. "map" (the default) is the last feature map of the backbone. "native"
            is a 1 x 1 map: the vector from the backbone's own pretrained pooling, such as the class token.
        averages_pixels: whether embeddings can be compared with projected pixels, as ``rerank`` does.
    """

    provides: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[Literal["map", "native"]] = "map"
    averages_pixels: ClassVar[bool] = True

    def forward(self, x: Tensor, project: Projection) -> Pooled:
        """Pool the feature maps ``x`` [B, C, H, W]. They may have any memory format and floating-point type."""
        raise NotImplementedError

    def observe(self, pooled: Pooled, *, step: int) -> None:
        """Update the state of the pooling with ``pooled``, its output for a training batch. ``step`` counts from 1."""

    def contributions(self, x: Tensor, project: Projection) -> Tensor | None:
        """Return how much each map location contributes to the embedding: shares [B, H, W], with sum 1 per image.

        Returns None if the pooling does not define such shares.
        """
        return self(x, project).side.get("weights")

    def nearest_prototypes(self, x: Tensor, project: Projection) -> Tensor | None:
        """Return the index of the dominant prototype at each map location, [B, H, W].

        Returns None if the pooling has no prototypes, or if they are not initialized yet.
        """
        return None

    @property
    def started(self) -> bool:
        """False until the pooling works in its final form.

        For example, ``pooling=gsp`` is plain average pooling until its prototypes are initialized.
        """
        return True

    def input_width(self, embedding_size: int) -> int:
        """Return how many outputs the projection needs, so that embeddings have ``embedding_size`` dimensions."""
        return embedding_size

    def output_width(self, projected_size: int) -> int:
        """Return how many dimensions embeddings have if the projection has ``projected_size`` outputs."""
        return projected_size


class WeightedPooling(Pooling):
    """A pooling whose side output "weights" [B, H, W] is the share of each pixel; rows sum to 1."""

    provides = ("weights",)


def check_odd(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1 or size % 2 == 0:
            raise ConfigError(f"{name}: got {size}, expected an odd positive number.")


def check_width(features: Tensor, expected: int) -> None:
    """Check C of a map, or D of projected features, against what the pooling was built for."""
    if features.shape[1] != expected:
        raise ConfigError(
            f"pooling: got {features.shape[1]} channels, expected {expected}. Set the pooling's num_channels to the "
            "last map's channels, and its embedding_size (or feature_size, width) to the projection's output size. "
            "With head=concatenated_levels, choose a pooling that does not depend on the number of channels."
        )


def width_of_parts(parts: int, feature_size: int | None, embedding_size: int | None) -> int:
    """Dimensions of each of an embedding's equal parts: ``feature_size``, or a share of ``embedding_size`` if None."""
    if feature_size is None:
        if not embedding_size or embedding_size % parts:
            raise ConfigError(
                f"head.out_features: got {embedding_size or 'null'}, expected a multiple of {parts} for "
                "feature_size=null. Set pooling.feature_size."
            )
        feature_size = embedding_size // parts
    check_positive(feature_size=feature_size)
    return feature_size


def project_pixels(x: Tensor, project: Projection, width: int) -> Tensor:
    """Projected pixels [B, HW, D] of a map [B, C, H, W]; D must be ``width``."""
    features = project(x)  # [B, D, H, W]
    check_width(features, width)
    return features.flatten(2).transpose(1, 2)


def reduced_width(num_channels: int, channel_reduction: int) -> int:
    if not 1 <= channel_reduction <= num_channels:
        raise ConfigError(
            f"channel_reduction: got {channel_reduction}, expected 1 to {num_channels}, the number of channels."
        )
    return num_channels // channel_reduction


def at_least_float32(x: Tensor) -> Tensor:
    """x, or its float32 copy if it is half precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def convolve(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """layer(x) in autocast's type if that is on, else in the layer's own type."""
    if not torch.is_autocast_enabled(x.device.type):
        x = x.to(layer.weight.dtype)
    return layer(x)


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
