"""Both editions of CUB-200 in every layout, none of them ever taken for the other."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from dmlbench.data.image_table import file_contents
from dmlbench.data.readers.cub200 import OF_2011, cub200, year_of
from dmlbench.data.readers.cub200_2010 import cub200_2010
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


def write_lists(root: Path, paths: list[str] | None = None) -> Path:
    """The original layout, as a subset whose image ids have gaps, written on Windows."""
    paths = paths or images()
    touch(root / "images", paths)
    ids = (3, 4, 9, 10, 11, 30, 31, 32)[: len(paths)]
    classes = {int(path[:3]): path.split("/")[0] for path in paths} | {2: "002.Auk"}
    lists = {
        "images.txt": [f"{i} {path}" for i, path in zip(ids, paths, strict=True)],
        "image_class_labels.txt": [f"{i} {int(path[:3])}" for i, path in zip(ids, paths, strict=True)],
        "classes.txt": [f"{c} {name}" for c, name in classes.items()],
        "train_test_split.txt": ["nobody reads this"],
    }
    for name, lines in lists.items():
        (root / name).write_bytes("\ufeff".encode() + "\r\n".join([*lines, ""]).encode())
    return root


def write_split(root: Path, paths: list[str] | None = None) -> None:
    for i, path in enumerate(paths or images()):
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
        assert table.layout == OF_2011.find(root)[1].description


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
        DataError, match=r"nearest is .*, which lacks image_class_labels\.txt\. .*Unpack CUB_200_2011\.tgz"
    ):
        cub200(tmp_path, check_counts=False)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "images.txt",
            "3 a.jpg\n99 b.jpg\n",
            r"line 2 of '.*': got the image_id '99', expected one of the ids in image_c",
        ),
        (
            "image_class_labels.txt",
            "3 1\n4 77\n",
            r"line 2 of .*: got the class_id '77', expected one of the ids in classes",
        ),
        ("classes.txt", "1 a\n100 b\n101 c\n200 d\n201 e\n", "line 5 of .*: got the class_id '201', expected 1 to 200"),
        ("bounding_boxes.txt", "3 1 1 5 5\n4 1 nan 5 5\n", r"line 2 of '.*': got the y 'nan', expected a number"),
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
        ("201.Nothing/x.jpg", "201.Nothing' has images but is not a class of CUB-200-2011"),
        ("Albatross/x.jpg", "Albatross' has images but is not a class of CUB-200-2011"),
        ("001.Alca/x.jpg", "class 1 of CUB-200-2011 has the folders '001.Albatross' and '001.Alca'"),
    ],
)
def test_folders_that_are_no_class_are_named(tmp_path: Path, path: str, message: str) -> None:
    touch(tmp_path, [*images(), path, "attributes/list.txt"])
    with pytest.raises(DataError, match=message):
        cub200(tmp_path, check_counts=False)


SPECIES = {1: "Black_footed_Albatross", 100: "Brown_Pelican", 101: "White_Pelican", 200: "Common_Yellowthroat"}
IDS = {2010: ("2950163169", "xxx"), 2011: ("796111", "18")}


def test_one_image_in_both_parts_of_a_split_is_an_error(tmp_path: Path) -> None:
    touch(tmp_path, ["train/001.Albatross/a.jpg", "test/001.Albatross/a.jpg"])
    with pytest.raises(DataError, match=r"'001\.Albatross/a\.jpg' is in more than one of train, test"):
        cub200(tmp_path, check_counts=False)


def images_of(year: int) -> list[str]:
    return [f"{c:03d}.{s}/{s}_{n:04d}_{i}.jpg" for c, s in SPECIES.items() for n, i in enumerate(IDS[year], start=1)]


@pytest.mark.parametrize(
    ("place", "below", "write"),
    [
        ("cub200_2010", "", touch),
        ("CUB-200-2010", "images", touch),
        ("archive/CUB_200", "images", touch),
        ("caltech-ucsd-birds-200", "", write_split),
        ("cub", "images", write_split),
    ],
)
def test_every_layout_of_2010_gives_the_same_table(tmp_path: Path, place: str, below: str, write) -> None:
    write(tmp_path / place / below, images_of(2010))
    for root in (tmp_path, tmp_path / place):
        table = cub200_2010(root, check_counts=False)
        assert table.name == "cub200_2010"
        halves = {1: "train", 100: "train", 101: "test", 200: "test"}
        expected = [(path, path.split("/")[0], halves[int(path[:3])]) for path in images_of(2010)]
        assert contents(table) == sorted(expected)


@pytest.mark.parametrize("below", ["", "images"])
@pytest.mark.parametrize(
    ("year", "reader", "message"),
    [
        (2011, cub200_2010, r"CUB-200-2010 is not in .* \(dataset=cub200 reads CUB-200-2011\)"),
        (2010, cub200, r"CUB-200-2011 is not in .* \(dataset=cub200_2010 reads CUB-200-2010\)"),
    ],
)
def test_the_other_edition_is_not_taken(tmp_path: Path, year: int, reader, message: str, below: str) -> None:
    touch(tmp_path / "cub" / below, images_of(year))
    for root in (tmp_path, tmp_path / "cub"):
        with pytest.raises(DataError, match=message):
            reader(root, check_counts=False)


# The names of either edition's folder may come first, and either may stand for the other.
@pytest.mark.parametrize(
    ("folder_2010", "folder_2011", "with_lists"),
    [
        ("CUB_200", "CUB_200_2011", True),
        ("cub200_2010", "cub200", False),
        ("cub200", "cub200_2011", False),
        ("cub-200", "CUB", False),
    ],
)
def test_a_folder_with_both_editions_gives_each_its_own(
    tmp_path: Path, folder_2010: str, folder_2011: str, with_lists: bool
) -> None:
    touch(tmp_path / folder_2010 / "images", images_of(2010))
    (write_lists if with_lists else touch)(tmp_path / folder_2011 / ("" if with_lists else "images"), images_of(2011))
    for reader, year in ((cub200_2010, 2010), (cub200, 2011)):
        assert sorted(reader(tmp_path, check_counts=False).paths.tolist()) == sorted(images_of(year))


def test_images_of_both_editions_in_one_folder_are_refused_by_both(tmp_path: Path) -> None:
    touch(tmp_path, images_of(2010) + images_of(2011))
    for reader in (cub200_2010, cub200):
        with pytest.raises(DataError, match=r"mixes 8 images of .* and 8 of .*\. Keep one"):
            reader(tmp_path, check_counts=False)


def numbered(root: Path, train: int, test: int) -> Path:
    """200 class folders with these sums of the halves, whose files have lost their published names."""
    for c in range(200):
        folder = root / f"{c + 1:03d}.Bird"
        folder.mkdir(parents=True)
        total = train if c < 100 else test
        for n in range(total // 100 + (c % 100 < total % 100)):
            (folder / f"{n}.jpg").touch()
    return root


def test_renamed_images_are_told_apart_by_their_number(tmp_path: Path) -> None:
    whole = numbered(tmp_path / "cub200_2010", 2_990, 3_043)
    table = cub200_2010(whole)
    assert (len(table), table.num_classes, table.notes) == (6_033, 200, ())
    assert set(table.labels[table.role == "train"]) == set(range(100))
    with pytest.raises(DataError, match=r"train 2,990 images of 100 classes.*published train 5,864"):
        cub200(whole)
    assert cub200(whole, check_counts=False).notes == (
        "a subset: 6,033 of 11,788 images",
        "of unknown edition, 2010 or 2011",
    )


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
    shutil.unpack_archive(shared_dir / "data/cub200_2011/CUB_200_2011_subset.tar", tmp_path)
    table = cub200(tmp_path, check_counts=False)
    assert (len(table), table.num_classes) == (51, 10)
    assert table.notes == ("a subset: 51 of 11,788 images",)
    with pytest.raises(DataError, match="train 51 images of 10 classes"):
        cub200(tmp_path)


@pytest.mark.data
def test_every_published_name_of_2011_is_known_for_it(shared_dir: Path) -> None:
    lists = shared_dir / "data/cub200_2011/metadata/CUB_200_2011/images.txt"
    names = [line.split()[1] for line in lists.read_text().splitlines()]
    assert len(names) == 11_788
    assert {year_of(name) for name in names} == {2011}
