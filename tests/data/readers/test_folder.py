"""Image folders and CSV lists as data sets."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dmlbench.data.images.sources import read_image
from dmlbench.data.readers.folder import folder
from dmlbench.types import ConfigError, DataError


def write_images(root: Path, paths: list[str]) -> None:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (5, 4)).save(root / path)


def test_a_class_tree_is_halved_in_sorted_order(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_images(tmp_path, ["b/1.png", "b/2.JPG", "a/x/deep.png", "c/1.png", "d/1.png", "train/1.png", ".git/1.png"])
    (tmp_path / "words.txt").write_text("not an image")
    (tmp_path / "b" / "notes.txt").write_text("nor is this")
    (tmp_path / "empty").mkdir()
    table = folder(tmp_path, name="mine")
    assert f"'{tmp_path}': folders without images are ignored: empty" in caplog.text
    assert table.name == "mine"
    assert table.class_names == ("a", "b", "c", "d", "train")  # a class may be a train
    assert table.paths.tolist() == ["a/x/deep.png", "b/1.png", "b/2.JPG", "c/1.png", "d/1.png", "train/1.png"]
    assert table.role.tolist() == ["train"] * 3 + ["test"] * 3


@pytest.mark.parametrize(
    "paths",
    [
        ["Train/z/1.png", "Train/y/1.png", "test/a/1.png", "test/a/2.png"],
        ["train/a/1.png", "query/b/1.png", "gallery/b/2.png", "gallery/c/1.png"],
    ],
)
def test_folders_by_role_set_the_roles(tmp_path: Path, paths: list[str]) -> None:
    write_images(tmp_path, [*paths, "__MACOSX/Train/1.png"])
    table = folder(tmp_path)
    assert table.class_names == tuple(sorted({path.split("/")[1] for path in paths}))
    roles = {path: path.split("/")[0].lower() for path in paths}
    assert dict(zip(table.paths.tolist(), table.role.tolist(), strict=True)) == roles


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["train/a/1.png", "train/b/1.png"], "got images in train of '.*', expected class folders, or train and test"),
        (["train/a/1.png", "test/b/1.png", "val/c/1.png"], "got images in test, train, val of"),
        (
            ["train/a/1.png", "train/b/1.png", "val/a/2.png"],
            r"train, val of '.*' \(not all of these have b\)",
        ),
        (["train/1.png", "test/1.png"], "with class folders inside"),
        (["1.png"], "got images in no folder"),
        (["train/a/1.png", "test/b/1.png", "unlabeled/1.png"], "got images in test, train, unlabeled of"),
        (
            ["images/a/1.png", "images/b/1.png"],
            r"got images in images of .*Point dataset\.table\.root at the folder that holds",
        ),
        (
            ["train/a/1.png", "train/b/1.png", "test/b/2.png"],
            r"1 class in both the train and the test half \(b\), expected none\. .* merge them",
        ),
        (["train/a/1.png", "query/a/2.png", "gallery/a/3.png"], r"1 class in both the train and the test half \(a\)"),
    ],
)
def test_a_tree_that_cannot_be_understood_is_an_error(tmp_path: Path, paths: list[str], message: str) -> None:
    write_images(tmp_path, paths)
    with pytest.raises(DataError, match=message):
        folder(tmp_path)


@pytest.mark.parametrize("target", [".", ".."])
def test_a_link_that_leads_back_is_refused(tmp_path: Path, target: str) -> None:
    write_images(tmp_path, ["a/1.png", "b/1.png"])
    (tmp_path / "a" / "link").symlink_to(target)
    with pytest.raises(DataError, match=r"a/link' links back to"):
        folder(tmp_path)


def test_an_accent_may_be_stored_in_either_way(tmp_path: Path) -> None:
    write_images(tmp_path, ["cafe\u0301/1.png", "tea/1.png"])
    (tmp_path / "train.txt").write_text("caf\u00e9\n", encoding="utf-8")
    assert folder(tmp_path, train_classes="train.txt").class_names == ("cafe\u0301", "tea")
    write_images(
        tmp_path / "both", ["train/cafe\u0301/1.png", "train/tea/1.png", "test/caf\u00e9/1.png", "test/zoo/1.png"]
    )
    with pytest.raises(DataError, match="1 class in both the train and the test half"):
        folder(tmp_path / "both")
    write_images(tmp_path / "split", ["train/cafe\u0301/1.png", "val/caf\u00e9/1.png"])
    assert folder(tmp_path / "split").num_classes == 1


def test_lists_of_classes_set_the_halves_and_the_order(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_images(tmp_path, [f"{name}/1.png" for name in ("a", "b #2", "c", "d", "é")])
    (tmp_path / "first.txt").write_bytes("\ufeff# to train on\r\né # a comment\r\n\r\nb #2\r\n".encode())
    (tmp_path / "second.txt").write_text("d\nc\n")
    with caplog.at_level("WARNING"):
        table = folder(tmp_path, train_classes="first.txt", test_classes=tmp_path / "second.txt")
    assert table.class_names == ("é", "b #2", "d", "c")
    assert dict(zip(table.paths.tolist(), table.role.tolist(), strict=True)) == {
        "b #2/1.png": "train",
        "c/1.png": "test",
        "d/1.png": "test",
        "é/1.png": "train",
    }
    assert "1 classes are in neither list and are ignored: a" in caplog.text
    assert folder(tmp_path, train_classes="first.txt").class_names == ("é", "b #2", "a", "c", "d")
    assert folder(tmp_path, test_classes="second.txt").class_names == ("a", "b #2", "é", "d", "c")


@pytest.mark.parametrize("second", ["test", "val", "Validation"])
def test_folders_with_the_same_classes_are_merged_with_a_notice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, second: str
) -> None:
    write_images(tmp_path, [f"{part}/{c}/{i}.png" for part in ("train", second) for c in "dcba" for i in range(2)])
    table = folder(tmp_path, name="mine")
    (notice,) = caplog.messages
    assert notice.endswith("hold the same 4 classes; their images are merged by class")
    assert table.class_names == ("a", "b", "c", "d")
    assert np.bincount(table.labels).tolist() == [4] * 4
    assert {table.class_names[c]: role for c, role in zip(table.labels, table.role, strict=True)} == {
        **dict.fromkeys("ab", "train"), **dict.fromkeys("cd", "test"),
    }  # fmt: skip
    assert table.layout.endswith(", merged by class")


def test_what_is_nested_loose_or_no_image_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_images(tmp_path, ["a/x/1.png", "a/x/y/2.png", "a/3.png", "b/1.png", "loose.png", "b/.thumbs/1.png"])
    for name in ("a/4.HEIC", "a/x/5.heic", "b/README", "b/.hidden.txt", "b/.thumbs/index.db", "notes.txt"):
        (tmp_path / name).touch()
    with caplog.at_level("INFO"):
        table = folder(tmp_path, name="mine")
    assert np.bincount(table.labels).tolist() == [3, 1]
    assert caplog.messages == [
        f"data set 'mine': 1 images in '{tmp_path}' are ignored: they are not in a class folder",
        "data set 'mine': files without an image's suffix are ignored: 2 .heic, 1 without suffix",
        "data set 'mine': 2 images are in subfolders of their class folders",
    ]


def test_paths_are_relative_to_root_wherever_the_csv_is(tmp_path: Path) -> None:
    write_images(tmp_path, ["images/1.png", "images/2.png", "lists/1.png"])
    (tmp_path / "lists" / "list.csv").write_text("path,label\n1.png,a\n2.png,b\n")
    assert folder(tmp_path / "images", csv="../lists/list.csv").paths.tolist() == ["1.png", "2.png"]
    with pytest.raises(DataError, match=r"2 of 2 listed images are missing in .*: 1\.png, 2\.png"):
        folder(tmp_path, csv="lists/list.csv")
    (tmp_path / "list.csv").write_text(f"path,label\n{tmp_path}/images/1.png,a\nimages/2.png,b\n")
    assert folder(tmp_path, csv="list.csv").paths.tolist() == ["images/1.png", "images/2.png"]


def test_images_of_any_known_suffix_are_read_and_folders_with_one_are_folders(tmp_path: Path) -> None:
    write_images(tmp_path, ["a/1.pgm", "a/2.png", "b/clip.gif/1.png", "b/2.JP2"])
    (tmp_path / "a/2.png").rename(tmp_path / "a/2.jfif")
    assert folder(tmp_path).paths.tolist() == ["a/1.pgm", "a/2.jfif", "b/2.JP2", "b/clip.gif/1.png"]


def test_lists_of_classes_merge_the_folders_of_a_split_for_classification(tmp_path: Path) -> None:
    write_images(tmp_path, ["train/a/1.png", "train/b/1.png", "val/a/2.png", "val/b/2.png"])
    (tmp_path / "train.txt").write_text("b")
    table = folder(tmp_path, train_classes="train.txt")
    assert table.class_names == ("b", "a")
    assert [path for path, role in zip(table.paths, table.role, strict=True) if role == "train"] == [
        "train/b/1.png",
        "val/b/2.png",
    ]


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        ("a\nbb\n", None, r"line 2 of '.*train\.txt': unknown class 'bb'.*Known: a, b, c"),
        ("a\n\na\n", None, r"train\.txt': got 2 classes, expected one or more, each once"),
        ("a\nb\n", "c\nb\n", r"both '.*train\.txt' and '.*test\.txt' list b\. List each"),
        ("# none\n", None, "got 0 classes"),
        (None, "a\nb\nc\n", "has no class to train on"),
        ("a\nb\nc\n", None, "has no class to test on"),
    ],
)
def test_a_list_of_classes_at_fault_is_refused(
    tmp_path: Path, train: str | None, test: str | None, message: str
) -> None:
    write_images(tmp_path, ["a/1.png", "b/1.png", "c/1.png"])
    for name, text in (("train.txt", train), ("test.txt", test)):
        if text is not None:
            (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        folder(tmp_path, train_classes=train and "train.txt", test_classes=test and "test.txt")
    (tmp_path / "list.csv").write_text("path,label,role\na/1.png,a,train\n")
    with pytest.raises(ConfigError, match=r"has roles from the list list\.csv with roles\. Remove"):
        folder(tmp_path, csv="list.csv", train_classes="list.csv")


def test_integer_labels_are_sorted_as_integers_and_roles_default_to_halves(tmp_path: Path) -> None:
    write_images(tmp_path, ["1.png", "2.png", "3.png", "4.png"])
    file = tmp_path / "elsewhere.csv"
    file.write_text("\ufeff\nlabel,path\n10,1.png\n-9,2.png\n100,3.png\n11,4.png\n", encoding="utf-8")
    table = folder(tmp_path, csv=file)
    assert table.class_names == ("-9", "10", "11", "100")
    assert table.labels.tolist() == [1, 0, 3, 2]
    assert table.role.tolist() == ["train", "train", "test", "test"]


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_a_csv_may_give_roles_and_super_classes_and_be_separated_as_spreadsheets_do(
    tmp_path: Path, separator: str
) -> None:
    write_images(tmp_path, ["ä, 1.png", "2.png", "3.png"])
    rows = [
        ["label", " path", "super_label", "role"],
        ["x", '"ä, 1.png"', "chair", "train"],
        ["y", "2.png", "bed", "query"],
        ["y", "3.png", "bed", "gallery"],
    ]
    text = "\r\n".join(separator.join(row) for row in rows)
    (tmp_path / "list.csv").write_bytes(text.encode())
    table = folder(tmp_path, csv="list.csv")
    assert table.super_labels is not None
    found = zip(table.paths.tolist(), table.super_labels.tolist(), table.role.tolist(), strict=True)
    assert set(found) == {("ä, 1.png", 1, "train"), ("2.png", 0, "query"), ("3.png", 0, "gallery")}


def test_other_columns_of_a_csv_are_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_images(tmp_path, ["1.png", "2.png"])
    (tmp_path / "list.csv").write_text("id,path,label,split\n7,1.png,a,\n,2.png,b,x\n")
    with caplog.at_level("INFO"):
        table = folder(tmp_path, csv="list.csv")
    assert table.paths.tolist() == ["1.png", "2.png"] and table.class_names == ("a", "b")
    assert "are ignored: id, split" in caplog.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("file,label\n1.png,a\n", "line 1 of .*: got the columns file, label, expected path and label"),
        ("path,label\n", "got no images, expected a line for each"),
        ("", "got the columns , expected path and label"),
        (
            "path,label\n\n1.png,\n",
            r"line 3 of '.*list\.csv': got '1\.png, ', expected a value for each of path, label\.",
        ),
        ("path,label\n1.png\n", r"line 2 of .*: got '1\.png', expected a value for each"),
        ("path,label\n1.png,a\n2.png,a,b\n", r"line 3 of .*: got '2\.png, a, b', expected a value for each"),
        ('path,label\n1.png,"a\n', "line 2 of '.*' is not CSV: unexpected end of data"),
        ("path,label,role\n1.png,a,trian\n", "line 2 of .*: got the role 'trian', expected one of train, test, query"),
        ("path,label\n1.png,a\n.//1.png,b\n", r"lists images twice: 1\.png"),
        ("path,label,label\n1.png,a,b\n", "got the columns path, label, label"),
        ("path,label\n1.png,a\n9.png,b\n", r"1 of 2 listed images are missing in '.*': 9\.png\. Copy them there"),
        (
            "path,label,role\n1.png,a,train\n2.png,a,test\n",
            r"in both the train and the test half \(a\), .* remove the column role\. To test",
        ),
        ("path,label,Role\n1.png,a,train\n", "got the columns path, label, Role, expected path and label"),
    ],
)
def test_a_csv_at_fault_is_refused(tmp_path: Path, text: str, message: str) -> None:
    write_images(tmp_path, ["1.png", "2.png"])
    (tmp_path / "list.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        folder(tmp_path, csv="list.csv")


@pytest.mark.slow
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
    shutil.unpack_archive(shared_dir / "data" / archive, tmp_path)
    table = folder(tmp_path / root)
    assert (len(table), table.num_classes) == (images, classes)
    assert np.unique(table.labels[table.role == "train"]).tolist() == list(range(classes // 2))
    for row in range(0, images, images // 20):
        assert read_image(Path(table.root) / table.paths[row]).mode == "RGB"
