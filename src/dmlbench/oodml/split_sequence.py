"""Train-test splits of growing distance, by exchange and removal of classes (section 3.3)."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Literal, get_args

import numpy as np
import scipy.sparse

from dmlbench.oodml.frechet import Float, Gaussian, distance_of_gaussians, gaussian_of_moments, gaussian_of_rows
from dmlbench.types import DataError, IntArray, check_choice, counted

Over = Literal["class_means", "samples"]
OVER = get_args(Over)
Rule = Literal["nearest", "exchange_first"]


@dataclass(frozen=True)
class ClassFeatures:
    """Features of images, class by class."""

    rows: Float  # [N, d], sorted by class
    start: IntArray  # [C + 1] first row of each class
    over: Over = "class_means"  # whether distances compare class means (public code) or images (equation 1)

    @staticmethod
    def of(features: Float, labels: IntArray, *, over: Over = "class_means") -> "ClassFeatures":
        """Sort by class, and center, which changes no distance and keeps float64 exact where means are large."""
        check_choice("over", over, OVER)
        order = np.argsort(labels, kind="stable")
        rows = np.asarray(features, dtype=np.float64)[order]
        start = np.searchsorted(labels[order], np.arange(labels.max() + 2))
        return ClassFeatures(rows - rows.mean(axis=0), start, over)

    @cached_property
    def means(self) -> Float:
        """[C, d] class means; NaN without rows."""
        n, counts = len(self.rows), np.diff(self.start)[:, None]
        members = scipy.sparse.csr_array((np.ones(n), np.arange(n), self.start), shape=(len(counts), n))
        return np.divide(sums := members @ self.rows, counts, out=np.full_like(sums, np.nan), where=counts > 0)


@dataclass(frozen=True)
class Step:
    """A train-test split: "default" (the first), "exchanged", "reversed" (for a smaller distance) or "removed"."""

    kind: str
    count: int  # classes exchanged so far, or removed from each half
    train: tuple[int, ...]  # classes, ascending
    test: tuple[int, ...]
    distance: float  # squared Fréchet distance

    @property
    def halves(self) -> frozenset[tuple[int, ...]]:
        """The halves, whichever of them trains."""
        return frozenset((self.train, self.test))


class _Half:
    """The classes of one half in slots, with running mean and scatter, so that k rows cost 2 k d^2 instead of n d^2."""

    def __init__(self, rows_of: Callable[[Sequence[int]], Float], classes: Sequence[int], dimension: int) -> None:
        self.rows_of, self.slots = rows_of, list(classes)
        rows = rows_of(self.slots)
        self.count, self.total = len(rows), rows.sum(axis=0)
        self.scatter = rows.T @ rows if self.count > dimension else None

    def put(self, slots: Sequence[int], classes: Sequence[int]) -> None:
        self._change([self.slots[slot] for slot in slots], classes)
        for slot, arrived in zip(slots, classes, strict=True):
            self.slots[slot] = arrived

    def remove(self, slots: Sequence[int]) -> None:
        self._change([self.slots[slot] for slot in slots], [])
        gone = set(slots)
        self.slots = [held for slot, held in enumerate(self.slots) if slot not in gone]

    def _change(self, gone: Sequence[int], arrived: Sequence[int]) -> None:
        for classes, sign in ((gone, -1), (arrived, 1)):
            rows = self.rows_of(classes)
            self.count += sign * len(rows)
            self.total = self.total + sign * rows.sum(axis=0)
            if self.scatter is not None:
                self.scatter = self.scatter + sign * (rows.T @ rows)

    def gaussian(self) -> Gaussian:
        mean = self.total / self.count
        if self.scatter is None or self.count <= len(mean):
            return gaussian_of_rows(self.rows_of(self.slots))
        covariance = (self.scatter - self.count * np.outer(mean, mean)) / (self.count - 1)
        return gaussian_of_moments(mean, covariance)


class _Halves:
    def __init__(self, features: ClassFeatures, train: Sequence[int], test: Sequence[int]) -> None:
        if shared := set(train) & set(test):
            raise DataError(f"the halves share {counted(len(shared), 'class')}, such as {min(shared)}.")
        known = set(np.flatnonzero(np.diff(features.start)).tolist())
        for name, classes in (("train", train), ("test", test)):
            if len(classes) < 2:
                raise DataError(f"{name} half: got {counted(len(classes), 'class')}, expected two or more.")
            if without := sorted(set(classes) - known):
                raise DataError(f"{len(without)} classes of the {name} half have no features, such as {without[0]}.")
        self.means = features.means

        def rows_of(classes: Sequence[int]) -> Float:
            if features.over == "class_means":
                return features.means[np.asarray(classes, dtype=np.int64)]
            parts = [features.rows[features.start[c] : features.start[c + 1]] for c in classes]
            return np.concatenate([features.rows[:0], *parts])

        self.both = tuple(_Half(rows_of, classes, features.rows.shape[1]) for classes in (train, test))

    def distance(self) -> float:
        train, test = self.both
        by_squares = train.scatter is not None and test.scatter is not None
        return distance_of_gaussians(train.gaussian(), test.gaussian(), by_squares=by_squares)

    def centers(self) -> list[Float]:
        """Mean of the class means of each half."""
        return [self.means[half.slots].mean(axis=0) for half in self.both]

    def to_centers(self, own: int) -> tuple[Float, Float]:
        """Distances of one half's classes to the center of the other half and to their own, by slot."""
        means, centers = self.means[self.both[own].slots], self.centers()
        to_both = [np.linalg.norm(means - center, axis=1) for center in centers]
        return to_both[1 - own], to_both[own]

    def order(self, own: int, *, reverse: bool = False) -> list[int]:
        """Slots of one half, the relatively nearest to the other half first (eq. 2 and 3)."""
        other, home = self.to_centers(own)
        order = np.argsort(other - home, kind="stable").tolist()
        return order[::-1] if reverse else order

    def exchange(self, slots: Sequence[tuple[int, int]]) -> None:
        train, test = self.both
        arriving = [test.slots[b] for _, b in slots], [train.slots[a] for a, _ in slots]
        train.put([a for a, _ in slots], arriving[0])
        test.put([b for _, b in slots], arriving[1])

    def step(self, kind: str, count: int) -> Step:
        train, test = (tuple(sorted(half.slots)) for half in self.both)
        return Step(kind, count, train, test, self.distance())


class _Memory:
    """Recently exchanged slots of each half, which may not be exchanged again at once."""

    def __init__(self, length: int) -> None:
        self.lately: tuple[deque[int], deque[int]] = deque(maxlen=length), deque(maxlen=length)

    def pick(self, orders: Sequence[Sequence[int]], count: int) -> list[tuple[int, int]]:
        """The first ``count`` pairs of slots that were not exchanged lately, or fewer."""
        picked: list[tuple[int, int]] = []
        for k in range(count):
            pair = [
                next((slot for slot in islice(order, k, None) if slot not in lately), None)
                for order, lately in zip(orders, self.lately, strict=True)
            ]
            if pair[0] is None or pair[1] is None:
                break
            for lately, slot in zip(self.lately, pair, strict=True):
                lately.append(slot)  # type: ignore[arg-type]
            picked.append((pair[0], pair[1]))
        return picked


def exchange(
    features: ClassFeatures, train: Sequence[int], test: Sequence[int], *, steps: int, per_step: int = 2,
    memory: int = 5, reverse: bool = False,
) -> Iterator[Step]:  # fmt: skip
    """Yield the given split, then the split after every exchange of ``per_step`` classes between the halves.

    With class means m_c and their means M, M' over both halves, the classes of the least |m_c - M'| - |m_c - M| go.
    Stops before halves that occurred before.

    Args:
        memory: so many recently exchanged slots are kept.
        reverse: take the greatest instead, so that the halves become more alike.

    Source: T. Milbich et al., NeurIPS 2021, section 3.3 and public code.
    """
    halves, lately = _Halves(features, train, test), _Memory(memory)
    exchanged, step = 0, halves.step("default", 0)
    seen = {step.halves}
    yield step
    for _ in range(steps):
        orders = [halves.order(own, reverse=reverse) for own in (0, 1)]
        slots = lately.pick(orders, per_step)
        if not slots:
            return
        halves.exchange(slots)
        exchanged += len(slots)
        step = halves.step("reversed" if reverse else "exchanged", exchanged)
        if step.halves in seen:  # few classes: these are halves from before, perhaps with train and test swapped
            return
        seen.add(step.halves)
        yield step


def removal(
    features: ClassFeatures, train: Sequence[int], test: Sequence[int], *, steps: int, per_step: int = 2,
    keep: float = 0.6, rule: Rule = "nearest", memory: int = 5,
) -> Iterator[Step]:  # fmt: skip
    """Yield the given split, then the split after every removal of ``per_step`` classes of each half.

    Args:
        keep: share of each half's classes that must remain.
        rule: "nearest" removes the classes nearest to the center of the other half (paper); "exchange_first" tries an
            exchange, keeps it if it lowers the distance, and else removes those classes (public code).

    Source: T. Milbich et al., NeurIPS 2021, section 3.3 and public code.
    """
    check_choice("rule", rule, get_args(Rule))
    halves, lately = _Halves(features, train, test), _Memory(memory)
    least = [max(2, int(np.ceil(keep * len(half.slots)))) for half in halves.both]
    step = halves.step("removed", 0)
    yield step
    for _ in range(steps):
        if any(len(half.slots) - per_step < few for half, few in zip(halves.both, least, strict=True)):
            return
        if rule == "nearest":
            goes = [np.argsort(halves.to_centers(own)[0], kind="stable")[:per_step].tolist() for own in (0, 1)]
        else:
            slots = lately.pick([halves.order(own) for own in (0, 1)], per_step)
            if not slots:
                return
            halves.exchange(slots)
            exchanged = halves.step("removed", step.count)
            if exchanged.distance < step.distance:
                yield (step := exchanged)
                continue
            for a, b in reversed(slots):
                halves.exchange([(a, b)])
            goes = [sorted({pair[own] for pair in slots}) for own in (0, 1)]
        for half, some in zip(halves.both, goes, strict=True):
            half.remove(some)
        yield (step := halves.step("removed", step.count + per_step))


def alike_halves(features: ClassFeatures, classes: Sequence[int], *, seed: int) -> float:
    """Distance between two random halves of the images of the same classes (table 1, "i.i.d.")."""
    generator = np.random.default_rng(seed)
    parts: tuple[list[Float], list[Float]] = [], []
    for c in classes:
        rows = features.rows[features.start[c] : features.start[c + 1]]
        if len(rows) < 2:
            raise DataError(f"class {c}: got {counted(len(rows), 'image')}, expected two or more.")
        drawn = generator.permutation(len(rows))
        for part, chosen in zip(parts, (drawn[: len(rows) // 2], drawn[len(rows) // 2 :]), strict=True):
            part.append(rows[chosen].mean(axis=0)[None] if features.over == "class_means" else rows[chosen])
    return distance_of_gaussians(*(gaussian_of_rows(np.concatenate(part)) for part in parts))


def pick_evenly(steps: Sequence[Step], count: int) -> list[Step]:
    """Pick ``count`` splits of evenly spaced distances, ascending; the default split replaces the one nearest to it."""
    own_first = sorted(steps, key=lambda step: step.kind == "default")  # the last of equal ones is kept
    ordered = sorted({step.halves: step for step in own_first}.values(), key=lambda step: step.distance)
    if count < 2 or len(ordered) < count:
        raise DataError(
            f"picks: got {count}, expected 2 to {len(ordered)}, the number of different splits. Change picks, or lower "
            "per_step if the data set has few classes."
        )
    distances = np.array([step.distance for step in ordered])
    picked: list[int] = []
    for target in np.linspace(distances[0], distances[-1], count):
        free = [i for i in range(len(ordered)) if i not in picked]
        picked.append(min(free, key=lambda i: abs(distances[i] - target)))
    default = next((i for i, step in enumerate(ordered) if step.kind == "default"), None)
    if default is not None and default not in picked:
        inner = picked[1:-1] or picked
        picked[picked.index(min(inner, key=lambda i: abs(i - default)))] = default
    return [ordered[i] for i in sorted(picked)]
