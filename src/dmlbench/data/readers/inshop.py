"""In-shop Clothes Retrieval (DeepFashion): ``list_eval_partition.txt`` with train, query and gallery images."""

from pathlib import Path

import numpy as np

from dmlbench.data.image_table import Listing, Published, table_of_files
from dmlbench.data.readers.layouts import DataFolder, Layout, resolve
from dmlbench.data.readers.lists import TextList, boxes_by_name, read_list
from dmlbench.types import DataError, ImageTable, IntArray, Originals

PUBLISHED = Published({"train": (25_882, 3_997), "query": (14_218, 3_985), "gallery": (12_612, 3_985)})

_LIST = "|".join(f"{place}list_eval_partition.txt" for place in ("Eval/", "Anno/", ""))
# The list says img/WOMEN/...; the images of the papers are those of img.zip, so these come before img_highres.
_PLACES = "img Img/img img/img Img img_highres Img/img_highres img_highres/img_highres Img/img_highres/img_highres"
_BOXES = [f"{place}list_bbox_inshop.txt" for place in ("Anno/", "Eval/", "")]
_SIZE = (256, 256)  # of img.zip
_IMAGES = "|".join(f"{place}/*MEN" for place in _PLACES.split())
FOLDER = DataFolder(
    "In-shop",
    (
        *("inshop", "in_shop_clothes_retrieval_benchmark", "in_shop_clothes_retrieval", "in_shop_clothes"),
        *("deepfashion", "deepfashion_inshop"),
    ),
    (
        Layout(
            "lists",
            "list_eval_partition.txt (there, in Eval or in Anno) and folders MEN and WOMEN in img or img_highres "
            "(there or in Img)",
            (_LIST, _IMAGES),
        ),
    ),
    "put list_eval_partition.txt and the unpacked img.zip there",
)
_COLUMNS = ("image_name", "item_id", "evaluation_status")
_ROLES = ("train", "query", "gallery")


def inshop(root: str | Path, *, check_counts: bool = True) -> ImageTable:
    """Garments as classes; the list assigns training, query and gallery images (Liu et al. 2016).

    ``super_labels`` number the pairs of gender and category of the paths (``WOMEN/Dresses``) in sorted order.

    Args:
        root: folder of the data set, or one that holds it under a usual name.
        check_counts: insist on the published 25,882 images of 3,997 classes to train, 14,218 queries and 12,612
            gallery images of 3,985. False takes a subset.

    Raises:
        DataError: the list is missing or faulty, images are missing, or counts differ.

    Source: Z. Liu et al., "DeepFashion: Powering Robust Clothes Recognition and Retrieval with Rich Annotations",
        CVPR 2016. The count of the list itself is 52,712 images of 7,982 garments.
    """
    folder, layout = FOLDER.find(root)
    images = resolve(folder, _IMAGES).parent
    rows = read_list(resolve(folder, _LIST), _COLUMNS, has_count=True, has_header=True)
    rows.check_known("evaluation_status", _ROLES, ", ".join(_ROLES))
    items, labels = np.unique(rows.texts("item_id"), return_inverse=True)
    paths, super_labels = _paths_below_img(rows)
    listing = Listing(
        name="inshop",
        root=images,
        layout=f"{layout.description}; images of {images.relative_to(folder).as_posix()}",
        paths=paths,
        labels=labels.astype(np.int64),
        class_names=items.tolist(),
        role=np.array(rows.texts("evaluation_status"), dtype=np.str_),
        super_labels=super_labels,
        originals=_originals(folder, rows.paths("image_name")),
    )
    return table_of_files(listing, published=PUBLISHED, check_counts=check_counts)


def _originals(folder: Path, paths: list[str]) -> Originals:
    """Those of img.zip, and their boxes if the list is there; only the check of the images needs them."""
    file = next((folder / place for place in _BOXES if (folder / place).is_file()), None)
    if file is None:
        return Originals(size=_SIZE)
    edges = ("x_1", "y_1", "x_2", "y_2")
    columns = ("image_name", "clothes_type", "pose_type", *edges)
    rows = read_list(file, columns, has_count=True, has_header=True)
    boxes = boxes_by_name(rows, "image_name", np.stack([rows.decimals(edge) for edge in edges], axis=1), paths)
    return Originals(size=_SIZE, boxes=boxes, boxes_from=file.name)


def _paths_below_img(rows: TextList) -> tuple[list[str], IntArray]:
    """Paths [N] without the leading ``img``, and their gender and category as numbers [N]."""
    paths, categories = [], []
    for row, path in enumerate(rows.paths("image_name")):
        parts = path.split("/")
        if len(parts) < 4 or parts[0] != "img":
            raise DataError(
                f"{rows.where(row)} names the image '{path}', expected img/<gender>/<category>/...; put the original "
                "list there"
            )
        paths.append("/".join(parts[1:]))
        categories.append(f"{parts[1]}/{parts[2]}")
    return paths, np.unique(categories, return_inverse=True)[1].astype(np.int64)
