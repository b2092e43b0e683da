"""Checks and fingerprint of tables, and tables of the files that lists name."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dmlbench.data.image_table import (
    Listing,
    Published,
    file_contents,
    fingerprint,
    identified,
    rows_of_classes,
    table_of,
)
from dmlbench.types import DataError

PATHS = ("a/1", "a/2", "b/1", "c/1", "c/2")


def test_fingerprint_depends_on_names_sizes_labels_and_roles_alone() -> None:
    names, sizes, labels = ["x", "y", "z"], np.array([1, 2, 3]), np.array([0, 1, 1])
    role = np.array(["train", "query", "gallery"])
    digest = fingerprint(names, sizes, labels, role)
    order = [2, 0, 1]
    assert digest == fingerprint([names[i] for i in order], sizes[order], labels[order], role[order])
    assert digest != fingerprint(["x", "y", "w"], sizes, labels, role)
    assert digest != fingerprint(names, np.array([1, 2, 4]), labels, role)
    assert digest != fingerprint(names, sizes, np.array([0, 1, 0]), role)
    assert digest != fingerprint(names, "a digest of pixels", labels, role)
    assert digest != fingerprint(names, sizes, labels, role[[0, 2, 1]])
    # Frozen: results of different machines and releases are compared by it.
    assert digest == "5233a334b4df589681619e22b4ac14bffb5ef17125afaf9db97d1ddfe81ec713"


def test_missing_files_are_counted_and_the_first_ten_named(tmp_path: Path) -> None:
    (tmp_path / "here.png").write_bytes(b"12345")
    assert file_contents(tmp_path, ["here.png"], name="x").tolist() == [5]
    (tmp_path / "one.bmp").write_bytes(b"12345")  # of a format whose sizes tell the dimensions alone
    (tmp_path / "two.bmp").write_bytes(b"54321")
    assert len(set(file_contents(tmp_path, ["here.png", "one.bmp", "two.bmp"], name="x").tolist())) == 3
    for name, content in (("one.pgm", b"12345"), ("two.pgm", b"54321")):
        (tmp_path / name).write_bytes(content)
    assert len(set(file_contents(tmp_path, ["one.pgm", "two.pgm"], name="x").tolist())) == 2
    with pytest.raises(DataError, match=r"x: 12 of 13 listed images are missing in .*m0\.png, .*m9\.png and 2 more"):
        file_contents(tmp_path, ["here.png", *(f"m{i}.png" for i in range(12))], name="x")


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


def test_files_are_sorted_and_classes_without_images_left_out(tmp_path: Path) -> None:
    listing = small_listing(tmp_path)
    assert listing.super_labels is not None and listing.role is not None
    order = np.array([3, 0, 4, 2, 1])
    rows = {"labels": listing.labels[order], "role": listing.role[order], "super_labels": listing.super_labels[order]}
    shuffled = replace(listing, paths=[PATHS[i] for i in order], **rows)
    tables = [table_of(x, published=None) for x in (listing, shuffled)]
    assert tables[0].fingerprint == tables[1].fingerprint
    for table in tables:
        assert table.class_names == ("zero", "two", "three")
        assert (table.layout, table.root) == ("by hand", str(tmp_path))
        assert table.paths.tolist() == list(PATHS)
        assert table.labels.tolist() == [0, 0, 1, 2, 2]
        assert table.role.tolist() == ["train"] * 3 + ["test"] * 2
        assert table.super_labels is not None and table.super_labels.tolist() == [7, 7, 8, 9, 9]
        assert rows_of_classes(table, [0, 2]).tolist() == [0, 1, 3, 4]


def test_a_table_without_a_fingerprint_gets_one_of_its_images_and_their_order(tmp_path: Path) -> None:
    table = table_of(small_listing(tmp_path), published=None)
    assert identified(table) is table
    own = replace(table, fingerprint="")
    pixels = np.arange(5 * 4, dtype=np.uint8).reshape(5, 2, 2)
    others = [
        *(own, replace(own, paths=own.paths[::-1]), replace(own, labels=own.labels[::-1])),
        *(replace(own, root="", pixels=values) for values in (pixels, pixels + 1)),
    ]
    assert len({identified(other).fingerprint for other in others}) == len(others)
    assert identified(own).fingerprint == identified(own).fingerprint


def test_counts_are_compared_by_role(tmp_path: Path) -> None:
    listing = small_listing(tmp_path)
    right = Published({"train": (3, 2), "test": (2, 1)})
    assert len(table_of(listing, published=right)) == 5
    other = Published({"train": (1234, 2), "query": (2, 1)})
    message = (
        r"got train 3 images of 2 classes, query 0 images of 0 classes, test 2 images of 1 classes, expected the "
        r"published train 1,234 images of 2 classes, query 2 images of 1 classes\. .*dataset\.table\.check_counts=false"
    )
    with pytest.raises(DataError, match=message):
        table_of(listing, published=other)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"paths": ["a/1", "a/1", *PATHS[2:]]}, "lists images twice: a/1"),
        ({"paths": ["a/1", "../a/1", *PATHS[2:]]}, r"lists images outside of '.*': \.\./a/1"),
        ({"paths": ["a/1", "/a/1", *PATHS[2:]]}, "lists images outside of '.*': /a/1"),
        ({"labels": np.array([0, 0, 2, 3, 4])}, "got labels from 0 to 4, expected 0 to 3"),
        ({"labels": np.array([0, 0, 1])}, "different lengths"),
        ({"role": np.array(["train", "train", "train", "test", "tset"])}, "'tset': did you mean 'test'"),
        (
            {"role": np.array(["train", "query", "train", "test", "test"])},
            r"1 class in both the train and the test half \(zero\)",
        ),
        ({"class_names": ["a", "b", "a", "c"]}, "two classes of the same name"),
        ({"super_labels": np.array([0])}, "different lengths"),
        ({"pixels": np.zeros((3, 2, 2), np.uint8)}, "different lengths"),
    ],
)
def test_a_listing_at_fault_is_rejected(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        table_of(replace(small_listing(tmp_path), **changes))
