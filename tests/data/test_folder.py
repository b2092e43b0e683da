"""Image folders and CSV lists as data sets."""

import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dmlbench.data.folder import folder
from dmlbench.data.table import read_image
from dmlbench.types import DataError


def write_images(root: Path, paths: list[str]) -> None:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (5, 4)).save(root / path)


def test_a_class_tree_is_halved_in_sorted_order(tmp_path: Path) -> None:
    write_images(tmp_path, ["b/1.png", "b/2.JPG", "a/x/deep.png", "c/1.png", "d/1.png", "train/1.png", ".git/1.png"])
    (tmp_path / "words.txt").write_text("not an image")
    (tmp_path / "b" / "notes.txt").write_text("nor is this")
    (tmp_path / "empty").mkdir()
    table = folder(tmp_path, name="mine")
    assert table.name == "mine"
    assert table.class_names == ("a", "b", "c", "d", "train")  # a class may be a train
    assert table.paths.tolist() == ["a/x/deep.png", "b/1.png", "b/2.JPG", "c/1.png", "d/1.png", "train/1.png"]
    assert table.role.tolist() == ["train"] * 3 + ["test"] * 3


def test_train_and_test_folders_set_the_roles(tmp_path: Path) -> None:
    write_images(tmp_path, ["train/z/1.png", "train/y/1.png", "test/a/1.png", "test/a/2.png"])
    table = folder(tmp_path)
    assert table.class_names == ("a", "y", "z")
    assert dict(zip(table.paths.tolist(), table.role.tolist(), strict=True))["test/a/2.png"] == "test"
    assert sorted(table.role.tolist()) == ["test", "test", "train", "train"]


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["train/a/1.png", "train/b/1.png"], "point root at one of them"),
        (["train/a/1.png", "test/b/1.png", "val/c/1.png"], "expected class folders, or both train and test"),
        (["train/a/1.png", "test/a/1.png"], "1 classes both to train and to test on: a"),
        (["train/1.png", "test/b/1.png"], "lies in no class folder"),
        (["1.png"], "finds no images"),
    ],
)
def test_a_tree_that_cannot_be_understood_is_refused(tmp_path: Path, paths: list[str], message: str) -> None:
    write_images(tmp_path, paths)
    with pytest.raises(DataError, match=message):
        folder(tmp_path)


def test_a_missing_root_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere', which is not a folder"):
        folder(tmp_path / "nowhere")


def test_a_csv_may_give_query_and_gallery(tmp_path: Path) -> None:
    write_images(tmp_path, ["1.png", "2.png", "3.png", "4.png"])
    (tmp_path / "list.csv").write_text(
        "path, label, role\n1.png,x,train\n2.png,y,query\n3.png,y,gallery\n4.png,x,train\n"
    )
    table = folder(tmp_path, csv="list.csv")
    assert table.labels.tolist() == [0, 1, 1, 0]
    assert table.role.tolist() == ["train", "query", "gallery", "train"]


def test_integer_labels_are_sorted_as_integers_and_roles_default_to_halves(tmp_path: Path) -> None:
    write_images(tmp_path, ["1.png", "2.png", "3.png", "4.png"])
    file = tmp_path / "elsewhere.csv"
    file.write_text("\ufefflabel,path\n10,1.png\n9,2.png\n100,3.png\n11,4.png\n", encoding="utf-8")
    table = folder(tmp_path, csv=file)
    assert table.class_names == ("9", "10", "11", "100")
    assert table.labels.tolist() == [1, 0, 3, 2]
    assert table.role.tolist() == ["train", "train", "test", "test"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("file,label\n1.png,a\n", "expected path,label"),
        ("path,label\n", "lists no images"),
        ("path,label\n1.png,\n", "line 2 of"),
        ("path,label\n1.png,a,b\n", "line 2 of"),
        ("path,label,role\n1.png,a,trian\n", "'trian'; did you mean 'train'"),
        ("path,label\n1.png,a\n1.png,b\n", "lists images twice: 1.png"),
        ("path,label\n1.png,a\nmissing.png,b\n", "lacks 1 of 2 images.*missing.png"),
        ("path,label,role\n1.png,a,train\n2.png,a,query\n", "both to train and to test"),
    ],
)
def test_a_csv_at_fault_is_refused(tmp_path: Path, text: str, message: str) -> None:
    write_images(tmp_path, ["1.png", "2.png"])
    (tmp_path / "list.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        folder(tmp_path, csv="list.csv")


def test_a_csv_that_is_missing_or_binary_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"list\.csv', which is missing"):
        folder(tmp_path, csv="list.csv")
    (tmp_path / "list.csv").write_bytes(b"path,label\n\xff\xfe\x00,a\n")
    with pytest.raises(DataError, match="not a CSV in UTF-8"):
        folder(tmp_path, csv="list.csv")


@pytest.mark.data
@pytest.mark.parametrize(
    ("archive", "root", "images", "classes"),
    [
        ("clothing/clothing-dataset-small_subset.tar", "clothing-dataset-small/train", 100, 10),
        ("tiny_imagenet/tiny-imagenet-200_subset.zip", "tiny-imagenet-200/train", 3000, 60),
        ("cifar10/cifar10_jpg_subset.zip", "cifar10/train", 4000, 10),
    ],
)
def test_real_folders_are_read(
    shared_dir: Path, tmp_path: Path, archive: str, root: str, images: int, classes: int
) -> None:
    file = shared_dir / "data" / archive
    if file.suffix == ".tar":
        with tarfile.open(file) as tar:
            tar.extractall(tmp_path, filter="data")
    else:
        with zipfile.ZipFile(file) as packed:
            packed.extractall(tmp_path)
    table = folder(tmp_path / root)
    assert (len(table), table.num_classes) == (images, classes)
    assert np.unique(table.labels[table.role == "train"]).tolist() == list(range(classes // 2))
    for row in range(0, images, images // 20):
        assert read_image(Path(table.root) / table.paths[row]).mode == "RGB"
