"""Tiny-ImageNet and trees like it: ``train/<wnid>/images``, ``wnids.txt``, ``words.txt``, ``val`` with its list."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from dmlbench.data.image_table import Listing, Published
from dmlbench.data.readers.files import read_list
from dmlbench.data.readers.layouts import Archive, DataFolder, Layout, images_in, subfolders
from dmlbench.types import ConfigError, DataError, ImageTable, Originals

PARTS = ("train", "val")
_PUBLISHED_OF_PARTS = {
    ("train",): Published({"train": (50_000, 100), "test": (50_000, 100)}),
    ("val",): Published({"train": (5_000, 100), "test": (5_000, 100)}),
    ("train", "val"): Published({"train": (55_000, 100), "test": (55_000, 100)}),
}


def tiny_imagenet(root: str | Path, *, parts: Sequence[str] = ("train",), check_counts: bool = True) -> ImageTable:
    """Nouns as classes; the first half of those in ``wnids.txt`` trains, the others test.

    The requested parts, a split for classification, are merged. No paper defines the halves; they are this project's.

    Args:
        parts: of "train" (500 images a class) and "val" (50 a class); the archive's test images have no classes.
    """
    merged = tuple(part for part in PARTS if part in parts)
    if isinstance(parts, str) or not parts or len(merged) < len(parts):
        shown = f"the text '{parts}'" if isinstance(parts, str) else ", ".join(parts) or "none"
        raise ConfigError(f"dataset.table.parts: got {shown}, expected a list of train, val or both.")
    return _with_parts(merged).table(root, check_counts=check_counts)


def _of_lists(folder: Path, *, parts: Sequence[str]) -> Listing:
    listed = read_list(folder / "wnids.txt", ("wnid",))
    listed.check_unique("wnid")
    words_of = read_list(folder / "words.txt", ("wnid", "words"), separator="\t")
    words = dict(zip(words_of["wnid"], words_of["words"], strict=True))
    listed.check_known("wnid", words, "the ids in words.txt")
    number_of = {wnid: number for number, wnid in enumerate(listed["wnid"])}
    images = [image for part in parts for image in _images_of_part(folder, part, number_of)]
    return Listing(
        root=folder,
        paths=[path for path, _ in images],
        labels=np.array([label for _, label in images], dtype=np.int64),
        class_names=[f"{wnid} {words[wnid]}" for wnid in number_of],  # words alone are not unique
        originals=Originals(size=(64, 64)),
    )


def _images_of_part(folder: Path, part: str, number_of: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Paths and classes of the images in one part of the archive."""
    if not (folder / part).is_dir():
        raise DataError(f"Tiny-ImageNet in '{folder}' lacks {part}. Complete it or correct dataset.table.parts.")
    if part == "val" and (folder / "val" / "images").is_dir():
        rows = read_list(folder / "val" / "val_annotations.txt", ("file", "wnid", "x_0", "y_0", "x_1", "y_1"))
        rows.check_known("wnid", number_of, "the ids in wnids.txt")
        for name, wnid in zip(rows["file"], rows["wnid"], strict=True):
            yield f"val/images/{name}", number_of[wnid]
        return
    for wnid in subfolders(folder / part):
        if wnid not in number_of:
            raise DataError(f"'{folder / part / wnid}' is not a class of '{folder / 'wnids.txt'}'. Move it away.")
        inner = "images" if (folder / part / wnid / "images").is_dir() else ""
        prefix = "/".join(filter(None, (part, wnid, inner)))
        for name in images_in(folder / prefix):
            yield f"{prefix}/{name}", number_of[wnid]


def _with_parts(parts: tuple[str, ...]) -> DataFolder:
    return DataFolder(
        name="tiny_imagenet",
        title="Tiny-ImageNet",
        usual_names=("tiny_imagenet", "tiny_imagenet_200"),
        layouts=(
            Layout(
                "tiny-imagenet-200 with wnids.txt, words.txt and train/<wnid>/images",
                ("wnids.txt", "words.txt", "train"),
                partial(_of_lists, parts=parts),
            ),
        ),
        remedy="Unpack tiny-imagenet-200.zip there",
        published=_PUBLISHED_OF_PARTS[parts],
        home="http://cs231n.stanford.edu/",
        terms="ImageNet's terms: non-commercial research and education",
        citation="Y. Le, X. Yang, Tiny ImageNet Visual Recognition Challenge, CS231N report, Stanford 2015",
        alternatives=((Archive("tiny-imagenet-200.zip", "90528d7ca1a48142e341f4ef8d21d0de", 248_100_043),),),
        by_hand="get tiny-imagenet-200.zip from cs231n.stanford.edu",
        mirrors=("http://cs231n.stanford.edu/",),
    )


FOLDER = _with_parts(("train",))
