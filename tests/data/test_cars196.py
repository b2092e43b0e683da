"""Cars196 in its original layout."""

import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from dmlbench.data.cars196 import cars196
from dmlbench.data.table import read_image
from dmlbench.types import DataError


def write_cars(root: Path, classes: list[int], *, skip_image: int | None = None) -> None:
    (root / "car_ims").mkdir(parents=True)
    rows = np.zeros((1, len(classes)), dtype=[("relative_im_path", "O"), ("class", "O"), ("test", "O")])
    for i, number in enumerate(classes):
        rows[0, i] = (f"car_ims/{i + 1:06d}.jpg", number, i % 2)
        if i != skip_image:
            Image.new("RGB", (8, 6)).save(root / "car_ims" / f"{i + 1:06d}.jpg")
    names = np.array([f"Car {i}" for i in range(1, 197)], dtype=object)
    savemat(root / "cars_annos.mat", {"annotations": rows, "class_names": names})


def test_halves_come_from_the_class_and_never_from_the_test_flag(tmp_path: Path) -> None:
    write_cars(tmp_path, [98, 99, 98, 99, 1, 1])
    table = cars196(tmp_path, check_counts=False)
    assert table.class_names == ("Car 1", "Car 98", "Car 99")
    assert table.labels.tolist() == [1, 2, 1, 2, 0, 0]
    assert table.role.tolist() == ["train", "test", "train", "test", "train", "train"]


def test_wrong_counts_name_expected_and_found_and_the_remedy(tmp_path: Path) -> None:
    write_cars(tmp_path, [1, 99])
    with pytest.raises(DataError, match=r"2 images of 2 classes.*expected 16185 of 196.*check_counts=false"):
        cars196(tmp_path)


def test_missing_images_are_named(tmp_path: Path) -> None:
    write_cars(tmp_path, [1, 1, 99, 99], skip_image=2)
    with pytest.raises(DataError, match=r"lacks 1 of 4 images.*car_ims/000003\.jpg"):
        cars196(tmp_path, check_counts=False)


def test_a_wrong_folder_names_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cars_annos\.mat', which is missing"):
        cars196(tmp_path)
    write_cars(tmp_path / "cars", [1])
    (tmp_path / "cars" / "car_ims" / "000001.jpg").unlink()
    (tmp_path / "cars" / "car_ims").rmdir()
    with pytest.raises(DataError, match="car_ims', which is missing"):
        cars196(tmp_path / "cars")


@pytest.mark.parametrize("content", [b"", b"not a matlab file " * 20])
def test_damaged_annotations_are_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "car_ims").mkdir()
    (tmp_path / "cars_annos.mat").write_bytes(content)
    with pytest.raises(DataError, match=r"cannot read its annotations '.*cars_annos\.mat'"):
        cars196(tmp_path)


def test_truncated_annotations_are_named(tmp_path: Path) -> None:
    write_cars(tmp_path, [1, 99])
    file = tmp_path / "cars_annos.mat"
    file.write_bytes(file.read_bytes()[:-300])
    with pytest.raises(DataError, match=r"cannot read its annotations '.*cars_annos\.mat'"):
        cars196(tmp_path)


@pytest.mark.data
def test_the_complete_annotations_have_the_published_counts(
    shared_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dmlbench.data.cars196.file_sizes", lambda root, paths, *, name: np.ones(len(paths), np.int64))
    (tmp_path / "car_ims").mkdir()
    (tmp_path / "cars_annos.mat").symlink_to(shared_dir / "data" / "cars196" / "metadata" / "cars_annos.mat")
    table = cars196(tmp_path)
    assert (len(table), table.num_classes) == (16_185, 196)
    assert int((table.role == "train").sum()) == 8_054
    assert int((table.role == "test").sum()) == 8_131
    assert set(table.labels[table.role == "train"]) == set(range(98))


@pytest.mark.data
def test_real_images_are_found_and_read(shared_dir: Path, tmp_path: Path) -> None:
    with tarfile.open(shared_dir / "data" / "cars196" / "cars196_subset.tar") as archive:
        archive.extractall(tmp_path, filter="data")
    table = cars196(tmp_path / "cars196", check_counts=False)
    assert (len(table), table.num_classes) == (588, 196)
    assert int((table.role == "train").sum()) == 294
    assert table.class_names[0] == "AM General Hummer SUV 2000"
    image = read_image(Path(table.root) / table.paths[0])
    assert image.mode == "RGB"
    assert min(image.size) > 50
