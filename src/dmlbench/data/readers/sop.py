"""Stanford Online Products: the lists ``Ebay_train.txt`` and ``Ebay_test.txt`` and the folders of its categories."""

from pathlib import Path

import numpy as np

from dmlbench.data.image_table import Listing, Published
from dmlbench.data.readers.files import read_list
from dmlbench.data.readers.layouts import Archive, DataFolder, Layout, resolve
from dmlbench.types import DataError, ImageTable, Originals

NUM_CLASSES = 22_634
_LISTS = {role: f"Ebay_{role}.txt|Info_Files/Ebay_{role}.txt" for role in ("train", "test")}
_COLUMNS = ("image_id", "class_id", "super_class_id", "path")


def sop(root: str | Path, *, check_counts: bool = True) -> ImageTable:
    """Products as classes; the two lists say which train and which test (Oh Song et al. 2016).

    ``super_labels`` are the categories (bicycles, cabinets, ...), numbered from 0.
    """
    table = FOLDER.table(root, check_counts=check_counts)
    last = max(map(int, table.class_names))
    if check_counts and last != NUM_CLASSES:
        raise DataError(
            f"lists in '{table.root}': got classes up to {last:,}, expected the published 1 to {NUM_CLASSES:,}. "
            "Replace them with the original lists."
        )
    return table


def _of_lists(folder: Path) -> Listing:
    files = {role: resolve(folder, marker) for role, marker in _LISTS.items()}
    rows = {role: read_list(file, _COLUMNS, has_header=True) for role, file in files.items()}
    for part in rows.values():
        part.numbers("image_id")
        part.check_unique("image_id")
    ids, labels = np.unique(np.concatenate([part.numbers("class_id") for part in rows.values()]), return_inverse=True)
    paths = [path for part in rows.values() for path in part["path"]]
    is_apart = (folder / "images").is_dir() and not (folder / paths[0].split("/")[0]).exists()
    return Listing(
        root=folder / "images" if is_apart else folder,  # of the categories' folders
        paths=paths,
        labels=labels,
        class_names=list(map(str, ids)),
        role=np.repeat(list(rows), [len(part) for part in rows.values()]),
        super_labels=np.concatenate([part.numbers("super_class_id") for part in rows.values()]) - 1,
        originals=Originals(),
    )


FOLDER = DataFolder(
    name="sop",
    title="Stanford Online Products",
    usual_names=("sop", "online_products", "stanford_online_product", "stanford_online_products"),
    layouts=(
        Layout(
            "Ebay_train.txt and Ebay_test.txt (there or in Info_Files) and folders such as bicycle_final (there or in "
            "images)",
            tuple(_LISTS.values()),
            _of_lists,
        ),
    ),
    remedy="Unpack Stanford_Online_Products.zip there",
    published=Published({"train": (59_551, 11_318), "test": (60_502, 11_316)}),
    home="https://cvgl.stanford.edu/projects/lifted_struct/",
    terms="research; the images belong to the sellers who put them on eBay",
    citation="H. Oh Song et al., Deep Metric Learning via Lifted Structured Feature Embedding, CVPR 2016",
    alternatives=((Archive("Stanford_Online_Products.zip", "7f73d41a2f44250d4779881525aea32e"),),),
    by_hand="get Stanford_Online_Products.zip from cvgl.stanford.edu/projects/lifted_struct",
    mirrors=("http://ftp.cs.stanford.edu/cs/cvgl/", "ftp://cs.stanford.edu/cs/cvgl/"),
)
