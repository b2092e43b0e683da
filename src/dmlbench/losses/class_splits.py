"""Halves of a batch that have no class in common."""

import logging
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dmlbench.losses.base import SeededDraws
from dmlbench.types import ConfigError, IntArray, check_at_least

logger = logging.getLogger(__name__)

Halves = tuple[Tensor, Tensor]  # rows of the first and of the second half, ascending, on the CPU
HalvesBy = Literal["random", "alternate"]


class ClassSplits(SeededDraws):
    """Split batches by class.

    ``random`` shuffles the classes of a batch and cuts this order where the halves are nearest to equal numbers of
    images. ``alternate`` sorts the classes and puts every other one into the first half.
    """

    def __init__(self, num_splits: int = 1, halves: HalvesBy = "random") -> None:
        super().__init__()
        check_at_least(1, num_splits=num_splits)
        if halves == "alternate" and num_splits > 1:
            raise ConfigError(f"num_splits: got {num_splits}, expected 1 with halves=alternate, as all are the same.")
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
                    "a batch of %d images has a single class, hence no class-disjoint halves: its regularizers are 0. "
                    "Raise sampler.classes_per_batch. (Logged once.)",
                    len(labels),
                )
            self._has_warned = True
            return []
        in_first = (torch.from_numpy(self._first_half(class_of, rng)) for _ in range(self.num_splits))
        return [(x.nonzero()[:, 0], (~x).nonzero()[:, 0]) for x in in_first]

    def _first_half(self, class_of: IntArray, rng: np.random.Generator) -> NDArray[np.bool_]:
        """Which rows are in the first half, given each row's class in [0, C), C > 1."""
        if self.halves == "alternate":
            return class_of % 2 == 0
        sizes = np.bincount(class_of)
        order = rng.permutation(len(sizes))
        imbalance = np.abs(2 * np.cumsum(sizes[order])[:-1] - len(class_of))
        return np.isin(class_of, order[: int(imbalance.argmin()) + 1])
