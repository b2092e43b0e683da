"""Training and test images of the same classes, as some studies look at: no metric learning on unseen classes."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dmlbench.data.protocols import Protocol
from dmlbench.types import DataError, ImageTable, RetrievalSet, Split


@dataclass(frozen=True)
class SameClasses(Protocol):
    """Train on a data set's published training part and test on its published test part, of the same classes.

    The parts are told by the beginnings of the images' names, ``train/`` and ``test/``. Nothing is selected: the
    training ends with its last step.
    """

    num_repeats: int = 1
    num_folds: ClassVar[int] = 1
    name: ClassVar[str] = "same_classes"
    aggregation: ClassVar[str] = "mean_of_test"

    def split(self, table: ImageTable, *, fold: int) -> Split:
        """The two parts; the check that classes are disjoint is not for this protocol.

        Raises:
            DataError: a part is empty, or has classes of its own.
        """
        parts = [np.flatnonzero(np.char.startswith(table.paths, f"{part}/")) for part in ("train", "test")]
        classes = [np.unique(table.labels[rows]) for rows in parts]
        if not len(parts[0]) or not np.array_equal(classes[0], classes[1]):
            raise DataError(
                f"protocol '{self.name}' needs images of the same classes in train/ and test/, which '{table.name}' "
                f"does not have ({len(parts[0]):,} and {len(parts[1]):,} images); use a data set that was published "
                "for classification, such as cifar10"
            )
        train, test = (rows.astype(np.int64) for rows in parts)
        return Split(f"{table.name} {self.name}", fold, train=train, val=None, test=RetrievalSet(test))
