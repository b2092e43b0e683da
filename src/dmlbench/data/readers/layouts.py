"""Finds data sets on disk, under the usual names of their folders, in any known layout, and reads them as tables."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dmlbench.data.image_table import Listing, Published, table_of
from dmlbench.types import DataError, ImageTable

# Folders that mirrors' archives wrap a data set in.
_WRAPPERS = ("archive", "data", "dataset")
_DEPTH = 3
IMAGE_SUFFIXES = (
    *(".avif", ".bmp", ".gif", ".jfif", ".jp2", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".pnm", ".ppm"),
    *(".tif", ".tiff", ".webp"),
)

# Mirrors sort the images of each class into these; metric learning splits by class instead and merges them again.
SPLIT_FOLDERS = ("train", "test", "val", "valid")


@dataclass(frozen=True)
class Layout:
    """One way to arrange a data set on disk.

    Attributes:
        markers: paths relative to the data set's folder, all of which must exist. Each may hold wildcards and several
            alternatives separated by ``|``.
        read: what a folder of this layout lists: a ``Listing`` where images are files, else images by their names, or
            the path of what holds them all.
        recognizes: a further test of the folder.
    """

    description: str
    markers: tuple[str, ...]
    read: Callable[[Path], Any]
    recognizes: Callable[[Path], bool] = field(default=lambda folder: True)


@dataclass(frozen=True)
class Archive:
    """One file that a data set is published as; files without a checksum are not downloaded."""

    name: str
    md5: str | None = None
    size: int | None = None


@dataclass(frozen=True)
class DataFolder:
    """A published data set: its layouts on disk, and where to get it.

    Attributes:
        name: in the configuration; ``title`` in messages.
        usual_names: of its folder; case, blanks and punctuation do not matter.
        layouts: the preferred one first.
        remedy: what to put there where it is not found.
        published: the counts that identify the benchmark.
        terms: permitted use, as far as the publisher states it.
        alternatives: sets of files, each of which is the complete data set; the preferred one first.
        by_hand: how to get the files without this program.
        mirrors: folders to download the files from; none where links are dead or an agreement is needed.
        is_read_packed: whether the archives are read without unpacking.
    """

    name: str
    title: str
    usual_names: tuple[str, ...]
    layouts: tuple[Layout, ...]
    remedy: str
    published: Published
    home: str
    terms: str
    citation: str
    alternatives: tuple[tuple[Archive, ...], ...]
    by_hand: str
    mirrors: tuple[str, ...] = ()
    is_read_packed: bool = False

    @property
    def archives(self) -> tuple[Archive, ...]:
        return tuple(archive for files in self.alternatives for archive in files)

    def links(self, archive: Archive) -> list[str]:
        """Where to download an archive from."""
        return [mirror + archive.name for mirror in self.mirrors if archive.md5]

    def found(self, root: str | Path) -> tuple[Path, Layout] | None:
        """Like ``find``, but None where no layout is complete."""
        try:
            return self.find(root)
        except DataError:
            return None

    @property
    def expected(self) -> str:
        return "; or ".join(layout.description for layout in self.layouts)

    def find(self, root: str | Path) -> tuple[Path, Layout]:
        """The folder and its layout, in ``root`` or up to three levels down in folders of the usual names."""
        root = Path(root)
        if not root.is_dir():
            raise DataError(
                f"{self.title} cannot be found: '{root}' is not a folder. Set DMLBENCH_DATA (or paths.data_dir) to the "
                f"folder of your data sets. {self.remedy}."
            )
        names = {plain_name(name) for name in (*self.usual_names, *_WRAPPERS)}
        folders = level = [root]
        for _ in range(_DEPTH):
            level = [folder / name for folder in level for name in subfolders(folder) if plain_name(name) in names]
            folders = folders + level
        nearest: tuple[int, str] = (0, "")
        for layout in self.layouts:
            for folder in folders:
                missing = [marker for marker in layout.markers if first_match(folder, marker) is None]
                if not missing and layout.recognizes(folder):
                    return folder, layout
                present = len(layout.markers) - len(missing)
                if missing and present > nearest[0]:
                    lacking = ", ".join(marker.replace("|", " or ") for marker in missing)
                    nearest = present, f". The nearest is '{folder}' ({layout.description}), which lacks {lacking}"
        searched = ", ".join(f"'{folder}'" for folder in folders)
        raise DataError(f"{self.title} is not in {searched}{nearest[1]}. Expected {self.expected}. {self.remedy}.")

    def table(self, root: str | Path, *, check_counts: bool) -> ImageTable:
        """The data set as a table.

        Args:
            root: folder of the data set, or one that holds it under a usual name.
            check_counts: require the published numbers of images and classes. False takes a subset.
        """
        folder, layout = self.find(root)
        return self.table_of(layout.read(folder), layout, check_counts=check_counts)

    def table_of(self, listing: Listing, layout: Layout, *, check_counts: bool) -> ImageTable:
        """The table of what a layout lists."""
        listing = replace(listing, name=self.name, layout=listing.layout or layout.description)
        return table_of(listing, published=self.published, check_counts=check_counts)

    def notes(self, root: str | Path) -> tuple[str, ...]:
        """How the data below ``root`` differ from the published ones, as far as is known without decoding them."""
        folder, layout = self.find(root)
        found = layout.read(folder)
        if isinstance(found, Listing):
            return self.table_of(found, layout, check_counts=False).notes
        return self.published.subset_note(len(found))


def resolve(folder: Path, marker: str) -> Path:
    """The path that a marker matches: the first of its places that exists, the first match in sorted order."""
    if (found := first_match(folder, marker)) is None:
        raise DataError(f"'{folder}' lacks {marker.replace('|', ' or ')}. Complete the data set.")
    return found


def first_match(folder: Path, marker: str) -> Path | None:
    """Like ``resolve``, but None where nothing exists."""
    return next((path for place in marker.split("|") for path in sorted(folder.glob(place))), None)


def images_of_classes(
    root: Path, class_of: Callable[[Path], int], *, parts: Sequence[str] = ("",)
) -> tuple[list[str], list[int]]:
    """Paths of the images in class folders, relative to ``root``, and their classes.

    Args:
        class_of: the class of a folder that holds images; raises DataError where it is none.
        parts: folders of ``root`` whose class folders are merged; those that do not exist are skipped.
    """
    paths: list[str] = []
    classes: list[int] = []
    for part in parts:
        if (root / part).is_dir():
            for name in subfolders(root / part):
                if images := images_in(root / part / name):
                    classes += [class_of(root / part / name)] * len(images)
                    paths += [f"{part}/{name}/{image}".removeprefix("/") for image in images]
    return paths, classes


def images_below(top: Path) -> list[str]:
    """The images among ``files_below``."""
    return [path for path in files_below(top) if is_image(path)]


def files_below(top: Path) -> list[str]:
    """Paths of the visible files below, relative to ``top``, with forward slashes, sorted."""

    def walk(folder: Path, prefix: str, inside: frozenset[Path]) -> Iterator[str]:
        place = folder.resolve()
        if place in inside:
            raise DataError(f"'{folder}' links back to '{place}', which contains it. Remove that link.")
        yield from (prefix + name for name in _files_in(folder))
        for name in subfolders(folder):
            yield from walk(folder / name, f"{prefix}{name}/", inside | {place})

    return sorted(walk(top, "", frozenset({top.parent.resolve()})))


def images_in(folder: Path) -> list[str]:
    """Sorted names of the image files directly in a folder, hidden ones left out."""
    return [name for name in _files_in(folder) if is_image(name)]


def _files_in(folder: Path) -> list[str]:
    names = sorted(entry.name for entry in _entries(folder) if entry.name[0] != "." and not _is_folder(entry))
    for name in (folder.name, *filter(is_image, names)):
        try:
            name.encode()
        except UnicodeEncodeError:  # bytes of the file system that Python has escaped
            raise DataError(f"'{folder}': got the name {os.fsencode(name)!r}, expected UTF-8. Rename it.") from None
    return names


def is_image(name: str) -> bool:
    """Whether a file name is an image's and not hidden."""
    return not name.startswith(".") and name.lower().endswith(IMAGE_SUFFIXES)


def subfolders(folder: Path) -> list[str]:
    """Sorted names of the visible folders in a folder; symbolic links to folders count."""
    return sorted(entry.name for entry in _entries(folder) if entry.name[0] != "." and _is_folder(entry))


def plain_name(name: str) -> str:
    """A name without its case, slashes, blanks and punctuation."""
    return "".join(character for character in name.casefold() if character.isalnum())


def read_names(data_set: str) -> tuple[str, ...]:
    """The class names of a data set in published order, from the list next to this module."""
    return tuple(Path(__file__).with_name(f"{data_set}_names.txt").read_text(encoding="utf-8").splitlines())


def _is_folder(entry: os.DirEntry[str]) -> bool:
    # os.path.isdir knows that a link to itself is none; other entries need no look at the disk
    return os.path.isdir(entry) if entry.is_symlink() else entry.is_dir()


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        raise DataError(f"cannot read the folder '{folder}' ({error.strerror}). Make it readable.") from error
