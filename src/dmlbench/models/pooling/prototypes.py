"""Prototypes initialized from the first training embeddings, for transport poolings."""

import logging
from typing import Any

import torch
from torch import Tensor, nn

from dmlbench.models.pooling.base import Pooled, Pooling
from dmlbench.models.transport import clip_norm
from dmlbench.types import ConfigError, check_at_least

logger = logging.getLogger(__name__)


def greedy_k_center(initial: Tensor, candidates: Tensor, count: int) -> Tensor:
    """Pick the candidate [N, D] farthest from everything initial [I, D] or picked, ``count`` times: [count, D].

    Ties go to the smaller row; beyond the distinct candidates picks repeat. Nothing waits for the device.
    """
    nearest = torch.cdist(candidates, initial, compute_mode="donot_use_mm_for_euclid_dist").amin(dim=1)  # [N]
    picks = []
    for _ in range(count):
        pick = candidates.index_select(0, nearest.argmax().view(1))  # [1, D]
        picks.append(pick)
        nearest = torch.minimum(nearest, torch.linalg.vector_norm(candidates - pick, dim=1))
    return torch.cat(picks)


class PrototypePooling(Pooling):
    """A pooling with m prototypes in the space of the projection; subclasses implement ``forward``.

    The prototypes start from the average-pooled embeddings of the first training batches after ``start_step``:
    ``observe`` copies them, u / max(1, |u|), into a memory of ``memory_rows``; with the batch that fills it (whose rows
    may replace older ones) the prototypes are set by greedy k-center from the memory's first m rows as initial set over
    its other rows as candidates. The side output "pooled" is copied, or the embedding where there is none.

    Source: the authors' TensorFlow code of GSP (yetigurbuz/generalized-sum-pooling).
    """

    memory: Tensor
    filled: Tensor
    prototypes_started: Tensor

    def __init__(self, width: int, num_prototypes: int, *, memory_rows: int, start_step: int) -> None:
        super().__init__()
        if memory_rows < 2 * num_prototypes:
            raise ConfigError(
                f"memory_rows: got {memory_rows}, expected at least twice num_prototypes ({num_prototypes})."
            )
        check_at_least(0, start_step=start_step)
        self.num_prototypes = num_prototypes
        self.start_step = start_step
        # Changed in place only: the optimizer holds this tensor.
        self.prototypes = nn.Parameter(torch.empty(num_prototypes, width))
        nn.init.kaiming_normal_(self.prototypes)
        self.register_buffer("memory", torch.zeros(memory_rows, width))
        self.register_buffer("filled", torch.zeros((), dtype=torch.int64))
        self.register_buffer("prototypes_started", torch.zeros((), dtype=torch.bool))
        # Copies on the host: reading a buffer on a GPU in every step would wait for it.
        self._filled = 0
        self._started = False

    @property
    def started(self) -> bool:
        return self._started

    @torch.no_grad()
    def observe(self, pooled: Pooled, *, step: int) -> None:
        if self._started or step <= self.start_step:
            return
        capacity, width = self.memory.shape
        averages = pooled.side.get("pooled", pooled.embedding)[:, :width]
        rows = clip_norm(averages.detach().to(self.memory.dtype))[-capacity:]
        end = min(self._filled + len(rows), capacity)
        self.memory[end - len(rows) : end].copy_(rows)
        self._filled = end
        self.filled.fill_(end)
        if end == capacity:
            first = self.num_prototypes
            self.prototypes.copy_(greedy_k_center(self.memory[:first], self.memory[first:], first))
            self._started = True
            self.prototypes_started.fill_(True)
            logger.info("step %d: %d prototypes start from %d embeddings", step, self.num_prototypes, capacity)

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._filled = int(self.filled)
        self._started = bool(self.prototypes_started)
