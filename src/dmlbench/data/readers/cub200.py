"""CUB-200-2011 (birds): the lists of the original archive, or bare class folders as mirrors have them."""

import re
from pathlib import Path

import numpy as np

from dmlbench.data.image_table import Listing, Published, table_of_files
from dmlbench.data.readers.layouts import SPLIT_FOLDERS, Layout, first_match, images_by_folder, locate
from dmlbench.data.readers.lists import TextList, read_list
from dmlbench.types import DataError, ImageTable

NUM_TRAIN_CLASSES = 100
NUM_CLASSES = 200
PUBLISHED = Published({"train": (5_864, 100), "test": (5_924, 100)})

USUAL_NAMES = (
    "cub200",
    "cub",
    "cub_200",
    "cub_200_2011",
    "cub200_2011",
    "cub2002011",
    "caltech_ucsd_birds",
    "caltech_ucsd_birds_200_2011",
)
_LISTS = ("images.txt", "image_class_labels.txt", "classes.txt")
_CLASS = "[0-9][0-9][0-9].*"
LAYOUTS = (
    Layout(
        "lists",
        "CUB_200_2011 with images.txt, image_class_labels.txt, classes.txt and images",
        (*_LISTS, f"images|{_CLASS}"),
    ),
    Layout("images", "images with class folders such as 001.Black_footed_Albatross", (f"images/{_CLASS}",)),
    Layout("folders", "class folders such as 001.Black_footed_Albatross", (_CLASS,)),
    Layout("split", "class folders in train and test", (f"train/{_CLASS}", f"test/{_CLASS}")),
    Layout(
        "split_images",
        "class folders in images/train and images/test",
        (f"images/train/{_CLASS}", f"images/test/{_CLASS}"),
    ),
)
REMEDY = "unpack CUB_200_2011.tgz there"


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
    folder, layout = find(root)
    listing = _from_lists(folder, layout) if layout.name == "lists" else _from_folders(folder, layout)
    return table_of_files(listing, published=PUBLISHED if check_counts else None)


def find(root: str | Path) -> tuple[Path, Layout]:
    """The folder of the data set and how it lies there.

    Raises:
        DataError: it is not found, or only some of its three lists are there.
    """
    folder, layout = locate(root, title="CUB-200-2011", usual_names=USUAL_NAMES, layouts=LAYOUTS, remedy=REMEDY)
    present = [name for name in _LISTS if (folder / name).is_file()]
    if 0 < len(present) < len(_LISTS):
        missing = ", ".join(name for name in _LISTS if name not in present)
        raise DataError(
            f"CUB-200-2011 in '{folder}' has {', '.join(present)} but lacks {missing}; put the original lists there "
            "(or remove the others: the class folders alone are enough)"
        )
    return folder, layout


def _from_lists(folder: Path, layout: Layout) -> Listing:
    images = read_list(folder / "images.txt", ("image_id", "path"))
    labels = read_list(folder / "image_class_labels.txt", ("image_id", "class_id"))
    classes = read_list(folder / "classes.txt", ("class_id", "name"))
    names = dict(zip(classes.unique_numbers("class_id").tolist(), classes.texts("name"), strict=True))
    class_of = _classes_of_images(images, labels, names)
    ids = sorted(names)
    is_beside = first_match(folder, f"images/{_CLASS}") is None and first_match(folder, _CLASS) is not None
    return Listing(
        name="cub200",
        root=folder if is_beside else folder / "images",
        layout=layout.description,
        paths=images.paths("path"),
        labels=np.searchsorted(ids, class_of).astype(np.int64),
        class_names=[names[i] for i in ids],
        role=np.where(np.array(class_of) <= NUM_TRAIN_CLASSES, "train", "test"),
    )


def _classes_of_images(images: TextList, labels: TextList, names: dict[int, str]) -> list[int]:
    """[N] published class of each image, which counts from 1."""
    class_ids = labels.numbers("class_id").tolist()
    for row, class_id in enumerate(class_ids):
        if class_id not in names:
            raise DataError(
                f"{labels.where(row)} names the class {class_id}, which has no name in classes.txt; put the original "
                "lists there"
            )
    by_image = dict(zip(labels.unique_numbers("image_id").tolist(), class_ids, strict=True))
    class_of = []
    for row, image_id in enumerate(images.unique_numbers("image_id").tolist()):
        if image_id not in by_image:
            raise DataError(
                f"{images.where(row)} lists the image {image_id}, which has no class in '{labels.file.name}'; put the "
                "original lists there"
            )
        class_of.append(by_image[image_id])
    return class_of


def _from_folders(folder: Path, layout: Layout) -> Listing:
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
    ids = sorted(names)
    return Listing(
        name="cub200",
        root=root,
        layout=layout.description,
        paths=paths,
        labels=np.searchsorted(ids, class_of).astype(np.int64),
        class_names=[names[i] for i in ids],
        role=np.where(np.array(class_of) <= NUM_TRAIN_CLASSES, "train", "test"),
    )


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
