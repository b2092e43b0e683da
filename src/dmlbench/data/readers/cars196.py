"""Cars196 (Stanford Cars): the original ``car_ims``, the later ``cars_train`` and ``cars_test``, or class folders."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.io import loadmat
from scipy.io.matlab import MatReadError

from dmlbench.data.image_table import Listing, Published, leaves_root, table_of_files
from dmlbench.data.readers.layouts import (
    SPLIT_FOLDERS,
    DataFolder,
    Layout,
    first_match,
    images_by_folder,
    images_in,
    plain_name,
    read_names,
    resolve,
    subfolders,
)
from dmlbench.types import DataError, ImageTable, IntArray, Originals, not_a_file

NAMES = read_names("cars196")  # in published order, which is not the alphabetical one
NUM_TRAIN_CLASSES = 98
PUBLISHED = Published({"train": (8_054, 98), "test": (8_131, 98)})

_BOX = ("bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2")
_DEVKIT = ("devkit/", "car_devkit/devkit/", "car_devkit/", "")


def _in_devkit(name: str) -> str:
    return "|".join(f"{place}{name}" for place in _DEVKIT)


_TRAIN_LABELS = _in_devkit("cars_train_annos.mat")
_TEST_LABELS = _in_devkit("cars_test_annos_withlabels*.mat")  # browsers add " (1)" to a second download
_TEST_BOXES = _in_devkit("cars_test_annos.mat")
_META = _in_devkit("cars_meta.mat")


def _has_class_folders(folder: Path) -> bool:
    return folder.is_dir() and any(plain_name(name) in _CLASS_OF_KEY for name in subfolders(folder))


def _has_split_class_folders(folder: Path) -> bool:
    return all(_has_class_folders(folder / part) for part in ("train", "test"))


FOLDER = DataFolder(
    "Cars196",
    (
        *("cars196", "cars", "car_data", "stanford_cars", "stanford_cars_dataset"),
        "stanford_car_dataset_by_classes_folder",
    ),
    (
        Layout("car_ims", "car_ims and cars_annos.mat", ("cars_annos.mat", "car_ims")),
        Layout(
            "cars_train_test",
            "cars_train, cars_test and devkit with cars_train_annos.mat and cars_test_annos_withlabels.mat",
            ("cars_train", "cars_test", _TRAIN_LABELS),
        ),
        Layout("folders", f"class folders such as '{NAMES[0]}'", (), _has_class_folders),
        Layout("split", "class folders in train and test", ("train", "test"), _has_split_class_folders),
    ),
    "unpack car_ims.tgz next to cars_annos.mat; or put the devkit's .mat files next to cars_train and cars_test, to "
    "which cars_annos.mat does not belong, because its images are numbered differently",
)

# What scipy raises on damaged files, and what missing fields lead to.
_UNREADABLE = (OSError, EOFError, LookupError, TypeError, ValueError, NotImplementedError, MatReadError, zlib.error)


def cars196(root: str | Path, *, check_counts: bool = True) -> ImageTable:
    """Car models as classes; the first 98 of 196 train, the others test (Oh Song et al. 2016).

    The ``test`` field of the annotations and the folders ``train`` and ``test`` are the split for classification: the
    former is ignored, the latter are merged.

    Args:
        root: folder of the data set, or one that holds it under a usual name.
        check_counts: insist on the published 8,054 images of 98 classes to train and 8,131 of 98 to test on.
            False takes a subset: classes without images are left out, and each other one keeps its half.

    Raises:
        DataError: a file or folder is missing, damaged or unknown, images are missing, or counts differ.

    Source: J. Krause et al., "3D Object Representations for Fine-Grained Categorization", 3DRR 2013; halves by
        H. Oh Song et al., "Deep Metric Learning via Lifted Structured Feature Embedding", CVPR 2016.
    """
    folder, layout = FOLDER.find(root)
    if layout.name == "car_ims":
        listed = _of_car_ims(folder)
    elif layout.name == "cars_train_test":
        listed = _of_train_and_test(folder)
    else:
        listed = _of_class_folders(folder, SPLIT_FOLDERS if layout.name == "split" else ("",))
    listing = Listing(
        name="cars196",
        root=listed.root,
        layout=layout.description,
        paths=listed.paths,
        labels=listed.published - 1,
        class_names=NAMES,
        role=np.where(listed.published <= NUM_TRAIN_CLASSES, "train", "test"),
        originals=listed.originals,
    )
    return table_of_files(listing, published=PUBLISHED, check_counts=check_counts)


@dataclass(frozen=True)
class _Listed:
    """Folder of the images, paths below it, published classes from 1."""

    root: Path
    paths: list[str]
    published: IntArray
    originals: Originals = field(default_factory=Originals)


def _of_car_ims(folder: Path) -> _Listed:
    file = folder / "cars_annos.mat"
    _check_names(file)
    paths, published, boxes = _annotations(file, "relative_im_path")
    originals = Originals(boxes=boxes, boxes_from=file.name)
    return _Listed(resolve(folder, "car_ims/car_ims|car_ims").parent, paths, published, originals)


def _of_train_and_test(folder: Path) -> _Listed:
    if meta := first_match(folder, _META):
        _check_names(meta)
    paths: list[str] = []
    classes, boxes = [], []
    for part, file in (("cars_train", resolve(folder, _TRAIN_LABELS)), ("cars_test", _test_labels(folder))):
        names, published, boxes_of_part = _annotations(file, "fname")
        images = resolve(folder, f"{part}/{part}|{part}").relative_to(folder).as_posix()
        paths += [f"{images}/{name}" for name in names]
        classes.append(published)
        boxes.append(boxes_of_part)
    originals = Originals(boxes=np.concatenate(boxes), boxes_from="the devkit")
    return _Listed(folder, paths, np.concatenate(classes), originals)


def _test_labels(folder: Path) -> Path:
    """The annotations of ``cars_test`` that have classes."""
    if file := first_match(folder, _TEST_LABELS):
        return file
    file = first_match(folder, _TEST_BOXES)
    if file and "class" in (_read(file, "annotations").dtype.names or ()):
        return file
    # The boxes of cars_annos.mat do not decide it: 14 test images share their box with an image of another class.
    found = f"'{file}' has boxes but no classes" if file else "there is no list of its images"
    raise DataError(
        f"Cars196 in '{folder}' has no classes for cars_test: {found}; put cars_test_annos_withlabels.mat into "
        f"'{resolve(folder, _TRAIN_LABELS).parent}' (cars_annos.mat numbers the images differently: it cannot help)"
    )


def _of_class_folders(folder: Path, parts: Sequence[str]) -> _Listed:
    paths: list[str] = []
    published: list[int] = []
    for part in parts:
        if (folder / part).is_dir():
            for name, images in _class_images(folder / part).items():
                paths += [f"{part}/{name}/{image}" if part else f"{name}/{image}" for image in images]
                published += [_CLASS_OF_KEY[plain_name(name)]] * len(images)
    return _Listed(folder, paths, np.array(published, dtype=np.int64))


def _class_images(folder: Path) -> dict[str, list[str]]:
    """Class folder -> its images; one class may be nested, where its name's slash became 'Ram C' and 'V Cargo Van'."""
    found = images_by_folder(folder)
    for name in found:
        if plain_name(name) not in _CLASS_OF_KEY:
            near = get_close_matches(name, NAMES, n=1)
            hint = f" (nearest is '{near[0]}')" if near else ""
            raise DataError(
                f"'{folder / name}' holds images but is no class of Cars196{hint}; rename it as published or move it "
                "away"
            )
    for name in subfolders(folder):
        if plain_name(name) not in _CLASS_OF_KEY:
            nested = [inner for inner in subfolders(folder / name) if plain_name(name + inner) in _CLASS_OF_KEY]
            found |= {f"{name}/{inner}": images_in(folder / name / inner) for inner in nested}
    return found


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
    except _UNREADABLE as error:
        raise _unreadable(file, error) from error
    if len(published) == 0 or published.min() < 1 or published.max() > len(NAMES):
        found = f"classes from {published.min()} to {published.max()}" if len(published) else "no images"
        raise DataError(f"'{file}' has {found}, but they count from 1 to {len(NAMES)}; put the original file there")
    if outside := [path for path in paths if leaves_root(path)]:
        raise DataError(f"'{file}' names '{outside[0]}', which lies outside of its folder; put the original file there")
    return paths, published, boxes


def _check_names(file: Path) -> None:
    """Refuse class names that are not the published ones: the class ids would mean something else."""
    names = [str(name) for name in _read(file, "class_names")]
    differing = [i for i, (name, own) in enumerate(zip(names, NAMES, strict=False), start=1) if name != own]
    if differing or len(names) != len(NAMES):
        example = f", class {differing[0]} '{names[differing[0] - 1]}'" if differing else ""
        expected = f", class {differing[0]} '{NAMES[differing[0] - 1]}'" if differing else ""
        raise DataError(
            f"'{file}' names {len(names)} classes{example}, published are {len(NAMES)}{expected}; put the original "
            "file there"
        )


def _read(file: Path, variable: str) -> Any:
    """A variable of a .mat file as an array; reading it runs no code."""
    if what := not_a_file(file):
        raise DataError(f"Cars196's annotations '{file}' are {what}, not a file; put the original file there")
    try:
        return np.atleast_1d(loadmat(file, squeeze_me=True, variable_names=[variable])[variable])
    except _UNREADABLE as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: Exception) -> DataError:
    return DataError(f"Cars196 cannot read its annotations '{file}' ({error!r}); put the original file there")


_CLASS_OF_KEY = {plain_name(name): number for number, name in enumerate(NAMES, start=1)}
