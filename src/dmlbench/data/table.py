"""How a data set becomes an ``ImageTable``: the checks every one must pass, its fingerprint, and reading one image."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from dmlbench.types import ROLES, DataError, ImageTable, IntArray, closest

_NAMED_IN_ERRORS = 10


def make_table(
    name: str,
    root: str | Path,
    *,
    paths: Sequence[str] | NDArray[np.str_],
    labels: IntArray,
    class_names: Sequence[str],
    role: NDArray[np.str_],
    content: IntArray | str,
    super_labels: IntArray | None = None,
    pixels: NDArray[np.uint8] | None = None,
) -> ImageTable:
    """An ``ImageTable`` whose parts fit together.

    Args:
        name: the data set's name, for messages and results.
        root: folder that ``paths`` are relative to; empty when ``pixels`` holds the images.
        paths: [N] unique names.
        labels: [N] class ids; every id in [0, len(class_names)) has at least one image.
        class_names: one unique name per class id, in published order.
        role: [N] entries of ``ROLES``.
        content: [N] file sizes in bytes, or one digest that stands for all pixels: what the fingerprint rests on
            besides names and labels.
        super_labels: [N] super-class ids, or None.
        pixels: [N, H, W] or [N, H, W, 3] uint8, or None.

    Raises:
        DataError: no images, lengths that differ, a path twice, a class without images, or an unknown role.
    """
    names = np.asarray(paths, dtype=np.str_)
    labels = np.asarray(labels, dtype=np.int64)
    role = np.asarray(role, dtype=np.str_)
    if len(names) == 0:
        raise DataError(f"data set '{name}' has no images; check its folder '{root}'")
    lengths = {"paths": len(names), "labels": len(labels), "role": len(role)}
    if super_labels is not None:
        super_labels = np.asarray(super_labels, dtype=np.int64)
        lengths["super_labels"] = len(super_labels)
    if pixels is not None:
        lengths["pixels"] = len(pixels)
    if len(set(lengths.values())) > 1:
        raise DataError(
            f"data set '{name}' has parts of different lengths: {lengths}; each must have one entry an image"
        )
    unique, counts = np.unique(names, return_counts=True)
    if len(unique) < len(names):
        raise DataError(f"data set '{name}' lists images twice: {shorten(unique[counts > 1])}; list each once")
    if len(set(class_names)) < len(class_names):
        raise DataError(f"data set '{name}' has two classes of one name among its {len(class_names)}; rename one")
    present = np.unique(labels)
    if present[0] < 0 or present[-1] >= len(class_names):
        raise DataError(
            f"data set '{name}' has labels in [{present[0]}, {present[-1]}] but {len(class_names)} class names; "
            f"labels must lie in [0, {len(class_names)})"
        )
    if len(present) < len(class_names):
        empty = [class_names[c] for c in np.setdiff1d(np.arange(len(class_names)), present)]
        raise DataError(f"data set '{name}' has classes without images: {shorten(empty)}; leave them out")
    for unknown in sorted(set(np.unique(role).tolist()) - set(ROLES)):
        raise DataError(f"data set '{name}' has the unknown role '{unknown}'; {closest(unknown, ROLES)}")
    return ImageTable(
        name=name,
        root=str(root),
        paths=names,
        labels=labels,
        class_names=tuple(class_names),
        role=role,
        super_labels=super_labels,
        pixels=pixels,
        fingerprint=fingerprint(names, content, labels),
    )


def fingerprint(names: Sequence[str] | NDArray[np.str_], content: IntArray | str, labels: IntArray) -> str:
    """Hexadecimal sha256 over sorted names with their sizes and labels.

    The order of the rows and the folder do not enter, so the same data gives the same digest on every machine.

    Args:
        names: [N] names of the images.
        content: [N] file sizes in bytes, or one digest that stands for the pixels of all images.
        labels: [N] class ids.
    """
    digest = hashlib.sha256()
    sizes: Sequence[int] | IntArray = np.zeros(len(names), dtype=np.int64)
    if isinstance(content, str):
        digest.update(f"pixels {content}\n".encode())
    else:
        sizes = content
    lines = sorted(f"{n}\t{int(s)}\t{int(c)}\n" for n, s, c in zip(names, sizes, labels, strict=True))
    digest.update("".join(lines).encode())
    return digest.hexdigest()


def rows_of_classes(table: ImageTable, class_ids: Sequence[int] | IntArray) -> IntArray:
    """Rows, ascending, of every image whose label is among ``class_ids``."""
    return np.flatnonzero(np.isin(table.labels, np.asarray(class_ids, dtype=np.int64))).astype(np.int64)


def halved_roles(labels: IntArray, num_classes: int) -> NDArray[np.str_]:
    """[N] roles of the usual zero-shot split: the first ``num_classes // 2`` classes are "train", the others "test"."""
    return np.where(np.asarray(labels) < num_classes // 2, "train", "test")


def file_sizes(root: str | Path, paths: Sequence[str] | NDArray[np.str_], *, name: str) -> IntArray:
    """[N] sizes in bytes of the files, all of which must exist.

    Raises:
        DataError: files are missing; the first ten are named.
    """
    sizes = np.zeros(len(paths), dtype=np.int64)
    missing: list[str] = []
    for row, path in enumerate(paths):
        try:
            sizes[row] = (Path(root) / path).stat().st_size
        except OSError:
            missing.append(str(path))
    if missing:
        raise DataError(
            f"data set '{name}' lacks {len(missing)} of {len(paths)} images under '{root}': {shorten(missing)}; "
            "copy them there or correct the list"
        )
    return sizes


def shorten(names: Sequence[str] | NDArray[np.str_]) -> str:
    """The first ten names and how many more there are, for messages."""
    shown = ", ".join(str(n) for n in names[:_NAMED_IN_ERRORS])
    return shown if len(names) <= _NAMED_IN_ERRORS else f"{shown} and {len(names) - _NAMED_IN_ERRORS} more"


def read_image(path: str | Path) -> Image.Image:
    """One image file as 8-bit RGB, turned upright by its EXIF orientation.

    Grey, palette, CMYK and 16-bit grey images are converted (16 bits keep their high byte); transparency is dropped.

    Raises:
        DataError: the file is missing, truncated, not an image, or holds floating point pixels.
    """
    try:
        with Image.open(path) as file:
            file.load()
            image = ImageOps.exif_transpose(file)
    except (OSError, SyntaxError, ValueError, EOFError, IndexError, Image.DecompressionBombError) as error:
        raise DataError(
            f"image '{path}' cannot be read ({error}); replace the file or remove it from the data"
        ) from error
    if image.mode == "F":
        raise DataError(f"image '{path}' holds floating point pixels; convert it to 8 bits a channel")
    if image.mode.startswith("I"):
        # Pillow clips 16-bit grey to 255 when it converts, which would leave an all-white picture.
        image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    return image if image.mode == "RGB" else image.convert("RGB")
