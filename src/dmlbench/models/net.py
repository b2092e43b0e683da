"""The model of a run: backbone, pooling and projection in one module, with the distance of its embeddings."""

import torch
from pytorch_metric_learning.distances import BaseDistance, LpDistance
from torch import Tensor, nn

from dmlbench.models.backbones import Backbone
from dmlbench.models.pooling.base import Pooled, Pooling
from dmlbench.models.projection import Projection
from dmlbench.types import ConfigError, ModelOutput


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
            backbone: its last map is pooled.
            pooling: see ``Pooling``.
            projection: from the last map's channels to what the pooling wants.
            distance: of pytorch-metric-learning; None is the Euclidean distance of normalized embeddings.

        Raises:
            ConfigError: widths that do not fit together.
        """
        super().__init__()
        if projection.in_features != backbone.channels[-1]:
            raise ConfigError(
                f"the projection takes {projection.in_features} channels, but the backbone's last map has "
                f"{backbone.channels[-1]}; set the projection's in_features to it"
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
        maps = self.backbone(self.backbone.preprocess(images))
        pooled: Pooled = self.pooling(maps[-1], self.projection)
        return ModelOutput(pooled.embedding.to(torch.float32), pooled.side)

    @torch.no_grad()
    def explain(self, images: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """What the pooling looks at: contributions [B, H, W] and dominant prototypes [B, H, W] (see ``Pooling``)."""
        x = self.backbone(self.backbone.preprocess(images))[-1]
        return self.pooling.contributions(x, self.projection), self.pooling.nearest_prototypes(x, self.projection)

    def observe(self, output: ModelOutput, *, step: int) -> None:
        """Let the pooling take note of a training batch; ``step`` counts from 1."""
        self.pooling.observe(Pooled(output.embedding, output.side), step=step)

    def parameter_groups(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        """Every trainable parameter, under its full name, in exactly one of ``backbone``, ``pooling`` and ``head``."""
        groups: dict[str, list[tuple[str, nn.Parameter]]] = {"backbone": [], "pooling": [], "head": []}
        for name, parameter in self.named_parameters():
            if parameter.requires_grad:
                owner = name.split(".", 1)[0]
                groups[owner if owner in groups else "head"].append((name, parameter))
        return groups
