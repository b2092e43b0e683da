"""Stanford Online Products in every layout."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dmlbench.data.image_table import Published, file_contents
from dmlbench.data.readers import sop as reader
from dmlbench.data.readers.sop import sop
from dmlbench.types import DataError

HEADER = "image_id class_id super_class_id path"
TRAIN = ["1 1 1 bicycle_final/11_0.JPG", "2 1 1 bicycle_final/11_1.JPG", "3 2 5 fan_final/12_0.JPG"]
TEST = ["4 3 1 bicycle_final/13_0.JPG", "5 3 1 bicycle_final/13_1.JPG", "6 4 5 fan_final/ventilateur_é.JPG"]


def write_lists(folder: Path, *, train: list[str] = TRAIN, test: list[str] = TEST, header: str = HEADER) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in (("Ebay_train.txt", train), ("Ebay_test.txt", test)):
        (folder / name).write_bytes("\r\n".join([header, *lines, ""]).encode())


def touch(root: Path) -> None:
    for line in (*TRAIN, *TEST):
        file = root / line.split()[3]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


def write_original(root: Path) -> None:
    write_lists(root)
    touch(root)


def write_info_files(root: Path) -> None:
    write_lists(root / "Info_Files")
    touch(root / "images")


LAYOUTS: dict[str, Callable[[Path], None]] = {
    "Stanford_Online_Products": write_original,
    "archive/stanford-online-products/Stanford_Online_Products": write_original,
    "sop": write_info_files,
    "online_products": lambda root: (write_lists(root), touch(root / "images"))[0],
    "SOP": lambda root: (write_lists(root / "Info_Files"), touch(root))[0],
}


@pytest.mark.parametrize("place", LAYOUTS)
def test_every_layout_gives_the_same_table(tmp_path: Path, place: str) -> None:
    LAYOUTS[place](tmp_path / place)
    write_original(tmp_path / "reference")
    reference = sop(tmp_path / "reference", check_counts=False)
    for root in (tmp_path, tmp_path / place):
        table = sop(root, check_counts=False)
        assert dict(zip(table.paths.tolist(), table.labels.tolist(), strict=True)) == {
            line.split()[3]: int(line.split()[1]) - 1 for line in (*TRAIN, *TEST)
        }
        assert table.class_names == ("1", "2", "3", "4")
        assert table.role.tolist() == [("train", "train", "test", "test")[c] for c in table.labels]
        assert table.super_labels is not None
        assert table.super_labels.tolist() == [4 * path.startswith("fan") for path in table.paths]
        assert (file_contents(table.root, table.paths, name="sop") == 0).all()
        assert table.fingerprint == reference.fingerprint


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["1 1 0 x.JPG"], r"line 2 of '.*': got the super_class_id '0', expected a whole number of at least 1"),
        ([TRAIN[0], "1 1 1 x.JPG"], r"line 3 of '.*': got the image_id '1', expected each value once"),
    ],
)
def test_a_faulty_list_is_named_with_its_line(tmp_path: Path, lines: list[str], message: str) -> None:
    write_original(tmp_path)
    write_lists(tmp_path, train=lines)
    with pytest.raises(DataError, match=message):
        sop(tmp_path, check_counts=False)


@pytest.mark.data
def test_real_lists_in_the_format_load_with_their_counts(shared_dir: Path, tmp_path: Path, without_files: None) -> None:
    (tmp_path / "Info_Files").symlink_to(shared_dir / "data/sop_format_lists/Info_Files")
    table = sop(tmp_path, check_counts=False)
    is_train = table.role == "train"
    assert (int(is_train.sum()), int((~is_train).sum())) == (9_131, 9_091)
    assert (len(np.unique(table.labels[is_train])), table.num_classes) == (2_051, 2_051 + 2_050)
    with pytest.raises(DataError, match="train 9,131 images of 2,051 classes, test 9,091 images of 2,050 classes"):
        sop(tmp_path)


def test_classes_numbered_in_another_way_are_not_the_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_original(tmp_path)
    published = Published({"train": (3, 2), "test": (3, 2)})
    monkeypatch.setattr(reader, "FOLDER", replace(reader.FOLDER, published=published))
    with pytest.raises(DataError, match="got classes up to 4, expected the published 1 to 22,634"):
        sop(tmp_path)
