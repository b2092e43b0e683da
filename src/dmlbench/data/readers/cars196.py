"""Cars196 (Stanford Cars): the original ``car_ims``, the later ``cars_train`` and ``cars_test``, or class folders."""

import io
import zlib
from collections.abc import Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.io import loadmat
from scipy.io.matlab import MatReadError

from dmlbench.data.image_table import Listing, Published
from dmlbench.data.readers import layouts
from dmlbench.data.readers.files import ORIGINAL_FILE, read_file
from dmlbench.data.readers.layouts import Archive, DataFolder, Layout
from dmlbench.types import DataError, ImageTable, IntArray, Originals

NAMES = layouts.read_names("cars196")  # in published order, which is not the alphabetical one
_CLASS_OF_KEY = {layouts.plain_name(name): number for number, name in enumerate(NAMES, start=1)}

_BOX = ("bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2")
_DEVKIT = ("devkit/", "car_devkit/devkit/", "car_devkit/", "")


def _in_devkit(name: str) -> str:
    return "|".join(f"{place}{name}" for place in _DEVKIT)


_TRAIN_LABELS = _in_devkit("cars_train_annos.mat")
_TEST_LABELS = _in_devkit("cars_test_annos_withlabels*.mat")  # browsers add " (1)" to a second download
_TEST_BOXES = _in_devkit("cars_test_annos.mat")
_META = _in_devkit("cars_meta.mat")

# Scipy raises these on damaged files; missing fields lead to some of them.
_MATLAB = (OSError, EOFError, LookupError, TypeError, ValueError, NotImplementedError, MatReadError, zlib.error)


def cars196(root: str | Path, *, check_counts: bool = True) -> ImageTable:
    """Car models as classes; the first 98 of 196 train, the others test (Oh Song et al. 2016).

    The split for classification is ignored (``test`` of the annotations) or merged (folders ``train`` and ``test``).

    Source: halves by H. Oh Song et al., "Deep Metric Learning via Lifted Structured Feature Embedding", CVPR 2016.
    """
    return FOLDER.table(root, check_counts=check_counts)


def _listing(root: Path, paths: Sequence[str], published: IntArray, originals: Originals) -> Listing:
    return Listing(root=root, paths=paths, labels=published - 1, class_names=NAMES, originals=originals)


def _of_car_ims(folder: Path) -> Listing:
    file = folder / "cars_annos.mat"
    _check_names(file)
    paths, published, boxes = _annotations(file, "relative_im_path")
    originals = Originals(boxes=boxes, boxes_from=file.name)
    return _listing(layouts.resolve(folder, "car_ims/car_ims|car_ims").parent, paths, published, originals)


def _of_train_and_test(folder: Path) -> Listing:
    if meta := layouts.first_match(folder, _META):
        _check_names(meta)
    paths: list[str] = []
    classes, boxes = [], []
    for part, file in (("cars_train", layouts.resolve(folder, _TRAIN_LABELS)), ("cars_test", _test_labels(folder))):
        names, published, boxes_of_part = _annotations(file, "fname")
        images = layouts.resolve(folder, f"{part}/{part}|{part}").relative_to(folder).as_posix()
        paths += [f"{images}/{name}" for name in names]
        classes.append(published)
        boxes.append(boxes_of_part)
    originals = Originals(boxes=np.concatenate(boxes), boxes_from="the devkit")
    return _listing(folder, paths, np.concatenate(classes), originals)


def _test_labels(folder: Path) -> Path:
    """The annotations of ``cars_test`` that have classes."""
    if file := layouts.first_match(folder, _TEST_LABELS):
        return file
    file = layouts.first_match(folder, _TEST_BOXES)
    if file and "class" in (_read(file, "annotations").dtype.names or ()):
        return file
    # The boxes of cars_annos.mat do not decide it: 14 test images share their box with an image of another class.
    found = f"'{file}' has boxes but no classes" if file else "there is no list of its images"
    raise DataError(
        f"Cars196 in '{folder}' has no classes for cars_test: {found}. Put cars_test_annos_withlabels.mat into "
        f"'{layouts.resolve(folder, _TRAIN_LABELS).parent}'. cars_annos.mat cannot replace it, because it numbers the "
        "images differently."
    )


def _of_class_folders(folder: Path, *, parts: Sequence[str]) -> Listing:
    paths, published = layouts.images_of_classes(folder, _class_of, parts=parts)
    for part in parts:
        for outer in layouts.subfolders(folder / part) if (folder / part).is_dir() else ():
            # One class may be nested, where its name's slash became the folders 'Ram C' and 'V Cargo Van'.
            if layouts.plain_name(outer) not in _CLASS_OF_KEY:
                for inner in layouts.subfolders(folder / part / outer):
                    if number := _CLASS_OF_KEY.get(layouts.plain_name(outer + inner)):
                        nested = f"{part}/{outer}/{inner}".removeprefix("/")
                        images = layouts.images_in(folder / nested)
                        paths += [f"{nested}/{image}" for image in images]
                        published += [number] * len(images)
    return _listing(folder, paths, np.array(published, dtype=np.int64), Originals())


def _class_of(folder: Path) -> int:
    if (number := _CLASS_OF_KEY.get(layouts.plain_name(folder.name))) is None:
        near = get_close_matches(folder.name, NAMES, n=1)
        hint = f" (nearest is '{near[0]}')" if near else ""
        raise DataError(
            f"'{folder}' has images but is not a class of Cars196{hint}. Give it its published name or move it away."
        )
    return number


def _annotations(file: Path, path_field: str) -> tuple[list[str], IntArray, NDArray[np.float64]]:
    """Paths [N], published classes [N], which count from 1, and boxes [N, 4], NaN in lists without boxes."""
    rows = _read(file, "annotations")
    boxes = np.full((len(rows), 4), np.nan)
    try:
        paths = [str(p) for p in rows[path_field]]
        published = np.array([int(c) for c in rows["class"]], dtype=np.int64)
        if set(_BOX) <= set(rows.dtype.names):
            boxes[:] = np.array([[float(value) for value in rows[name]] for name in _BOX]).T
            boxes[:, :2] -= 1  # pixels count from 1, and the last one belongs to the box
    except _MATLAB as error:
        raise _unreadable(file, error) from error
    if len(published) == 0 or published.min() < 1 or published.max() > len(NAMES):
        found = f"classes from {published.min()} to {published.max()}" if len(published) else "no images"
        raise DataError(f"'{file}': got {found}, expected classes from 1 to {len(NAMES)}. {ORIGINAL_FILE}.")
    return paths, published, boxes


def _check_names(file: Path) -> None:
    """Raise if class names are not the published ones: the class ids would mean something else."""
    if tuple(map(str, _read(file, "class_names"))) != NAMES:
        raise DataError(f"'{file}' does not list the {len(NAMES)} published classes in their order. {ORIGINAL_FILE}.")


def _read(file: Path, variable: str) -> Any:
    """A variable of a .mat file as an array; reading it runs no code."""
    content = io.BytesIO(read_file(file))
    try:
        return np.atleast_1d(loadmat(content, squeeze_me=True, variable_names=[variable])[variable])
    except _MATLAB as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: Exception) -> DataError:
    return DataError(f"cannot read the annotations '{file}' of Cars196 ({error!r}). {ORIGINAL_FILE}.")


def _has_class_folders(folder: Path) -> bool:
    return folder.is_dir() and any(layouts.plain_name(name) in _CLASS_OF_KEY for name in layouts.subfolders(folder))


FOLDER = DataFolder(
    name="cars196",
    title="Cars196",
    usual_names=(
        *("cars196", "cars", "car_data", "stanford_cars", "stanford_cars_dataset"),
        "stanford_car_dataset_by_classes_folder",
    ),
    layouts=(
        Layout("car_ims and cars_annos.mat", ("cars_annos.mat", "car_ims"), _of_car_ims),
        Layout(
            "cars_train, cars_test and devkit with cars_train_annos.mat and cars_test_annos_withlabels.mat",
            ("cars_train", "cars_test", _TRAIN_LABELS),
            _of_train_and_test,
        ),
        Layout(f"class folders such as '{NAMES[0]}'", (), partial(_of_class_folders, parts=("",)), _has_class_folders),
        Layout(
            "class folders in train and test",
            ("train", "test"),
            partial(_of_class_folders, parts=layouts.SPLIT_FOLDERS),
            lambda folder: all(_has_class_folders(folder / part) for part in ("train", "test")),
        ),
    ),
    remedy="Unpack car_ims.tgz next to cars_annos.mat, or put the devkit's .mat files next to cars_train and "
    "cars_test. cars_annos.mat does not belong to these, because it numbers the images differently",
    published=Published({"train": (8_054, 98), "test": (8_131, 98)}),
    home="https://ai.stanford.edu/~jkrause/cars/car_dataset.html",
    terms="research",
    citation="J. Krause et al., 3D Object Representations for Fine-Grained Categorization, 3DRR 2013",
    alternatives=(
        (
            Archive("car_ims.tgz", "d5c8f0aa497503f355e17dc7886c3f14"),
            Archive("cars_annos.mat", "b407c6086d669747186bd1d764ff9dbc"),
        ),
        (
            Archive("cars_train.tgz", "065e5b463ae28d29e77c1b4b166cfe61"),
            Archive("cars_test.tgz", "4ce7ebf6a94d07f1952d94dd34c4d501"),
            Archive("car_devkit.tgz", "c3b158d763b6e2245038c8ad08e45376"),
            Archive("cars_test_annos_withlabels.mat", "b0a2b23655a3edd16d84508592a98d10"),
        ),
    ),
    by_hand="the publisher's links are dead since 2023: get car_ims.tgz with cars_annos.mat, or cars_train, "
    "cars_test and the devkit with cars_test_annos_withlabels.mat, from a mirror such as Kaggle's "
    "'Stanford Cars Dataset'",
)
