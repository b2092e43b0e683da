"""From listed images to an ``ImageTable``: checks, published counts and the fingerprint."""

import hashlib
import os
import stat
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dmlbench.data.published_images import deviations_of_sample
from dmlbench.types import ROLES, DataError, ImageTable, IntArray, Originals, closest, counted, shorten

_COMPRESSED = (".avif", ".gif", ".heic", ".jfif", ".jp2", ".jpeg", ".jpg", ".png", ".webp")


@dataclass(frozen=True)
class Listing:
    """The images that a reader found: files that are not looked at yet, or ``pixels``.

    Attributes:
        root: folder that ``paths`` [N] are relative to, with forward slashes; empty with ``pixels``.
        labels: [N] indices into ``class_names``.
        class_names: every published class in published order, also those that a subset has no images of.
        role: [N] entries of ``ROLES``; None: the first half of ``class_names`` trains, the others test.
        super_labels: [N] ids of the super-classes, or None.
        originals: what is known of the published images, its boxes in the order of ``paths``; or None.
        notes: how the data may differ from the published ones, as far as names tell.
        remedy: how to resolve classes in both halves, for the message.
        pixels: [N, H, W] or [N, H, W, 3] uint8; None for files.
        digest: of ``pixels``; where it is empty, the sizes of the files identify the images.
    """

    root: str | Path
    paths: Sequence[str] | NDArray[np.str_]
    labels: IntArray
    class_names: Sequence[str]
    role: NDArray[np.str_] | None = None
    super_labels: IntArray | None = None
    originals: Originals | None = None
    notes: tuple[str, ...] = ()
    name: str = ""
    layout: str = ""
    remedy: str = "Get the original lists"
    pixels: NDArray[np.uint8] | None = None
    digest: str = ""


@dataclass(frozen=True)
class Published:
    """Numbers that identify a benchmark: role -> (images, classes), such as ``{"train": (5_864, 100), ...}``."""

    by_role: Mapping[str, tuple[int, int]]

    @property
    def num_images(self) -> int:
        return sum(images for images, _ in self.by_role.values())

    @property
    def num_queries(self) -> int:
        return self.by_role["query" if "query" in self.by_role else "test"][0]

    def subset_note(self, count: int) -> tuple[str, ...]:
        """A note where there are fewer images than published."""
        total = self.num_images
        return (f"a subset: {count:,} of {total:,} images",) if count < total else ()

    def __str__(self) -> str:
        return ", ".join(
            f"{role} {images:,} images of {classes:,} classes" for role, (images, classes) in self.by_role.items()
        )


def table_of(
    listing: Listing,
    *,
    published: Published | None = None,
    check_counts: bool = True,
    place: str | Path | None = None,
) -> ImageTable:
    """The table of a listing whose images are all there; files are sorted by path, whatever the order of the lists.

    Args:
        check_counts: require the published numbers. False takes a subset: classes without images are left out, the
            others keep their order and half.
        place: what the images were read from, for messages; ``listing.root`` by default.
    """
    name, names, place = listing.name, listing.class_names, place or listing.root
    paths = np.asarray(listing.paths, dtype=np.str_)
    labels = np.asarray(listing.labels, dtype=np.int64)
    role = halved_roles(labels, len(names)) if listing.role is None else np.asarray(listing.role, dtype=np.str_)
    super_labels = None if listing.super_labels is None else np.asarray(listing.super_labels, dtype=np.int64)
    parts = {"paths": paths, "labels": labels, "role": role, "super_labels": super_labels, "pixels": listing.pixels}
    lengths = {what: len(part) for what, part in parts.items() if part is not None}
    if len(set(lengths.values())) > 1:
        raise DataError(f"data set '{name}': got different lengths, {lengths}, expected one entry per image in each.")
    notes: tuple[str, ...] = ()
    if published is not None:
        found = dict.fromkeys(published.by_role, (0, 0)) | counts_by_role(labels, role)
        if found != dict(published.by_role):
            if check_counts:
                raise DataError(
                    f"{name} in '{place}': got {Published(found)}, expected the published {published}. Complete the "
                    "data, or take a subset with dataset.table.check_counts=false."
                )
            other = f"other counts than published: {Published(found)}"
            notes = published.subset_note(len(labels)) or (other,)
    if len(paths) == 0:
        raise DataError(f"data set '{name}' has no images. Check its folder '{place}'.")
    if labels.min() < 0 or labels.max() >= len(names):
        raise DataError(
            f"data set '{name}': got labels from {labels.min()} to {labels.max()}, expected 0 to {len(names) - 1} for "
            f"its {len(names)} class names."
        )
    present = np.unique(labels)
    class_names = tuple(names[c] for c in present)
    if len(set(class_names)) < len(class_names):
        raise DataError(
            f"data set '{name}': got two classes of the same name among {len(class_names)}, expected unique names. "
            "Rename one."
        )
    for unknown in sorted(set(role.tolist()) - set(ROLES)):
        raise DataError(f"data set '{name}' has the unknown role '{unknown}': {closest(unknown, ROLES)}")
    unique, counts = np.unique(paths, return_counts=True)
    if len(unique) < len(paths):
        raise DataError(f"data set '{name}' lists images twice: {shorten(unique[counts > 1])}. List each once.")
    if shared := np.intersect1d(labels[role == "train"], labels[role != "train"]).tolist():
        raise DataError(
            f"data set '{name}': got {counted(len(shared), 'class')} in both the train and the test half "
            f"({shorten([names[c] for c in shared])}), expected none. {listing.remedy}."
        )
    order = np.arange(len(labels))
    content: IntArray | str = listing.digest
    if not listing.digest:
        if outside := [path for path in paths.tolist() if leaves_root(path)]:
            raise DataError(
                f"data set '{name}' lists images outside of '{place}': {shorten(outside)}. Use paths in that folder."
            )
        order = np.argsort(paths)
        content = file_contents(listing.root, paths[order], name=name)
    originals = listing.originals
    if originals is not None:
        if originals.boxes is not None:
            originals = replace(originals, boxes=originals.boxes[order])
        notes += deviations_of_sample(listing.root, paths[order].tolist(), originals)
    compact = np.searchsorted(present, labels[order])
    return ImageTable(
        name,
        str(listing.root),
        paths[order],
        compact,
        class_names,
        role[order],
        None if super_labels is None else super_labels[order],
        listing.pixels,
        fingerprint(paths[order], content, compact, role[order]),
        listing.layout,
        originals,
        notes + listing.notes,
        None if published is None else published.num_queries,
    )


def identified(table: ImageTable) -> ImageTable:
    """The table; a user's table without a fingerprint gets one, by the order of its rows."""
    if table.fingerprint:
        return table
    names = [f"{row}\t{path}" for row, path in enumerate(table.paths)]
    if table.pixels is not None:
        content: IntArray | str = hashlib.sha256(table.pixels.tobytes()).hexdigest()
    else:
        content = file_contents(table.root, table.paths, name=table.name)
    return replace(table, fingerprint=fingerprint(names, content, table.labels, table.role))


def counts_by_role(labels: IntArray, role: NDArray[np.str_]) -> dict[str, tuple[int, int]]:
    """Role -> (images, classes) of the roles that occur, in the order of ``ROLES``."""
    rows_of = {part: role == part for part in ROLES}
    return {part: (int(rows.sum()), len(np.unique(labels[rows]))) for part, rows in rows_of.items() if rows.any()}


def fingerprint(
    names: Sequence[str] | NDArray[np.str_], content: IntArray | str, labels: IntArray, role: NDArray[np.str_]
) -> str:
    """Hexadecimal sha256 over sorted names with their sizes, labels and roles; the order of rows does not matter."""
    digest = hashlib.sha256()
    sizes = np.zeros(len(names), dtype=np.int64) if isinstance(content, str) else np.asarray(content)
    if isinstance(content, str):
        digest.update(f"pixels {content}\n".encode())
    rows = zip(np.asarray(names).tolist(), sizes.tolist(), labels.tolist(), np.asarray(role).tolist(), strict=True)
    digest.update("".join(sorted(f"{n}\t{s}\t{c}\t{r}\n" for n, s, c, r in rows)).encode())
    return digest.hexdigest()


def rows_of_classes(table: ImageTable, class_ids: Sequence[int] | IntArray) -> IntArray:
    """Rows, ascending, of every image whose label is among ``class_ids``."""
    return np.flatnonzero(np.isin(table.labels, np.asarray(class_ids, dtype=np.int64))).astype(np.int64)


def halved_roles(labels: IntArray, num_classes: int) -> NDArray[np.str_]:
    """[N] roles of the usual zero-shot split: the first ``num_classes // 2`` classes are "train", the others "test"."""
    return np.where(np.asarray(labels) < num_classes // 2, "train", "test")


def file_contents(root: str | Path, paths: Sequence[str] | NDArray[np.str_], *, name: str) -> IntArray:
    """[N] sizes in bytes of the files, all of which must exist.

    Of formats without compression, whose sizes tell the dimensions alone, and of unknown ones also a checksum << 31.
    """
    contents = np.zeros(len(paths), dtype=np.int64)
    missing: list[str] = []
    folder = os.path.join(root, "")
    for row, path in enumerate(map(str, paths)):
        try:
            status = os.stat(folder + path)
        except (OSError, ValueError):
            status = None
        if status is None or not stat.S_ISREG(status.st_mode):  # opening a pipe would wait without end
            missing.append(path)
            continue
        contents[row] = status.st_size
        if not path.lower().endswith(_COMPRESSED):
            try:
                contents[row] += zlib.crc32(Path(folder + path).read_bytes()) << 31
            except OSError as error:
                raise DataError(
                    f"image '{path}' of '{name}' cannot be read ({error.strerror}). Make it readable."
                ) from error
    if missing:
        raise DataError(
            f"{name}: {len(missing):,} of {len(paths):,} listed images are missing in '{root}': {shorten(missing)}. "
            "Copy them there or correct the list."
        )
    return contents


def leaves_root(path: str) -> bool:
    """Whether a path points out of the folder that it is relative to."""
    if path.startswith(("/", "\\")) or (":" in path and os.path.isabs(path)):
        return True
    return ".." in path and ".." in path.replace("\\", "/").split("/")
