"""Finding a data set on disk: under the usual names of its folder, in the layouts that are in circulation."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dmlbench.types import DataError, not_a_file

# Folders that mirrors' archives wrap a data set in.
_WRAPPERS = ("archive", "data", "dataset")
_DEPTH = 3
IMAGE_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")

# Mirrors sort the images of each class into these; metric learning splits by class instead and merges them again.
SPLIT_FOLDERS = ("train", "test", "val", "valid")


@dataclass(frozen=True)
class Layout:
    """One way to arrange a data set on disk.

    Attributes:
        name: identifies the layout within its module.
        description: as messages print it.
        markers: paths relative to the data set's folder, all of which must exist. Each may hold wildcards (``*``,
            ``?``, ``[0-9]``) and several alternatives separated by ``|``, one of which is enough.
        recognizes: a further test of the folder, for what markers cannot express.
    """

    name: str
    description: str
    markers: tuple[str, ...]
    recognizes: Callable[[Path], bool] | None = None


@dataclass(frozen=True)
class DataFolder:
    """The folder of a data set: its usual names, and its possible layouts.

    Attributes:
        title: the data set's name, for messages.
        usual_names: names of the folder; case, blanks and punctuation do not matter.
        layouts: the possible layouts, the preferred one first.
        remedy: how to get the data; ends the message if they are not found.
    """

    title: str
    usual_names: tuple[str, ...]
    layouts: tuple[Layout, ...]
    remedy: str

    def find(self, root: str | Path) -> tuple[Path, Layout]:
        """The folder and its layout, in ``root`` or up to three levels down in folders of the usual names.

        Raises:
            DataError: no layout is complete; names the folders searched, and what the nearest one lacks.
        """
        root = Path(root)
        if not root.is_dir():
            raise DataError(
                f"{self.title} is looked for in '{root}', which is not a folder; set DMLBENCH_DATA (or paths.data_dir) "
                f"to the folder that holds your data sets; {self.remedy}"
            )
        folders = list(_candidates(root, {plain_name(name) for name in (*self.usual_names, *_WRAPPERS)}))
        nearest: tuple[int, str] = (0, "")
        for layout in self.layouts:
            for folder in folders:
                missing = [marker for marker in layout.markers if first_match(folder, marker) is None]
                if not missing and (layout.recognizes is None or layout.recognizes(folder)):
                    return folder, layout
                present = len(layout.markers) - len(missing)
                if missing and present > nearest[0]:
                    lacking = ", ".join(marker.replace("|", " or ") for marker in missing)
                    nearest = present, f"; nearest is '{folder}' ({layout.description}), which lacks {lacking}"
        looked = ", ".join(f"'{folder}'" for folder in folders)
        expected = "; or ".join(layout.description for layout in self.layouts)
        raise DataError(f"{self.title} is not in {looked}{nearest[1]}; expected {expected}; {self.remedy}")


def resolve(folder: Path, marker: str) -> Path:
    """The path that a marker matches: the first of its places that exists, the first match in sorted order.

    Raises:
        DataError: none exists.
    """
    if (found := first_match(folder, marker)) is None:
        raise DataError(f"'{folder}' lacks {marker.replace('|', ' or ')}; complete the data set")
    return found


def first_match(folder: Path, marker: str) -> Path | None:
    """Like ``resolve``, but None where nothing exists."""
    for place in marker.split("|"):
        try:
            if any(character in place for character in "*?["):
                found = sorted(folder.glob(place))
            else:
                found = [folder / place] if (folder / place).exists() else []
        except OSError:
            continue
        if found:
            return found[0]
    return None


def images_by_folder(base: Path) -> dict[str, list[str]]:
    """Folder -> names of the images directly inside, both sorted, of the visible folders of ``base`` that hold any.

    Raises:
        DataError: a folder cannot be read.
    """
    found = {name: images_in(base / name) for name in subfolders(base)}
    return {name: images for name, images in found.items() if images}


def images_in(folder: Path) -> list[str]:
    """Sorted names of the image files directly in a folder, hidden ones left out.

    Raises:
        DataError: it cannot be read, or a name is not UTF-8.
    """
    names = [entry.name for entry in _entries(folder) if entry.name[0] != "."]
    names = sorted(name for name in names if name.lower().endswith(IMAGE_SUFFIXES))
    for name in (folder.name, *names):
        try:
            name.encode()
        except UnicodeEncodeError:  # bytes of the file system that Python has escaped
            raise DataError(f"'{folder}' has the name {os.fsencode(name)!r}, which is not UTF-8; rename it") from None
    return names


def subfolders(folder: Path) -> list[str]:
    """Sorted names of the visible folders in a folder; symbolic links to folders count.

    Raises:
        DataError: it cannot be read.
    """
    return sorted(entry.name for entry in _entries(folder) if entry.name[0] != "." and _is_folder(entry))


def file_stamp(file: Path) -> str:
    """Size and time of a file, which change when it does.

    Raises:
        DataError: it is gone or unreadable, or no file, so that reading it could wait without end.
    """
    try:
        status = file.stat()
    except OSError as error:
        raise DataError(f"'{file}' cannot be read ({error.strerror}); replace it") from error
    if what := not_a_file(file):
        raise DataError(f"'{file}' is {what}, not a file; replace it")
    return f"{status.st_size} {status.st_mtime_ns}"


def plain_name(name: str) -> str:
    """A name without its case, slashes, blanks and punctuation."""
    return "".join(character for character in name.casefold() if character.isalnum())


def read_names(data_set: str) -> tuple[str, ...]:
    """The published class names of a data set in published order, from the list next to this module."""
    return tuple(Path(__file__).with_name(f"{data_set}_names.txt").read_text(encoding="utf-8").splitlines())


def _candidates(root: Path, names: set[str]) -> Iterator[Path]:
    level = [root]
    for depth in range(_DEPTH + 1):
        yield from level
        if depth < _DEPTH:
            level = [folder / name for folder in level for name in subfolders(folder) if plain_name(name) in names]


def _is_folder(entry: os.DirEntry[str]) -> bool:
    # os.path.isdir knows that a link to itself is none
    return os.path.isdir(entry) if entry.is_symlink() else entry.is_dir()


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        raise DataError(f"cannot look into '{folder}' ({error.strerror}); make it a readable folder") from error
