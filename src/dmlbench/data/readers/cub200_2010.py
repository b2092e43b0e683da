"""CUB-200 of 2010 (birds): the archive's images, or bare class folders."""

from pathlib import Path

from dmlbench.data.readers.cub_editions import OF_2010, listed_in_folders
from dmlbench.types import ImageTable

FOLDER = OF_2010
PUBLISHED = OF_2010.published


def cub200_2010(root: str | Path, *, check_counts: bool = True) -> ImageTable:
    """Bird species as classes, 20 to 39 images each; the first 100 of 200 train, the others test.

    The classes are those of ``cub200``, the edition of 2011, and so is the split by classes; the images differ. The
    lists of the archive are for classification and ignored.

    Args:
        root: folder of the data set, or one that holds it under a usual name.
        check_counts: insist on the published 2,990 images of 100 classes to train and 3,043 of 100 to test on.
            False takes a subset: classes without images are left out, and each other one keeps its half.

    Raises:
        DataError: the folder is missing or faulty, it is the edition of 2011, or counts differ.

    Source: P. Welinder et al., "Caltech-UCSD Birds 200", CNS-TR-2010-001, 2010.
    """
    folder, layout = FOLDER.find(root)
    return OF_2010.table(listed_in_folders(folder, layout, OF_2010), layout, check_counts=check_counts)
