"""How many training batches there were, for what changes with their number."""

import torch
from torch import Tensor, nn


class BatchCount(nn.Module):
    """A count that is in checkpoints, and as a Python number beside it: reading a buffer would wait for the device."""

    batches: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))
        self._batches = 0
        self.register_load_state_dict_post_hook(_read_state)

    def forward(self) -> int:
        """Training batches before this one, which counts from here on; in evaluation mode the count stands still."""
        before = self._batches
        if self.training:
            self._batches += 1
            self.batches.fill_(self._batches)
        return before


def _read_state(module: BatchCount, _: object) -> None:
    module._batches = int(module.batches)
