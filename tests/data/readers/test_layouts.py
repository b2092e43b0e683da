"""Finding data sets on disk."""

from pathlib import Path

import pytest

from dmlbench.data.image_table import Published
from dmlbench.data.readers.layouts import DataFolder, Layout, first_match, images_of_classes, resolve
from dmlbench.types import DataError

PREFERRED = Layout("list.txt and images", ("list.txt", "images"), lambda folder: None)
OTHER = Layout("class folders", ("[0-9][0-9].*",), lambda folder: None)


def make(root: Path, *paths: str) -> Path:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).touch()
    return root


def find(root: Path, *layouts: Layout) -> tuple[Path, Layout]:
    published = Published({"train": (1, 1), "test": (1, 1)})
    names = ("birds", "birds_200")
    about = dict.fromkeys(("home", "terms", "citation", "by_hand"), "")
    layouts = layouts or (PREFERRED, OTHER)
    return DataFolder("birds", "Birds", names, layouts, "Unpack birds.tgz", published, **about, alternatives=()).find(
        root
    )


@pytest.mark.parametrize(
    "place", ["", "birds", "Birds-200", "BIRDS 200", "archive", "birds/birds", "archive/data/birds_200"]
)
def test_a_data_set_is_found_in_the_folder_itself_and_under_its_usual_names(tmp_path: Path, place: str) -> None:
    make(tmp_path / place, "list.txt", "images/a.jpg")
    assert find(tmp_path) == (tmp_path / place, PREFERRED)


def test_the_preferred_layout_wins_over_a_nearer_folder(tmp_path: Path) -> None:
    make(tmp_path, "01.finch/a.jpg")
    assert find(tmp_path) == (tmp_path, OTHER)
    make(tmp_path / "birds", "list.txt", "images/a.jpg")
    assert find(tmp_path) == (tmp_path / "birds", PREFERRED)


def test_where_nothing_is_found_the_message_says_what_is_nearest(tmp_path: Path) -> None:
    make(tmp_path, "birds/list.txt", "fishes/list.txt", "fishes/images/a.jpg")  # another name
    make(tmp_path / "birds/data/data/data", "list.txt", "images/a.jpg")  # too deep
    with pytest.raises(DataError) as error:
        find(tmp_path)
    folders = [tmp_path / "/".join(("birds", "data", "data")[:depth]) for depth in range(4)]
    assert str(error.value) == (
        f"Birds is not in {', '.join(map(repr, map(str, folders)))}. The nearest is '{folders[1]}' (list.txt "
        "and images), which lacks images. Expected list.txt and images; or class folders. Unpack birds.tgz."
    )


def test_a_marker_may_have_several_places_of_which_the_first_counts(tmp_path: Path) -> None:
    make(tmp_path, "b/x.txt", "a/x (2).txt", "a/x (1).txt")
    assert resolve(tmp_path, "a/x*.txt|b/x.txt") == tmp_path / "a/x (1).txt"
    assert resolve(tmp_path, "a/y.txt|b/x.txt") == tmp_path / "b/x.txt"
    assert first_match(tmp_path, "a/y.txt|y*") is None
    with pytest.raises(DataError, match=r"lacks a/y\.txt or y\*"):
        resolve(tmp_path, "a/y.txt|y*")


def test_a_folder_must_also_be_recognized_where_a_layout_asks_for_it(tmp_path: Path) -> None:
    make(tmp_path, "birds/a.txt", "data/a.txt")
    layout = Layout("a folder named data", ("a.txt",), lambda folder: None, lambda folder: folder.name == "data")
    assert find(tmp_path, layout)[0] == tmp_path / "data"


def test_images_of_folders_are_sorted_and_nothing_hidden_or_else_counts(tmp_path: Path) -> None:
    make(
        tmp_path, "b/2.JPEG", "b/1.png", "b/._1.png", "b/list.txt", "empty/list.txt", ".git/1.png", "1.png", "b/c/3.jpg"
    )
    make(tmp_path / "elsewhere", "4.jpg")
    (tmp_path / "a").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to("loop")
    paths, classes = images_of_classes(tmp_path, lambda folder: len(folder.name), parts=("", "b", "none"))
    assert paths == ["a/4.jpg", "b/1.png", "b/2.JPEG", "elsewhere/4.jpg", "b/c/3.jpg"]
    assert classes == [1, 1, 1, 9, 1]
