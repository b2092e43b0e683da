"""Regularizers by which prototypes reconstruct embeddings of the classes that they have seen, to compare XML with."""

from typing import Literal

import torch
from torch import Tensor

from dmlbench.losses.regularizer import DmlLoss, Regularizer
from dmlbench.losses.xml import solve_gram
from dmlbench.types import ConfigError, ModelOutput, check_at_least, check_positive


def reconstruction_error(reconstructed: Tensor, pooled: Tensor) -> Tensor:
    """(1/B) sum_i |reconstructed_i - pooled_i|^2 of rows [B, D]."""
    return (reconstructed - pooled).square().sum(dim=1).mean()


class ReconstructionRegularizer(Regularizer):
    """|V Z - Y|^2 / B with the pooling's own prototypes V, which learn by its gradient.

    Source: Gürbüz & Alatan, Generalizable Embeddings with Cross-batch Metric Learning, section 2.2, first paragraph
    (there without 1/B, which makes the weight independent of the batch size).
    """

    requires = ("reconstruction", "pooled")

    def forward(self, output: ModelOutput, labels: Tensor, dml_loss: DmlLoss) -> Tensor:
        dtype = output.embedding.dtype
        return reconstruction_error(output.side["reconstruction"].to(dtype), output.side["pooled"].to(dtype))


class RecursiveRegularizer(Regularizer):
    """Prototypes fitted to all batches so far, older ones exponentially forgotten, judged on the batch at hand.

        V = argmin_A sum_{i <= K} forgetting^(K - i) |A Z_i - Y_i|^2 + ridge |A|^2 = Q_K' (S_K + ridge I)^-1
        S_K = forgetting S_{K-1} + Z_K Z_K',    Q_K = forgetting Q_{K-1} + Z_K Y_K'

    The gradient runs through the batch at hand, K, and takes what is left of older ones as constant. S and Q are
    buffers; in evaluation mode they stand still.

    ``penalty: reconstruction`` is |V Z_K - Y_K|^2 / B, ``dml`` the metric learning loss of V Z_K. With the latter, the
    one difference to XML is that V was fitted to the classes that it is judged on.

    Source: Gürbüz & Alatan, Generalizable Embeddings with Cross-batch Metric Learning, equations 2.5 and 2.6 (which
    prints V transposed). 2.7 states the same as an update, but its W lacks the factor alpha.
    """

    requires = ("histogram", "pooled")
    labels_on_host = True  # as ``dml_loss`` wants them
    gram: Tensor
    cross: Tensor

    def __init__(
        self,
        weight: float,
        num_prototypes: int,
        embedding_size: int,
        *,
        forgetting: float = 0.99,
        ridge: float = 0.05,
        penalty: Literal["reconstruction", "dml"] = "reconstruction",
    ) -> None:
        super().__init__(weight)
        check_at_least(1, num_prototypes=num_prototypes, embedding_size=embedding_size)
        if not 0 < forgetting <= 1:
            raise ConfigError(f"forgetting: got {forgetting}, expected a number in (0, 1].")
        check_positive(ridge=ridge)
        self.forgetting = forgetting
        self.ridge = ridge
        self.penalty = penalty
        # Sums over a whole training: in float32 the ridge and recent batches would drown in them.
        self.register_buffer("gram", torch.zeros(num_prototypes, num_prototypes, dtype=torch.float64))  # S
        self.register_buffer("cross", torch.zeros(num_prototypes, embedding_size, dtype=torch.float64))  # Q

    def forward(self, output: ModelOutput, labels: Tensor, dml_loss: DmlLoss) -> Tensor:
        histogram, pooled = (output.side[name].to(output.embedding.dtype) for name in self.requires)
        if (histogram.shape[1], pooled.shape[1]) != self.cross.shape:
            raise ConfigError(
                f"num_prototypes, embedding_size: got {tuple(self.cross.shape)}, expected the pooling's "
                f"({histogram.shape[1]}, {pooled.shape[1]})."
            )
        z, y = histogram.to(self.gram.dtype), pooled.to(self.gram.dtype)
        gram = self.forgetting * self.gram + z.T @ z
        cross = self.forgetting * self.cross + z.T @ y
        if self.training:
            self.gram.copy_(gram.detach())
            self.cross.copy_(cross.detach())
        made = (z @ solve_gram(gram, cross, ridge=self.ridge)).to(pooled.dtype)  # [B, D]
        return reconstruction_error(made, pooled) if self.penalty == "reconstruction" else dml_loss(made, labels)
