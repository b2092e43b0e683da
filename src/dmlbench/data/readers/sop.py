"""Stanford Online Products: the lists ``Ebay_train.txt`` and ``Ebay_test.txt`` and the folders of its categories."""

from pathlib import Path

import numpy as np

from dmlbench.data.image_table import Listing, Published, shorten, table_of_files
from dmlbench.data.readers.layouts import DataFolder, Layout
from dmlbench.data.readers.lists import read_list
from dmlbench.types import DataError, ImageTable, Originals

NUM_CLASSES = 22_634
PUBLISHED = Published({"train": (59_551, 11_318), "test": (60_502, 11_316)})

FOLDER = DataFolder(
    "Stanford Online Products",
    ("sop", "online_products", "stanford_online_product", "stanford_online_products"),
    (
        Layout(
            "original",
            "Stanford_Online_Products with Ebay_train.txt, Ebay_test.txt and folders such as bicycle_final",
            ("Ebay_train.txt", "Ebay_test.txt"),
        ),
        Layout(
            "info_files",
            "Info_Files with Ebay_train.txt and Ebay_test.txt, and images with folders such as bicycle_final",
            ("Info_Files/Ebay_train.txt", "Info_Files/Ebay_test.txt"),
        ),
    ),
    "unpack Stanford_Online_Products.zip there",
)
_COLUMNS = ("image_id", "class_id", "super_class_id", "path")


def sop(root: str | Path, *, check_counts: bool = True) -> ImageTable:
    """Products as classes; the two lists say which train and which test (Oh Song et al. 2016).

    ``super_labels`` are the categories (bicycles, cabinets, ...), numbered from 0.

    Args:
        root: folder of the data set, or one that holds it under a usual name.
        check_counts: insist on the published 59,551 images of 11,318 classes to train and 60,502 of 11,316 to test
            on, with classes 1 to 22,634. False takes a subset.

    Raises:
        DataError: a list is missing or faulty, a class is in both lists, images are missing, or counts differ.

    Source: H. Oh Song et al., "Deep Metric Learning via Lifted Structured Feature Embedding", CVPR 2016.
    """
    folder, layout = FOLDER.find(root)
    lists = folder if layout.name == "original" else folder / "Info_Files"
    rows = {role: read_list(lists / f"Ebay_{role}.txt", _COLUMNS, has_header=True) for role in ("train", "test")}
    for part in rows.values():
        part.numbers("image_id")
        part.check_once("image_id")
    class_ids = {role: part.numbers("class_id") for role, part in rows.items()}
    shared = np.intersect1d(class_ids["train"], class_ids["test"])
    if len(shared):
        raise DataError(
            f"Ebay_train.txt and Ebay_test.txt in '{lists}' share {len(shared):,} classes: "
            f"{shorten(shared.astype(np.str_))}; metric learning tests on unseen classes, so put the original lists "
            "there"
        )
    ids, labels = np.unique(np.concatenate(list(class_ids.values())), return_inverse=True)
    paths = [path for part in rows.values() for path in part.paths("path")]
    listing = Listing(
        name="sop",
        root=_image_root(folder, paths[0]),
        layout=layout.description,
        paths=paths,
        labels=labels.astype(np.int64),
        class_names=[str(i) for i in ids.tolist()],
        role=np.repeat(list(rows), [len(part) for part in rows.values()]),
        super_labels=np.concatenate([part.numbers("super_class_id") for part in rows.values()]) - 1,
        originals=Originals(),
    )
    table = table_of_files(listing, published=PUBLISHED, check_counts=check_counts)
    if check_counts and ids[-1] != NUM_CLASSES:
        raise DataError(
            f"the lists in '{lists}' name classes up to {ids[-1]:,}, published are 1 to {NUM_CLASSES:,}; put the "
            "original lists there"
        )
    return table


def _image_root(folder: Path, first_path: str) -> Path:
    """The folder of the categories' folders: ``images``, or that of the lists."""
    category = first_path.split("/")[0]
    has_own = (folder / category).exists()
    return folder / "images" if (folder / "images").is_dir() and not has_own else folder
