"""A batch's labels on the device and on the host."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dmlbench.device_copies import to_device


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
        """The labels where a loss, miner or regularizer declares to want them."""
        return self.on_host if getattr(component, "labels_on_host", False) else self.on_device
