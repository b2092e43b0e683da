"""What losses share: a batch's labels on the device and on the host, and losses that take no pairs."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dmlbench.device_copies import to_device
from dmlbench.types import ConfigError


@dataclass(frozen=True)
class BatchLabels:
    """Labels [B] where components want them.

    Most components compare labels on the device. One whose labels decide shapes or draws in Python declares
    ``labels_on_host = True`` and gets them on the CPU, so that no step waits for the device.
    """

    on_device: Tensor
    on_host: Tensor

    @classmethod
    def of(cls, labels: Tensor, device: torch.device) -> "BatchLabels":
        """Copy labels to the device, for which nothing waits, or to the host, for which the device is waited for."""
        return cls(to_device(labels, device), labels.cpu())

    def wanted_by(self, component: object) -> Tensor:
        return self.on_host if getattr(component, "labels_on_host", False) else self.on_device


class WholeBatchLoss(nn.Module):
    """A loss that takes no pairs; subclasses implement ``of_batch``."""

    def forward(self, embeddings: Tensor, labels: Tensor, indices_tuple: tuple[Tensor, ...] | None = None) -> Tensor:
        if indices_tuple is not None:
            raise ConfigError(f"{type(self).__name__} compares the whole batch and takes no pairs; set miner=null")
        return self.of_batch(embeddings, labels)

    def of_batch(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """The loss, a scalar."""
        raise NotImplementedError
