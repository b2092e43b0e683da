"""CUB-200-2011 (birds): the lists of the original archive, or bare class folders as mirrors have them."""

from pathlib import Path

import numpy as np

from dmlbench.data.readers.cub_editions import CLASS_FOLDER, OF_2011, Listed, listed_in_folders
from dmlbench.data.readers.layouts import first_match
from dmlbench.data.readers.lists import boxes_by_name, read_list
from dmlbench.types import ImageTable, Originals

FOLDER = OF_2011
PUBLISHED = OF_2011.published


def cub200(root: str | Path, *, check_counts: bool = True) -> ImageTable:
    """Bird species as classes; the first 100 of 200 train, the others test (Oh Song et al. 2016).

    ``train_test_split.txt`` and folders ``train`` and ``test`` are the split for classification: the former is
    ignored, the latter are merged.

    Args:
        root: folder of the data set, or one that holds it under a usual name.
        check_counts: insist on the published 5,864 images of 100 classes to train and 5,924 of 100 to test on.
            False takes a subset: classes without images are left out, and each other one keeps its half.

    Raises:
        DataError: a list or folder is missing or faulty, images are missing, it is the edition of 2010, or counts
            differ.

    Source: C. Wah et al., "The Caltech-UCSD Birds-200-2011 Dataset", CNS-TR-2011-001, 2011; halves by
        H. Oh Song et al., "Deep Metric Learning via Lifted Structured Feature Embedding", CVPR 2016.
    """
    folder, layout = FOLDER.find(root)
    listed = _of_lists(folder) if layout.name == "lists" else listed_in_folders(folder, layout, OF_2011)
    return OF_2011.table(listed, layout, check_counts=check_counts)


def _of_lists(folder: Path) -> Listed:
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
    has_images_folder = first_match(folder, f"images/{CLASS_FOLDER}") or not first_match(folder, CLASS_FOLDER)
    return Listed(
        folder / "images" if has_images_folder else folder,
        images.paths("path"),
        [class_by_image[image] for image in images.texts("image_id")],
        dict(zip(classes.numbers("class_id").tolist(), classes.texts("name"), strict=True)),
        _originals(folder / "bounding_boxes.txt", images.texts("image_id")),
    )


def _originals(file: Path, image_ids: list[str]) -> Originals:
    """The boxes, if their list is there; only the check of the images needs them.

    Of 51 published images that were looked at, the JPEGs of 48 keep colors at full resolution.
    """
    if not file.is_file():
        return Originals(full_color=True)
    rows = read_list(file, ("image_id", "x", "y", "width", "height"))
    left, top, width, height = (rows.decimals(column) for column in ("x", "y", "width", "height"))
    edges = np.stack([left, top, left + width, top + height], axis=1)
    return Originals(boxes=boxes_by_name(rows, "image_id", edges, image_ids), boxes_from=file.name, full_color=True)
