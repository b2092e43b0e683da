"""Omniglot from archives: a synthetic one for the rules, the published one for the counts."""

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dmlbench.data.readers.omniglot import FOLDER, omniglot
from dmlbench.types import DataError, ImageTable


def write_archive(file: Path, characters: list[str], *, images: int = 3) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{file.stem}/", "")
        archive.writestr(f"__MACOSX/{characters[0]}/._0001_01.png", b"junk")
        for number, character in enumerate(characters):
            for image in range(images):
                drawing = np.full((105, 105), 255, dtype=np.uint8)
                drawing[10 : 40 + image, 20 + number : 60] = 0
                buffer = io.BytesIO()
                Image.fromarray(drawing).convert("1").save(buffer, "png")
                archive.writestr(f"{file.stem}/{character}/{number:04d}_{image + 1:02d}.png", buffer.getvalue())


def subset(root: Path, **arguments: Any) -> ImageTable:
    return omniglot(root, check_counts=False, **arguments)


BACKGROUND = [f"Greek/character{i:02d}" for i in (2, 1, 3)] + ["Balinese/character01"]


def test_background_alone_is_halved_in_sorted_order(tmp_path: Path) -> None:
    write_archive(tmp_path / "images_background.zip", BACKGROUND)
    table = subset(tmp_path, cache_dir=tmp_path / "cache", image_size=35)
    assert table.class_names == tuple(sorted(BACKGROUND))
    assert table.labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert table.role.tolist() == ["train"] * 6 + ["test"] * 6
    assert table.super_labels is not None
    assert table.super_labels.tolist() == [0] * 3 + [1] * 9
    assert table.pixels is not None
    assert table.pixels.shape == (12, 35, 35)
    # Ink is white; 105 to 35 pixels is a mean over 3 x 3.
    assert table.pixels[0, 8, 15] == 255
    assert table.pixels[0, 0, 0] == 0


def test_with_evaluation_the_archives_are_the_halves(tmp_path: Path) -> None:
    write_archive(tmp_path / "images_background.zip", BACKGROUND)
    count = "a subset: {} of 32,460 images"
    cut = "train and test half share Greek: the split cuts an alphabet"
    assert subset(tmp_path, cache_dir=tmp_path).notes == (count.format(12), cut)
    assert FOLDER.notes(tmp_path) == (count.format(12),)
    write_archive(tmp_path / "images_evaluation.zip", ["Angelic/character01", "Zulu/character01"])
    table = subset(tmp_path, cache_dir=tmp_path)
    assert (table.notes, table.published_queries) == ((count.format(18),), 13_180)
    assert table.class_names == (*sorted(BACKGROUND), "Angelic/character01", "Zulu/character01")
    assert table.role.tolist() == ["train"] * 12 + ["test"] * 6
    only = subset(tmp_path, cache_dir=tmp_path, archives=["images_evaluation.zip"])
    assert only.role.tolist() == ["train"] * 3 + ["test"] * 3


def test_small_archives_are_joined_and_left_out_beside_the_full_one(tmp_path: Path) -> None:
    write_archive(tmp_path / "images_background_small1.zip", BACKGROUND[:3])
    write_archive(tmp_path / "images_background_small2.zip", [BACKGROUND[0], "Latin/character01"])
    joined = subset(tmp_path, cache_dir=tmp_path)
    assert len(joined) == 12  # the character of both counts once
    write_archive(tmp_path / "images_background.zip", BACKGROUND)
    assert "Latin/character01" not in subset(tmp_path, cache_dir=tmp_path).class_names


@pytest.mark.parametrize("in_own_folder", [False, True])
def test_unpacked_folders_are_the_same_data(tmp_path: Path, in_own_folder: bool) -> None:
    unpacked = tmp_path / "data" / "omniglot-py"
    for name, characters in (("images_background", BACKGROUND), ("images_evaluation", ["Zulu/character01"])):
        write_archive(tmp_path / f"{name}.zip", characters)
        with zipfile.ZipFile(tmp_path / f"{name}.zip") as archive:
            archive.extractall(unpacked / name if in_own_folder else unpacked)
    packed = subset(tmp_path, cache_dir=tmp_path / "cache")
    assert subset(tmp_path / "data", cache_dir=tmp_path / "cache").fingerprint == packed.fingerprint
    one = subset(tmp_path / "data", cache_dir=tmp_path / "cache", archives=["images_evaluation.zip"])
    assert one.class_names == ("Zulu/character01",)


def test_an_incomplete_archive_is_told_from_the_published_one(tmp_path: Path) -> None:
    write_archive(tmp_path / "images_evaluation.zip", BACKGROUND)
    with pytest.raises(
        DataError, match=r"got 12 drawings of 4 characters, expected the published 13,180 of 659.*check_counts"
    ):
        omniglot(tmp_path, cache_dir=tmp_path)


@pytest.mark.slow
@pytest.mark.data
def test_the_published_small_archive_has_136_characters_of_5_alphabets(shared_dir: Path, tmp_path: Path) -> None:
    table = omniglot(shared_dir / "data" / "omniglot", cache_dir=tmp_path)
    assert len(table) == 2720
    assert table.num_classes == 136
    assert (np.bincount(table.labels) == 20).all()
    assert table.super_labels is not None
    assert len(np.unique(table.super_labels)) == 5
    assert int((table.role == "train").sum()) == 1360
    assert table.pixels is not None
    assert 0.03 < (table.pixels > 127).mean() < 0.15


def test_the_second_small_archive_must_have_five_alphabets_of_whole_characters(tmp_path: Path) -> None:
    file = tmp_path / "images_background_small2.zip"
    characters = [f"{alphabet}/character01" for alphabet in "ABCDE"]
    write_archive(file, characters, images=20)
    assert len(omniglot(tmp_path, cache_dir=tmp_path)) == 100
    for wrong, images in ((characters[:4], 20), (characters, 3)):
        write_archive(file, wrong, images=images)
        with pytest.raises(DataError, match="expected the published 20 of each character of 5 alphabets"):
            omniglot(tmp_path, cache_dir=tmp_path)
