"""Any image folder as a data set: class folders, folders by role, or a CSV list; text files may name the classes."""

import csv as csv_reader
import io
import logging
import posixpath
import re
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from dmlbench.data.image_table import Listing, shorten, table_of
from dmlbench.data.readers.layouts import images_below, subfolders
from dmlbench.data.readers.lists import read_text
from dmlbench.types import ROLES, ConfigError, DataError, ImageTable, IntArray, closest

PART_FOLDERS = {*ROLES, "val", "valid", "validation"}
_ROLE_FOLDERS = ({"train", "test"}, {"train", "query", "gallery"})
_COLUMNS = ("path", "label", "role", "super_label")
_NEEDED = {"path", "label"}
_COMMENT = re.compile(r"(^|\s)#.*")
_SEPARATORS = (",", ";", "\t")
_CORRECT_PATH = "correct its path in dataset.table, which is relative to root"

logger = logging.getLogger(__name__)


def folder(
    root: str | Path,
    *,
    csv: str | Path | None = None,
    train_classes: str | Path | None = None,
    test_classes: str | Path | None = None,
    name: str = "folder",
) -> ImageTable:
    """A table of the images under ``root``.

    - ``root/<class>/.../<image>``: the first half of the sorted classes trains, the second tests.
    - ``root/train/<class>/...`` with ``root/test/<class>/...``, or with ``root/query/...`` and ``root/gallery/...``:
      the folders say which.
    - a CSV with the columns ``path,label`` and, optionally, ``role`` (train, test, query or gallery; without it the
      halves are as above) and ``super_label``. Paths are relative to ``root``; semicolons or tabs may separate columns.

    Classes are sorted, as numbers where all are whole numbers. Lists of classes (one name a line, ``#`` begins a
    comment) set the halves and the order in which protocols cut: those of ``train_classes`` come first, each list in
    its own order. With only one list, all other classes form the other half. With both, classes in neither are left
    out. Folders such as ``train``, ``val`` and ``test`` are then merged.

    Files are relative to ``root`` unless absolute; ``name`` is the data set's in results.
    """
    root = Path(root)
    if not root.is_dir():
        raise DataError(f"data set '{name}' looks for its images in '{root}', which is not a folder; correct root")
    has_lists = train_classes is not None or test_classes is not None
    images, layout = _read_csv(root / csv) if csv is not None else _read_tree(root, name, merge=has_lists)
    class_names = _sorted_classes(images["label"])
    num_train = len(class_names) // 2
    if has_lists:
        if "role" in images:
            raise ConfigError(
                f"data set '{name}' has roles from {layout}; remove these, or train_classes and test_classes"
            )
        lists = (None if file is None else root / file for file in (train_classes, test_classes))
        class_names, num_train = _listed_classes(class_names, *lists, name=name)
        images = images[images["label"].isin(class_names)]

    def numbered(column: str, names: Sequence[str]) -> IntArray:
        return pd.Index(names).get_indexer(pd.Index(images[column])).astype(np.int64)

    labels = numbered("label", class_names)
    has_super = "super_label" in images
    listing = Listing(
        name=name,
        root=root,
        layout=layout,
        paths=images["path"].tolist(),
        labels=labels,
        class_names=class_names,
        role=images["role"].to_numpy(np.str_) if "role" in images else np.where(labels < num_train, "train", "test"),
        super_labels=numbered("super_label", _sorted_classes(images["super_label"])) if has_super else None,
        remedy="point root at one of the folders, or give each class one half by train_classes and test_classes",
    )
    return table_of(listing, published=None)


def _read_tree(root: Path, name: str, *, merge: bool) -> tuple[pd.DataFrame, str]:
    """Path and label of images in class folders, their role unless folders by role are merged; and the layout."""
    below = {top: images_below(root / top) for top in subfolders(root) if top != "__MACOSX"}
    tops = {top: images for top, images in below.items() if images}
    if tops and (empty := [top for top in below if top not in tops]):
        logger.warning("%s of '%s' hold no images, so they are no classes", shorten(empty), root)
    parts = [top for top in tops if top.casefold() in PART_FOLDERS]
    if not tops:
        raise DataError(f"data set '{name}' finds no images in sub-folders of '{root}', expected <class>/<image>")
    nested = [top for top in parts if any("/" in image for image in tops[top])]
    if nested and len(parts) < len(tops):
        others = shorten([top for top in tops if top not in parts])
        raise DataError(
            f"data set '{name}' finds both {', '.join(nested)} with folders inside and {others} in '{root}', expected "
            "classes or parts; move one kind away, or list the images in a csv"
        )
    if len(parts) < len(tops):
        if len(tops) == 1:
            (only,) = tops
            raise DataError(
                f"data set '{name}' finds one class, '{only}', expected two or more; point root at '{root / only}' if "
                "its sub-folders are the classes"
            )
        listed = [(f"{top}/{image}", top) for top, images in tops.items() for image in images]
        return pd.DataFrame(listed, columns=["path", "label"], dtype=object), "class folders"
    role_of = {top: top.casefold() for top in tops}
    if not merge and (set(role_of.values()) not in _ROLE_FOLDERS or len(set(role_of.values())) < len(tops)):
        raise DataError(
            f"data set '{name}' finds {', '.join(sorted(tops))} in '{root}', expected class folders, both train and "
            "test, or train, query and gallery; set train_classes and test_classes, or point root at one of them"
        )
    rows = []
    for top, images in tops.items():
        for image in images:
            if "/" not in image:
                raise DataError(f"'{root / top / image}' is in no class folder; expected {top}/<class>/<image>")
            rows.append((f"{top}/{image}", image.split("/")[0], role_of[top]))
    found_images = pd.DataFrame(rows, columns=["path", "label", "role"], dtype=object)
    return found_images.drop(columns="role") if merge else found_images, f"class folders in {', '.join(tops)}"


def _read_csv(file: Path) -> tuple[pd.DataFrame, str]:
    rows: list[dict[str, str]] = []
    for number, row in _csv_rows(file):
        if row.get("role", "train") not in ROLES:
            raise DataError(
                f"line {number} of '{file}' has the unknown role '{row['role']}'; {closest(row['role'], ROLES)}"
            )
        row["path"] = posixpath.normpath(row["path"])  # ./a//b.jpg is a/b.jpg
        rows.append(row)
    if not rows:
        raise DataError(f"'{file}' lists no images; add a line for each")
    return pd.DataFrame(rows, dtype=object), f"the list {file.name}" + (" with roles" if "role" in rows[0] else "")


def _csv_rows(file: Path) -> Iterable[tuple[int, dict[str, str]]]:
    """Line number and values by column of each row."""
    text = read_text(file, remedy=_CORRECT_PATH)
    first = text.split("\n", 1)[0]
    separator = max(_SEPARATORS, key=first.count)
    reader = csv_reader.DictReader(io.StringIO(text), skipinitialspace=True, delimiter=separator)
    try:
        header = [column.strip() for column in reader.fieldnames or []]
        if not _NEEDED <= set(header) <= set(_COLUMNS) or len(set(header)) < len(header):
            raise DataError(
                f"line 1 of '{file}' has the columns {', '.join(header)}, expected path and label; optional are role "
                "and super_label"
            )
        reader.fieldnames = header
        for row in reader:
            values = {column: (row[column] or "").strip() for column in header}
            if None in row or not all(values.values()):
                raise DataError(f"line {reader.line_num} of '{file}' must have {len(header)} values; correct it")
            yield reader.line_num, values
    except csv_reader.Error as error:
        raise DataError(f"line {reader.line_num} of '{file}' is no line of a CSV ({error}); correct it") from error


def _listed_classes(
    classes: Sequence[str], train_list: Path | None, test_list: Path | None, *, name: str
) -> tuple[list[str], int]:
    """The classes in the order of the lists, and how many of them train; these come first."""
    known = set(classes)
    train = None if train_list is None else _read_classes(train_list, known)
    test = None if test_list is None else _read_classes(test_list, known)
    if train is not None and test is not None and (both := [c for c in test if c in train]):
        raise DataError(
            f"line {test[both[0]]} of '{test_list}' names '{both[0]}', as does line {train[both[0]]} of '{train_list}'"
        )
    if train is None:
        train = {c: 0 for c in classes if c not in (test or {})}
    if test is None:
        test = {c: 0 for c in classes if c not in train}
    if not train or not test:
        raise DataError(f"data set '{name}' has no class to {'test' if train else 'train'} on; name some in each half")
    if left_out := [c for c in classes if c not in train and c not in test]:
        logger.warning("data set '%s': %d classes are in neither list: %s", name, len(left_out), shorten(left_out))
    return [*train, *test], len(train)


def _read_classes(file: Path, known: set[str]) -> dict[str, int]:
    """Class -> the number of its line, in the order of the lines."""
    line_of: dict[str, int] = {}
    written = {unicodedata.normalize("NFC", c): c for c in known}  # file systems store an accent in one of two ways
    for number, line in enumerate(read_text(file, remedy=_CORRECT_PATH).split("\n"), start=1):
        class_name = _COMMENT.sub("", line).strip()
        if not class_name:
            continue
        class_name = written.get(unicodedata.normalize("NFC", class_name), class_name)
        if class_name not in known:
            raise DataError(
                f"line {number} of '{file}': unknown class '{class_name}'; {closest(class_name, sorted(known))}"
            )
        if (first := line_of.setdefault(class_name, number)) != number:
            raise DataError(f"line {number} of '{file}' names '{class_name}' of line {first} again; remove one")
    if not line_of:
        raise DataError(f"'{file}' names no class; write one a line")
    return line_of


def _sorted_classes(class_of: Iterable[str]) -> list[str]:
    classes = set(class_of)
    if all(c.isascii() and c.isdigit() and len(c) < 19 for c in classes):
        return sorted(classes, key=lambda c: (int(c), c))
    return sorted(classes)
