"""Counters that are in checkpoints, and Python numbers for every step: to read a buffer is to wait for the device."""

import numpy as np
import torch
from torch import nn

from dmlbench.runtime import generator


class Counters(nn.Module):
    """A module with whole numbers that are buffers for checkpoints and Python values for the host."""

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


class BatchCount(Counters):
    def __init__(self) -> None:
        super().__init__()
        self.register_count("batches")

    def forward(self) -> int:
        """Training batches before this one, which counts from here on; in evaluation mode the count stands still."""
        before = self.count_of("batches")
        if self.training:
            self.set_count("batches", before + 1)
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
        draws = self.count_of("draws")
        if self.training:
            self.set_count("draws", draws + 1)
        return generator(purpose, self.count_of("seed"), draws)


def _read_counts(module: Counters, _: object) -> None:
    module._counts = {name: int(module.get_buffer(name)) for name in module._counts}
