"""The protocol of studies whose training and test images are of the same classes."""

import logging
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dmlbench.data.protocols import Protocol
from dmlbench.types import DataError, ImageTable, RetrievalSet, Split, counted

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SameClasses(Protocol):
    """Train on images under ``train/`` and test on images under ``test/``; the last step is tested."""

    num_repeats: int = 1
    num_folds: ClassVar[int] = 1
    name: ClassVar[str] = "same_classes"
    aggregation: ClassVar[str] = "mean_of_test"
    shares_classes: ClassVar[bool] = True

    def _split(self, table: ImageTable, fold: int) -> Split:
        tops = np.array([path.split("/")[0].casefold() for path in table.paths.tolist()])
        parts = [np.flatnonzero(tops == part) for part in ("train", "test")]
        classes = [np.unique(table.labels[rows]) for rows in parts]
        if not len(parts[0]) or not np.array_equal(classes[0], classes[1]):
            raise DataError(
                f"protocol '{self.name}': got {len(parts[0]):,} images of '{table.name}' in train/ and "
                f"{len(parts[1]):,} in test/, expected the same classes in train/ and test/. Use a classification "
                "data set, such as cifar10."
            )
        if others := len(table) - sum(map(len, parts)):
            found = counted(others, "image")
            log.warning("%s: %s of '%s' outside of train/ and test/ not used", self.name, found, table.name)
        train, test = (rows.astype(np.int64) for rows in parts)
        return Split(f"{table.name} {self.name}", fold, train=train, val=None, test=RetrievalSet(test))
