"""Data sets of sixteen classes of four images, half of them to train on, in the published layouts; pixels are noise."""

from pathlib import Path

import numpy as np
from PIL import Image
from scipy.io import savemat

from dmlbench.data.readers.cars196 import NAMES


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
