"""The interfaces of heads and of models."""

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from pytorch_metric_learning.distances import BaseDistance, LpDistance
from torch import Tensor, nn

from dmlbench.types import ModelOutput

NamedGroups = dict[str, list[tuple[str, nn.Parameter]]]


class MetricModel(Protocol):
    """A ``torch.nn.Module``: images [B, 3, H, W] to embeddings [B, D] that ``distance`` compares.

    ``forward`` changes no state but batch norm's statistics; in training, ``observe`` is called once per step between
    the forward pass and the loss.

    Attributes:
        distance: what the losses train and the evaluation searches by.
        embedding_size: D.
        explains_pairs: whether ``distance`` has attributions (see ``avsl.AvslModel``).
    """

    distance: BaseDistance
    embedding_size: int
    explains_pairs: ClassVar[bool]

    def __call__(self, images: Tensor) -> ModelOutput:
        """Embeddings in float32 of RGB images, uint8 or floating point in [0, 1], and side outputs."""

    def explain(self, images: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Contributions and nearest prototypes of the pooling, [B, H, W] each, or None (see ``Pooling``)."""

    def observe(self, output: ModelOutput, *, step: int) -> Mapping[str, Tensor] | None:
        """Update state by a training batch, ``step`` counting from 1; the result is logged."""

    @property
    def observer(self) -> nn.Module:
        """The module that ``observe`` changes."""

    @property
    def started(self) -> bool:
        """False while the model works provisionally (see ``Pooling``)."""

    @property
    def provides(self) -> tuple[str, ...]:
        """Side outputs for regularizers, given once the model has started."""

    def parameter_groups(self) -> NamedGroups:
        """Every trainable parameter, under its full name, in exactly one group of the optimizer."""

    # of ``torch.nn.Module``
    training: bool

    def eval(self) -> Any: ...
    def to(self, *args: Any, **kwargs: Any) -> Any: ...
    def modules(self) -> Any: ...
    def load_state_dict(self, state_dict: Any, /) -> Any: ...
    def state_dict(self) -> dict[str, Tensor]: ...


class Head(nn.Module):
    """From a backbone's maps to embeddings and their distance; ``conf/head`` names subclasses.

    A constructor gets those of these arguments that it has:
        in_features: channels of the pooling's input, mostly the last map.
        in_channels: channels of every map, low to high.
        map_sizes: height and width of every map.
        out_features: dimensions that the pooling wants of a projection for the configured embedding.

    A head of several levels has ``num_levels`` among its arguments.

    Attributes:
        pools: whether it pools without a ``Pooling``.
    """

    pools: ClassVar[bool] = False

    def make_distance(self) -> BaseDistance:
        """Euclidean distance of unit vectors, unless a head has its own."""
        return LpDistance(normalize_embeddings=True, p=2, power=1)
