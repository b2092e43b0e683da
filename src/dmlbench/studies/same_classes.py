"""The protocol of studies whose training and test images are of the same classes."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dmlbench.data.protocols import Protocol
from dmlbench.types import DataError, ImageTable, RetrievalSet, Split


@dataclass(frozen=True)
class SameClasses(Protocol):
    """Train on images under ``train/`` and test on images under ``test/``; the last step is tested."""

    num_repeats: int = 1
    num_folds: ClassVar[int] = 1
    name: ClassVar[str] = "same_classes"
    aggregation: ClassVar[str] = "mean_of_test"

    def split(self, table: ImageTable, *, fold: int) -> Split:
        parts = [np.flatnonzero(np.char.startswith(table.paths, f"{part}/")) for part in ("train", "test")]
        classes = [np.unique(table.labels[rows]) for rows in parts]
        if not len(parts[0]) or not np.array_equal(classes[0], classes[1]):
            raise DataError(
                f"protocol '{self.name}': got {len(parts[0]):,} images of '{table.name}' in train/ and "
                f"{len(parts[1]):,} in test/, expected the same classes in train/ and test/. Use a classification "
                "data set, such as cifar10."
            )
        train, test = (rows.astype(np.int64) for rows in parts)
        return Split(f"{table.name} {self.name}", fold, train=train, val=None, test=RetrievalSet(test))
