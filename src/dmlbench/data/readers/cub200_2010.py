"""CUB-200 of 2010 (birds): the archive's images, or bare class folders."""

from pathlib import Path

from dmlbench.data.readers.cub200 import OF_2010
from dmlbench.types import ImageTable


def cub200_2010(root: str | Path, *, check_counts: bool = True) -> ImageTable:
    """Bird species as classes, 20 to 39 images each; the first 100 of 200 train, the others test.

    Classes and halves are those of ``cub200``; the images differ. The archive's lists, for classification, are ignored.
    """
    return OF_2010.table(root, check_counts=check_counts)
