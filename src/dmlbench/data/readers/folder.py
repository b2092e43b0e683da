"""Any image folder as a data set: class folders, folders by role, or a CSV list; text files may name the classes."""

import csv as csv_module
import io
import logging
import os
import posixpath
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path

import numpy as np
import pandas as pd

from dmlbench.data.image_table import Listing, table_of
from dmlbench.data.readers.files import read_text
from dmlbench.data.readers.layouts import files_below, images_in, is_image, subfolders
from dmlbench.types import ROLES, ConfigError, DataError, ImageTable, IntArray, closest, shorten

_SPLIT_FOLDERS = {"train", "test", "val", "valid", "validation"}
PART_FOLDERS = {*ROLES, *_SPLIT_FOLDERS}
ROLE_FOLDERS = ({"train", "test"}, {"train", "query", "gallery"})
_COLUMNS = {"path", "label", "role", "super_label"}
_NEEDED = {"path", "label"}
_COMMENT = re.compile(r"(^|\s)#.*")
_SEPARATORS = (",", ";", "\t")
_CORRECT_PATH = "Correct its path in dataset.table. Paths are relative to dataset.table.root"

logger = logging.getLogger(__name__)


def folder(
    root: str | Path,
    *,
    csv: str | Path | None = None,
    train_classes: str | Path | None = None,
    test_classes: str | Path | None = None,
    name: str = "folder",
) -> ImageTable:
    """Read class folders, folders by role, or a CSV list under ``root``.

    Class folders. The class is the top folder, as in torchvision's ``ImageFolder``; deeper folders do not matter::

        root/cat/1.jpg
        root/cat/outdoors/2.jpg     class cat
        root/dog/3.jpg

    Folders by role, with different classes to train and to test on::

        root/train/cat/1.jpg        root/train/cat/1.jpg
        root/test/dog/2.jpg         root/query/dog/2.jpg
                                    root/gallery/dog/3.jpg

    A split for classification: two or more of train, test, val, valid and validation, all with the same classes. Their
    images are merged by class, as if the class folders were in ``root``::

        root/train/cat/1.jpg        root/train/dog/2.jpg
        root/val/cat/3.jpg          root/val/dog/4.jpg

    A CSV list with a header. ``role`` (train, test, query or gallery) and ``super_label`` are optional columns;
    semicolons or tabs may separate columns; other columns are ignored, and lines without values skipped::

        path,label,role,super_label
        photos/1.jpg,cat,train,pet
        photos/2.jpg,dog,test,pet

    Without roles, the first half of the sorted classes trains and the second tests. Classes are sorted as numbers if
    all are whole numbers. ``train_classes`` and ``test_classes`` set the halves and the order of the classes instead:
    those of ``train_classes`` come first, each list in its own order. With one list, all other classes form the other
    half. With both, classes in neither are left out. With any list, folders such as train, val and test are merged.

    Args:
        root: folder of the images. Paths in the CSV are relative to it, wherever the CSV is.
        csv: relative to ``root`` unless absolute.
        train_classes: text file with one class a line; ``#`` begins a comment. Relative to ``root`` unless absolute.
        test_classes: as ``train_classes``.
        name: of the data set in results.
    """
    root = Path(root)
    if not root.is_dir():
        raise DataError(
            f"data set '{name}' looks for its images in '{root}', which is not a folder. Correct dataset.table.root."
        )
    has_lists = train_classes is not None or test_classes is not None
    images, layout = _read_csv(root / csv) if csv is not None else _read_tree(root, name, merge=has_lists)
    if csv is not None:
        images["path"] = images["path"].str.removeprefix(f"{Path(os.path.abspath(root)).as_posix()}/")
    for column in images.columns.intersection(["label", "super_label"]):
        images[column] = _in_one_form(images[column])
    class_names = _sorted_classes(images["label"])
    num_train = len(class_names) // 2
    if has_lists:
        if "role" in images:
            raise ConfigError(
                f"data set '{name}' has roles from {layout}. Remove these, or train_classes and test_classes."
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
        remedy=(
            "Set root to one of the folders, or merge them by class with train_classes or test_classes"
            if csv is None
            else "Give each class one role, or remove the column role. To test known classes, use folders train and "
            "test with protocol=same_classes"
        ),
    )
    return table_of(listing)


def _read_tree(root: Path, name: str, *, merge: bool) -> tuple[pd.DataFrame, str]:
    """Path and label of images in class folders, their role unless folders by role are merged; and the layout."""
    below = {top: files_below(root / top) for top in subfolders(root) if top != "__MACOSX"}
    tops = {top: kept for top, files in below.items() if (kept := [*filter(is_image, files)])}
    if tops and (empty := [top for top in below if top not in tops]):
        logger.warning("'%s': folders without images are ignored: %s", root, shorten(empty))
    if tops and (loose := images_in(root)):
        logger.warning(
            "data set '%s': %d images in '%s' are ignored: they are not in a class folder", name, len(loose), root
        )
    unread = (file for top in tops for file in below[top] if not is_image(file))
    if others := Counter(Path(file).suffix.lower() or "without suffix" for file in unread):
        counts = ", ".join(f"{count} {suffix}" for suffix, count in others.most_common())
        logger.warning("data set '%s': files without an image's suffix are ignored: %s", name, counts)
    roles = {top: top.casefold() for top in tops if top.casefold() in PART_FOLDERS}
    has_parts = len(roles) == len(tops)
    is_split, differing = False, ""
    if has_parts and tops:
        found_roles = set(roles.values())
        classes = [{unicodedata.normalize("NFC", image.split("/")[0]) for image in images} for images in tops.values()]
        if in_some := sorted(classes[0].union(*classes) - classes[0].intersection(*classes)):
            differing = f" (not all of these have {shorten(in_some)})"
        is_split = len(tops) > 1 and found_roles <= _SPLIT_FOLDERS and all(own == classes[0] for own in classes)
        is_known = merge or is_split or (found_roles in ROLE_FOLDERS and len(found_roles) == len(tops))
        is_known &= all("/" in image for images in tops.values() for image in images)
    else:
        is_known = len(tops) > 1 and not any("/" in image for top in roles for image in tops[top])
    if not is_known or not tops:
        raise DataError(
            f"data set '{name}': got images in {shorten(sorted(tops)) or 'no folder'} of '{root}'{differing}, expected "
            "class folders, or train and test, or train, query and gallery, with class folders inside. Point "
            "dataset.table.root at the folder that holds these, set dataset.table.train_classes or test_classes, or "
            "list the images in dataset.table.csv."
        )
    found = pd.DataFrame([(top, image) for top, images in tops.items() for image in images], columns=["top", "image"])
    images = pd.DataFrame({"path": found["top"] + "/" + found["image"], "label": found["top"]})
    if deep := int((found["image"].str.count("/") > has_parts).sum()):
        logger.info("data set '%s': %d images are in subfolders of their class folders", name, deep)
    if not has_parts:
        return images, "class folders"
    images["label"] = found["image"].str.split("/").str[0]
    if is_split and not merge:
        logger.warning(
            "data set '%s': %s hold the same %d classes; their images are merged by class",
            *(name, " and ".join(tops), len(classes[0])),
        )
    elif not merge:
        images["role"] = found["top"].map(roles)
    return images, f"class folders in {', '.join(tops)}" + ", merged by class" * is_split


def _read_csv(file: Path) -> tuple[pd.DataFrame, str]:
    text = read_text(file, remedy=_CORRECT_PATH)
    separator = max(_SEPARATORS, key=text.lstrip().split("\n", 1)[0].count)
    lines = csv_module.reader(io.StringIO(text), delimiter=separator, skipinitialspace=True, strict=True)

    def error(found: str, expected: str) -> DataError:
        return DataError(f"line {lines.line_num} of '{file}': got {found}, expected {expected}. Correct it.")

    rows: list[list[str]] = []
    try:
        header = [column.strip() for column in next(filter(any, lines), [])]
        others = [column for column in header if column not in _COLUMNS]
        misspelt = [column for column in others if get_close_matches(column.lower(), _COLUMNS, cutoff=0.8)]
        if misspelt or not set(header) >= _NEEDED or len(set(header)) < len(header):
            raise error(f"the columns {', '.join(header)}", "path and label, optionally role and super_label")
        if others:
            logger.info(
                "'%s': other columns than path, label, role, super_label are ignored: %s", file, shorten(others)
            )
        columns = [column for column in header if column in _COLUMNS]
        for line in lines:
            if not any(value.strip() for value in line):
                continue
            if len(line) != len(header):
                raise error(f"'{', '.join(line)}'", f"a value for each of {', '.join(header)}")
            values = [value.strip() for column, value in zip(header, line, strict=True) if column in _COLUMNS]
            if not all(values):
                raise error(f"'{', '.join(values)}'", f"a value for each of {', '.join(columns)}")
            rows.append(values)
            if "role" in columns and (role := values[columns.index("role")]) not in ROLES:
                raise error(f"the role '{role}'", f"one of {', '.join(ROLES)}")
    except csv_module.Error as broken:
        raise DataError(f"line {lines.line_num} of '{file}' is not CSV: {broken}. Correct it.") from broken
    if not rows:
        raise DataError(f"'{file}': got no images, expected a line for each. Add them.")
    images = pd.DataFrame(rows, columns=columns)
    images["path"] = images["path"].map(posixpath.normpath)  # ./a//b.jpg is a/b.jpg
    return images, f"the list {file.name}" + (" with roles" if "role" in columns else "")


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
        raise DataError(
            f"both '{train_list}' and '{test_list}' list {shorten(sorted(both))}. List each class in one of them."
        )
    if not train or not test:
        raise DataError(
            f"data set '{name}' has no class to {'test' if train else 'train'} on. List classes for each half."
        )
    if left_out := sorted(set(classes) - {*train, *test}):
        logger.warning(
            "data set '%s': %d classes are in neither list and are ignored: %s", name, len(left_out), shorten(left_out)
        )
    return [*train, *test], len(train)


def _read_classes(file: Path, known: Sequence[str]) -> list[str]:
    written = {unicodedata.normalize("NFC", c): c for c in known}
    listed: list[str] = []
    for number, line in enumerate(read_text(file, remedy=_CORRECT_PATH).split("\n"), start=1):
        whole = unicodedata.normalize("NFC", line.strip())
        if class_name := whole if whole in written else _COMMENT.sub("", whole).strip():
            if class_name not in written:
                raise DataError(
                    f"line {number} of '{file}': unknown class '{class_name}': {closest(class_name, known)}"
                )
            listed.append(written[class_name])
    if len(set(listed)) < len(listed) or not listed:
        raise DataError(f"'{file}': got {len(listed)} classes, expected one or more, each once. Correct it.")
    return listed


def _in_one_form(names: Iterable[str]) -> list[str]:
    """Names as they are, but each in the form in which it occurs first: an accent can be stored in one of two ways."""
    first: dict[str, str] = {}
    return [first.setdefault(unicodedata.normalize("NFC", name), name) for name in names]


def _sorted_classes(class_of: Iterable[str]) -> list[str]:
    classes = set(class_of)
    if all(re.fullmatch("-?[0-9]{1,18}", c) for c in classes):
        return sorted(classes, key=lambda c: (int(c), c))
    return sorted(classes)
