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
        requires: names of the side outputs that ``forward`` reads. If the model lacks one of them, the run raises
            an error before it trains.
        weight: weight (lambda) of the regularizer in the objective.
        num_classes: number of classes if the regularizer has parameters for each class; else None.
        of_head: settings that the head must have, such as ``curvature``, and their values. If the head has other
            values, the run raises an error.
        key_momentum: decay of the momentum encoder (EMA), which computes the side output "keys". None if the
            regularizer does not use "keys".
        step: number of the optimizer step, from 1. The training loop sets it before each call.
    """

    requires: ClassVar[tuple[str, ...]] = ()
    num_classes: int | None = None
    key_momentum: float | None = None
    step: int = 1

    def __init__(self, weight: float) -> None:
        super().__init__()
        check_positive(weight=weight)
        self.weight = weight

    @property
    def of_head(self) -> Mapping[str, float]:
        return {}

    def forward(self, output: ModelOutput, labels: Tensor, dml_loss: DmlLoss) -> Tensor:
        """Compute the value of the regularizer, a scalar, for a training batch.

        Args:
            output: float32 embeddings [B, D], and at least the side outputs that ``requires`` names.
            labels: class of each image [B]. The tensor is on the CPU if the regularizer sets ``labels_on_host = True``,
                else
                on the training device.
            dml_loss: the configured loss, a function of embeddings and labels. A regularizer that computes further
                embeddings can apply it to them, too.
        """
        raise NotImplementedError
