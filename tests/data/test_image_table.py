"""Checks and fingerprint of ``dmlbench.data.image_table``."""

from pathlib import Path

import numpy as np
import pytest

from dmlbench.data.image_table import file_contents, fingerprint, halved_roles, make_table, rows_of_classes
from dmlbench.types import DataError, ImageTable


def small_table(**changes: object) -> ImageTable:
    labels = np.array([0, 0, 1, 1])
    parts: dict[str, object] = {
        "paths": ["a/1", "a/2", "b/1", "b/2"],
        "labels": labels,
        "class_names": ["a", "b"],
        "role": halved_roles(labels, 2),
        "content": np.array([10, 20, 30, 40]),
    }
    return make_table("small", "/root", **(parts | changes))


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


def test_rows_of_classes_are_the_rows_with_these_labels() -> None:
    assert rows_of_classes(small_table(), [1]).tolist() == [2, 3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"paths": ["a/1", "a/1", "b/1", "b/2"]}, "lists images twice: a/1"),
        ({"labels": np.array([0, 0, 0, 0])}, "without images: b"),
        ({"labels": np.array([0, 0, 1, 2])}, r"labels must lie in \[0, 2\)"),
        ({"labels": np.array([0, 0, 1])}, "different lengths"),
        ({"role": np.array(["train", "train", "tset", "test"])}, "'tset'; did you mean 'test'"),
        ({"class_names": ["a", "a"]}, "two classes of one name"),
        ({"super_labels": np.array([0])}, "different lengths"),
        ({"pixels": np.zeros((3, 2, 2), np.uint8)}, "different lengths"),
    ],
)
def test_a_table_whose_parts_do_not_fit_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        small_table(**changes)


def test_missing_files_are_counted_and_the_first_ten_named(tmp_path: Path) -> None:
    (tmp_path / "here.png").write_bytes(b"12345")
    assert file_contents(tmp_path, ["here.png"], name="x").tolist() == [5]
    with pytest.raises(DataError, match=r"lacks 12 of 13 image files.*m0\.png, .*m9\.png and 2 more"):
        file_contents(tmp_path, ["here.png", *(f"m{i}.png" for i in range(12))], name="x")
