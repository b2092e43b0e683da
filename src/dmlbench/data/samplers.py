"""Batches with equally many images of each of their classes, in an order that can be saved and taken up again."""

import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from dmlbench.runtime import generator
from dmlbench.types import ConfigError, IntArray, RunError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class IndexBatch:
    """Positions [B] into the training rows, and where in the sequence of batches they stand.

    Attributes:
        rows: [classes_per_batch * images_per_class], the images of a class side by side.
        epoch: number of the epoch, from 0.
        index: number of the batch in its epoch, from 0.
    """

    rows: IntArray
    epoch: int
    index: int


class ClassBalancedBatchSampler:
    """An endless iterator over batches of ``classes_per_batch`` distinct classes x ``images_per_class`` images.

    In an epoch the images of each class are shuffled and cut into groups of ``images_per_class``; what is left over
    sits this epoch out. A class with fewer images gives one group, filled by going through its own images again. Groups
    are dealt in passes: each pass goes once through the classes that still have groups, those that the last pass left
    over first, the others shuffled, and cuts them into batches. The epoch ends when fewer than ``classes_per_batch``
    classes have groups left. So both images and classes come without replacement until they are used up.

    Epoch e depends on (seed, e) alone, so the state is a pair of numbers: epoch and batch.
    """

    def __init__(self, labels: IntArray, *, classes_per_batch: int, images_per_class: int, seed: int) -> None:
        """Plan batches.

        Args:
            labels: [N] class of each training row; any integers.
            classes_per_batch: distinct classes of a batch, at least 1.
            images_per_class: images of each, at least 1.
            seed: of every shuffle.

        Raises:
            ConfigError: a number below 1, or more classes than ``labels`` has.
        """
        self.labels = np.ascontiguousarray(labels, dtype=np.int64)
        for name, value in (("classes_per_batch", classes_per_batch), ("images_per_class", images_per_class)):
            if value < 1:
                raise ConfigError(f"{name} ({value}) must be at least 1")
        _, self._class_of, self._sizes = np.unique(self.labels, return_inverse=True, return_counts=True)
        if classes_per_batch > len(self._sizes):
            raise ConfigError(
                f"classes_per_batch ({classes_per_batch}) exceeds the {len(self._sizes)} training classes; "
                "lower sampler.classes_per_batch"
            )
        filled_up = int((self._sizes < images_per_class).sum())
        if filled_up:
            logger.warning(
                "%d of %d training classes have fewer than images_per_class (%d) images; theirs are drawn repeatedly",
                filled_up, len(self._sizes), images_per_class,
            )  # fmt: skip
        self.classes_per_batch = classes_per_batch
        self.images_per_class = images_per_class
        self.seed = seed
        self._fingerprint = hashlib.sha256(self.labels.tobytes()).hexdigest()[:16]
        self._epoch = 0
        self._index = 0
        self._plan = self._plan_epoch(0)
        self._length = len(self._plan)

    def __len__(self) -> int:
        """Batches of the first epoch: the nominal epoch for turning epochs into steps.

        Epochs of classes of unequal size may differ by a few batches, as it depends on the shuffle which class is
        left over at the end.
        """
        return self._length

    def __iter__(self) -> Iterator[IndexBatch]:
        return self

    def __next__(self) -> IndexBatch:
        if self._index >= len(self._plan):
            self._epoch, self._index = self._epoch + 1, 0
            self._plan = self._plan_epoch(self._epoch)
        batch = IndexBatch(self._plan[self._index], self._epoch, self._index)
        self._index += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch stands, and what it was planned from."""
        return self._state(self._epoch, self._index)

    def state_after(self, batch: IndexBatch) -> dict[str, Any]:
        """The state as it was when ``batch`` had just been taken, however many batches were taken since."""
        return self._state(batch.epoch, batch.index + 1)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state.

        Raises:
            RunError: it was saved by a sampler of other labels, another batch size or another seed.
        """
        expected = self.state_dict()
        for name in ("classes_per_batch", "images_per_class", "seed", "fingerprint"):
            if state.get(name) != expected[name]:
                raise RunError(
                    f"the saved sampler has {name} = {state.get(name)}, this run has {expected[name]}; "
                    "continue with the settings and data that it was saved with, or start anew"
                )
        epoch, index = int(state["epoch"]), int(state["index"])
        plan = self._plan if epoch == self._epoch else self._plan_epoch(epoch)
        if epoch < 0 or not 0 <= index <= len(plan):
            raise RunError(f"the saved sampler stands at batch {index} of epoch {epoch}, which has {len(plan)} batches")
        self._epoch, self._index, self._plan = epoch, index, plan

    def _state(self, epoch: int, index: int) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "epoch": epoch,
            "index": index,
            "classes_per_batch": self.classes_per_batch,
            "images_per_class": self.images_per_class,
            "fingerprint": self._fingerprint,
        }

    def _plan_epoch(self, epoch: int) -> IntArray:
        """[batches, classes_per_batch * images_per_class] positions into the labels."""
        random = generator(self.seed, "sampler", epoch)
        groups, first = self._cut_groups(random)
        left = np.diff(first)  # [C] groups that each class still has
        used = np.zeros_like(left)
        passed_over = np.zeros(0, dtype=np.int64)
        order: list[IntArray] = []
        while True:
            active = np.flatnonzero(left > used)
            if len(active) < self.classes_per_batch:
                break
            fresh = random.permutation(np.setdiff1d(active, passed_over, assume_unique=True))
            sequence = np.concatenate([passed_over, fresh])
            whole = len(sequence) // self.classes_per_batch * self.classes_per_batch
            dealt, passed_over = sequence[:whole], sequence[whole:]
            order.append(first[dealt] + used[dealt])
            used[dealt] += 1
        return groups[np.concatenate(order)].reshape(-1, self.classes_per_batch * self.images_per_class)

    def _cut_groups(self, random: np.random.Generator) -> tuple[IntArray, IntArray]:
        """Groups [G, images_per_class] of positions, class after class, and first [C + 1], where each class's begin."""
        size = self.images_per_class
        shuffled = random.permutation(len(self.labels))
        shuffled = shuffled[np.argsort(self._class_of[shuffled], kind="stable")]  # by class, shuffled within
        start = np.concatenate([[0], np.cumsum(self._sizes)])
        first = np.concatenate([[0], np.cumsum(np.maximum(self._sizes // size, 1))])
        owner = np.repeat(np.arange(len(self._sizes)), np.diff(first))  # [G] class of each group
        number = np.arange(len(owner)) - first[owner]  # [G] number of the group in its class
        within = number[:, None] * size + np.arange(size)  # [G, K]
        # The remainder wraps round only in a class smaller than a group.
        within %= self._sizes[owner][:, None]
        return shuffled[start[owner][:, None] + within], first
