"""Protocols: the classes of training, selection and test, and how runs are aggregated.

Classes are taken in published order (ids of the table), contiguous, never shuffled.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any, ClassVar

import numpy as np

from dmlbench.data.image_table import rows_of_classes
from dmlbench.types import ConfigError, DataError, ImageTable, IntArray, RetrievalSet, Split, check_fold

_MOST = 1000
"""Folds, repeats or parts of a protocol."""


class Protocol:
    """Base class of protocols. A protocol is a frozen dataclass that implements ``_split(table, fold)``. This method
    returns the ``Split`` of a fold: rows of its training, validation and test images.

    Attributes:
        num_folds: number of ways to split the classes into training, validation and test.
        num_repeats: number of runs of each fold, each with another seed.
        aggregation: name of the rule that computes the scores of a config from its runs. It is a key of
            ``results.rules.RULES``, or the importable name of your own ``AggregationRule``.
        leaves_plan: whether a run saves a plan (number of steps and learning-rate drops) for a later run. For example,
            stage 1 of ``two_stage`` saves the plan for stage 2.
    """

    name: ClassVar[str]
    least_folds: ClassVar[int] = 1
    shares_classes: ClassVar[bool] = False  # between training and test

    def __post_init__(self) -> None:
        for count, least in (("num_folds", self.least_folds), ("num_repeats", 1), ("num_parts", 2)):
            if not least <= (value := getattr(self, count, least)) <= _MOST:
                raise ConfigError(f"{count} of protocol '{self.name}': got {value}, expected {least} to {_MOST}.")

    @property
    def num_folds(self) -> int:
        raise NotImplementedError

    @property
    def num_repeats(self) -> int:
        raise NotImplementedError

    @property
    def aggregation(self) -> str:
        raise NotImplementedError

    @property
    def leaves_plan(self) -> bool:
        return False

    @property
    def planned_by(self) -> dict[str, Any] | None:
        """Settings in which the earlier run, which saves the plan, differs from this protocol.

        For example, stage 2 of ``two_stage`` follows the plan of stage 1, so ``planned_by`` is ``{"stage": 1}``. The
        value is None if the protocol follows no plan.
        """
        return None

    def split(self, table: ImageTable, *, fold: int) -> Split:
        """Return the training, validation and test images of one fold.

        Raises an error if a set is empty, if sets share a class, or if no query of a set has a positive.
        """
        self.check_fold(fold)
        return check_split(self._split(table, fold), table, shares_classes=self.shares_classes)

    def check_fold(self, fold: int) -> None:
        check_fold(fold, self.num_folds)

    def _split(self, table: ImageTable, fold: int) -> Split:
        raise NotImplementedError


@dataclass(frozen=True)
class Mlrc(Protocol):
    """The protocol of "A Metric Learning Reality Check" as the GSP paper runs it.

    The C train classes are cut at floor(i C / folds); fold 0 validates on the last part, fold 1 on the one before it.

    Source: K. Musgrave, S. Belongie, S.-N. Lim, "A Metric Learning Reality Check", ECCV 2020; fold edges of
        Y. Z. Gürbüz, O. Şener, A. A. Alatan, "Generalized Sum Pooling for Metric Learning", ICCV 2023 (public code).
    """

    num_folds: int = 4
    num_repeats: int = 3
    name: ClassVar[str] = "mlrc"
    aggregation: ClassVar[str] = "collections"
    least_folds: ClassVar[int] = 2

    def _split(self, table: ImageTable, fold: int) -> Split:
        parts = _without_part(table, self.num_folds, -1 - fold)
        return Split(f"{table.name} {self.name} fold {fold}", fold, *parts, test_set(table))


@dataclass(frozen=True)
class MlrcMusgrave(Mlrc):
    """The same idea with the folds of Musgrave et al.'s own code.

    The published halves are not used: the first T = num_classes // 2 classes train, the others test. Fold k trains on
    the T - V classes, V = floor(T / folds), from floor(k T / folds) on, wrapping around, and validates on the V that
    follow; so a few classes are never validated on when the number of folds does not divide T.

    Source: K. Musgrave, S. Belongie, S.-N. Lim, "A Metric Learning Reality Check", ECCV 2020 (public code).
    """

    name: ClassVar[str] = "mlrc_musgrave"

    def _split(self, table: ImageTable, fold: int) -> Split:
        if np.isin(table.role, ("query", "gallery")).any():
            raise ConfigError(
                f"protocol '{self.name}' cannot split the query and gallery sets of '{table.name}'. Use protocol=mlrc."
            )
        half = table.num_classes // 2
        _check_enough(table, half, at_least=self.num_folds)
        ring = (np.arange(half) + fold * half // self.num_folds) % half
        kept = half - half // self.num_folds
        classes = ring[:kept], ring[kept:], np.arange(half, table.num_classes)
        train, val, test = (rows_of_classes(table, part) for part in classes)
        return Split(f"{table.name} {self.name} fold {fold}", fold, train, RetrievalSet(val), RetrievalSet(test))


@dataclass(frozen=True)
class Conventional(Protocol):
    """Train on the complete train half; select on the test half, as older papers did (``val_is_test``: optimistic)."""

    num_repeats: int = 3
    num_folds: ClassVar[int] = 1
    name: ClassVar[str] = "conventional"
    aggregation: ClassVar[str] = "best_and_mean"

    def _split(self, table: ImageTable, fold: int) -> Split:
        test = test_set(table)
        train = _train_rows(table, _train_classes(table, at_least=1))
        return Split(f"{table.name} {self.name}", fold, train, val=test, test=test, val_is_test=True)


@dataclass(frozen=True)
class Hpo(Protocol):
    """For choosing hyperparameters: train on all but one of the contiguous parts of the train half, validate on that.

    The C train classes are cut at floor(i C / num_parts). The test half is out of reach (``test`` is None).
    """

    num_parts: int = 5
    held_out_part: int = 4
    num_repeats: int = 3
    num_folds: ClassVar[int] = 1
    name: ClassVar[str] = "hpo"
    aggregation: ClassVar[str] = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.held_out_part < self.num_parts:
            raise ConfigError(f"held_out_part: got {self.held_out_part}, expected 0 to {self.num_parts - 1}.")

    def _split(self, table: ImageTable, fold: int) -> Split:
        parts = _without_part(table, self.num_parts, self.held_out_part)
        return Split(f"{table.name} {self.name} part {self.held_out_part}", fold, *parts, test=None)


@dataclass(frozen=True)
class HeldOut(Protocol):
    """Train on all but the last of the parts of the train half (as ``Hpo``), select on that, test once."""

    num_parts: int = 2
    num_repeats: int = 3
    num_folds: ClassVar[int] = 1
    name: ClassVar[str] = "held_out"
    aggregation: ClassVar[str] = "mean_of_test"

    def _split(self, table: ImageTable, fold: int) -> Split:
        parts = _without_part(table, self.num_parts, -1)
        return Split(f"{table.name} {self.name}", fold, *parts, test_set(table))


@dataclass(frozen=True)
class TwoStage(Protocol):
    """Find the length of the training and its rates on one half of the train classes, then train on all with them.

    Stage 1 trains on the first half of the train classes and validates on the second. Stage 2 follows its plan (see
    ``training.stage_plan``): it trains on all train classes without validation and is tested once at its end.

    Attributes:
        stage: 1 or 2; stage 2 needs stage 1 of the same config and repeat.

    Source: E. W. Teh, T. DeVries, G. W. Taylor, "ProxyNCA++", ECCV 2020, section 4.1.
    """

    stage: int = 1
    num_repeats: int = 5
    num_folds: ClassVar[int] = 1
    name: ClassVar[str] = "two_stage"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stage not in (1, 2):
            raise ConfigError(f"stage of protocol '{self.name}': got {self.stage}, expected 1 or 2.")

    @property
    def aggregation(self) -> str:
        return "mean" if self.stage == 1 else "mean_of_test"

    @property
    def leaves_plan(self) -> bool:
        return self.stage == 1

    @property
    def planned_by(self) -> dict[str, Any] | None:
        return {"stage": 1} if self.stage == 2 else None

    def _split(self, table: ImageTable, fold: int) -> Split:
        name = f"{table.name} {self.name} stage {self.stage}"
        if self.stage == 1:
            return Split(name, fold, *_without_part(table, 2, -1), test=None)
        train = _train_rows(table, _train_classes(table, at_least=2))
        return Split(name, fold, train, val=None, test=test_set(table))


def check_split(split: Split, table: ImageTable, *, shares_classes: bool = False) -> Split:
    """The split itself, if its sets are not empty, share no classes (or may), and have a query with a positive.

    Queries without a positive are legal: evaluation skips and counts them.
    """
    sets = {"training": split.train}
    if split.val is not None:
        sets["validation"] = split.val.rows
    if split.test is not None:
        sets["test"] = split.test.rows
    for what, rows in sets.items():
        if len(rows) == 0:
            raise DataError(
                f"the {what} set of {split.name} is empty. Data set '{table.name}' is too small for this protocol."
            )
        if len(np.unique(rows)) < len(rows):
            raise DataError(f"the {what} set of {split.name} has a row twice, expected each once.")
    for first, second in combinations(sets, 2):
        shared = np.intersect1d(table.labels[sets[first]], table.labels[sets[second]])
        if len(shared) and not shares_classes and not (split.val_is_test and first == "validation"):
            raise DataError(
                f"the {first} and {second} sets of {split.name} share {len(shared)} classes, such as "
                f"'{table.class_names[shared[0]]}', expected none."
            )
    for what, retrieval in (("validation", split.val), ("test", split.test)):
        if retrieval is not None and not _has_positive(retrieval, table.labels):
            raise DataError(
                f"no query in the {what} set of {split.name} has a positive. Use classes of at least two images."
            )
    return split


def _has_positive(retrieval: RetrievalSet, labels: IntArray) -> bool:
    if retrieval.gallery is None:
        return bool((np.unique(labels[retrieval.query], return_counts=True)[1] > 1).any())
    return bool(np.isin(labels[retrieval.query], labels[retrieval.gallery]).any())


def _train_classes(table: ImageTable, *, at_least: int) -> IntArray:
    classes = np.unique(table.labels[table.role == "train"])
    _check_enough(table, len(classes), at_least=at_least)
    return classes


def _parts(classes: IntArray, count: int) -> list[IntArray]:
    """Contiguous parts of C classes, cut at floor(i C / count)."""
    edges = [i * len(classes) // count for i in range(count + 1)]
    return [classes[start:end] for start, end in pairwise(edges)]


def _without_part(table: ImageTable, count: int, which: int) -> tuple[IntArray, RetrievalSet]:
    """Of ``count`` parts of the train classes: rows of all but part ``which``, and that part to validate on."""
    classes = _train_classes(table, at_least=count)
    held_out = _parts(classes, count)[which]
    return _train_rows(table, np.setdiff1d(classes, held_out)), RetrievalSet(_train_rows(table, held_out))


def _train_rows(table: ImageTable, classes: IntArray) -> IntArray:
    rows = rows_of_classes(table, classes)
    return rows[table.role[rows] == "train"]


def test_set(table: ImageTable) -> RetrievalSet:
    """Images to test on: queries and a gallery, or one set; raises DataError if roles exclude each other."""
    query, gallery, test = (np.flatnonzero(table.role == role) for role in ("query", "gallery", "test"))
    if len(test) and len(query) + len(gallery):
        raise DataError(
            f"data set '{table.name}' has both the role test and the roles query or gallery. Use one or the other."
        )
    if len(query) + len(gallery) == 0:
        return RetrievalSet(test)
    if len(query) == 0 or len(gallery) == 0:
        raise DataError(
            f"data set '{table.name}': got {len(query)} query and {len(gallery)} gallery images, expected both."
        )
    return RetrievalSet(query, gallery)


def _check_enough(table: ImageTable, count: int, *, at_least: int) -> None:
    if count < at_least:
        raise DataError(f"data set '{table.name}': got {count} train classes, expected {at_least} or more.")


def class_index(table: ImageTable, rows: Sequence[int] | IntArray) -> IntArray:
    """[table.num_classes] numbers 0..C-1 of the classes that occur in ``rows``, in id order; -1 for the others."""
    present = np.unique(table.labels[np.asarray(rows, dtype=np.int64)])
    index = np.full(table.num_classes, -1, dtype=np.int64)
    index[present] = np.arange(len(present))
    return index
