"""Tiny-ImageNet and trees like it: ``train/<wnid>/images``, ``wnids.txt``, ``words.txt``, ``val`` with its list."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from dmlbench.data.image_table import Listing, Published, halved_roles, table_of_files
from dmlbench.data.readers.layouts import Layout, images_in, locate, subfolders
from dmlbench.data.readers.lists import TextList, read_list
from dmlbench.types import ConfigError, DataError, ImageTable

PARTS = ("train", "val")
USUAL_NAMES = ("tiny_imagenet", "tiny_imagenet_200", "tinyimagenet", "tinyimagenet_200", "tinyimagenet200")
LAYOUTS = (
    Layout(
        "original",
        "tiny-imagenet-200 with wnids.txt, words.txt and train/<wnid>/images",
        ("wnids.txt", "words.txt", "train"),
    ),
)
PUBLISHED = Published({"train": (50_000, 100), "test": (50_000, 100)})
_PUBLISHED_OF_PARTS = {
    ("train",): PUBLISHED,
    ("val",): Published({"train": (5_000, 100), "test": (5_000, 100)}),
    ("train", "val"): Published({"train": (55_000, 100), "test": (55_000, 100)}),
}
REMEDY = "unpack tiny-imagenet-200.zip there"


def tiny_imagenet(root: str | Path, *, parts: Sequence[str] = ("train",), check_counts: bool = True) -> ImageTable:
    """Nouns as classes; the first half of those in ``wnids.txt`` trains, the others test.

    The split of the archive is one for classification: its parts, as many as asked for, are merged. The halves are
    this project's own, as no paper fixes them.

    Args:
        root: folder of the data set, or one that holds it under a usual name.
        parts: of "train" (500 images a class) and "val" (50 a class); the archive's test images have no classes.
        check_counts: insist on the published 200 classes with all images of each. False takes a subset, of which the
            first half of the listed classes trains.

    Raises:
        ConfigError: a part is unknown or named twice.
        DataError: a list or folder is missing or at fault, images are missing, or counts differ.

    Source: Stanford CS231N, "Tiny ImageNet Visual Recognition Challenge", 2015.
    """
    merged = tuple(part for part in PARTS if part in parts)
    if isinstance(parts, str) or not parts or len(merged) < len(parts):
        shown = f"the text '{parts}'" if isinstance(parts, str) else ", ".join(parts) or "none"
        raise ConfigError(
            f"parts ({shown}) of tiny_imagenet must be a list of train, val or both; correct dataset.table.parts"
        )
    folder, layout = find(root)
    wnids = _wnids(folder)
    number_of = {wnid: number for number, wnid in enumerate(wnids.texts("wnid"))}
    paths: list[str] = []
    labels: list[int] = []
    for part in merged:
        for wnid, images in _images_of_part(folder, part, number_of).items():
            paths += images
            labels += [number_of[wnid]] * len(images)
    listing = Listing(
        name="tiny_imagenet",
        root=folder,
        layout=layout.description,
        paths=paths,
        labels=np.array(labels, dtype=np.int64),
        class_names=_class_names(folder, wnids),
        role=halved_roles(np.array(labels, dtype=np.int64), len(wnids)),
    )
    return table_of_files(listing, published=_PUBLISHED_OF_PARTS[merged] if check_counts else None)


def find(root: str | Path) -> tuple[Path, Layout]:
    """The folder of the data set and how it lies there.

    Raises:
        DataError: it is not found.
    """
    return locate(root, title="Tiny-ImageNet", usual_names=USUAL_NAMES, layouts=LAYOUTS, remedy=REMEDY)


def _wnids(folder: Path) -> TextList:
    wnids = read_list(folder / "wnids.txt", ("wnid",))
    first: dict[str, int] = {}
    for row, wnid in enumerate(wnids.texts("wnid")):
        if first.setdefault(wnid, row) != row:
            raise DataError(
                f"{wnids.where(row)} repeats '{wnid}' of line {wnids.lines[first[wnid]]}; put the original file there"
            )
    return wnids


def _class_names(folder: Path, wnids: TextList) -> list[str]:
    """One name per class, such as ``n01443537 goldfish, Carassius auratus``; words alone are not unique."""
    words = read_list(folder / "words.txt", ("wnid", "words"), separator="\t")
    words_of = dict(words.rows)
    for row, wnid in enumerate(wnids.texts("wnid")):
        if wnid not in words_of:
            raise DataError(
                f"{wnids.where(row)} has the class '{wnid}', which '{words.file}' does not name; complete it"
            )
    return [f"{wnid} {words_of[wnid]}" for wnid in wnids.texts("wnid")]


def _images_of_part(folder: Path, part: str, number_of: Mapping[str, int]) -> dict[str, list[str]]:
    """wnid -> paths of its images, of one part of the archive."""
    if not (folder / part).is_dir():
        raise DataError(
            f"Tiny-ImageNet in '{folder}' lacks the folder {part}; complete it or correct dataset.table.parts"
        )
    if part == "val" and (folder / "val" / "images").is_dir():
        return _images_of_val_list(folder, number_of)
    found = {}
    for wnid in subfolders(folder / part):
        if wnid not in number_of:
            raise DataError(
                f"'{folder / part / wnid}' is no class of '{folder / 'wnids.txt'}'; complete the list or move it away"
            )
        inner = "images" if (folder / part / wnid / "images").is_dir() else ""
        prefix = "/".join(filter(None, (part, wnid, inner)))
        found[wnid] = [f"{prefix}/{name}" for name in images_in(folder / prefix)]
    return found


def _images_of_val_list(folder: Path, number_of: Mapping[str, int]) -> dict[str, list[str]]:
    """The validation images lie in one folder; a list has their classes (and boxes, which are not needed)."""
    rows = read_list(folder / "val" / "val_annotations.txt", ("file", "wnid", "x_0", "y_0", "x_1", "y_1"))
    found: dict[str, list[str]] = {}
    for row, (name, wnid) in enumerate(zip(rows.paths("file"), rows.texts("wnid"), strict=True)):
        if wnid not in number_of:
            raise DataError(
                f"{rows.where(row)} names the class '{wnid}', which is not in wnids.txt; put the original lists there"
            )
        found.setdefault(wnid, []).append(f"val/images/{name}")
    return found
