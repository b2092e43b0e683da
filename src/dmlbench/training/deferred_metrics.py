"""Losses and gradient norms, read back from the device many steps at once."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dmlbench.types import Diverged


@dataclass(frozen=True)
class BatchValues:
    """Scalars of a batch on the device: parts of the objective, and what the model observed for the log."""

    losses: Mapping[str, Tensor]
    noted: Mapping[str, Tensor]


class DeferredMetrics:
    """Values of steps that the host has not read yet.

    A value that is not finite ends the training when it is read, some steps late, so read before anything is saved.
    """

    def __init__(self) -> None:
        self.last: dict[str, float] = {}  # means over the batches of the step that was read last
        self._waiting: list[tuple[int, Sequence[BatchValues], Tensor]] = []

    def add(self, step: int, batches: Sequence[BatchValues], norm: Tensor) -> None:
        """Keep the values of a step's batches and the norm of its gradient."""
        self._waiting.append((step, batches, norm))

    def read(self) -> None:
        """Bring ``last`` up to date, by one copy from the device; raises Diverged for a value that is not finite."""
        if not self._waiting:
            return
        tensors = [
            x for _, batches, norm in self._waiting for b in batches for x in (*b.losses.values(), *b.noted.values())
        ]
        tensors += [norm for _, _, norm in self._waiting]
        values = iter(torch.stack([x.detach().to(torch.float64) for x in tensors]).cpu().tolist())
        read = [
            [({n: next(values) for n in b.losses}, {n: next(values) for n in b.noted}) for b in batches]
            for _, batches, _ in self._waiting
        ]
        for (step, _, _), batches, norm in zip(self._waiting, read, values, strict=True):
            for finite in (*(losses for losses, _ in batches), {"gradient norm": norm}):
                if not all(map(math.isfinite, finite.values())):
                    listing = ", ".join(f"{name} = {value}" for name, value in finite.items())
                    raise Diverged(
                        f"training stopped at step {step}: {listing}; lower optim.lr, set fit.clip_norm, or look at "
                        "the last lines of history.csv"
                    )
        members: dict[str, list[float]] = {}
        for losses, noted in read[-1]:
            for name, value in (losses | noted).items():
                members.setdefault(name, []).append(value)
        self.last = {name: sum(own) / len(own) for name, own in members.items()}
        self._waiting.clear()
