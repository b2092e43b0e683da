"""CUB-200 of 2010 (birds): the archive's images, or bare class folders."""

from pathlib import Path

from dmlbench.data.cub200 import listing_of_folders
from dmlbench.data.cub_editions import OF_2010, check_edition, folder_layouts, locate_edition
from dmlbench.data.layouts import Layout
from dmlbench.data.table import Published, table_of_files
from dmlbench.types import ImageTable

PUBLISHED = Published({"train": (2_990, 100), "test": (3_043, 100)})
LAYOUTS = folder_layouts(OF_2010)


def cub200_2010(root: str | Path, *, check_counts: bool = True) -> ImageTable:
    """Bird species as classes, 20 to 39 images each; the first 100 of 200 train, the others test.

    The classes are those of ``cub200``, the edition of 2011, and so is the split by classes; the images are not. The
    lists of the archive split for classification and are not looked at.

    Args:
        root: folder of the data set, or one that holds it under a usual name.
        check_counts: insist on the published 2,990 images of 100 classes to train and 3,043 of 100 to test on.
            False takes a subset: classes without images are left out, and each other one keeps its half.

    Raises:
        DataError: the folder is missing or at fault, it is the edition of 2011, or counts differ.

    Source: P. Welinder et al., "Caltech-UCSD Birds 200", CNS-TR-2010-001, 2010.
    """
    folder, layout = find(root)
    listing = check_edition(listing_of_folders(folder, layout, OF_2010), OF_2010)
    return table_of_files(listing, published=PUBLISHED if check_counts else None)


def find(root: str | Path) -> tuple[Path, Layout]:
    """The folder of the data set and how it lies there.

    Raises:
        DataError: it is not found; where the edition of 2011 is, the message says so.
    """
    return locate_edition(root, OF_2010, LAYOUTS)
