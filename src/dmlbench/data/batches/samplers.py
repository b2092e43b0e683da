"""Samplers of training rows, whose order can be saved and resumed."""

import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from dmlbench.runtime import generator
from dmlbench.types import ConfigError, IntArray, RunError, check_at_least

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class IndexBatch:
    """Positions ``rows`` [B] into the training rows, the epoch, and the batch's index in it; both count from 0."""

    rows: IntArray
    epoch: int
    index: int


class BatchSampler:
    """An endless iterator over batches. All batches of an epoch are planned at its start, from (seed, epoch) alone.

    Args:
        labels: [N] class of each training row; any integers.
        sizes: the arguments that describe a batch, by name; each at least 1.
    """

    def __init__(self, labels: IntArray, *, seed: int, sizes: dict[str, int]) -> None:
        self.labels = np.ascontiguousarray(labels, dtype=np.int64)
        self.seed = seed
        self._sizes_of_batch = sizes
        check_at_least(1, **sizes)
        _, self._class_of, self._sizes = np.unique(self.labels, return_inverse=True, return_counts=True)
        wanted = sizes.get("classes_per_batch", 1)
        if wanted > len(self._sizes):
            raise ConfigError(
                f"sampler.classes_per_batch: got {wanted}, expected at most {len(self._sizes)}, the training classes "
                "of the fold without those for validation. Lower it."
            )
        self._fingerprint = hashlib.sha256(self.labels.tobytes()).hexdigest()[:16]
        self._epoch, self._index = 0, 0
        self._plan = self._planned(0)
        self._length = len(self._plan)

    def _planned(self, epoch: int) -> IntArray:
        return self._plan_epoch(generator(self.seed, "sampler", epoch))

    def _plan_epoch(self, random: np.random.Generator) -> IntArray:
        """[batches, B] positions into the labels, at least one batch."""
        raise NotImplementedError

    def __len__(self) -> int:
        """Batches of a nominal epoch."""
        return self._length

    def __iter__(self) -> Iterator[IndexBatch]:
        return self

    def __next__(self) -> IndexBatch:
        if self._index >= len(self._plan):
            self._epoch, self._index = self._epoch + 1, 0
            self._plan = self._planned(self._epoch)
        batch = IndexBatch(self._plan[self._index], self._epoch, self._index)
        self._index += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The position of the next batch, and what it was planned from."""
        position = {"kind": type(self).__name__, "seed": self.seed, "epoch": self._epoch, "index": self._index}
        return {**position, **self._sizes_of_batch, "fingerprint": self._fingerprint}

    def state_after(self, batch: IndexBatch) -> dict[str, Any]:
        """The state right after ``batch``, however many batches were taken since."""
        return self.state_dict() | {"epoch": batch.epoch, "index": batch.index + 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a saved state; RunError if it is of another sampler, other labels or settings."""
        expected = self.state_dict()
        for name in ("kind", *self._sizes_of_batch, "seed", "fingerprint"):
            if state.get(name) != expected[name]:
                raise RunError(
                    f"saved sampler: got {name}={state.get(name)}, expected {expected[name]} as in this run. Resume "
                    "with the settings and data of the saved sampler, or start the run again."
                )
        epoch, index = int(state["epoch"]), int(state["index"])
        plan = self._plan if epoch == self._epoch else self._planned(epoch)
        if not 0 <= index <= len(plan):
            raise RunError(
                f"saved sampler: got batch {index} of epoch {epoch}, expected 0 to {len(plan)}. Start the run again."
            )
        self._epoch, self._index, self._plan = epoch, index, plan

    def _shuffled_by_class(self, random: np.random.Generator) -> tuple[IntArray, IntArray]:
        """Positions [N] class after class, shuffled within each, and start [C], where each class's begin."""
        shuffled = random.permutation(len(self.labels))
        shuffled = shuffled[np.argsort(self._class_of[shuffled], kind="stable")]
        return shuffled, np.cumsum(self._sizes) - self._sizes

    def _with_replacement(self, random: np.random.Generator, owner: IntArray) -> IntArray:
        """A random image of each class in ``owner`` (any shape)."""
        shuffled, start = self._shuffled_by_class(random)
        return shuffled[start[owner] + random.integers(0, self._sizes[owner])]

    def _without_replacement(
        self, random: np.random.Generator, owner: IntArray, turn: IntArray, *, size: int = 1
    ) -> IntArray:
        """Groups [n, size] of the classes ``owner`` [n], each the class's group number ``turn`` [n] in the epoch.

        A class's images are shuffled and cut into whole groups, and shuffled again when these are used up. A class with
        fewer images than a group repeats them.
        """
        groups = np.maximum(self._sizes // size, 1)[owner]
        rows = np.empty((len(owner), size), dtype=np.int64)
        # One shuffle of everything serves every class's first round, the next one its second, and so on.
        for round_number in range(int((turn // groups).max()) + 1):
            shuffled, start = self._shuffled_by_class(random)
            now = np.flatnonzero(turn // groups == round_number)
            within = (turn[now] % groups[now])[:, None] * size + np.arange(size)
            rows[now] = shuffled[start[owner[now]][:, None] + within % self._sizes[owner[now]][:, None]]
        return rows

    def _draw_classes(self, random: np.random.Generator, batches: int, count: int) -> IntArray:
        """[batches, count] classes, distinct within each batch."""
        return np.stack([random.choice(len(self._sizes), count, replace=False) for _ in range(batches)])

    def _whole_batches(self, batch_size: int) -> int:
        """How often ``batch_size`` goes into the images, at least once."""
        if batch_size > len(self.labels):
            sizes = ", ".join(f"sampler.{name}={value}" for name, value in self._sizes_of_batch.items())
            raise ConfigError(
                f"batch size: got {batch_size} ({sizes}), expected at most {len(self.labels)}, the number of training "
                "images. Lower it."
            )
        return len(self.labels) // batch_size


class _BalancedSampler(BatchSampler):
    """Batches of ``classes_per_batch`` classes x ``images_per_class`` images."""

    with_replacement: ClassVar[bool] = False
    """Whether images repeat anyway, so that small classes need no warning."""

    def __init__(self, labels: IntArray, *, classes_per_batch: int, images_per_class: int, seed: int) -> None:
        self.classes_per_batch = classes_per_batch
        self.images_per_class = images_per_class
        sizes = {"classes_per_batch": classes_per_batch, "images_per_class": images_per_class}
        super().__init__(labels, seed=seed, sizes=sizes)
        small, single = int((self._sizes < images_per_class).sum()), int((self._sizes == 1).sum())
        if small and not self.with_replacement:
            alone = (
                f". {single} of them have one image, whose only positive is another crop of itself" if single else ""
            )
            logger.warning(
                "%d of %d training classes have fewer than images_per_class (%d) images; their images are repeated%s",
                small, len(self._sizes), images_per_class, alone,
            )  # fmt: skip

    def _batches_of(self, groups: IntArray) -> IntArray:
        """[batches, B] from groups [G, images_per_class]; an incomplete last batch is left out."""
        count = len(groups) // self.classes_per_batch
        return groups[: count * self.classes_per_batch].reshape(count, -1)


class ClassBalancedBatchSampler(_BalancedSampler):
    """Distinct classes and their images, both without replacement until they are used up.

    In an epoch the images of each class are shuffled and cut into groups of ``images_per_class``, without the
    remainder. Groups are dealt in passes: each pass visits once every class that still has groups, those that the last
    pass left over first, the others shuffled, and cuts the sequence into batches. The epoch ends when fewer than
    ``classes_per_batch`` classes have groups left. With classes of unequal size, epochs may differ by a few batches.
    """

    def _plan_epoch(self, random: np.random.Generator) -> IntArray:
        left = np.maximum(self._sizes // self.images_per_class, 1)  # [C] groups that each class still has
        first = np.cumsum(left) - left
        owner = np.repeat(np.arange(len(left)), left)  # [G] class of each group
        turn = np.arange(len(owner)) - first[owner]
        groups = self._without_replacement(random, owner, turn, size=self.images_per_class)
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
        return self._batches_of(groups[np.concatenate(order)])


class EqualClassBatchSampler(_BalancedSampler):
    """Each class as often as any other, with the next images of its own shuffled sequence (GSP).

    With N images of C classes an epoch has ceil(N / C / images_per_class) rounds. Each round visits every class once in
    random order. The rounds are cut into batches one after the other, so a batch across two rounds may have a class
    twice. Groups that do not fill a batch are left out (the public code begins its next epoch with them).

    Source: yetigurbuz/generalized-sum-pooling b765b889, tensorflow/framework/datasets/samplers.py, MPerClass.
    """

    def _plan_epoch(self, random: np.random.Generator) -> IntArray:
        size, num_classes = self.images_per_class, len(self._sizes)
        rounds = -(-len(self.labels) // (num_classes * size))
        owner = np.repeat(np.arange(num_classes), rounds * size)
        images = self._without_replacement(random, owner, np.tile(np.arange(rounds * size), num_classes))
        order = np.concatenate([random.permutation(num_classes) for _ in range(rounds)])
        return self._batches_of(
            images.reshape(num_classes, rounds, size)[order, np.repeat(np.arange(rounds), num_classes)]
        )


class SplitClassBatchSampler(_BalancedSampler):
    """Batches of ``classes_per_batch`` groups of ``images_per_class`` images; a class may have several groups (LIBC).

    In an epoch the images of each class are shuffled and cut into groups. Random images of the class complete the last
    group; a class that fills its groups exactly gets one more of random images. A class with fewer images than a group
    is first filled up with random ones of its own. The groups of all classes are shuffled and cut into batches, the
    last of which is completed by random groups.

    Args:
        vary_classes: draw the number of groups in a batch anew for each epoch: a divisor of the batch size from 2 to
            its half.

    Source: dvl-tum/intra_batch a1ae3de8, combine_sampler.py, CombineSampler and NumberSampler.
    """

    def __init__(
        self, labels: IntArray, *, classes_per_batch: int, images_per_class: int, seed: int, vary_classes: bool = False
    ) -> None:
        batch_size = classes_per_batch * images_per_class
        divisors = [n for n in range(2, batch_size // 2 + 1) if batch_size % n == 0]
        if vary_classes and not divisors:
            raise ConfigError(
                f"sampler.vary_classes: got true with batches of {batch_size} images, expected a number with a divisor "
                "from 2 to its half. Change sampler.classes_per_batch or images_per_class."
            )
        self.shapes = [(n, batch_size // n) for n in (divisors if vary_classes else [classes_per_batch])]
        super().__init__(labels, classes_per_batch=classes_per_batch, images_per_class=images_per_class, seed=seed)
        groups = [(np.maximum(self._sizes, size) // size + 1).sum() for _, size in self.shapes]
        lengths = [-(-n // count) for n, (count, _) in zip(groups, self.shapes, strict=True)]
        self._length = round(float(np.mean(lengths)))  # of the nominal epoch, whatever the first one has

    def _plan_epoch(self, random: np.random.Generator) -> IntArray:
        count, size = self.shapes[random.integers(len(self.shapes))]
        shuffled, start = self._shuffled_by_class(random)
        groups = []
        for first, images in zip(start, self._sizes, strict=True):
            own = shuffled[first : first + images]
            own = np.concatenate([own, random.choice(own, max(size - images, 0))])
            missing = size - len(own) % size
            groups.append(np.concatenate([own, random.choice(own, missing, replace=False)]).reshape(-1, size))
        together = random.permutation(np.concatenate(groups))
        missing = -len(together) % count
        more = random.choice(len(together), missing, replace=missing > len(together))
        return np.concatenate([together, together[more]]).reshape(-1, count * size)


class RotatingClassBatchSampler(_BalancedSampler):
    """Each batch: newly drawn classes, of each the next images of its own shuffled sequence (ProxyNCA++, balanced).

    A class with fewer than ``images_per_class`` images repeats them (the public code returns a smaller batch).

    Source: E. W. Teh, T. DeVries, G. W. Taylor, "ProxyNCA++", ECCV 2020; public code euwern/proxynca_pp
        (``BalancedBatchSampler``), whose epoch has floor((N - 1) / B) batches.
    """

    def _plan_epoch(self, random: np.random.Generator) -> IntArray:
        batch_size = self.classes_per_batch * self.images_per_class
        self._whole_batches(batch_size)
        classes = self._draw_classes(random, max(1, (len(self.labels) - 1) // batch_size), self.classes_per_batch)
        drawn = classes.reshape(-1)
        turn = np.asarray(pd.Series(drawn).groupby(drawn).cumcount())  # [draws] how often the class was drawn before
        return self._batches_of(self._without_replacement(random, drawn, turn, size=self.images_per_class))


class IndependentClassBatchSampler(_BalancedSampler):
    """Each batch: distinct classes, and of each images with replacement, whatever came before (ProxyAnchor, balanced).

    Source: S. Kim et al., "Proxy Anchor Loss for Deep Metric Learning", CVPR 2020; public code
        tjddus9597/Proxy-Anchor-CVPR2020 (``BalancedSampler``), whose epoch has floor(N / B) batches.
    """

    with_replacement: ClassVar[bool] = True

    def _plan_epoch(self, random: np.random.Generator) -> IntArray:
        batches = self._whole_batches(self.classes_per_batch * self.images_per_class)
        classes = self._draw_classes(random, batches, self.classes_per_batch)
        return self._with_replacement(random, classes.repeat(self.images_per_class, axis=1))


class RepeatingClassBatchSampler(_BalancedSampler):
    """Each batch: classes with replacement, and of each draw images with replacement (ooDML).

    A class that is drawn twice has twice as many images in the batch, and an image may be there several times.

    Source: Milbich et al., NeurIPS 2021; Confusezius/Characterizing_Generalization_in_DeepMetricLearning e8a4171c,
        datasampler/class_random_sampler.py, whose epoch has floor(N / B) batches (here at least one).
    """

    with_replacement: ClassVar[bool] = True

    def _plan_epoch(self, random: np.random.Generator) -> IntArray:
        batches = max(1, len(self.labels) // (self.classes_per_batch * self.images_per_class))
        classes = random.integers(0, len(self._sizes), (batches, self.classes_per_batch))
        return self._with_replacement(random, classes.repeat(self.images_per_class, axis=1))


class FullClassBatchSampler(_BalancedSampler):
    """Every class gives as many groups in an epoch as the largest one; batches follow the order of classes (AVSL).

    Smaller classes repeat images. In each round every class gives one group of ``images_per_class``; the sequence of
    rounds is cut into batches, and an incomplete last batch is left out.

    Source: zbr17/AVSL fd2686e4, link_margin.yaml and link_avsl_margin.yaml, which take MPerClassFullSampler of gedml
        0.2.2 (core/samplers/m_per_class_full_sampler.py).
    """

    with_replacement: ClassVar[bool] = True

    def _plan_epoch(self, random: np.random.Generator) -> IntArray:
        size, num_classes = self.images_per_class, len(self._sizes)
        rounds = max(1, int(self._sizes.max()) // size)
        shuffled, start = self._shuffled_by_class(random)
        drawn = np.empty((num_classes, rounds * size), dtype=np.int64)  # places within the class
        for label, members in enumerate(self._sizes):
            drawn[label] = random.choice(members, rounds * size, replace=bool(members < rounds * size))
        groups = shuffled[start[:, None] + drawn].reshape(num_classes, rounds, size).swapaxes(0, 1)
        return self._batches_of(groups.reshape(-1, size))


class RandomClassBatchSampler(BatchSampler):
    """Each batch: a few newly drawn classes, and every image of a random one of them, with replacement (ProxyNCA++).

    Source: E. W. Teh, T. DeVries, G. W. Taylor, "ProxyNCA++", ECCV 2020; public code euwern/proxynca_pp
        (``RandomBatchSampler``), the baseline of its class-balanced sampling; incomplete batches are left out.
    """

    def __init__(self, labels: IntArray, *, classes_per_batch: int, batch_size: int, seed: int) -> None:
        self.classes_per_batch = classes_per_batch
        self.batch_size = batch_size
        super().__init__(labels, seed=seed, sizes={"classes_per_batch": classes_per_batch, "batch_size": batch_size})

    def _plan_epoch(self, random: np.random.Generator) -> IntArray:
        classes = self._draw_classes(random, self._whole_batches(self.batch_size), self.classes_per_batch)
        which = random.integers(0, self.classes_per_batch, (len(classes), self.batch_size))
        return self._with_replacement(random, np.take_along_axis(classes, which, axis=1))


class RandomBatchSampler(BatchSampler):
    """Shuffled epochs cut into batches, whatever the classes; an incomplete last batch is left out (ProxyAnchor)."""

    def __init__(self, labels: IntArray, *, batch_size: int, seed: int) -> None:
        self.batch_size = batch_size
        super().__init__(labels, seed=seed, sizes={"batch_size": batch_size})

    def _plan_epoch(self, random: np.random.Generator) -> IntArray:
        batches = self._whole_batches(self.batch_size)
        return random.permutation(len(self.labels))[: batches * self.batch_size].reshape(batches, self.batch_size)
