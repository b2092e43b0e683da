"""Whether the images on disk are the published ones: cut, rescaled and re-encoded ones show in the headers of files.

Enlarged images, adapted boxes, and images re-encoded in the published way are not detected.
"""

import os
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image

from dmlbench.types import IntArray, Originals

UNREADABLE = (
    *(OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, TypeError, RuntimeError, struct.error),
    Image.DecompressionBombError,
)
"""What Pillow raises for damaged files."""

SAMPLE = 64
_SHARE = 0.1  # of the images: some published boxes of CUB-200-2011 lie outside, up to 32 pixels
_FEWEST_AT_FAULT = 3  # one odd image of a small subset proves nothing
_FEWEST_ALIKE = 16
_ROUNDING = 1.0  # pixels
_SUBSAMPLING = {(2, 2): "4:2:0", (2, 1): "4:2:2"}  # by the sampling factors of the luma layer


@dataclass(frozen=True)
class Header:
    """Header of an image file: size before EXIF rotation, Pillow's format and mode, subsampling of a JPEG's colors."""

    width: int
    height: int
    format: str
    subsampling: str = ""  # such as "4:2:0"; empty for full color
    mode: str = "RGB"
    orientation: int = 1


def read_header(path: str | os.PathLike[str]) -> Header | None:
    """None if the file is no image; reading its pixels explains why."""
    try:
        with Image.open(path) as image:
            layers = getattr(image, "layer", [])  # of a JPEG: (id, horizontal and vertical sampling, table)
            factors = [tuple(layer[1:3]) for layer in layers]
            coarse = _SUBSAMPLING.get(factors[0], "subsampled") if len(set(factors)) > 1 else ""
            orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
            return Header(image.width, image.height, image.format or "", coarse, image.mode, orientation)
    except UNREADABLE:
        return None


def deviations_of_sample(root: str | os.PathLike[str], paths: Sequence[str], originals: Originals) -> tuple[str, ...]:
    """``deviations`` of at most 64 images, evenly spaced."""
    rows = np.unique(np.linspace(0, len(paths) - 1, min(SAMPLE, len(paths))).astype(np.int64))
    return deviations([read_header(os.path.join(root, paths[row])) for row in rows], originals, rows)


def deviations(headers: Sequence[Header | None], originals: Originals, rows: IntArray) -> tuple[str, ...]:
    """How images [n] differ from the published ones; ``rows`` [n] index ``originals.boxes``.

    Each text reads "images <participle> ...", such as "images re-encoded (4:2:0 JPEG)".
    """
    seen = [(header, row) for header, row in zip(headers, rows.tolist(), strict=True) if header is not None]
    if not seen:
        return ()
    sizes = np.array([(header.width, header.height) for header, _ in seen], dtype=np.float64)
    found = _of_sizes(sizes, originals, np.array([row for _, row in seen]))
    formats = [header.format for header, _ in seen]
    others = [name for name in formats if name != originals.format]
    if _are_many(len(others), len(formats)):
        found += [f"images re-encoded ({', '.join(sorted(set(others)))})"]
    coarse = Counter(header.subsampling for header, _ in seen if header.subsampling)
    if originals.full_color and len(seen) >= _FEWEST_ALIKE and 2 * coarse.total() > len(seen):
        found += [f"images re-encoded ({coarse.most_common(1)[0][0]} JPEG)"]
    return tuple(found)


def _of_sizes(sizes: NDArray[np.float64], originals: Originals, rows: IntArray) -> list[str]:
    """Deviations that sizes [n, 2] (width, height) reveal."""
    boxes = np.full((len(rows), 4), np.nan) if originals.boxes is None else originals.boxes[rows]
    # A box outside of its image was drawn on a larger one: the image was cut, if it has the size or shape of its box.
    is_outside = np.any(boxes[:, 2:] > sizes + _ROUNDING, axis=1)  # false of NaN
    count, known = int(is_outside.sum()), int(np.isfinite(boxes).all(axis=1).sum())
    misfit = f"boxes of {originals.boxes_from} lie outside of {count:,} of {known:,} images"
    if not _are_many(count, known):
        is_outside[:], misfit = False, ""
    outside, shaped = sizes[is_outside], np.maximum((boxes[:, 2:] - boxes[:, :2])[is_outside], 1)
    if _are_most(outside, shaped):
        return ["images cut to their boxes"]
    is_published = np.all(sizes == (originals.size or np.nan), axis=1)
    if originals.size and not _are_many(int((~is_published).sum()), len(sizes)):
        return [f"images listed with wrong boxes ({misfit})"] if misfit else []
    if len(sizes) >= _FEWEST_ALIKE and np.all(sizes == sizes[0]):
        width, height = sizes[0].astype(int)
        return [f"images rescaled to {width} x {height} pixels"]
    if _are_most(outside, shaped * np.max(outside / shaped, axis=1, keepdims=True)):
        return ["images cut to their boxes and rescaled"]
    short = sizes.min(axis=1)  # images of many sources differ in size
    if len(sizes) >= _FEWEST_ALIKE and np.all(short == short[0]):
        return [f"images rescaled to a short side of {int(short[0])} pixels"]
    if originals.size:
        return [f"images resized from the published {originals.size[0]} x {originals.size[1]} pixels"]
    return [f"images cut or rescaled ({misfit})"] if misfit else []


def _are_many(count: int, total: int) -> bool:
    return count >= max(_FEWEST_AT_FAULT, _SHARE * total)


def _are_most(sizes: NDArray[np.float64], expected: NDArray[np.float64]) -> bool:
    return bool(2 * np.all(np.abs(sizes - expected) <= _ROUNDING, axis=1).sum() > len(sizes))
