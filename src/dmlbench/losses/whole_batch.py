"""Losses that compare a whole batch with proxies or with itself, without pairs of a miner."""

from torch import Tensor, nn

from dmlbench.types import ConfigError


class WholeBatchLoss(nn.Module):
    """A loss that takes no pairs; subclasses implement ``of_batch(embeddings, labels)``."""

    def forward(self, embeddings: Tensor, labels: Tensor, indices_tuple: tuple[Tensor, ...] | None = None) -> Tensor:
        if indices_tuple is not None:
            raise ConfigError(f"{type(self).__name__} compares the whole batch and takes no pairs; set miner=null")
        return self.of_batch(embeddings, labels)

    def of_batch(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """The loss, a scalar."""
        raise NotImplementedError
