"""Halves of a batch that have no class in common."""

import logging
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from dmlbench.losses.counters import SeededDraws
from dmlbench.types import ConfigError, IntArray, check_at_least

logger = logging.getLogger(__name__)

Halves = tuple[Tensor, Tensor]
"""Rows of the first and of the second half, ascending, on the CPU."""

HalvesBy = Literal["random", "alternate"]


class ClassSplits(SeededDraws):
    """Split batches by class.

    ``halves: random`` shuffles the classes of a batch and cuts this order where the halves are nearest to equal numbers
    of images. ``halves: alternate`` sorts the classes and puts every other one into the first half.
    """

    def __init__(self, num_splits: int = 1, halves: HalvesBy = "random") -> None:
        super().__init__()
        check_at_least(1, num_splits=num_splits)
        if halves == "alternate" and num_splits > 1:
            raise ConfigError(
                f"num_splits: got {num_splits}, expected 1 with halves=alternate, whose splits are all the same. "
                "Use halves=random."
            )
        self.num_splits = num_splits
        self.halves = halves
        self._has_warned = False

    def forward(self, labels: Tensor) -> list[Halves]:
        """``num_splits`` pairs of halves; none for a batch of fewer than two classes."""
        rng = self.next_generator("class splits")
        classes, class_of = np.unique(labels.cpu().numpy(), return_inverse=True)
        if len(classes) < 2:
            if not self._has_warned:
                logger.warning(
                    "a batch of %d images holds a single class and has no class-disjoint halves: its cross-batch "
                    "regularizers are 0; raise sampler.classes_per_batch if that is the rule (said once)",
                    len(labels),
                )
            self._has_warned = True
            return []
        splits = (self._split(class_of, len(classes), rng) for _ in range(self.num_splits))
        return [(torch.from_numpy(first), torch.from_numpy(second)) for first, second in splits]

    def _split(self, class_of: IntArray, num_classes: int, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
        """Rows of two halves, given each row's class in [0, num_classes) and at least two classes."""
        if self.halves == "alternate":
            return np.flatnonzero(class_of % 2 == 0), np.flatnonzero(class_of % 2 == 1)
        order = rng.permutation(num_classes)
        sizes = np.bincount(class_of, minlength=num_classes)[order]
        imbalance = np.abs(2 * np.cumsum(sizes)[:-1] - len(class_of))
        in_first = np.isin(class_of, order[: int(imbalance.argmin()) + 1])
        return np.flatnonzero(in_first), np.flatnonzero(~in_first)
