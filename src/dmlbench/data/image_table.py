"""How a data set becomes an ``ImageTable``: the checks that each must pass, and its fingerprint."""

import hashlib
import os
import stat
import zlib
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dmlbench.data.originals import deviations_of_sample
from dmlbench.types import ROLES, DataError, ImageTable, IntArray, Originals, closest

_NAMED_IN_ERRORS = 10
_UNCOMPRESSED = (".bmp", ".ppm", ".tif", ".tiff")


@dataclass(frozen=True)
class Listing:
    """What the lists or folders of a data set name, before any image file is looked at.

    Attributes:
        root: folder that ``paths`` are relative to.
        paths: [N] names of the images, relative to ``root``, with forward slashes.
        labels: [N] indices into ``class_names``.
        class_names: every published class in published order, also those that a subset has no images of.
        role: [N] entries of ``ROLES``; None: the first half of ``class_names`` trains, the others test.
        super_labels: [N] ids of the super-classes, or None.
        originals: what is known of the published images, its boxes in the order of ``paths``; or None.
        notes: how the data may differ from the published ones, as far as names tell.
        name: the data set's name, for messages and results.
        layout: which of the known layouts it has, in words.
        remedy: how to resolve classes in both halves, for the message.
    """

    root: Path
    paths: Sequence[str]
    labels: IntArray
    class_names: Sequence[str]
    role: NDArray[np.str_] | None = None
    super_labels: IntArray | None = None
    originals: Originals | None = None
    notes: tuple[str, ...] = ()
    name: str = ""
    layout: str = ""
    remedy: str = "get the original lists"


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


def table_of_files(listing: Listing, *, published: Published | None, check_counts: bool = True) -> ImageTable:
    """The table of a listing whose images are all there, its rows sorted by path.

    The order of the lists does not matter: tables of one fingerprint have the same rows, so that results of runs can be
    combined row by row whichever layout they were read from.

    Args:
        listing: what the data set's lists name.
        published: the benchmark's counts, if there are any.
        check_counts: insist on them. False takes a subset: classes without images are left out, the others keep their
            order and half.
    """
    labels = np.asarray(listing.labels, dtype=np.int64)
    role = halved_roles(labels, len(listing.class_names)) if listing.role is None else np.asarray(listing.role)
    super_labels = None if listing.super_labels is None else np.asarray(listing.super_labels, dtype=np.int64)
    _check_lengths(listing.name, paths=listing.paths, labels=labels, role=role, super_labels=super_labels)
    if published is not None and check_counts:
        check_published(listing.name, listing.root, labels, role, published)
    if outside := [path for path in listing.paths if leaves_root(path)]:
        raise DataError(
            f"data set '{listing.name}' lists images outside of '{listing.root}': {shorten(outside)}; "
            "give paths below that folder"
        )
    _refuse_shared_classes(listing, labels, role)
    order = np.array(sorted(range(len(labels)), key=listing.paths.__getitem__), dtype=np.int64)
    paths = [listing.paths[row] for row in order.tolist()]
    present, compact = np.unique(labels[order], return_inverse=True)
    table = make_table(
        listing.name,
        listing.root,
        paths=paths,
        labels=compact.astype(np.int64),
        class_names=[listing.class_names[c] for c in present],
        role=role[order],
        content=file_contents(listing.root, paths, name=listing.name),
        super_labels=None if super_labels is None else super_labels[order],
        layout=listing.layout,
    )
    notes = differing_counts(labels, role, published)
    table = replace(table, published_queries=None if published is None else published.num_queries)
    if (originals := listing.originals) is None:
        return replace(table, notes=notes + listing.notes)
    if originals.boxes is not None:
        originals = replace(originals, boxes=originals.boxes[order])
    notes += deviations_of_sample(listing.root, paths, originals) + listing.notes
    return replace(table, originals=originals, notes=notes)


def differing_counts(labels: IntArray, role: NDArray[np.str_], published: Published | None) -> tuple[str, ...]:
    """A note for results where a data set's counts are not the published ones; none where they are or none are known.

    Args:
        labels: [N] class ids.
        role: [N] entries of ``ROLES``.
        published: the benchmark's counts, or None.
    """
    if published is None or _counts(labels, role, published) == dict(published.by_role):
        return ()
    other = f"other counts than published: {Published(_counts(labels, role, published))}"
    return published.subset_note(len(labels)) or (other,)


def counts_by_role(labels: IntArray, role: NDArray[np.str_]) -> dict[str, tuple[int, int]]:
    """Role -> (images, classes) of the roles that occur, from labels [N] and roles [N], in the order of ``ROLES``."""
    rows_of = {part: role == part for part in ROLES}
    return {part: (int(rows.sum()), len(np.unique(labels[rows]))) for part, rows in rows_of.items() if rows.any()}


def _counts(labels: IntArray, role: NDArray[np.str_], published: Published) -> dict[str, tuple[int, int]]:
    """The counts of the published roles and of those that occur."""
    return dict.fromkeys(published.by_role, (0, 0)) | counts_by_role(labels, role)


def check_published(
    name: str, place: str | Path, labels: IntArray, role: NDArray[np.str_], published: Published
) -> None:
    """Insist on a benchmark's counts.

    Args:
        name: the data set's name, for the message.
        place: folder or archive that it was read from, for the message.
        labels: [N] class ids.
        role: [N] entries of ``ROLES``.
        published: the counts.
    """
    found = _counts(labels, role, published)
    if found != dict(published.by_role):
        raise DataError(
            f"{name} in '{place}' has {Published(found)}; published are {published}; complete the "
            "data, or accept a subset with dataset.table.check_counts=false"
        )


def _refuse_shared_classes(listing: Listing, labels: IntArray, role: NDArray[np.str_]) -> None:
    is_train = role == "train"
    shared = np.intersect1d(labels[is_train], labels[~is_train])
    if len(shared):
        raise DataError(
            f"data set '{listing.name}' has {len(shared):,} classes both to train and to test on: "
            f"{shorten([listing.class_names[c] for c in shared])}; metric learning tests on unseen classes: "
            f"{listing.remedy}"
        )


def _check_lengths(name: str, **parts: Sized | None) -> None:
    lengths = {what: len(part) for what, part in parts.items() if part is not None}
    if len(set(lengths.values())) > 1:
        raise DataError(
            f"data set '{name}' has parts of different lengths: {lengths}; each must have one entry an image"
        )


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
    layout: str = "",
    notes: tuple[str, ...] = (),
    published_queries: int | None = None,
) -> ImageTable:
    """An ``ImageTable`` whose parts fit together.

    Args:
        name: the data set's name, for messages and results.
        root: folder that ``paths`` are relative to; empty when ``pixels`` holds the images.
        paths: [N] unique names.
        labels: [N] class ids; every id in [0, len(class_names)) has at least one image.
        class_names: one unique name per class id, in published order.
        role: [N] entries of ``ROLES``.
        content: [N] file sizes in bytes, or one digest of all pixels: what the fingerprint depends on besides names
            and labels.
        super_labels: [N] super-class ids, or None.
        pixels: [N, H, W] or [N, H, W, 3] uint8, or None.
        layout: which of the known layouts was found, in words.
        notes: how the data differ from the published ones.
        published_queries: queries of the published test half, if there is one.
    """
    names = np.asarray(paths, dtype=np.str_)
    labels = np.asarray(labels, dtype=np.int64)
    role = np.asarray(role, dtype=np.str_)
    if len(names) == 0:
        raise DataError(f"data set '{name}' has no images; check its folder '{root}'")
    super_labels = None if super_labels is None else np.asarray(super_labels, dtype=np.int64)
    _check_lengths(name, paths=names, labels=labels, role=role, super_labels=super_labels, pixels=pixels)
    if len(set(names.tolist())) < len(names):
        unique, counts = np.unique(names, return_counts=True)
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
        fingerprint=fingerprint(names, content, labels, role),
        layout=layout,
        notes=notes,
        published_queries=published_queries,
    )


def fingerprint(
    names: Sequence[str] | NDArray[np.str_], content: IntArray | str, labels: IntArray, role: NDArray[np.str_]
) -> str:
    """Hexadecimal sha256 over sorted names with their sizes, labels and roles.

    The order of the rows and the folder do not matter, so the same data gives the same digest on every machine.

    Args:
        names: [N] names of the images.
        content: [N] file sizes in bytes, or one digest of the pixels of all images.
        labels: [N] class ids.
        role: [N] entries of ``ROLES``.
    """
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
    """[N] numbers that identify the files' contents: sizes in bytes; for uncompressed formats, whose sizes depend on
    the images' dimensions alone, a checksum in the bits above the size.
    """
    contents = file_sizes(root, paths, name=name)
    for row, path in enumerate(map(str, paths)):
        if path.lower().endswith(_UNCOMPRESSED):
            try:
                with open(os.path.join(root, path), "rb") as file:
                    contents[row] += zlib.crc32(file.read()) << 31
            except OSError as error:
                raise DataError(
                    f"image '{path}' of '{name}' cannot be read ({error.strerror}); make it readable"
                ) from error
    return contents


def file_sizes(root: str | Path, paths: Sequence[str] | NDArray[np.str_], *, name: str) -> IntArray:
    """[N] sizes in bytes of the files, all of which must exist."""
    sizes = np.zeros(len(paths), dtype=np.int64)
    missing: list[str] = []
    folder = os.path.join(root, "")
    for row, path in enumerate(map(str, paths)):
        try:
            status = os.stat(folder + path)
        except (OSError, ValueError):
            status = None
        if status is None or not stat.S_ISREG(status.st_mode):  # opening a pipe would wait without end
            missing.append(path)
        else:
            sizes[row] = status.st_size
    if missing:
        raise DataError(
            f"data set '{name}' lacks {len(missing):,} of {len(paths):,} image files under '{root}': "
            f"{shorten(missing)}; copy them there or correct the list"
        )
    return sizes


def leaves_root(path: str) -> bool:
    """Whether a path of a list points out of the folder that it should be relative to."""
    if path.startswith(("/", "\\")) or (":" in path and os.path.isabs(path)):
        return True
    return ".." in path and ".." in path.replace("\\", "/").split("/")


def shorten(names: Sequence[str] | NDArray[np.str_]) -> str:
    """The first ten names and how many more there are, for messages."""
    shown = ", ".join(str(n) for n in names[:_NAMED_IN_ERRORS])
    return shown if len(names) <= _NAMED_IN_ERRORS else f"{shown} and {len(names) - _NAMED_IN_ERRORS} more"
