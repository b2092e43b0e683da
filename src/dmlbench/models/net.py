"""The model of a run: backbone, pooling and projection in one module, with the distance of its embeddings."""

import torch
from pytorch_metric_learning.distances import BaseDistance, LpDistance
from torch import Tensor, nn

from dmlbench.models.backbones import Backbone
from dmlbench.models.pooling.base import Pooled, Pooling
from dmlbench.models.projection import Projection
from dmlbench.types import ConfigError, ModelOutput


def pooled_channels(backbone: Backbone, pooling: Pooling) -> int:
    """Channels of what the pooling works on: the last map, or the vector of the backbone's own pooling."""
    return backbone.native_channels if pooling.needs == "native" else backbone.channels[-1]


class MetricModel(nn.Module):
    """Images [B, 3, H, W] to embeddings [B, D] that ``distance`` compares.

    ``forward`` changes no state but batch norm's statistics; in training, ``observe`` is called once per step between
    the forward pass and the loss.

    Attributes:
        distance: what the losses train and the evaluation searches by.
        embedding_size: D.
    """

    def __init__(
        self, backbone: Backbone, pooling: Pooling, projection: Projection, *, distance: BaseDistance | None = None
    ) -> None:
        """
        Args:
            backbone: its last map is pooled, or its own pooling is used where ``pooling`` needs that; else the
                parameters of its own pooling get no gradient.
            pooling: see ``Pooling``.
            projection: from ``pooled_channels`` to what the pooling wants.
            distance: of pytorch-metric-learning; None is the Euclidean distance of normalized embeddings.

        Raises:
            ConfigError: widths that do not fit together.
        """
        super().__init__()
        channels = pooled_channels(backbone, pooling)
        if projection.in_features != channels:
            given = "own pooling gives" if pooling.needs == "native" else "last map has"
            raise ConfigError(
                f"the projection takes {projection.in_features} channels, but the backbone's {given} {channels}; "
                "set the projection's in_features to it"
            )
        self.backbone = backbone
        self.pooling = pooling
        self.projection = projection
        self.distance = distance if distance is not None else LpDistance(normalize_embeddings=True, p=2, power=1)
        self.embedding_size = pooling.output_width(projection.out_features)

    def forward(self, images: Tensor) -> ModelOutput:
        """
        Args:
            images: RGB, uint8 or floating point in [0, 1].

        Returns:
            Embedding in float32, not normalized, and the pooling's side outputs.
        """
        pooled: Pooled = self.pooling(self._features(images), self.projection)
        return ModelOutput(pooled.embedding.to(torch.float32), pooled.side)

    def _features(self, images: Tensor) -> Tensor:
        """What the pooling works on: [B, C, H, W], or the backbone's own vector as [B, C, 1, 1]."""
        images = self.backbone.preprocess(images)
        if self.pooling.needs == "native":
            return self.backbone.native(images)[:, :, None, None]
        return self.backbone(images)[-1]

    @torch.no_grad()
    def explain(self, images: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """What the pooling looks at: contributions [B, H, W] and dominant prototypes [B, H, W] (see ``Pooling``)."""
        x = self._features(images)
        return self.pooling.contributions(x, self.projection), self.pooling.nearest_prototypes(x, self.projection)

    def observe(self, output: ModelOutput, *, step: int) -> None:
        """Let the pooling take note of a training batch; ``step`` counts from 1."""
        self.pooling.observe(Pooled(output.embedding, output.side), step=step)

    @property
    def observer(self) -> nn.Module:
        """What ``observe`` changes."""
        return self.pooling

    @property
    def started(self) -> bool:
        """Whether the pooling works as it will to the end (see ``Pooling``)."""
        return self.pooling.started

    @property
    def provides(self) -> tuple[str, ...]:
        """Side outputs that ``forward`` gives once the pooling has started."""
        return self.pooling.provides

    def parameter_groups(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        """Every trainable parameter, under its full name, in exactly one of ``backbone``, ``pooling`` and ``head``."""
        groups: dict[str, list[tuple[str, nn.Parameter]]] = {"backbone": [], "pooling": [], "head": []}
        for name, parameter in self.named_parameters():
            if parameter.requires_grad:
                owner = name.split(".", 1)[0]
                groups[owner if owner in groups else "head"].append((name, parameter))
        return groups
