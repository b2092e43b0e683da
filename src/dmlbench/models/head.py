"""What a head is, and what all models are to training, tests and applications."""

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
        explains_pairs: whether its distance can be taken apart (see ``avsl.AvslModel``).
    """

    distance: BaseDistance
    embedding_size: int
    explains_pairs: ClassVar[bool]

    def __call__(self, images: Tensor) -> ModelOutput:
        """Embeddings in float32 of RGB images, uint8 or floating point in [0, 1], and side outputs."""

    def explain(self, images: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """What the pooling looks at: contributions and dominant prototypes, [B, H, W] each, or None (``Pooling``)."""

    def observe(self, output: ModelOutput, *, step: int) -> Mapping[str, Tensor] | None:
        """Take note of a training batch; ``step`` counts from 1. What is returned goes into the log."""

    @property
    def observer(self) -> nn.Module:
        """What ``observe`` changes."""

    @property
    def started(self) -> bool:
        """Whether the model works as it will to the end."""

    @property
    def provides(self) -> tuple[str, ...]:
        """Side outputs for regularizers that ``forward`` gives once the model has started."""

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

    The wiring gives a constructor those of these arguments that it has:
        in_features: channels of what the pooling works on, mostly the last map.
        in_channels: channels of every map that the backbone returns, low to high.
        map_sizes: height and width of every map.
        out_features: the dimensions that the pooling wants of a projection for the configured embedding.

    A head of several levels has ``num_levels`` among its arguments.

    Attributes:
        pools: whether it pools by itself; else a pooling must be chosen, too.
    """

    pools: ClassVar[bool] = False

    def make_distance(self) -> BaseDistance:
        """A new distance of the embeddings: Euclidean and of unit vectors, unless a head has its own."""
        return LpDistance(normalize_embeddings=True, p=2, power=1)
