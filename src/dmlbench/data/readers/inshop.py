"""In-shop Clothes Retrieval (DeepFashion): ``list_eval_partition.txt`` with train, query and gallery images."""

from pathlib import Path

import numpy as np

from dmlbench.data.image_table import Listing, Published
from dmlbench.data.readers.files import read_list
from dmlbench.data.readers.layouts import Archive, DataFolder, Layout, resolve
from dmlbench.types import ImageTable, Originals

_LIST = "|".join(f"{place}list_eval_partition.txt" for place in ("Eval/", "Anno/", ""))
# The list says img/WOMEN/...; the images of the papers are those of img.zip, so these come before img_highres.
_PLACES = "img Img/img img/img Img img_highres Img/img_highres img_highres/img_highres Img/img_highres/img_highres"
_BOXES = [f"{place}list_bbox_inshop.txt" for place in ("Anno/", "Eval/", "")]
_SIZE = (256, 256)  # of img.zip
_IMAGES = "|".join(f"{place}/*MEN" for place in _PLACES.split())
_DESCRIPTION = (
    "list_eval_partition.txt (there, in Eval or in Anno) and folders MEN and WOMEN in img or img_highres (there or in "
    "Img)"
)
_COLUMNS = ("image_name", "item_id", "evaluation_status")
_ROLES = ("train", "query", "gallery")


def inshop(root: str | Path, *, check_counts: bool = True) -> ImageTable:
    """Garments as classes; the list assigns training, query and gallery images (Liu et al. 2016).

    ``super_labels`` number the pairs of gender and category of the paths (``WOMEN/Dresses``) in sorted order. The count
    of the list itself is 52,712 images of 7,982 garments.
    """
    return FOLDER.table(root, check_counts=check_counts)


def _of_list(folder: Path) -> Listing:
    images = resolve(folder, _IMAGES).parent
    rows = read_list(resolve(folder, _LIST), _COLUMNS, has_count=True, has_header=True)
    rows.check_known("evaluation_status", _ROLES, ", ".join(_ROLES))
    rows.check("image_name", rows.rows["image_name"].str.match("img/[^/]+/[^/]+/"), "img/<gender>/<category>/...")
    items, labels = np.unique(rows["item_id"], return_inverse=True)
    paths = [path.removeprefix("img/") for path in rows["image_name"]]
    categories = ["/".join(path.split("/")[:2]) for path in paths]
    return Listing(
        root=images,
        layout=f"{_DESCRIPTION}; images of {images.relative_to(folder).as_posix()}",
        paths=paths,
        labels=labels,
        class_names=items.tolist(),
        role=np.array(rows["evaluation_status"]),
        super_labels=np.unique(categories, return_inverse=True)[1],
        originals=_originals(folder, rows["image_name"]),
    )


def _originals(folder: Path, paths: list[str]) -> Originals:
    """Those of img.zip, with boxes if their list is there."""
    file = next((folder / place for place in _BOXES if (folder / place).is_file()), None)
    if file is None:
        return Originals(size=_SIZE)
    edges = ("x_1", "y_1", "x_2", "y_2")
    columns = ("image_name", "clothes_type", "pose_type", *edges)
    rows = read_list(file, columns, has_count=True, has_header=True)
    boxes = rows.boxes("image_name", rows.decimals(edges), paths)
    return Originals(size=_SIZE, boxes=boxes, boxes_from=file.name)


FOLDER = DataFolder(
    name="inshop",
    title="In-shop",
    usual_names=(
        *("inshop", "in_shop_clothes_retrieval_benchmark", "in_shop_clothes_retrieval", "in_shop_clothes"),
        *("deepfashion", "deepfashion_inshop"),
    ),
    layouts=(Layout(_DESCRIPTION, (_LIST, _IMAGES), _of_list),),
    remedy="Put list_eval_partition.txt and the unpacked img.zip there",
    published=Published({"train": (25_882, 3_997), "query": (14_218, 3_985), "gallery": (12_612, 3_985)}),
    home="https://mmlab.ie.cuhk.edu.hk/projects/DeepFashion/InShopRetrieval.html",
    terms="non-commercial research and education, by an agreement with MMLAB (CUHK)",
    citation="Z. Liu et al., DeepFashion: Powering Robust Clothes Recognition and Retrieval with Rich Annotations, "
    "CVPR 2016",
    alternatives=((Archive("img.zip"), Archive("list_eval_partition.txt")),),
    by_hand="follow the agreement at mmlab.ie.cuhk.edu.hk/projects/DeepFashion/InShopRetrieval.html, then get "
    "Img/img.zip and Eval/list_eval_partition.txt",
)
