"""CUB-200-2011 (birds): the lists of the original archive, or bare class folders as mirrors have them."""

import re
from pathlib import Path

import numpy as np

from dmlbench.data.image_table import Listing, Published, table_of_files
from dmlbench.data.readers.layouts import SPLIT_FOLDERS, DataFolder, Layout, first_match, images_by_folder
from dmlbench.data.readers.lists import read_list
from dmlbench.types import DataError, ImageTable

NUM_TRAIN_CLASSES = 100
NUM_CLASSES = 200
PUBLISHED = Published({"train": (5_864, 100), "test": (5_924, 100)})

_LISTS = ("images.txt", "image_class_labels.txt", "classes.txt")
_CLASS = "[0-9][0-9][0-9].*"
_FOLDERS = "class folders such as 001.Black_footed_Albatross"


def _has_no_list(folder: Path) -> bool:
    """Where some of the lists are, the others are missing: class folders alone are not what is meant."""
    return not any((folder / name).is_file() for name in _LISTS)


FOLDER = DataFolder(
    "CUB-200-2011",
    ("cub200", "cub", "cub_200_2011", "caltech_ucsd_birds", "caltech_ucsd_birds_200_2011"),
    (
        Layout(
            "lists",
            "CUB_200_2011 with images.txt, image_class_labels.txt, classes.txt and images",
            (*_LISTS, f"images|{_CLASS}"),
        ),
        Layout(
            "images",
            "images with class folders such as 001.Black_footed_Albatross",
            (f"images/{_CLASS}",),
            _has_no_list,
        ),
        Layout("folders", "class folders such as 001.Black_footed_Albatross", (_CLASS,), _has_no_list),
        Layout("split", "class folders in train and test", (f"train/{_CLASS}", f"test/{_CLASS}"), _has_no_list),
        Layout(
            "split_images",
            "class folders in images/train and images/test",
            (f"images/train/{_CLASS}", f"images/test/{_CLASS}"),
            _has_no_list,
        ),
    ),
    "unpack CUB_200_2011.tgz there",
)


def cub200(root: str | Path, *, check_counts: bool = True) -> ImageTable:
    """Bird species as classes; the first 100 of 200 train, the others test (Oh Song et al. 2016).

    ``train_test_split.txt`` and folders ``train`` and ``test`` are the split for classification: the former is not
    looked at, the latter are merged.

    Args:
        root: folder of the data set, or one that holds it under a usual name.
        check_counts: insist on the published 5,864 images of 100 classes to train and 5,924 of 100 to test on.
            False takes a subset: classes without images are left out, and each other one keeps its half.

    Raises:
        DataError: a list or folder is missing or at fault, images are missing, or counts differ.

    Source: C. Wah et al., "The Caltech-UCSD Birds-200-2011 Dataset", CNS-TR-2011-001, 2011; halves by
        H. Oh Song et al., "Deep Metric Learning via Lifted Structured Feature Embedding", CVPR 2016.
    """
    folder, layout = FOLDER.find(root)
    listed = _of_lists(folder) if layout.name == "lists" else _of_folders(folder, layout)
    images_root, paths, class_of, names = listed
    ids = sorted(names)
    listing = Listing(
        name="cub200",
        root=images_root,
        layout=layout.description,
        paths=paths,
        labels=np.searchsorted(ids, class_of).astype(np.int64),
        class_names=[names[i] for i in ids],
        role=np.where(np.array(class_of) <= NUM_TRAIN_CLASSES, "train", "test"),
    )
    return table_of_files(listing, published=PUBLISHED if check_counts else None)


_Listed = tuple[Path, list[str], list[int], dict[int, str]]  # folder of the images, paths, class of each, class names


def _of_lists(folder: Path) -> _Listed:
    images = read_list(folder / "images.txt", ("image_id", "path"))
    labels = read_list(folder / "image_class_labels.txt", ("image_id", "class_id"))
    classes = read_list(folder / "classes.txt", ("class_id", "name"))
    for rows, column in ((images, "image_id"), (labels, "image_id"), (classes, "class_id")):
        rows.numbers(column)
        rows.check_once(column)
    class_ids = labels.numbers("class_id").tolist()
    labels.check_known("class_id", classes.texts("class_id"), "classes.txt")
    class_by_image = dict(zip(labels.texts("image_id"), class_ids, strict=True))
    images.check_known("image_id", class_by_image, labels.file.name)
    is_beside = first_match(folder, f"images/{_CLASS}") is None and first_match(folder, _CLASS) is not None
    return (
        folder if is_beside else folder / "images",
        images.paths("path"),
        [class_by_image[image] for image in images.texts("image_id")],
        dict(zip(classes.numbers("class_id").tolist(), classes.texts("name"), strict=True)),
    )


def _of_folders(folder: Path, layout: Layout) -> _Listed:
    root = folder / "images" if layout.name in ("images", "split_images") else folder
    parts = [f"{part}/" for part in SPLIT_FOLDERS if (root / part).is_dir()] if "split" in layout.name else [""]
    names: dict[int, str] = {}
    place_of: dict[str, str] = {}
    paths, class_of = [], []
    for part in parts:
        for name, images in images_by_folder(root / part).items():
            class_id = _class_id(root / part / name)
            if names.setdefault(class_id, name) != name:
                raise DataError(
                    f"class {class_id} of CUB-200-2011 has the folders '{names[class_id]}' and '{name}' in '{root}'; "
                    "keep the one of the original"
                )
            for image in images:
                path = f"{part}{name}/{image}"
                if (other := place_of.setdefault(f"{name}/{image}", path)) != path:
                    raise DataError(f"'{path}' lies in '{root}' a second time as '{other}'; keep one of them")
                paths.append(path)
                class_of.append(class_id)
    return root, paths, class_of, names


def _class_id(folder: Path) -> int:
    match = re.fullmatch(r"(\d{3})\..+", folder.name, re.ASCII)
    if match is None:
        raise DataError(
            f"'{folder}' holds images but is no class of CUB-200-2011 (such as 001.Black_footed_Albatross); rename it "
            "as the original or move it away"
        )
    class_id = int(match[1])
    if not 1 <= class_id <= NUM_CLASSES:
        raise DataError(
            f"'{folder}' is class {class_id}, but those of CUB-200-2011 count from 1 to {NUM_CLASSES}; use the "
            "original names"
        )
    return class_id
