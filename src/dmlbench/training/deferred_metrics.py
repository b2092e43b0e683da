"""Losses and gradient norms, read back from the device many steps at once."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dmlbench.types import Diverged

MAX_SKIPPED = 50  # steps in a row; each halves the scale, which starts at 2^16


@dataclass(frozen=True)
class BatchValues:
    """Scalars of a batch on the device: parts of the objective, and what the model observed for the log."""

    losses: Mapping[str, Tensor]
    noted: Mapping[str, Tensor]


class DeferredMetrics:
    """Values of steps that the host has not read yet.

    A value that is not finite ends the training when it is read, some steps late, so read before anything is saved.
    """

    def __init__(self, skipped_steps: int = 0) -> None:
        self.last: dict[str, float] = {}  # means over the batches of the step that was read last
        self.skipped_steps = skipped_steps
        self._skipped_in_a_row = 0
        self._waiting: list[tuple[int, Sequence[BatchValues], Tensor, Tensor | None]] = []

    def add(self, step: int, batches: Sequence[BatchValues], norm: Tensor, skipped: Tensor | None = None) -> None:
        """Keep the values of a step's batches, the norm of its gradient and whether a gradient scaler skipped it.

        The gradient of a skipped step need not be finite, but ``MAX_SKIPPED`` skipped steps in a row are an error.
        """
        self._waiting.append((step, batches, norm, skipped))

    def read(self) -> None:
        """Bring ``last`` up to date, by one copy from the device; raises Diverged for a value that is not finite."""
        if not self._waiting:
            return
        tensors = [
            x for _, batches, *_ in self._waiting for b in batches for x in (*b.losses.values(), *b.noted.values())
        ]
        tensors += [norm for _, _, norm, _ in self._waiting]
        tensors += [skipped for *_, skipped in self._waiting if skipped is not None]
        values = iter(torch.stack([x.detach().to(torch.float64) for x in tensors]).cpu().tolist())
        read = [
            [({n: next(values) for n in b.losses}, {n: next(values) for n in b.noted}) for b in batches]
            for _, batches, *_ in self._waiting
        ]
        norms = [next(values) for _ in self._waiting]
        for (step, *_, skipped), batches, norm in zip(self._waiting, read, norms, strict=True):
            is_skipped = skipped is not None and bool(next(values))
            self.skipped_steps += is_skipped
            self._skipped_in_a_row = self._skipped_in_a_row + 1 if is_skipped else 0
            if self._skipped_in_a_row == MAX_SKIPPED:
                raise Diverged(
                    f"fit.precision: got fp16, but the gradients of all {MAX_SKIPPED} steps up to step {step} are not "
                    "finite. Set fit.precision=bf16 or float32."
                )
            for finite in (*(losses for losses, _ in batches), {} if is_skipped else {"gradient norm": norm}):
                if not all(map(math.isfinite, finite.values())):
                    listing = ", ".join(f"{name} = {value}" for name, value in finite.items())
                    raise Diverged(
                        f"training stopped at step {step}: {listing}. Lower optim.lr, set fit.clip_norm, or look at "
                        "the last lines of history.csv."
                    )
        members: dict[str, list[float]] = {}
        for losses, noted in read[-1]:
            for name, value in (losses | noted).items():
                members.setdefault(name, []).append(value)
        if self._waiting[-1][-1] is not None:
            members["skipped_steps"] = [self.skipped_steps]
        self.last = {name: sum(own) / len(own) for name, own in members.items()}
        self._waiting.clear()
