"""A further part of the objective that may require side outputs of the pooling."""

from collections.abc import Callable, Mapping
from typing import ClassVar

from torch import Tensor, nn

from dmlbench.types import ModelOutput, check_positive

DmlLoss = Callable[[Tensor, Tensor], Tensor]
"""The configured metric learning loss of embeddings [N, D] and labels [N] on the host, a scalar."""


class Regularizer(nn.Module):
    """Base class of regularizers: terms that are added to the loss. Subclasses implement ``forward``.

    Attributes:
        requires: names of the side outputs that ``forward`` reads. A run whose pooling does not provide them raises an
            error before it trains.
        weight: weight (lambda) of the regularizer in the objective.
        num_classes: number of classes if the regularizer has parameters per class; else None.
        of_head: settings that the head must have too, by name and with equal values, such as a curvature.
        key_momentum: decay of the momentum encoder (EMA) that makes the side output "keys"; None if the regularizer
            does not need "keys".
    """

    requires: ClassVar[tuple[str, ...]] = ()
    num_classes: int | None = None
    key_momentum: float | None = None

    def __init__(self, weight: float) -> None:
        super().__init__()
        check_positive(weight=weight)
        self.weight = weight

    @property
    def of_head(self) -> Mapping[str, float]:
        return {}

    def forward(self, output: ModelOutput, labels: Tensor, dml_loss: DmlLoss) -> Tensor:
        """Compute the value of the regularizer for a training batch, a scalar.

        Args:
            output: embeddings [B, D] in float32, and side outputs that include all names in ``requires``.
            labels: class of each image [B]. The tensor is on the CPU if the regularizer's class sets
                ``labels_on_host = True``, else on the device.
            dml_loss: the configured loss, a function of embeddings and labels. Some regularizers apply it to embeddings
                that they compute themselves.
        """
        raise NotImplementedError
