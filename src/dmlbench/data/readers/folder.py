"""Any image folder as a data set: class folders, folders by role, or a CSV list; text files may name the classes."""

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
from dmlbench.data.readers.files import read_text
from dmlbench.data.readers.layouts import images_below, subfolders
from dmlbench.types import ROLES, ConfigError, DataError, ImageTable, IntArray, closest

PART_FOLDERS = {*ROLES, "val", "valid", "validation"}
_ROLE_FOLDERS = ({"train", "test"}, {"train", "query", "gallery"})
_COLUMNS = ("path", "label", "role", "super_label")
_NEEDED = {"path", "label"}
_ROLES = f"roles are {', '.join(ROLES)}"
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
    return table_of(listing)


def _read_tree(root: Path, name: str, *, merge: bool) -> tuple[pd.DataFrame, str]:
    """Path and label of images in class folders, their role unless folders by role are merged; and the layout."""
    below = {top: images_below(root / top) for top in subfolders(root) if top != "__MACOSX"}
    tops = {top: images for top, images in below.items() if images}
    if tops and (empty := [top for top in below if top not in tops]):
        logger.warning("%s of '%s' hold no images, so they are no classes", shorten(empty), root)
    roles = {top: top.casefold() for top in tops if top.casefold() in PART_FOLDERS}
    has_parts = len(roles) == len(tops)
    if has_parts:
        is_known = merge or (set(roles.values()) in _ROLE_FOLDERS and len(set(roles.values())) == len(tops))
        is_known &= all("/" in image for images in tops.values() for image in images)
    else:
        is_known = len(tops) > 1 and not any("/" in image for top in roles for image in tops[top])
    if not is_known or not tops:
        raise DataError(
            f"data set '{name}' finds images in {shorten(sorted(tops)) or 'no folder'} of '{root}', expected class "
            "folders, or folders train and test, or train, query and gallery, with class folders inside; point root at "
            "the folder that holds these, set train_classes and test_classes, or list the images in a csv"
        )
    found = pd.DataFrame([(top, image) for top, images in tops.items() for image in images], columns=["top", "image"])
    images = pd.DataFrame({"path": found["top"] + "/" + found["image"], "label": found["top"]})
    if not has_parts:
        return images, "class folders"
    images["label"] = found["image"].str.split("/").str[0]
    if not merge:
        images["role"] = found["top"].map(roles)
    return images, f"class folders in {', '.join(tops)}"


def _read_csv(file: Path) -> tuple[pd.DataFrame, str]:
    text = read_text(file, remedy=_CORRECT_PATH)
    separator = max(_SEPARATORS, key=text.split("\n", 1)[0].count)
    try:
        rows = pd.read_csv(io.StringIO(text), sep=separator, dtype=str, na_filter=False, skipinitialspace=True)
    except ValueError as error:
        raise DataError(f"'{file}' is no CSV ({error}); correct it") from error
    rows = rows.rename(columns=str.strip).apply(lambda column: column.str.strip())
    if not _NEEDED <= set(rows.columns) <= set(_COLUMNS) or not isinstance(rows.index, pd.RangeIndex):
        raise DataError(
            f"'{file}' has the columns {', '.join(rows.columns)}, expected path and label, optionally role and "
            "super_label, and as many values in each row; correct it"
        )
    if rows.empty:
        raise DataError(f"'{file}' lists no images; add a line for each")
    wrong = (rows == "").any(axis=1)
    if "role" in rows:
        wrong |= ~rows["role"].isin(ROLES)
    for values in rows[wrong].to_numpy():
        raise DataError(f"'{file}' has the row '{', '.join(values)}', expected a value in each column; {_ROLES}")
    rows["path"] = rows["path"].map(posixpath.normpath)  # ./a//b.jpg is a/b.jpg
    return rows, f"the list {file.name}" + (" with roles" if "role" in rows else "")


def _listed_classes(
    classes: Sequence[str], train_list: Path | None, test_list: Path | None, *, name: str
) -> tuple[list[str], int]:
    """The classes in the order of the lists, and how many of them train; these come first."""
    train = None if train_list is None else _read_classes(train_list, classes)
    test = None if test_list is None else _read_classes(test_list, classes)
    if train is None:
        others = set(test or ())
        train = [c for c in classes if c not in others]
    if test is None:
        others = set(train)
        test = [c for c in classes if c not in others]
    if both := set(train) & set(test):
        raise DataError(f"both '{train_list}' and '{test_list}' name {shorten(sorted(both))}; remove it from one")
    if not train or not test:
        raise DataError(f"data set '{name}' has no class to {'test' if train else 'train'} on; name some in each half")
    if left_out := sorted(set(classes) - {*train, *test}):
        logger.warning("data set '%s': %d classes are in neither list: %s", name, len(left_out), shorten(left_out))
    return [*train, *test], len(train)


def _read_classes(file: Path, known: Sequence[str]) -> list[str]:
    written = {unicodedata.normalize("NFC", c): c for c in known}  # file systems store an accent in one of two ways
    listed: list[str] = []
    for number, line in enumerate(read_text(file, remedy=_CORRECT_PATH).split("\n"), start=1):
        if class_name := unicodedata.normalize("NFC", _COMMENT.sub("", line).strip()):
            if class_name not in written:
                raise DataError(
                    f"line {number} of '{file}': unknown class '{class_name}'; {closest(class_name, known)}"
                )
            listed.append(written[class_name])
    if len(set(listed)) < len(listed) or not listed:
        raise DataError(f"'{file}' names {len(listed)} classes, expected one or more, each once; correct it")
    return listed


def _sorted_classes(class_of: Iterable[str]) -> list[str]:
    classes = set(class_of)
    if all(c.isascii() and c.isdigit() and len(c) < 19 for c in classes):
        return sorted(classes, key=lambda c: (int(c), c))
    return sorted(classes)
