"""CUB-200 of 2010 in every layout, and never taken for the edition of 2011, or that for it."""

from pathlib import Path

import pytest

from dmlbench.data.readers.cub200 import cub200, year_of
from dmlbench.data.readers.cub200_2010 import FOLDER, cub200_2010
from dmlbench.types import DataError

SPECIES = {1: "Black_footed_Albatross", 100: "Brown_Pelican", 101: "White_Pelican", 200: "Common_Yellowthroat"}
IDS = {2010: ("2950163169", "xxx"), 2011: ("796111", "18")}


def images(year: int) -> list[str]:
    return [f"{c:03d}.{s}/{s}_{n:04d}_{i}.jpg" for c, s in SPECIES.items() for n, i in enumerate(IDS[year], start=1)]


def write(root: Path, year: int = 2010, *, split: bool = False) -> Path:
    for number, path in enumerate(images(year)):
        file = root / (("train", "test")[number % 2] if split else "") / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(path)
    return root


def write_lists(root: Path) -> Path:
    """CUB-200-2011 as published."""
    write(root / "images", 2011)
    rows = [(int(path[:3]), path) for path in images(2011)]
    (root / "images.txt").write_text("".join(f"{i} {path}\n" for i, (_, path) in enumerate(rows, 1)))
    (root / "image_class_labels.txt").write_text("".join(f"{i} {c}\n" for i, (c, _) in enumerate(rows, 1)))
    (root / "classes.txt").write_text("".join(f"{c} {c:03d}.{s}\n" for c, s in SPECIES.items()))
    return root


LAYOUTS = {
    "cub200_2010": lambda root: write(root),
    "CUB-200-2010": lambda root: write(root / "images"),
    "archive/CUB_200": lambda root: write(root / "images"),
    "caltech-ucsd-birds-200": lambda root: write(root, split=True),
    "cub": lambda root: write(root / "images", split=True),
}


@pytest.mark.parametrize("place", LAYOUTS)
def test_every_layout_gives_the_same_table(tmp_path: Path, place: str) -> None:
    LAYOUTS[place](tmp_path / place)
    for root in (tmp_path, tmp_path / place):
        table = cub200_2010(root, check_counts=False)
        assert table.name == "cub200_2010"
        assert table.class_names == tuple(f"{c:03d}.{s}" for c, s in SPECIES.items())
        names = [path.removeprefix("train/").removeprefix("test/") for path in table.paths.tolist()]
        assert sorted(names) == sorted(images(2010))
        assert all(path.startswith(table.class_names[c]) for path, c in zip(names, table.labels, strict=True))
        roles = {table.class_names[c]: role for c, role in zip(table.labels, table.role.tolist(), strict=True)}
        assert list(roles.values()) == ["train", "train", "test", "test"]
        assert table.layout == FOLDER.find(root)[1].description


@pytest.mark.parametrize("below", ["", "images"])
@pytest.mark.parametrize(
    ("year", "reader", "message"),
    [
        (2011, cub200_2010, r"CUB-200-2010 is not in .* \(dataset=cub200 reads CUB-200-2011\)"),
        (2010, cub200, r"CUB-200-2011 is not in .* \(dataset=cub200_2010 reads CUB-200-2010\)"),
    ],
)
def test_the_other_edition_is_not_taken(tmp_path: Path, year: int, reader, message: str, below: str) -> None:
    write(tmp_path / "cub" / below, year)
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
    write(tmp_path / folder_2010 / "images")
    write_lists(tmp_path / folder_2011) if with_lists else write(tmp_path / folder_2011 / "images", 2011)
    for reader, year in ((cub200_2010, 2010), (cub200, 2011)):
        assert sorted(reader(tmp_path, check_counts=False).paths.tolist()) == sorted(images(year))


def test_images_of_both_editions_in_one_folder_are_refused_by_both(tmp_path: Path) -> None:
    write(write(tmp_path), 2011)
    for reader in (cub200_2010, cub200):
        with pytest.raises(DataError, match=r"mixes 8 images of .* and 8 of .*; keep one"):
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
    with pytest.raises(DataError, match=r"train 2,990 images of 100 classes.*published are train 5,864"):
        cub200(whole)
    assert cub200(whole, check_counts=False).notes == (
        "a subset: 6,033 of 11,788 images",
        "of unknown edition, 2010 or 2011",
    )


@pytest.mark.parametrize(
    ("path", "year"),
    [
        ("001.A_b/A_b_0001_2950163169.jpg", 2010),
        ("001.A_b/A_b_0001_1234567.jpg", 2010),
        ("159.A/A_0001_xxx.jpg", 2010),
        ("001.A_b/A_b_0001_796111.jpg", 2011),
        ("001.A/A_0003_18.JPG", 2011),
        ("001.A/a.jpg", None),
        ("001.A/17.png", None),
    ],
)
def test_the_name_of_an_image_tells_its_edition(path: str, year: int | None) -> None:
    assert year_of(path) == year


@pytest.mark.data
def test_every_published_name_of_2011_is_known_for_it(shared_dir: Path) -> None:
    lists = shared_dir / "data/cub200_2011/metadata/CUB_200_2011/images.txt"
    names = [line.split()[1] for line in lists.read_text().splitlines()]
    assert len(names) == 11_788
    assert {year_of(name) for name in names} == {2011}
