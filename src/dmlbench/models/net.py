"""The models of a run: a backbone, a pooling and a head in one module, with the distance of its embeddings."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from pytorch_metric_learning.distances import BaseDistance
from torch import Tensor, nn

from dmlbench.models.backbones import Backbone
from dmlbench.models.diml import cells_of
from dmlbench.models.pooling.base import Pooled, Pooling, at_least_float32
from dmlbench.models.projection import Head, Projection
from dmlbench.types import ConfigError, ModelOutput

NamedGroups = dict[str, list[tuple[str, nn.Parameter]]]


def pooled_channels(backbone: Backbone, pooling: Pooling | None) -> int:
    """Channels of what the pooling works on: the last map, or the vector of the backbone's own pooling."""
    return backbone.native_channels if pooling is not None and pooling.needs == "native" else backbone.channels[-1]


def features_of(x: Tensor) -> dict[str, Tensor]:
    """The side outputs "features" and "features_max" [B, C]: average and maximum of a map."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return {"features": x.mean(dim=(2, 3), dtype=dtype), "features_max": x.amax(dim=(2, 3)).to(dtype)}


class MetricModel(nn.Module):
    """Images [B, 3, H, W], RGB, uint8 or floating point in [0, 1], to embeddings [B, D] that ``distance`` compares.

    ``forward`` returns float32, or float64 if weights are, and changes no state but batch norm's statistics. In
    training, ``observe`` is called between the forward pass and the loss.

    Attributes:
        distance: of training and evaluation.
        embedding_size: D.
        explains_pairs: whether ``distance`` has attributions (see ``avsl.AvslModel``).
    """

    explains_pairs: ClassVar[bool] = False

    backbone: Backbone
    pooling: Pooling | None
    distance: BaseDistance
    embedding_size: int

    @torch.no_grad()
    def explain(self, images: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Contributions and nearest prototypes of the pooling, [B, H, W] each, or None (see ``Pooling``)."""
        return None, None

    def observe(self, output: ModelOutput, *, step: int) -> Mapping[str, Tensor] | None:
        """Update state by a training batch, ``step`` counting from 1; the result is logged."""
        if self.pooling is not None:
            self.pooling.observe(Pooled(output.embedding, output.side), step=step)
        return None

    @property
    def observer(self) -> nn.Module:
        """The module that ``observe`` changes."""
        return nn.Identity() if self.pooling is None else self.pooling

    @property
    def started(self) -> bool:
        """False while the model works provisionally (see ``Pooling``)."""
        return self.pooling is None or self.pooling.started

    @property
    def provides(self) -> tuple[str, ...]:
        """Side outputs of the pooling, and in training ``features_of`` the last map."""
        return (*(() if self.pooling is None else self.pooling.provides), "features", "features_max")

    def parameter_groups(self) -> NamedGroups:
        """Every trainable parameter, under its full name, in exactly one group of the optimizer."""
        groups: NamedGroups = {"backbone": [], "pooling": [], "head": [], "distance": []}
        for name, parameter in self.named_parameters():
            if parameter.requires_grad:
                owner = name.split(".", 1)[0]
                groups[owner if owner in groups else "head"].append((name, parameter))
        return groups

    def _sides(self, x: Tensor) -> dict[str, Tensor]:
        return features_of(x) if self.training else {}


class PooledModel(MetricModel):
    """The last map, pooled and projected.

    Attributes:
        stored_pooled: whether ``forward`` takes pooled features [B, C, 1, 1] of a feature cache in place of images.
    """

    pooling: Pooling
    stored_pooled: bool

    def __init__(self, backbone: Backbone, pooling: Pooling, projection: Projection) -> None:
        super().__init__()
        channels = pooled_channels(backbone, pooling)
        if projection.in_features != channels:
            given = "own pooling returns" if pooling.needs == "native" else "last map has"
            raise ConfigError(
                f"head.in_features: got {projection.in_features}, but the backbone's {given} {channels} channels. Set "
                f"head.in_features={channels}."
            )
        self.stored_pooled = False
        self.backbone = backbone
        self.pooling = pooling
        self.projection = projection
        self.distance = projection.make_distance()
        self.embedding_size = pooling.output_width(projection.out_features)
        projection.check_embedding_size(self.embedding_size)

    @property
    def provides(self) -> tuple[str, ...]:
        return () if self.stored_pooled else super().provides

    def forward(self, images: Tensor) -> ModelOutput:
        """Embedding, not normalized, and the pooling's side outputs; with ``stored_pooled``, of pooled features."""
        if self.stored_pooled:
            return ModelOutput(self.projection.finished(at_least_float32(self.projection(images.flatten(1)))), {})
        x = self.last_map(images)
        pooled: Pooled = self.pooling(x, self.projection)
        if not isinstance(pooled, Pooled) or pooled.embedding.shape[1:] != (self.embedding_size,):
            shape = f"embeddings of {tuple(pooled.embedding.shape)}" if isinstance(pooled, Pooled) else ""
            raise ConfigError(
                f"{type(self.pooling).__name__}: got {shape or type(pooled).__name__}, expected Pooled with embeddings "
                f"[B, {self.embedding_size}]. A pooling's forward must return Pooled(project(...))."
            )
        embedding = self.projection.finished(at_least_float32(pooled.embedding))
        return ModelOutput(embedding, pooled.side | self._sides(x))

    def last_map(self, images: Tensor) -> Tensor:
        """What the pooling works on: [B, C, H, W], or the backbone's own vector as [B, C, 1, 1]."""
        if self.pooling.needs == "native":
            return self.backbone.native(self.backbone.preprocess(images))[:, :, None, None]
        return self.backbone.maps_of(images)[-1]

    def pooled_features(self, images: Tensor, *, exactly: bool = True) -> Tensor | None:
        """What the projection works on, [B, C]; None of a pooling that projects before it pools.

        With ``exactly``, None also of a pooling that changes what the projection makes, as ``Tsmk`` adds a bias.
        """
        if self.stored_pooled:
            return images.flatten(1)
        calls: list[tuple[Tensor, Tensor]] = []
        hook = self.projection.register_forward_hook(lambda _, given, output: calls.append((given[0], output)))
        try:
            embedding = self.pooling(self.last_map(images), self.projection).embedding
        finally:
            hook.remove()
        pools_first = len(calls) == 1 and calls[0][0].ndim == 2
        return calls[0][0] if pools_first and (calls[0][1] is embedding or not exactly) else None

    def projection_inputs(self, images: Tensor) -> Tensor:
        """What the projection's weight multiplies, [B, C]; the average over pixels if it projects before it pools."""
        rows = self.pooled_features(images, exactly=False)
        if rows is None:
            rows = self.last_map(images).flatten(2).transpose(1, 2)  # [B, pixels, C]
        rows = self.projection.normalized(rows.to(self.projection.weight.dtype))
        return rows if rows.ndim == 2 else rows.mean(dim=1)

    def storable_features(self, images: Tensor) -> Tensor:
        """``pooled_features`` of a pooling without parameters or state.

        Raises:
            ConfigError: of another pooling.
        """
        pooling = self.pooling
        trained = [name for name, p in pooling.named_parameters() if p.requires_grad]
        learns = bool(trained or [*pooling.buffers()])
        features = None if learns else self.pooled_features(images)
        if features is None:
            what = "has parameters or a state" if learns else "projects before it pools"
            fixed = "pooling.learn_power=false or " if trained == ["power"] else ""
            raise ConfigError(
                f"feature_cache.level: got pooled, but {type(pooling).__name__} {what}. Set {fixed}"
                "feature_cache.level=maps."
            )
        return features

    def require_cells(self) -> None:
        """Raise ConfigError where ``rows_with_cells`` has no map, or cells and embedding differ in width."""
        pooling, remedy = type(self.pooling).__name__, "Choose another pooling, such as pooling=gap."
        if self.pooling.needs == "native":
            raise ConfigError(f"rerank compares cells of a map, but {pooling} uses no map. {remedy}")
        if not self.pooling.averages_pixels:
            raise ConfigError(f"rerank: {pooling} makes no average of projected pixels to compare with cells. {remedy}")
        if self.embedding_size != self.projection.out_features:
            raise ConfigError(
                f"rerank: got embeddings of {self.embedding_size} dimensions from {pooling}, expected "
                f"{self.projection.out_features}, as in the cells of the projected map. {remedy}"
            )

    def rows_with_cells(self, images: Tensor, grid_size: int) -> Tensor:
        """Rows [B, (1 + g g) D] in float32: the embedding, then the projected map's g x g cells (``diml.cells_of``)."""
        self.require_cells()
        x = self.last_map(images)
        center = self.pooling(x, self.projection).embedding.to(torch.float32)
        cells = cells_of(self.projection(x), grid_size).to(torch.float32)
        rows = torch.cat([center[:, None], cells], dim=1)  # [B, 1 + g g, D]
        return self.projection.finished(rows.flatten(0, 1)).unflatten(0, rows.shape[:2]).flatten(1)

    @torch.no_grad()
    def explain(self, images: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x = self.last_map(images)
        return self.pooling.contributions(x, self.projection), self.pooling.nearest_prototypes(x, self.projection)


class LevelsHead(Head):
    """Base class of heads, such as AVSL, that read the feature maps of several backbone stages (levels).

    Subclasses implement ``forward`` and ``embedding_size``.
    """

    def forward(self, maps: Sequence[Tensor], pooling: Pooling | None) -> ModelOutput:
        """Compute embeddings from the feature maps of all levels.

        Args:
            maps: one feature map [B, C_l, H_l, W_l] per level l, from the lowest level to the top level.
            pooling: the pooling selected by ``pooling=``; None for ``pooling=null``.

        Returns:
            The embeddings [B, D], and side outputs for the loss or regularizers.
        """
        raise NotImplementedError

    def embedding_size(self, pooling: Pooling | None) -> int:
        raise NotImplementedError

    def model(self, backbone: Backbone, pooling: Pooling | None) -> MetricModel:
        return LevelsModel(backbone, pooling, self)


class LevelsModel(MetricModel):
    """All maps of the backbone, pooled by a head."""

    def __init__(self, backbone: Backbone, pooling: Pooling | None, head: LevelsHead) -> None:
        super().__init__()
        if pooling is not None and pooling.needs == "native":
            raise ConfigError(
                f"{type(head).__name__} pools maps of several levels, but {type(pooling).__name__} uses the "
                "backbone's own pooling. Choose another pooling, such as pooling=gap."
            )
        self.backbone = backbone
        self.pooling = pooling
        self.head = head
        self.distance = head.make_distance()
        self.embedding_size = head.embedding_size(pooling)

    def forward(self, images: Tensor) -> ModelOutput:
        maps = self.maps(images)
        output: ModelOutput = self.head(maps, self.pooling)
        return ModelOutput(at_least_float32(output.embedding), output.side | self._sides(maps[-1]))

    def maps(self, images: Tensor) -> tuple[Tensor, ...]:
        """Maps of all levels, low to high."""
        return self.backbone.maps_of(images)


def make_model(backbone: Backbone, pooling: Pooling | None, head: Head) -> MetricModel:
    if isinstance(head, LevelsHead):
        return head.model(backbone, pooling)
    if isinstance(head, Projection) and pooling is not None:
        return PooledModel(backbone, pooling, head)
    raise ConfigError(
        f"head: got {type(head).__name__} with pooling {type(pooling).__name__}, expected a LevelsHead, or a "
        "Projection with a Pooling."
    )
