"""Inspects every image of a data set for unreadable, odd, duplicated and unlisted ones."""

import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import ImageFile

from dmlbench.data.image_table import file_sizes
from dmlbench.data.images.pixels import read_image
from dmlbench.data.images.threads import for_each
from dmlbench.data.originals import Header, deviations, read_header
from dmlbench.data.readers.layouts import is_image
from dmlbench.runtime import file_sha256
from dmlbench.types import DataError, ImageTable

TINY_SIDE = 16

Watch = Callable[[int], None]  # called with the number of images that were just read


@dataclass(frozen=True)
class Duplicates:
    """Paths of each group of images with the same bytes, and how many groups span several classes, or both halves."""

    groups: tuple[tuple[str, ...], ...] = ()
    across_classes: int = 0
    across_halves: int = 0

    @property
    def images(self) -> int:
        return sum(len(group) for group in self.groups)


@dataclass(frozen=True)
class Report:
    """What was found in a data set.

    Attributes:
        looked_at: number of images read.
        broken: (path, reason) of each image that cannot be read.
        modes: number of files that are not 8-bit RGB, by Pillow's mode.
        rotated: number of files with an EXIF orientation to apply.
        tiny: paths of images with a side below ``TINY_SIDE`` pixels.
        constant: paths of images of one color, in array data sets.
        deviations: how the images differ from the published ones; see ``dmlbench.data.originals``.
        unlisted: image files in the data set's folders that no list names.
    """

    looked_at: int = 0
    broken: tuple[tuple[str, str], ...] = ()
    modes: dict[str, int] = field(default_factory=dict)
    rotated: int = 0
    tiny: tuple[str, ...] = ()
    constant: tuple[str, ...] = ()
    duplicates: Duplicates = field(default_factory=Duplicates)
    deviations: tuple[str, ...] = ()
    unlisted: tuple[str, ...] = ()

    @property
    def is_whole(self) -> bool:
        return not self.broken


@dataclass(frozen=True)
class _Seen:
    reason: str = ""
    digest: str = ""
    header: Header | None = None


def verify(table: ImageTable, *, num_threads: int = 1, watch: Watch = lambda count: None) -> Report:
    """Decode all images of a data set, or compare the pixels of one that is held as an array."""
    if table.pixels is not None:
        return _verify_pixels(table, watch)
    sizes = file_sizes(table.root, table.paths, name=table.name)
    _, inverse, counts = np.unique(sizes, return_inverse=True, return_counts=True)
    has_rival = (counts[inverse] > 1).tolist()  # only files of one size can be the same
    names = [os.path.join(table.root, path) for path in table.paths.tolist()]
    seen: list[_Seen] = [_Seen()] * len(names)

    def look(row: int) -> None:
        seen[row] = _look(names[row], with_digest=has_rival[row])

    before, ImageFile.LOAD_TRUNCATED_IMAGES = ImageFile.LOAD_TRUNCATED_IMAGES, False  # some library may have set it
    try:
        for_each(look, len(names), num_threads=max(1, num_threads), watch=watch)
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = before
    paths = table.paths.tolist()
    headers = [one.header for one in seen]
    readable = [header for header in headers if header is not None]
    originals = table.originals
    return Report(
        looked_at=len(names),
        broken=tuple((path, one.reason) for path, one in zip(paths, seen, strict=True) if one.reason),
        modes=dict(sorted(Counter(header.mode for header in readable if header.mode != "RGB").items())),
        rotated=sum(header.orientation in range(2, 9) for header in readable),
        tiny=tuple(
            path
            for path, header in zip(paths, headers, strict=True)
            if header is not None and min(header.width, header.height) < TINY_SIDE
        ),
        duplicates=_duplicates(table, (one.digest for one in seen)),
        deviations=() if originals is None else deviations(headers, originals, np.arange(len(headers))),
        unlisted=tuple(unlisted(table)),
    )


def unlisted(table: ImageTable) -> list[str]:
    """Image files that no list names, in the folders right below the root that hold listed images."""
    if table.pixels is not None:
        return []
    listed = set(table.paths.tolist())
    found = []
    for top in sorted({path.split("/")[0] for path in listed if "/" in path}):
        for directory, folders, files in os.walk(os.path.join(table.root, top)):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            prefix = Path(directory).relative_to(table.root).as_posix()
            names = (f"{prefix}/{name}" for name in files if is_image(name))
            found += [name for name in names if name not in listed]
    return sorted(found)


def _look(name: str, *, with_digest: bool) -> _Seen:
    digest = ""
    try:
        read_image(name)
        digest = file_sha256(name) if with_digest else ""
    except DataError as error:
        return _Seen(reason=_reason(error, name), digest=digest)
    except OSError as error:
        return _Seen(reason=str(error.strerror or error), digest=digest)
    return _Seen("", digest, read_header(name))


def _reason(error: DataError, name: str) -> str:
    cause = error.__cause__
    text = str(error) if cause is None else str(getattr(cause, "strerror", None) or cause) or type(cause).__name__
    return text.replace(f"image '{name}' ", "").replace(f" '{name}'", "").removeprefix(f"'{name}' ")


def _duplicates(table: ImageTable, digests: Iterable[str]) -> Duplicates:
    rows_of: dict[str, list[int]] = defaultdict(list)
    for row, digest in enumerate(digests):
        if digest:
            rows_of[digest].append(row)
    groups = [rows for rows in rows_of.values() if len(rows) > 1]
    return Duplicates(
        groups=tuple(tuple(table.paths[rows].tolist()) for rows in groups),
        across_classes=sum(len(np.unique(table.labels[rows])) > 1 for rows in groups),
        across_halves=sum(len(np.unique(table.role[rows] == "train")) > 1 for rows in groups),
    )


def _verify_pixels(table: ImageTable, watch: Watch) -> Report:
    pixels = table.pixels
    assert pixels is not None
    digests, constant = [], []
    for row in range(len(table)):
        image = np.ascontiguousarray(pixels[row])
        digests.append(hashlib.sha256(image.data).hexdigest())
        colors = image.reshape(image.shape[0] * image.shape[1], -1)
        if (colors == colors[0]).all():
            constant.append(str(table.paths[row]))
        watch(1)
    return Report(looked_at=len(table), constant=tuple(constant), duplicates=_duplicates(table, digests))
