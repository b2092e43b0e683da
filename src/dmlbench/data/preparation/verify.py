"""Describes a data set, and inspects its images for unreadable, odd, duplicated and unlisted ones."""

import hashlib
import itertools
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import ImageFile

from dmlbench.data.image_table import counts_by_role, file_contents
from dmlbench.data.images.sources import for_each, read_image
from dmlbench.data.protocols import test_set
from dmlbench.data.published_images import Header, deviations, read_header
from dmlbench.data.readers.layouts import is_image
from dmlbench.runtime import file_sha256
from dmlbench.types import DataError, ImageTable, counted

TINY_SIDE = 16
_NAMED = 10

Watch = Callable[[int], None]  # called with the number of images that were just read


@dataclass(frozen=True)
class Report:
    """What was found in a data set.

    Attributes:
        broken: (path, reason) of each image that cannot be read.
        modes: number of files that are not 8-bit RGB, by Pillow's mode.
        rotated: number of files with an EXIF orientation to apply.
        tiny: paths of images with a side below ``TINY_SIDE`` pixels.
        constant: paths of images of one color.
        twins: paths of each group of images with the same bytes; of these groups, ``across_classes`` span several
            classes and ``across_halves`` both halves.
    """

    looked_at: int = 0
    broken: tuple[tuple[str, str], ...] = ()
    modes: dict[str, int] = field(default_factory=dict)
    rotated: int = 0
    tiny: tuple[str, ...] = ()
    constant: tuple[str, ...] = ()
    twins: tuple[tuple[str, ...], ...] = ()
    across_classes: int = 0
    across_halves: int = 0
    deviations: tuple[str, ...] = ()
    unlisted: tuple[str, ...] = ()


def verify(
    table: ImageTable, *, num_threads: int = 1, watch: Watch = lambda count: None, whole_root: bool = False
) -> Report:
    """Decode all images of a data set, or compare the pixels of one that is held as an array.

    Args:
        whole_root: as of ``unlisted``.
    """
    if table.pixels is not None:
        return _verify_pixels(table, watch)
    contents = file_contents(table.root, table.paths, name=table.name)
    _, inverse, counts = np.unique(contents, return_inverse=True, return_counts=True)
    has_rival = (counts[inverse] > 1).tolist()  # other contents have other images
    paths = table.paths.tolist()
    reasons, digests, is_constant = [""] * len(paths), [""] * len(paths), [False] * len(paths)
    headers: list[Header | None] = [None] * len(paths)

    def look(row: int) -> None:
        name = os.path.join(table.root, paths[row])
        try:
            is_constant[row] = _is_constant(np.asarray(read_image(name)))
            digests[row] = file_sha256(name) if has_rival[row] else ""
            headers[row] = read_header(name)
        except (DataError, OSError) as error:
            cause = error.__cause__ or error
            text = str(getattr(cause, "strerror", None) or cause) or type(cause).__name__
            reasons[row] = text.replace(f"image '{name}' ", "").replace(f" '{name}'", "").removeprefix(f"'{name}' ")

    before, ImageFile.LOAD_TRUNCATED_IMAGES = ImageFile.LOAD_TRUNCATED_IMAGES, False  # some library may have set it
    try:
        for_each(look, len(paths), num_threads=max(1, num_threads), watch=watch)
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = before
    readable = [(path, header) for path, header in zip(paths, headers, strict=True) if header is not None]
    originals = table.originals
    return Report(
        looked_at=len(paths),
        broken=tuple((path, reason) for path, reason in zip(paths, reasons, strict=True) if reason),
        modes=dict(sorted(Counter(header.mode for _, header in readable if header.mode != "RGB").items())),
        rotated=sum(header.orientation in range(2, 9) for _, header in readable),
        tiny=tuple(path for path, header in readable if min(header.width, header.height) < TINY_SIDE),
        constant=tuple(itertools.compress(paths, is_constant)),
        **_twins(table, digests),
        deviations=() if originals is None else deviations(headers, originals, np.arange(len(headers))),
        unlisted=tuple(unlisted(table, whole_root=whole_root)),
    )


def unlisted(table: ImageTable, *, whole_root: bool = False) -> list[str]:
    """Image files that no list names, in the folders right below the root that hold listed images.

    Args:
        whole_root: look in the whole root, which holds no other data set.
    """
    if table.pixels is not None:
        return []
    listed = set(table.paths.tolist())
    found = []
    tops = {"."} if whole_root else {path.split("/")[0] for path in listed if "/" in path}
    for top in sorted(tops):
        for directory, folders, files in os.walk(os.path.join(table.root, top)):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            prefix = Path(directory).relative_to(table.root).as_posix()
            names = (f"{prefix}/{name}".removeprefix("./") for name in files if is_image(name))
            found += [name for name in names if name not in listed]
    return sorted(found)


def _twins(table: ImageTable, digests: Iterable[str]) -> dict[str, Any]:
    rows_of: dict[str, list[int]] = defaultdict(list)
    for row, digest in enumerate(digests):
        if digest:
            rows_of[digest].append(row)
    groups = [rows for rows in rows_of.values() if len(rows) > 1]
    return {
        "twins": tuple(tuple(table.paths[rows].tolist()) for rows in groups),
        "across_classes": sum(len(np.unique(table.labels[rows])) > 1 for rows in groups),
        "across_halves": sum(len(np.unique(table.role[rows] == "train")) > 1 for rows in groups),
    }


def _is_constant(image: NDArray[np.uint8]) -> bool:
    return bool((image == image[0, 0]).all())


def _verify_pixels(table: ImageTable, watch: Watch) -> Report:
    assert table.pixels is not None
    digests, constant = [], []
    for path, pixels in zip(table.paths.tolist(), table.pixels, strict=True):
        image = np.ascontiguousarray(pixels)
        digests.append(hashlib.sha256(image.data).hexdigest())
        if _is_constant(image):
            constant.append(path)
        watch(1)
    return Report(looked_at=len(table), constant=tuple(constant), **_twins(table, digests))


def described(table: ImageTable) -> list[str]:
    """Counts, place and fingerprint of a data set, one line each."""
    per_class = np.bincount(table.labels, minlength=table.num_classes)
    singles = int((per_class == 1).sum())
    facts = {
        "images per class": f"{per_class.min()} to {per_class.max()}, median {int(np.median(per_class))}",
        "classes of one image": f"{singles:,}, which have no positives" if singles else "",
        "super-classes": table.super_labels is not None and len(np.unique(table.super_labels)),
        "root": table.root,
        "layout": table.layout,
        "held as one array": table.pixels is not None and f"{' x '.join(map(str, table.pixels.shape[1:]))} pixels",
        "not as published": "; ".join(table.notes),
        "fingerprint": table.fingerprint,
    }
    lines = [f"{table.name}: {counted(len(table), 'image')} of {counted(table.num_classes, 'class')}"]
    counts = counts_by_role(table.labels, table.role)
    lines += [
        f"  {role:<8} {counted(n, 'image')} of {counted(classes, 'class')}" for role, (n, classes) in counts.items()
    ]
    return lines + [f"  {name}: {fact}" for name, fact in facts.items() if fact]


def findings(report: Report) -> list[str]:
    """What a report has found, one line each, with the first ten names."""
    found = {
        "cannot be read": [f"{path}: {reason}" for path, reason in report.broken],
        f"smaller than {TINY_SIDE} pixels": report.tiny,
        "of one color": report.constant,
        "on disk but not listed": report.unlisted,
    }
    lines = [f"  looked at: {counted(report.looked_at, 'image')}" if report.looked_at else "  images were not decoded"]
    if report.modes:
        modes = ", ".join(f"{count} {mode}" for mode, count in report.modes.items())
        lines += [f"  converted to RGB when read: {modes}"]
    if report.rotated:
        lines += [f"  turned upright by EXIF when read: {report.rotated}"]
    for text, names in found.items():
        if names:
            lines += [f"  {text}: {len(names)}", *_first(names)]
    if report.twins:
        groups = counted(len(report.twins), "group")
        lines += [
            f"  identical images: {groups} of {sum(map(len, report.twins))} images in all; "
            f"{report.across_classes} across classes, {report.across_halves} across training and test half",
            *_first([" = ".join(_first(group, indent="")) for group in report.twins]),
        ]
    return lines


def _first(names: Sequence[str], *, indent: str = "    ") -> list[str]:
    more = [f"and {len(names) - _NAMED} more"] if len(names) > _NAMED else []
    return [f"{indent}{name}" for name in [*names[:_NAMED], *more]]


def unusable(table: ImageTable) -> str:
    """Why `dmlbench train` cannot use a data set; empty if it can."""
    classes, reason = len(np.unique(table.labels[table.role == "train"])), ""
    try:
        test_set(table)
    except DataError as error:
        reason = str(error)
    if classes < 2:
        reason = f"train: got {counted(classes, 'class')}, expected 2 or more."
    return reason and f"{reason} `dmlbench train` cannot use this data set."


def verdict(report: Report, counts: str, *, num_images: int, num_published: int) -> str:
    """A data set's state in one sentence.

    Args:
        counts: "published", "as asked" (those of the requested part), "others" or "unknown" (nothing is published).
    """
    if report.broken:
        return f"{len(report.broken):,} of {num_images:,} images cannot be read; replace these files."
    present = f"All {num_images:,} images{' of the requested part' * (counts == 'as asked')} are present"
    if counts == "others":
        present = f"{num_images:,} of {num_published:,} images are present"
        if num_images >= num_published:
            present = f"{num_images:,} images are present, split otherwise than the {num_published:,} published"
    if report.deviations:
        looks = " and ".join(text.removeprefix("images ").partition(" (boxes")[0] for text in report.deviations)
        return f"{present}; they look {looks}, so scores may not compare with papers."
    if counts == "others":
        return f"{present}, so scores do not compare with papers."
    if not report.looked_at:
        return f"{present}; they were not decoded."
    return f"{present} and {'can be read' if counts == 'unknown' else 'look as published'}."
