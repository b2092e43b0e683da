"""What losses share: a batch's labels on device and host, losses that take no pairs, and counters in checkpoints."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from dmlbench.device_copies import to_device
from dmlbench.runtime import generator
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


class WholeBatchLoss(nn.Module, ABC):
    """Base class of losses that compare all images of a batch and need no miner. Subclasses implement ``of_batch``."""

    def forward(self, embeddings: Tensor, labels: Tensor, indices_tuple: tuple[Tensor, ...] | None = None) -> Tensor:
        if indices_tuple is not None:
            raise ConfigError(f"{type(self).__name__} compares the whole batch and takes no pairs. Set miner=null.")
        return self.of_batch(embeddings, labels)

    @abstractmethod
    def of_batch(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of a batch, a scalar, from its ``embeddings`` [B, D] and ``labels`` [B]."""


class Counters(nn.Module):
    """A module with whole numbers: buffers for checkpoints, and Python values, for which nothing waits."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: dict[str, int] = {}
        self.register_load_state_dict_post_hook(_read_counts)

    def register_count(self, name: str, value: int = 0) -> None:
        self.register_buffer(name, torch.tensor(value))
        self._counts[name] = value

    def count_of(self, name: str) -> int:
        return self._counts[name]

    def set_count(self, name: str, value: int) -> None:
        self._counts[name] = value
        self.get_buffer(name).fill_(value)

    def next_count(self, name: str) -> int:
        """The count before it is raised by one; in evaluation mode it stands still."""
        before = self._counts[name]
        if self.training:
            self.set_count(name, before + 1)
        return before


class SeededDraws(Counters):
    """A random generator for every training batch, of a seed and the number of batches so far.

    The seed comes from torch's generator, hence from the run's seed. In evaluation mode every draw is the same.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_count("seed", int(torch.randint(2**62, ())))
        self.register_count("draws")

    def next_generator(self, purpose: str) -> np.random.Generator:
        return generator(purpose, self.count_of("seed"), self.next_count("draws"))


def _read_counts(module: Counters, _: object) -> None:
    module._counts = {name: int(module.get_buffer(name)) for name in module._counts}
