"""The protocol of the ooDML study: train-test splits of a file, each with the distance between its halves.

Files are those of ``dmlbench oodml splits`` (JSON), or the study's own (pickles, read without executing them).
"""

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import ConfigDict, Field, field_validator, model_validator

from dmlbench.data.image_table import rows_of_classes
from dmlbench.data.protocols import Protocol
from dmlbench.data.readers.files import read_pickle
from dmlbench.external_files import Schema, validated
from dmlbench.runtime import read_json
from dmlbench.types import (
    ConfigError,
    DataError,
    ImageTable,
    IntArray,
    RetrievalSet,
    Split,
    check_choice,
    closest,
    counted,
    shorten,
)

FORMAT = "dmlbench oodml splits 1"
SELECTIONS = ("official_test", "val")
_REMEDY = "Make a split file with `dmlbench oodml splits`, or use one of the study's pickles."


class GivenSplit(Schema):
    """A train-test split by the names of its classes.

    Attributes:
        kind: "default", "exchanged", "reversed", "removed", or "published".
        distance: squared Fréchet distance between the halves.
        fitted, validation: train classes to train on and to select on; empty where the file has none.
    """

    model_config = ConfigDict(extra="ignore")
    name: str
    kind: str
    distance: float = Field(ge=0)
    train: tuple[str, ...] = Field(min_length=1)
    test: tuple[str, ...] = Field(min_length=1)
    fitted: tuple[str, ...] = ()
    validation: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _select_within_train(self) -> "GivenSplit":
        both = set(self.fitted) & set(self.validation)
        if both or not set(self.fitted) | set(self.validation) <= set(self.train):
            raise ValueError("fitted and validation classes to be disjoint parts of the train half")
        return self


class SplitFile(Schema):
    """A file of splits. ``dataset`` and ``dataset_fingerprint`` are empty where it does not name the data set."""

    model_config = ConfigDict(extra="ignore")
    format: Literal["dmlbench oodml splits 1"]
    dataset: str
    measured_by: str
    splits: tuple[GivenSplit, ...] = Field(min_length=1)
    dataset_fingerprint: str = ""
    sha256: str = ""

    @field_validator("splits")
    @classmethod
    def _differ_in_name(cls, splits: tuple[GivenSplit, ...]) -> tuple[GivenSplit, ...]:
        names = [split.name for split in splits]
        if twice := [name for i, name in enumerate(names) if name in names[:i]]:
            raise ValueError(f"unique names, not two splits named {twice[0]!r}")
        return splits

    def require_of(self, table: ImageTable, path: str | Path) -> None:
        """Raise ``DataError`` if the splits of the file at ``path`` were made of another data set."""
        if self.dataset not in ("", table.name):
            raise DataError(f"{path}: got splits of '{self.dataset}', expected splits of '{table.name}'.")

    def measured_on(self, table: ImageTable) -> str:
        """How the distances were measured, and whether on other images than those of ``table``."""
        is_other = self.dataset_fingerprint not in ("", table.fingerprint)
        return f"{self.measured_by}, ON OTHER IMAGES" if is_other else self.measured_by


def read_splits(path: str | Path) -> SplitFile:
    """Read a file of splits."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise DataError(f"split file {path} is missing. {_REMEDY}")
    stamp = path.stat()
    return _read(path.resolve(), stamp.st_mtime_ns, stamp.st_size)


@lru_cache(maxsize=8)
def _read(path: Path, changed: int, size: int) -> SplitFile:
    content = path.read_bytes()
    try:
        if content.lstrip()[:1] == b"{":
            found = read_json(path)
        else:
            stored = read_pickle(content, name=str(path))
            splits = [_published(str(key), split) for key, split in stored.items()]
            measured_by = "the study, by a ResNet50 with ImageNet weights"
            found = {"format": FORMAT, "dataset": "", "measured_by": measured_by, "splits": splits}
        file = validated(found, SplitFile)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"'{path}' is not a split file, or is damaged ({error}). {_REMEDY}") from error
    return file.model_copy(update={"sha256": hashlib.sha256(content).hexdigest()})


def _published(name: str, split: Mapping[str, Any]) -> dict[str, Any]:
    keys = {"train": "train", "test": "test", "fitted": "split_train", "validation": "split_val"}
    halves = {ours: list(map(str, split.get(theirs, ()))) for ours, theirs in keys.items()}
    return {"name": name, "kind": "published", "distance": float(split["fid"]), **halves}


def rows_of_split(split: GivenSplit, table: ImageTable) -> dict[str, IntArray]:
    """Rows of the images of ``train``, ``test``, ``fitted`` and ``validation``, by the names of their classes.

    Names are compared without punctuation and case. SOP's products are also found by the number that their files' names
    begin with, as the study calls them.
    """
    exact, plain = _classes_by_name(table)
    rows: dict[str, IntArray] = {}
    for key in ("train", "test", "fitted", "validation"):
        names = getattr(split, key)
        found = [exact.get(name, plain.get(_plain(name), -1)) for name in names]
        unknown = [name for name, label in zip(names, found, strict=True) if label < 0]
        if unknown:
            listed, several = shorten([f"'{name}'" for name in unknown]), counted(len(unknown), "class")
            raise DataError(
                f"split {split.name} names {several} that '{table.name}' does not have: {listed}. "
                f"'{unknown[0]}': {closest(unknown[0], table.class_names)} Use splits of this data set."
            )
        rows[key] = rows_of_classes(table, np.array(sorted(set(found)), dtype=np.int64))
    if len(shared := np.intersect1d(rows["train"], rows["test"])):
        name = table.class_names[table.labels[shared[0]]]
        raise DataError(f"the halves of split {split.name} share classes, such as '{name}'. {_REMEDY}")
    return rows


def _plain(name: str) -> str:
    return re.sub(r"[\W_]+", " ", name).strip().lower()


def _classes_by_name(table: ImageTable) -> tuple[dict[str, int], dict[str, int]]:
    """Classes by exact names, and by plain ones that are unique."""
    exact = {name: i for i, name in enumerate(table.class_names)}
    if table.name == "sop":
        numbers = (Path(str(path)).name.partition("_")[0] for path in table.paths)
        exact |= {number: int(label) for number, label in zip(numbers, table.labels, strict=True)}
    plain = [_plain(name) for name in table.class_names]
    counts = Counter(plain)
    return exact, {name: i for i, name in enumerate(plain) if counts[name] == 1}


@dataclass(frozen=True)
class Oodml(Protocol):
    """Splits of a file, one a fold in the order of the file.

    Attributes:
        splits_sha256: of the file's content, which must not change; None accepts any.
        select_on: "official_test" trains on all train classes and selects on the test half, as the study's zero-shot
            runs do (``val_is_test``); "val" trains on a part of the train classes and selects on the others.

    Source: T. Milbich et al., "Characterizing Generalization under Out-Of-Distribution Shifts in Deep Metric Learning",
        NeurIPS 2021, and its public code.
    """

    splits: str
    splits_sha256: str | None = None
    select_on: str = "official_test"
    num_repeats: int = 5
    name: ClassVar[str] = "oodml"
    aggregation: ClassVar[str] = "over_splits"

    def __post_init__(self) -> None:
        check_choice("select_on", self.select_on, SELECTIONS)
        super().__post_init__()

    @property
    def num_folds(self) -> int:
        return len(self._file().splits)

    def _file(self) -> SplitFile:
        file = read_splits(self.splits)
        if self.splits_sha256 not in (None, file.sha256):
            raise ConfigError(
                f"{self.splits} has changed: got SHA-256 {file.sha256[:12]}..., expected "
                f"{str(self.splits_sha256)[:12]}... Restore the former file."
            )
        return file

    def _split(self, table: ImageTable, fold: int) -> Split:
        file = self._file()
        given = file.splits[fold]
        file.require_of(table, self.splits)
        rows = rows_of_split(given, table)
        name = f"{table.name} {self.name} split {given.name}"
        facts: dict[str, float | int | str] = {
            "split": given.name,
            "kind": "default" if _is_own_split(rows, table) else given.kind,
            "distance": given.distance,
            "distance_by": file.measured_on(table),
        }
        test = RetrievalSet(rows["test"])
        if self.select_on == "official_test":
            return Split(name, fold, train=rows["train"], val=test, test=test, val_is_test=True, facts=facts)
        if not given.validation:
            raise ConfigError(
                f"split {given.name} of {self.splits} has no validation classes. Use select_on=official_test."
            )
        return Split(name, fold, train=rows["fitted"], val=RetrievalSet(rows["validation"]), test=test, facts=facts)


def _is_own_split(rows: Mapping[str, IntArray], table: ImageTable) -> bool:
    own = np.flatnonzero(table.role == "train"), np.flatnonzero(table.role != "train")
    return all(np.array_equal(np.sort(rows[key]), half) for key, half in zip(("train", "test"), own, strict=True))


def validation_part(train: Sequence[str], *, share: float = 0.25) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Classes to train on and, the last ``share`` of ``train``, to select on."""
    count = len(train) - int(len(train) * share)
    return tuple(train[:count]), tuple(train[count:])
