"""From what lists name to a table of files that are there."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dmlbench.data.image_table import Listing, Published, table_of
from dmlbench.types import DataError

PATHS = ("a/1", "a/2", "b/1", "c/1", "c/2")


def small_listing(root: Path) -> Listing:
    for path in PATHS:
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).write_text(path)
    return Listing(
        name="small",
        root=root,
        layout="by hand",
        paths=PATHS,
        labels=np.array([0, 0, 2, 3, 3]),
        class_names=("zero", "one", "two", "three"),
        role=np.array(["train", "train", "train", "test", "test"]),
        super_labels=np.array([7, 7, 8, 9, 9]),
    )


def test_classes_without_images_are_left_out_and_the_others_keep_their_order(tmp_path: Path) -> None:
    table = table_of(small_listing(tmp_path), published=None)
    assert table.class_names == ("zero", "two", "three")
    assert table.labels.tolist() == [0, 0, 1, 2, 2]
    assert (table.layout, table.root) == ("by hand", str(tmp_path))


def test_the_order_of_the_lists_does_not_change_the_table(tmp_path: Path) -> None:
    listing = small_listing(tmp_path)
    assert listing.super_labels is not None
    order = np.array([3, 0, 4, 2, 1])
    shuffled = replace(
        listing,
        paths=[PATHS[i] for i in order],
        labels=listing.labels[order],
        role=listing.role[order],
        super_labels=listing.super_labels[order],
    )
    one, other = (table_of(x, published=None) for x in (listing, shuffled))
    assert one.fingerprint == other.fingerprint
    assert other.paths.tolist() == list(PATHS)
    assert other.labels.tolist() == one.labels.tolist()
    assert other.role.tolist() == one.role.tolist()
    assert other.super_labels is not None
    assert other.super_labels.tolist() == [7, 7, 8, 9, 9]


def test_counts_are_compared_by_role(tmp_path: Path) -> None:
    listing = small_listing(tmp_path)
    right = Published({"train": (3, 2), "test": (2, 1)})
    assert len(table_of(listing, published=right)) == 5
    other = Published({"train": (1234, 2), "query": (2, 1)})
    message = (
        r"has train 3 images of 2 classes, query 0 images of 0 classes, test 2 images of 1 classes; published are "
        r"train 1,234 images of 2 classes, query 2 images of 1 classes; .*dataset\.table\.check_counts=false"
    )
    with pytest.raises(DataError, match=message):
        table_of(listing, published=other)


@pytest.mark.parametrize("path", ["../a/1", "/a/1", "b/../../a/1"])
def test_paths_outside_of_the_root_are_refused(tmp_path: Path, path: str) -> None:
    listing = replace(small_listing(tmp_path), paths=[path, *PATHS[1:]])
    with pytest.raises(DataError, match=f"lists images outside of '.*': {path}"):
        table_of(listing, published=None)


def test_a_class_in_both_halves_is_refused(tmp_path: Path) -> None:
    listing = replace(small_listing(tmp_path), role=np.array(["train", "query", "train", "gallery", "test"]))
    with pytest.raises(DataError, match="1 classes both to train and to test on: zero; metric learning tests on"):
        table_of(listing, published=None)
