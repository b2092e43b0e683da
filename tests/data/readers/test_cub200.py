"""CUB-200-2011 in every layout."""

import tarfile
from pathlib import Path

import numpy as np
import pytest

from dmlbench.data.image_table import file_contents
from dmlbench.data.readers.cub200 import FOLDER, cub200
from dmlbench.types import DataError, ImageTable

# Class ids of the images a.jpg, b.jpg, ... of a small tree; the names are made up.
CLASSES = (1, 1, 100, 101, 101, 200)
NAMES = {1: "001.Albatross", 2: "002.Auk", 100: "100.Pelican", 101: "101.Pélican_blanc", 200: "200.Yellowthroat"}


def images() -> list[str]:
    return [f"{NAMES[c]}/{letter}.jpg" for c, letter in zip(CLASSES, "abcdef", strict=True)]


def touch(root: Path, paths: list[str]) -> None:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(path.rsplit("/", 1)[-1])


def write_lists(root: Path) -> Path:
    """The original layout, as a subset whose image ids have gaps, written on Windows."""
    touch(root / "images", images())
    ids = [3, 4, 9, 10, 11, 30]
    lists = {
        "images.txt": [f"{i} {path}" for i, path in zip(ids, images(), strict=True)],
        "image_class_labels.txt": [f"{i} {c}" for i, c in zip(ids, CLASSES, strict=True)],
        "classes.txt": [f"{c} {name}" for c, name in NAMES.items()],
        "train_test_split.txt": ["nobody reads this"],
    }
    for name, lines in lists.items():
        (root / name).write_bytes("\ufeff".encode() + "\r\n".join([*lines, ""]).encode())
    return root


def write_split(root: Path) -> None:
    for i, path in enumerate(images()):
        touch(root / ("train" if i % 2 else "test"), [path])


LAYOUTS = {
    "CUB_200_2011": write_lists,
    "archive/CUB_200_2011/CUB_200_2011": write_lists,
    "cub2002011/cub_200_2011": lambda root: touch(root / "images", images()),
    "Caltech-UCSD-Birds": lambda root: touch(root, images()),
    "cub-200": lambda root: [path.rename(root / path.name) for path in (write_lists(root) / "images").iterdir()],
    "cub": write_split,
    "cub200": lambda root: write_split(root / "images"),
}


def contents(table: ImageTable) -> list[tuple[str, str, str]]:
    names = [path.removeprefix("train/").removeprefix("test/") for path in table.paths.tolist()]
    classes = [table.class_names[c] for c in table.labels]
    return sorted(zip(names, classes, table.role.tolist(), strict=True))


@pytest.mark.parametrize("place", LAYOUTS)
def test_every_layout_gives_the_same_table(tmp_path: Path, place: str) -> None:
    LAYOUTS[place](tmp_path / place)
    for root in (tmp_path, tmp_path / place):
        table = cub200(root, check_counts=False)
        assert table.class_names == (NAMES[1], NAMES[100], NAMES[101], NAMES[200])
        halves = {1: "train", 100: "train", 101: "test", 200: "test"}
        assert contents(table) == [(p, NAMES[c], halves[c]) for p, c in zip(images(), CLASSES, strict=True)]
        assert (file_contents(table.root, table.paths, name="cub200") == 5).all()
        assert table.layout == FOLDER.find(root)[1].description


def test_boxes_belong_to_images_by_their_ids(tmp_path: Path) -> None:
    write_lists(tmp_path)
    rows = [f"{i} {i}.5 2.0 100.0 {i}" for i in (30, 11, 10, 9, 3)]  # none of the image 4
    (tmp_path / "bounding_boxes.txt").write_text("\n".join(rows))
    table = cub200(tmp_path, check_counts=False)
    assert table.originals is not None
    assert table.originals.boxes is not None
    expected = [[i + 0.5, 2, i + 100.5, i + 2.0] if i != 4 else [np.nan] * 4 for i in (3, 4, 9, 10, 11, 30)]
    np.testing.assert_array_equal(table.originals.boxes, expected)


def test_missing_lists_are_named_even_where_class_folders_would_do(tmp_path: Path) -> None:
    write_lists(tmp_path)
    (tmp_path / "image_class_labels.txt").unlink()
    with pytest.raises(
        DataError, match=r"nearest is .*, which lacks image_class_labels\.txt; .*unpack CUB_200_2011\.tgz"
    ):
        cub200(tmp_path, check_counts=False)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("images.txt", "3 a.jpg\n3 b.jpg\n", r"line 2 of '.*images\.txt' has the image_id '3', expected each once"),
        ("images.txt", "3 a.jpg\n99 b.jpg\n", r"line 2 of '.*' has the image_id '99', expected one of image_c"),
        ("images.txt", "3 ../a.jpg\n", r"lists images outside of '.*images': \.\./a\.jpg"),
        ("images.txt", "3 x/gone.jpg\n4 001.Albatross/b.jpg\n", r"lacks 1 of 2 image files .*: x/gone\.jpg"),
        ("image_class_labels.txt", "3 1\n4 77\n", r"line 2 of .* has the class_id '77', expected one of classes"),
        ("classes.txt", "1 a\n100 b\n101 c\n200 d\n201 e\n", "line 5 of .* has the class_id '201', expected 1 to 200"),
        ("classes.txt", "1 a\n1 b\n", r"line 2 of '.*classes\.txt' has the class_id '1', expected each"),
        ("bounding_boxes.txt", "3 1 1 5 5\n4 1 nan 5 5\n", r"line 2 of '.*' has the y 'nan', expected a number"),
        ("images/201.Nothing/x.jpg", "", None),  # no list names it
    ],
)
def test_a_faulty_list_is_named_with_its_line(tmp_path: Path, name: str, content: str, message: str | None) -> None:
    write_lists(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(content)
    if message is None:
        assert len(cub200(tmp_path, check_counts=False)) == len(CLASSES)
        return
    with pytest.raises(DataError, match=message):
        cub200(tmp_path, check_counts=False)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("201.Nothing/x.jpg", "201.Nothing' holds images but is no class of CUB-200-2011"),
        ("Albatross/x.jpg", "Albatross' holds images but is no class of CUB-200-2011"),
        ("001.Alca/x.jpg", "class 1 of CUB-200-2011 has the folders '001.Albatross' and '001.Alca'"),
    ],
)
def test_folders_that_are_no_class_are_named(tmp_path: Path, path: str, message: str) -> None:
    touch(tmp_path, [*images(), path, "attributes/list.txt"])
    with pytest.raises(DataError, match=message):
        cub200(tmp_path, check_counts=False)


def test_one_image_in_both_parts_of_a_split_is_an_error(tmp_path: Path) -> None:
    touch(tmp_path, ["train/001.Albatross/a.jpg", "test/001.Albatross/a.jpg"])
    with pytest.raises(DataError, match=r"'001\.Albatross/a\.jpg' is in several of train, test"):
        cub200(tmp_path, check_counts=False)


@pytest.mark.data
@pytest.mark.usefixtures("without_files")
def test_the_complete_published_lists_have_the_published_counts(shared_dir: Path, tmp_path: Path) -> None:
    for file in (shared_dir / "data/cub200_2011/metadata/CUB_200_2011").glob("*.txt"):
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "images").mkdir()
    table = cub200(tmp_path)
    assert (len(table), table.num_classes) == (11_788, 200)
    assert (int((table.role == "train").sum()), int((table.role == "test").sum())) == (5_864, 5_924)
    assert table.class_names[0] == "001.Black_footed_Albatross"
    assert all(path.startswith(table.class_names[c]) for path, c in zip(table.paths, table.labels, strict=True))


@pytest.mark.data
def test_the_subset_of_real_images_loads(shared_dir: Path, tmp_path: Path) -> None:
    with tarfile.open(shared_dir / "data/cub200_2011/CUB_200_2011_subset.tar") as archive:
        archive.extractall(tmp_path, filter="data")
    table = cub200(tmp_path, check_counts=False)
    assert (len(table), table.num_classes) == (51, 10)
    assert table.notes == ("a subset: 51 of 11,788 images",)
    with pytest.raises(DataError, match="train 51 images of 10 classes"):
        cub200(tmp_path)
