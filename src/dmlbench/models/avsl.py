"""AVSL's head and model: maps of several levels become nodes and their certainties.

Letters: B images, L levels, r nodes of each, C channels, S locations.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dmlbench.models.avsl_distance import AvslDistance, Inference, Variant
from dmlbench.models.backbones import Backbone
from dmlbench.models.net import LevelsHead, LevelsModel
from dmlbench.models.pooling.base import Pooling
from dmlbench.types import ConfigError, ModelOutput


class AvslHead(LevelsHead):
    """Maps of L levels to rows of 2 L r numbers: unit embeddings, then certainties.

    Each level has a linear layer h, a 1 x 1 convolution. Its embedding is h of the sum of average and maximum over the
    locations; its activation maps are h of the linearized map z~ = z + K z [z is its channel's maximum], whose average
    is that same embedding (eqs. 19-21). A node's certainty is the standard deviation of its normalized map (eq. 5),
    through which no gradient passes.

    variant:
        official: K = S at one of the largest locations; the maps include h's bias; before the standard deviation
            (with S - 1 degrees of freedom), the least value of each row of the map is subtracted and the map divided
            by its sum; for the edges the lower map is averaged down to the size of the higher one.
        paper: K = S / number of largest locations, at all of them; no bias; the map divided by its Euclidean length, as
            for the edges, and the standard deviation with S degrees of freedom; both maps at the lesser size.
    reliability:
        std: as above.
        learned: c = h'(normalized map), a linear layer per level (appendix, table 4).

    Source: Zhang et al., Attributable Visual Similarity Learning, 2022, sections 3.2, 3.3, A.2; zbr17/AVSL fd2686e4,
    models/avsl_embedder.py.
    """

    pools = True

    def __init__(
        self,
        in_channels: Sequence[int],
        *,
        num_levels: int = 3,
        level_size: int = 512,
        top_k: int = 128,
        momentum: float = 0.5,
        inference: Inference = "rectified",
        reliability: Literal["std", "learned"] = "std",
        variant: Variant = "official",
        map_sizes: Sequence[Sequence[int]] | None = None,
    ) -> None:
        super().__init__()
        if len(in_channels) != num_levels:
            raise ConfigError(
                f"head.num_levels: got {num_levels}, but the backbone returns {len(in_channels)} maps. Use "
                "resnet50_levels, bn_inception_levels or resnet20_levels (3), or timm with +backbone.out_indices=[...]."
            )
        self.reliability = reliability
        options = {"top_k": top_k, "momentum": momentum, "inference": inference, "variant": variant}
        self._new_distance = partial(AvslDistance, num_levels, level_size, **options)  # type: ignore[arg-type]
        self.make_distance()  # checks what it is given
        self.variant = variant
        self.level_size = level_size
        self.num_levels = num_levels
        # He's initialization by the outputs, as in the public code
        self.weights = nn.ParameterList(torch.randn(level_size, c) * math.sqrt(2 / level_size) for c in in_channels)
        self.biases = nn.ParameterList(torch.zeros(level_size) for _ in in_channels)
        self.certainty_weights = nn.ParameterList()
        if reliability == "learned":
            if map_sizes is None or len(map_sizes) != num_levels:
                raise ConfigError(
                    f"head.map_sizes: got {map_sizes}, expected [height, width] of the maps of all {num_levels} "
                    "levels for head.reliability=learned."
                )
            self.certainty_weights.extend(torch.randn(h * w) / math.sqrt(h * w) for h, w in map_sizes)

    def make_distance(self) -> AvslDistance:
        return self._new_distance()

    def embedding_size(self, pooling: Pooling | None) -> int:
        return 2 * self.num_levels * self.level_size

    def model(self, backbone: Backbone, pooling: Pooling | None) -> "AvslModel":
        return AvslModel(backbone, self)

    def forward(self, maps: Sequence[Tensor], pooling: Pooling | None = None) -> ModelOutput:
        """Rows [B, 2 L r] of maps [B, C_l, H_l, W_l] of every level, low to high, of any sizes.

        Side outputs "lower_l" and "higher_l" [B, r, S], l = 1 .. L - 1, are the normalized activation maps of adjacent
        levels, which edges are made of.
        """
        if len(maps) != self.num_levels:
            raise ConfigError(f"maps: got {len(maps)}, expected {self.num_levels}, one for each level.")
        with torch.autocast(maps[0].device.type, enabled=False):
            floats = [x.to(self.weights[0].dtype) for x in maps]
            units = [F.normalize(self._embedding(x, level), dim=1) for level, x in enumerate(floats)]
            embeddings = torch.stack(units, 1)
            with torch.no_grad():
                activations = [self._activation(x, level) for level, x in enumerate(floats)]
                side = {}
                for level in range(1, self.num_levels):
                    side[f"lower_{level}"], side[f"higher_{level}"] = self._aligned(*activations[level - 1 : level + 1])
            certainties = torch.stack([self._certainty(x, level) for level, x in enumerate(activations)], 1)
        return ModelOutput(torch.stack([embeddings, certainties], 1).flatten(1), side)

    @torch.no_grad()
    def activations(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """Class activation maps [B, r, H_l, W_l] of every level's nodes (eqs. 2, 17)."""
        return [self._activation(x.to(self.weights[0].dtype), level) for level, x in enumerate(maps)]

    @torch.no_grad()
    def unit_activations(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """``activations`` divided by the length of the image's embedding, which makes them comparable between images.

        The average of a node's map is its entry of the unit embedding (paper: without the bias).
        """
        lengths = [self._embedding(x.to(self.weights[0].dtype), level).norm(dim=1) for level, x in enumerate(maps)]
        scales = [length.clamp(min=1e-12)[:, None, None, None] for length in lengths]
        return [u / scale for u, scale in zip(self.activations(maps), scales, strict=True)]

    def _embedding(self, x: Tensor, level: int) -> Tensor:
        """e [B, r], not normalized (eqs. 15, 16)."""
        return F.linear(x.mean((2, 3)) + x.amax((2, 3)), self.weights[level], self.biases[level])

    def _activation(self, x: Tensor, level: int) -> Tensor:
        """Activation maps [B, r, H, W] of a map [B, C, H, W] (eqs. 17, 19-21)."""
        size = x.shape[2] * x.shape[3]
        if size < 2:
            raise ConfigError(
                f"map of level {level + 1}: got a single location, expected several. Use larger images or a backbone "
                "with a smaller stride."
            )
        if self.variant == "official":
            highest, place = F.adaptive_max_pool2d(x, 1, return_indices=True)
            linearized = x.flatten(2).scatter_add(2, place.flatten(2), size * highest.flatten(2)).view_as(x)
        else:
            is_highest = x == x.amax((2, 3), keepdim=True)
            linearized = x + x * is_highest * (size / is_highest.sum((2, 3), keepdim=True))
        bias = self.biases[level] if self.variant == "official" else None
        return F.linear(linearized.permute(0, 2, 3, 1), self.weights[level], bias).permute(0, 3, 1, 2)

    def _certainty(self, activation: Tensor, level: int) -> Tensor:
        """c [B, r] of activation maps [B, r, H, W]."""
        if self.reliability == "learned":
            weight = self.certainty_weights[level]
            flat = F.normalize(activation.flatten(2), dim=2)
            if flat.shape[2] != len(weight):
                raise ConfigError(
                    f"map of level {level + 1}: got {flat.shape[2]} locations, expected {len(weight)} for "
                    "reliability=learned. Use one image size."
                )
            return flat @ weight
        if self.variant == "official":
            above = activation - activation.amin(3, keepdim=True)
            return F.normalize(above.flatten(2), p=1, dim=2).std(2)
        return F.normalize(activation.flatten(2), dim=2).std(2, correction=0)

    def _aligned(self, lower: Tensor, higher: Tensor) -> tuple[Tensor, Tensor]:
        """Activation maps of adjacent levels at one size and of unit length, [B, r, S] each (eq. 3)."""
        size = higher.shape[2:]
        if self.variant == "paper":
            size = torch.Size(map(min, lower.shape[2:], higher.shape[2:]))
        aligned = [x if x.shape[2:] == size else F.adaptive_avg_pool2d(x, (size[0], size[1])) for x in (lower, higher)]
        lower, higher = (F.normalize(x.flatten(2), dim=2) for x in aligned)
        return lower, higher


class AvslModel(LevelsModel):
    """Images [B, 3, H, W] to rows [B, 2 L r] that ``distance`` compares, which holds the edges."""

    explains_pairs = True

    head: AvslHead
    distance: AvslDistance

    def __init__(self, backbone: Backbone, head: AvslHead) -> None:
        super().__init__(backbone, None, head)

    def observe(self, output: ModelOutput, *, step: int) -> dict[str, Tensor]:
        """Update the edges by a training batch.

        Returns their mean and maximum change between level n and the next for the log: "edge_change_mean_<n>" and
        "edge_change_max_<n>", n = 1 .. L - 1 (figure 9).
        """
        pairs = [(output.side[f"lower_{n}"], output.side[f"higher_{n}"]) for n in range(1, self.distance.num_levels)]
        change = self.distance.observe(pairs)
        return {
            f"edge_change_{kind}_{n}": change[n - 1, i]
            for i, kind in enumerate(("mean", "max"))
            for n in range(1, self.distance.num_levels)
        }

    @property
    def observer(self) -> nn.Module:
        return self.distance

    @property
    def started(self) -> bool:
        return bool(self.distance.updates > 0)
