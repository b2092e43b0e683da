"""The objective of a training step: a metric learning loss, its miner, and the regularizers mixed with it."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dmlbench.types import ModelOutput


class Objective(nn.Module):
    """Run a loss with the contract of pytorch-metric-learning (PML) on a model's output, in float32.

    The contract: ``loss(embeddings [B, D], labels [B], indices_tuple=None) -> scalar``; any PML loss fulfils it.

    Args:
        loss: PML loss. Its parameters (proxies, learnable margins) are trained as the group "loss".
        miner: PML miner ``miner(embeddings, labels) -> indices_tuple``, or None for all pairs or triplets.
    """

    def __init__(self, loss: nn.Module, miner: Callable[[Tensor, Tensor], tuple[Tensor, ...]] | None = None) -> None:
        super().__init__()
        self.loss = loss
        self.miner = miner

    def forward(self, output: ModelOutput, labels: Tensor, *, step: int) -> dict[str, Tensor]:
        """Value of every part and of the whole ("loss", what is differentiated) at training step ``step``.

        Args:
            output: embeddings [B, D] and side outputs of a batch.
            labels: [B] classes in [0, num_classes).
            step: number of this step, from 1.
        """
        # Distances near zero and sums over thousands of pairs do not survive bf16.
        with torch.autocast(output.embedding.device.type, enabled=False):
            embeddings = output.embedding.float()
            indices_tuple = None if self.miner is None else self.miner(embeddings, labels)
            dml = self.loss(embeddings, labels, indices_tuple)
        return {"loss": dml, "dml": dml}
