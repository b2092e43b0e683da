"""Cars196 in every layout."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from dmlbench.data.image_table import file_contents
from dmlbench.data.images.sources import read_image
from dmlbench.data.readers.cars196 import NAMES, cars196
from dmlbench.types import DataError, ImageTable

RAM = NAMES.index("Ram C/V Cargo Van Minivan 2012") + 1
CLASSES = (98, 99, 1, 1, RAM, RAM)  # of a small data set; every second image is in the part "test"


def save_rows(file: Path, fields: dict[str, Sequence[Any]], **more: Any) -> None:
    """Annotations as MATLAB keeps them: one row of structs."""
    rows = np.zeros((1, len(next(iter(fields.values())))), dtype=[(name, "O") for name in fields])
    for name, values in fields.items():
        for i, value in enumerate(values):
            rows[0, i][name] = value
    file.parent.mkdir(parents=True, exist_ok=True)
    savemat(file, {"annotations": rows, **more})


def cell(names: Sequence[str]) -> Any:
    return np.array(names, dtype=object)


def touch(*files: Path) -> None:
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


def write_car_ims(root: Path, classes: Sequence[int] = CLASSES, *, names: Sequence[str] = NAMES) -> None:
    paths = [f"car_ims/{i:06d}.jpg" for i in range(1, len(classes) + 1)]
    fields = {"relative_im_path": paths, "class": classes, "test": [i % 2 for i in range(len(classes))]}
    save_rows(root / "cars_annos.mat", fields, class_names=cell(names))
    touch(*(root / path for path in paths))


def write_train_and_test(
    root: Path, *, devkit: str = "devkit", nested: bool = False, test_labels: str | None = "devkit", copy: str = ""
) -> None:
    """``cars_train`` and ``cars_test``, both numbered from 1; ``test_labels``: where the classes of the latter lie."""
    for part, classes in (("train", CLASSES[::2]), ("test", CLASSES[1::2])):
        names = [f"{i:05d}.jpg" for i in range(1, len(classes) + 1)]
        touch(*(root / f"cars_{part}" / (f"cars_{part}" if nested else "") / name for name in names))
        if part == "train":
            save_rows(root / devkit / "cars_train_annos.mat", {"class": classes, "fname": names})
        else:
            save_rows(root / devkit / "cars_test_annos.mat", {"bbox_x1": [1] * len(names), "fname": names})
            if test_labels is not None:
                file = root / test_labels / f"cars_test_annos_withlabels{copy}.mat"
                save_rows(file, {"class": classes, "fname": names})
    savemat(root / devkit / "cars_meta.mat", {"class_names": cell(NAMES)})


def write_folders(
    root: Path, *, parts: bool = False, rename: Callable[[str], str] = lambda n: n.replace("/", "-")
) -> None:
    for i, number in enumerate(CLASSES):
        part = ("train", "test")[i % 2] if parts else ""
        # Both parts number their images from 1, so that one class may have two images of one name.
        touch(root / part / rename(NAMES[number - 1]) / (f"{i // 2:05d}.jpg" if parts else f"{i:05d}.jpg"))


LAYOUTS: dict[str, Callable[[Path], None]] = {
    "cars196": write_car_ims,
    "archive/cars/cars196": write_car_ims,
    "stanford_cars": lambda root: write_train_and_test(root, test_labels=""),
    "Stanford-Cars-Dataset": lambda root: write_train_and_test(
        root, devkit="car_devkit/devkit", nested=True, test_labels="", copy=" (1)"
    ),
    "StanfordCars": lambda root: write_train_and_test(root, devkit="", test_labels=""),
    "cars_196": write_folders,
    "cars": lambda root: write_folders(root, rename=lambda name: name.replace("/", "").replace(" ", "_")),
    "car_data/car_data": lambda root: write_folders(root, parts=True),
    "stanford-car-dataset-by-classes-folder/car_data": lambda root: write_folders(root, rename=str),  # Ram C/V ...
}


def by_class(table: ImageTable) -> list[tuple[str, str]]:
    return sorted(zip((table.class_names[c] for c in table.labels), table.role.tolist(), strict=True))


@pytest.mark.parametrize("place", LAYOUTS)
def test_every_layout_gives_the_same_labels_classes_and_halves(tmp_path: Path, place: str) -> None:
    LAYOUTS[place](tmp_path / place)
    for root in (tmp_path, tmp_path / place):
        table = cars196(root, check_counts=False)
        assert table.class_names == tuple(NAMES[c - 1] for c in sorted(set(CLASSES)))
        expected = [(NAMES[c - 1], "train" if c <= 98 else "test") for c in CLASSES]
        assert by_class(table) == sorted(expected)
        assert (file_contents(table.root, table.paths, name="cars196") == 0).all()


@pytest.mark.parametrize("has_boxes", [True, False])
def test_without_classes_of_the_test_images_the_file_to_get_is_named(tmp_path: Path, has_boxes: bool) -> None:
    write_train_and_test(tmp_path, test_labels=None)
    write_car_ims(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/cars_annos.mat").rename(tmp_path / "cars_annos.mat")
    if not has_boxes:
        (tmp_path / "devkit/cars_test_annos.mat").unlink()
    found = r"'.*cars_test_annos\.mat' has boxes but no classes" if has_boxes else "there is no list of its images"
    with pytest.raises(DataError, match=found + r"\. Put cars_test_annos_withlabels\.mat into '.*devkit'"):
        cars196(tmp_path, check_counts=False)


def test_a_list_of_the_test_images_that_has_classes_is_enough_under_its_plain_name(tmp_path: Path) -> None:
    write_train_and_test(tmp_path)
    (tmp_path / "devkit/cars_test_annos_withlabels.mat").replace(tmp_path / "devkit/cars_test_annos.mat")
    assert len(cars196(tmp_path, check_counts=False)) == 6


def test_an_unknown_class_folder_is_named_with_the_nearest_class(tmp_path: Path) -> None:
    write_folders(tmp_path)
    touch(tmp_path / "Audi V8 Sedan 1949" / "1.jpg")
    with pytest.raises(DataError, match=r"Audi V8 Sedan 1949' has images .* \(nearest is 'Audi V8 Sedan 1994'\)"):
        cars196(tmp_path, check_counts=False)


@pytest.mark.parametrize(
    ("fields", "names", "message"),
    [
        (
            {"relative_im_path": ["a.jpg"], "class": [0]},
            NAMES,
            "got classes from 0 to 0, expected classes from 1 to 196",
        ),
        ({"relative_im_path": ["a.jpg"], "class": [197]}, NAMES, "got classes from 197 to 197, expected"),
        ({"fname": ["1.jpg"]}, NAMES, r"cannot read the annotations '.*cars_annos\.mat'"),
        ({}, sorted(NAMES), "does not list the 196 published classes in their order"),
        ({}, NAMES[:-1], "does not list the 196 published classes in their order"),
    ],
)
def test_faulty_annotations_are_named(tmp_path: Path, fields: dict[str, Any], names: Any, message: str) -> None:
    write_car_ims(tmp_path)
    save_rows(tmp_path / "cars_annos.mat", fields or {"class": [1]}, class_names=cell(names))
    with pytest.raises(DataError, match=message):
        cars196(tmp_path, check_counts=False)


BOXES = [(11, 21, 40 + i, 50) for i in range(len(CLASSES))]  # pixels count from 1, the last one is inside


def box_fields(boxes: Sequence[tuple[int, ...]]) -> dict[str, Sequence[Any]]:
    return dict(zip(("bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2"), zip(*boxes, strict=True), strict=True))


def test_images_cut_to_the_published_boxes_are_noted(tmp_path: Path) -> None:
    write_car_ims(tmp_path)
    paths = [f"car_ims/{i:06d}.jpg" for i in range(1, len(CLASSES) + 1)]
    whole = cars196(tmp_path, check_counts=False)
    assert whole.originals is not None
    assert np.isnan(whole.originals.boxes).all()  # of a list without boxes
    assert whole.notes == ("a subset: 6 of 16,185 images",)
    fields = {"relative_im_path": paths, "class": CLASSES, **box_fields(BOXES)}
    save_rows(tmp_path / "cars_annos.mat", fields, class_names=cell(NAMES))
    for size_of, notes in (
        (lambda i: (30 + i, 30), ("images cut to their boxes",)),
        (lambda i: (60 + i, 55), ()),
        (lambda i: (35, 30 + i), ("images cut or rescaled (boxes of cars_annos.mat lie outside of 6 of 6 images)",)),
    ):
        for i, path in enumerate(paths):
            Image.new("RGB", size_of(i)).save(tmp_path / path)
        assert cars196(tmp_path, check_counts=False).notes == ("a subset: 6 of 16,185 images", *notes)


def test_boxes_of_the_devkit_are_those_of_their_part(tmp_path: Path) -> None:
    write_train_and_test(tmp_path)
    for name, part in (("cars_train_annos", 0), ("cars_test_annos_withlabels", 1)):
        names = [f"{i:05d}.jpg" for i in range(1, 4)]
        fields = {"class": CLASSES[part::2], "fname": names, **box_fields(BOXES[part::2])}
        save_rows(tmp_path / "devkit" / f"{name}.mat", fields)
    table = cars196(tmp_path, check_counts=False)
    assert [path.split("/")[0] for path in table.paths] == ["cars_test"] * 3 + ["cars_train"] * 3
    assert table.originals is not None
    assert table.originals.boxes is not None
    expected = [(10, 20, x2, 50) for x2 in (41, 43, 45, 40, 42, 44)]
    assert table.originals.boxes.tolist() == [list(box) for box in expected]


@pytest.mark.data
@pytest.mark.usefixtures("without_files")
@pytest.mark.parametrize("layout", ["car_ims", "cars_train_test"])
def test_the_complete_annotations_have_the_published_counts(shared_dir: Path, tmp_path: Path, layout: str) -> None:
    metadata = shared_dir / "data/cars196/metadata"
    if layout == "car_ims":
        (tmp_path / "car_ims").mkdir()
        (tmp_path / "cars_annos.mat").symlink_to(metadata / "cars_annos.mat")
    else:
        for name in ("cars_train", "cars_test", "devkit"):
            (tmp_path / name).mkdir()
        for name in ("cars_meta", "cars_train_annos", "cars_test_annos"):
            (tmp_path / "devkit" / f"{name}.mat").symlink_to(metadata / f"{name}.mat")
    table = cars196(tmp_path)
    assert (len(table), table.num_classes) == (16_185, 196)
    assert (int((table.role == "train").sum()), int((table.role == "test").sum())) == (8_054, 8_131)
    assert set(table.labels[table.role == "train"]) == set(range(98))
    assert np.bincount(table.labels)[[0, 1, 195]].tolist() == [89, 64, 80]
    assert table.originals is not None
    assert np.isfinite(table.originals.boxes).all()


@pytest.mark.data
def test_real_images_are_found_and_read(shared_dir: Path, tmp_path: Path) -> None:
    shutil.unpack_archive(shared_dir / "data" / "cars196" / "cars196_subset.tar", tmp_path)
    table = cars196(tmp_path, check_counts=False)
    assert table.notes == ("a subset: 588 of 16,185 images",)  # their boxes were rewritten to the cut images
    assert (len(table), table.num_classes) == (588, 196)
    assert int((table.role == "train").sum()) == 294
    assert table.class_names[0] == "AM General Hummer SUV 2000"
    assert min(read_image(Path(table.root) / table.paths[0]).size) > 50
