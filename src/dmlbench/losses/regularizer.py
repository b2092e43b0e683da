"""A further part of the objective that may require side outputs of the pooling."""

from collections.abc import Callable, Mapping
from typing import ClassVar

from torch import Tensor, nn

from dmlbench.types import ModelOutput, check_positive

DmlLoss = Callable[[Tensor, Tensor], Tensor]
"""The configured metric learning loss of embeddings [N, D] and labels [N] on the host, a scalar."""


class Regularizer(nn.Module):
    """A scalar of a batch's embeddings and side outputs; subclasses implement ``forward``.

    Attributes:
        requires: side outputs that ``forward`` reads; a pooling that provides none of them is rejected when the run is
            built.
        weight: lambda, the share of the regularizer in the objective.
        num_classes: how many classes it has parameters for; None for any number.
        of_head: values that the head must share.
        key_momentum: of the momentum encoder, for a regularizer that requires "keys"; else None.
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
        """
        Args:
            output: embeddings [B, D] in float32 and side outputs, which include every required one.
            labels: [B] classes; on the host for a class that declares ``labels_on_host = True``, else on the device.
            dml_loss: the configured loss, for regularizers that apply it to their own embeddings.
        """
        raise NotImplementedError
