"""Any image folder as a data set: a ``class/image`` tree, ``train`` and ``test`` trees, or a CSV list."""

import csv as csv_reader
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dmlbench.data.table import file_sizes, halved_roles, make_table, shorten
from dmlbench.types import ROLES, DataError, ImageTable, IntArray, closest

IMAGE_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
_SPLIT_FOLDERS = {"train", "test", "val", "valid", "validation"}


def folder(root: str | Path, *, csv: str | Path | None = None, name: str = "folder") -> ImageTable:
    """A table of the images under ``root``.

    - ``root/<class>/.../<image>``: the first half of the sorted classes trains, the second tests.
    - ``root/train/<class>/...`` and ``root/test/<class>/...``: the folders say which.
    - a CSV with the header ``path,label`` or ``path,label,role``: paths relative to ``root``; labels that are all
      integers are sorted as such, else as names; roles are train, test, query or gallery (default: halves as above).

    Args:
        root: folder of the images.
        csv: the list's file; relative to ``root`` unless absolute.
        name: name of the data set in results.

    Raises:
        DataError: a folder, the CSV or images are missing, a CSV line is at fault, only one of ``train`` and ``test``
            is there, or a class has images in both halves (metric learning tests on unseen classes).
    """
    root = Path(root)
    if not root.is_dir():
        raise DataError(f"data set '{name}' looks for its images in '{root}', which is not a folder; correct root")
    if csv is not None:
        paths, class_of, role = _read_csv(root / csv, name)
    else:
        paths, class_of, role = _read_tree(root, name)
    class_names = _sorted_classes(class_of)
    index = {c: i for i, c in enumerate(class_names)}
    labels = np.array([index[c] for c in class_of], dtype=np.int64)
    if role is None:
        role = halved_roles(labels, len(class_names))
    _refuse_shared_classes(labels, role, class_names, name=name)
    return make_table(
        name,
        root,
        paths=paths,
        labels=labels,
        class_names=class_names,
        role=role,
        content=file_sizes(root, paths, name=name),
    )


_Listing = tuple[list[str], list[str], NDArray[np.str_] | None]


def _read_tree(root: Path, name: str) -> _Listing:
    found = {entry.name: _images_below(entry) for entry in sorted(root.iterdir()) if _is_visible_folder(entry)}
    tops = {top: images for top, images in found.items() if images}
    if not tops:
        raise DataError(
            f"data set '{name}' finds no images ({', '.join(IMAGE_SUFFIXES)}) in sub-folders of '{root}'; "
            "expected root/<class>/<image>"
        )
    if not set(tops) <= _SPLIT_FOLDERS:
        listing = [(f"{top}/{image}", top) for top, images in tops.items() for image in images]
        return [path for path, _ in listing], [label for _, label in listing], None
    if set(tops) != {"train", "test"}:
        raise DataError(
            f"data set '{name}' finds {', '.join(sorted(tops))} in '{root}', expected class folders, or both train and "
            f"test; point root at one of them (such as '{root / sorted(tops)[0]}') or list the images in a csv"
        )
    paths, class_of, roles = [], [], []
    for top in ("train", "test"):
        for image in tops[top]:
            if "/" not in image:
                raise DataError(f"'{root / top / image}' lies in no class folder; expected {top}/<class>/<image>")
            paths.append(f"{top}/{image}")
            class_of.append(image.split("/")[0])
            roles.append(top)
    return paths, class_of, np.array(roles, dtype=np.str_)


def _is_visible_folder(entry: Path) -> bool:
    return entry.is_dir() and not entry.name.startswith(".")


def _images_below(top: Path) -> list[str]:
    """Paths of the images below, relative to ``top``, with forward slashes, sorted."""
    images = []
    for directory, folders, files in os.walk(top, followlinks=True):
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        prefix = Path(directory).relative_to(top)
        images += [(prefix / f).as_posix() for f in files if f.lower().endswith(IMAGE_SUFFIXES) and f[0] != "."]
    return sorted(images)


def _read_csv(file: Path, name: str) -> _Listing:
    if not file.is_file():
        raise DataError(f"data set '{name}' looks for its list in '{file}', which is missing; correct csv")
    paths: list[str] = []
    class_of: list[str] = []
    roles: list[str] = []
    try:
        with open(file, newline="", encoding="utf-8-sig") as stream:
            reader = csv_reader.DictReader(stream, skipinitialspace=True)
            header = [h.strip() for h in reader.fieldnames or []]
            if set(header) not in ({"path", "label"}, {"path", "label", "role"}):
                raise DataError(f"'{file}' has the columns {', '.join(header)}; expected path,label or path,label,role")
            reader.fieldnames = header
            for row in reader:
                values = {column: (row[column] or "").strip() for column in header}
                if None in row or not all(values.values()):
                    raise DataError(f"line {reader.line_num} of '{file}' must have {len(header)} values; correct it")
                if values.get("role", "train") not in ROLES:
                    raise DataError(
                        f"line {reader.line_num} of '{file}' has the unknown role '{values['role']}'; "
                        f"{closest(values['role'], ROLES)}"
                    )
                paths.append(values["path"])
                class_of.append(values["label"])
                roles.append(values.get("role", ""))
    except (UnicodeDecodeError, csv_reader.Error) as error:
        raise DataError(f"'{file}' is not a CSV in UTF-8 ({error}); save it as one") from error
    if not paths:
        raise DataError(f"'{file}' lists no images; add lines of {','.join(header)}")
    return paths, class_of, np.array(roles, dtype=np.str_) if "role" in header else None


def _sorted_classes(class_of: Sequence[str]) -> list[str]:
    classes = set(class_of)
    if all(c.isascii() and c.isdigit() for c in classes):
        return sorted(classes, key=lambda c: (int(c), c))
    return sorted(classes)


def _refuse_shared_classes(labels: IntArray, role: NDArray[np.str_], class_names: Sequence[str], *, name: str) -> None:
    is_train = role == "train"
    shared = np.intersect1d(labels[is_train], labels[~is_train])
    if len(shared):
        raise DataError(
            f"data set '{name}' has {len(shared)} classes both to train and to test on: "
            f"{shorten([class_names[c] for c in shared])}; metric learning tests on unseen classes, so point root at "
            "one of the folders, or give each class one half by a csv with roles"
        )
