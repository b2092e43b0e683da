"""Data sets of sixteen classes of four images, half of them to train on, in the published layouts; pixels are noise."""

from pathlib import Path

import numpy as np
from PIL import Image
from scipy.io import savemat

from dmlbench.data.image_table import Listing, table_of
from dmlbench.data.readers.cars196 import NAMES
from dmlbench.data.readers.cifar import CLASSES_100
from dmlbench.types import ImageTable


def write_photo(path: Path, color: int, *, side: int | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(color).integers(0, 256, (side or 48, side or 56, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def role_of(label: int, image: int) -> str:
    return "train" if label < 8 else ("query", "gallery")[image % 2]


def write_sop(root: Path) -> None:
    """Items in the layout of Stanford Online Products."""
    for part, labels in (("train", range(1, 9)), ("test", range(9, 17))):
        lines = ["image_id class_id super_class_id path"]
        for label in labels:
            for i in range(4):
                name = f"bicycle_final/{label}_{i}.JPG"
                write_photo(root / name, label)
                lines.append(f"{label * 4 + i - 3} {label} 1 {name}")
        (root / f"Ebay_{part}.txt").write_text("\n".join(lines) + "\n")


def write_inshop(root: Path) -> None:
    """Items in the layout of In-shop Clothes Retrieval."""
    lines = ["64", "image_name item_id evaluation_status"]
    for label in range(16):
        for i in range(4):
            name = f"img/WOMEN/Dresses/id_{label + 1:08d}/{i + 1:02d}_1_front.jpg"
            write_photo(root / name, label)
            lines.append(f"{name} id_{label + 1:08d} {role_of(label, i)}")
    (root / "list_eval_partition.txt").write_text("\n".join(lines) + "\n")


def write_cars196(root: Path) -> None:
    """Cars in the layout of Cars196 with its annotations."""
    rows = [(f"car_ims/{label:03d}{i}.jpg", label) for label in (*range(1, 9), *range(99, 107)) for i in range(4)]
    for name, label in rows:
        write_photo(root / name, label)
    annotations = np.array(rows, dtype=[("relative_im_path", object), ("class", object)])
    names = np.array(NAMES, dtype=object)
    savemat(root / "cars_annos.mat", {"annotations": annotations, "class_names": names})


def write_cub200(root: Path) -> None:
    """Birds in the class folders of CUB-200-2011."""
    for label in (*range(1, 9), *range(101, 109)):
        for i in range(4):
            write_photo(root / "images" / f"{label:03d}.Bird_{label}" / f"{i}.jpg", label)


def cifar100_of_colors(per_class: int) -> ImageTable:
    """A hundred classes of images, class c in super-class c % 20; the color of an image tells its row."""
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(100), per_class))
    rows = np.arange(len(labels))
    pixels = np.zeros((len(labels), 32, 32, 3), np.uint8)
    pixels[..., 0], pixels[..., 1] = (rows // 256)[:, None, None], (rows % 256)[:, None, None]
    paths = [f"train/{row:05d}" for row in rows]
    listing = Listing(
        "", paths, labels, CLASSES_100, super_labels=labels % 20, name="cifar100", pixels=pixels, digest="x"
    )
    return table_of(listing)
