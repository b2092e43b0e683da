"""Splits of a file: what it may hold, and how its classes are found in a data set."""

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dmlbench.data.split_file import FORMAT, Oodml, read_splits, validation_part
from dmlbench.runtime import write_json
from dmlbench.types import ConfigError, DataError, ImageTable

NAMES = ("Ram C/V Cargo Van", "Fiat 500", "BMW X6", "Audi 100", "Acura TL", "Volvo C30")


def table(names: tuple[str, ...] = NAMES) -> ImageTable:
    labels = np.repeat(np.arange(len(names)), 2)
    return ImageTable(
        name="cars", root="", paths=np.array([f"{c}_{i}.jpg" for i, c in enumerate(labels)]), labels=labels,
        class_names=names, role=np.where(labels < 3, "train", "test"),
    )  # fmt: skip


def split(**changes: Any) -> dict[str, Any]:
    train, test = ["Ram C/V Cargo Van", "Fiat 500", "BMW X6", "Acura TL"], ["Audi 100", "Volvo C30"]
    own = {"name": "1", "kind": "exchanged", "distance": 2.5, "train": train, "test": test}
    return own | {"fitted": ["Ram C/V Cargo Van", "Fiat 500", "BMW X6"], "validation": ["Acura TL"]} | changes


def written(folder: Path, *splits: dict[str, Any], **changes: Any) -> Path:
    document = {"format": FORMAT, "dataset": "cars", "measured_by": "a network", "splits": list(splits)}
    write_json(folder / "splits.json", document | changes)
    return folder / "splits.json"


def test_each_split_is_a_fold_with_its_distance_as_a_fact(tmp_path: Path) -> None:
    path = written(tmp_path, split(), split(name="2", distance=7.0, test=["Audi 100"]))
    protocol = Oodml(str(path), num_repeats=2)
    assert (protocol.num_folds, protocol.num_repeats, protocol.aggregation) == (2, 2, "over_splits")
    found = protocol.split(table(), fold=0)
    assert found.train.tolist() == [0, 1, 2, 3, 4, 5, 8, 9]
    assert found.test is not None and found.test.query.tolist() == [6, 7, 10, 11]
    assert found.val is found.test
    assert found.val_is_test
    assert found.facts == {"split": "1", "kind": "exchanged", "distance": 2.5, "distance_by": "a network"}
    assert protocol.split(table(), fold=1).facts["distance"] == 7.0
    with pytest.raises(ConfigError, match=r"fold: got 2"):
        protocol.split(table(), fold=2)


def test_selection_on_validation_classes_leaves_the_test_half_alone(tmp_path: Path) -> None:
    found = Oodml(str(written(tmp_path, split())), select_on="val").split(table(), fold=0)
    assert found.val is not None and found.val.query.tolist() == [8, 9]
    assert found.train.tolist() == [0, 1, 2, 3, 4, 5]
    assert not found.val_is_test
    without = written(tmp_path, split(fitted=[], validation=[]))
    with pytest.raises(ConfigError, match=r"has no validation classes\. Use select_on=official_test"):
        Oodml(str(without), select_on="val").split(table(), fold=0)


@pytest.mark.parametrize(
    ("train", "fitted", "validation"),
    [("abc", "abc", ""), ("abcd", "abc", "d"), ("abcdefghij", "abcdefgh", "ij"), ("dcbahgfe", "dcbahg", "fe")],
)
def test_the_last_quarter_of_the_train_classes_validates(train: str, fitted: str, validation: str) -> None:
    assert validation_part(train) == (tuple(fitted), tuple(validation))


def test_pickles_of_the_study_are_read_and_names_found_without_punctuation(tmp_path: Path) -> None:
    own = {
        "train": [np.str_("Ram C-V Cargo Van"), np.str_("Fiat 500")], "test": [np.str_("BMW X6"), np.str_("Audi 100")],
        "fid": np.float64(8.5), "split_train": [np.str_("Fiat 500")], "split_val": [np.str_("Ram C-V Cargo Van")],
        "test_episodes": {},
    }  # fmt: skip
    (tmp_path / "cars196_splits.pkl").write_bytes(pickle.dumps({1: own}))
    found = Oodml(str(tmp_path / "cars196_splits.pkl"), select_on="val").split(table(), fold=0)
    assert found.train.tolist() == [2, 3]
    assert found.val is not None and found.val.query.tolist() == [0, 1]
    assert found.facts["kind"] == "published"
    assert found.facts["distance"] == 8.5


def test_products_are_found_by_the_number_of_their_files(tmp_path: Path) -> None:
    products = replace(
        table(("1", "2", "3", "4")), name="sop", labels=np.repeat(np.arange(4), 2), role=np.repeat("train", 8),
        paths=np.array([f"bicycle_final/1112653{c}_{i}.JPG" for c in range(4) for i in range(2)]),
    )  # fmt: skip
    numbers = [f"1112653{c}" for c in range(4)]
    own = {"train": numbers[:2], "test": numbers[2:], "fid": 1.0}
    (tmp_path / "sop.pkl").write_bytes(pickle.dumps({1: own}))
    assert Oodml(str(tmp_path / "sop.pkl")).split(products, fold=0).train.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"test": []}, r"splits.0.test: got \[\], expected at least 1 item"),
        ({"distance": -1.0}, "splits.0.distance: got -1.0, expected greater than or equal to 0"),
        ({"validation": ["Audi 100"]}, "expected fitted and validation classes to be disjoint parts of the train half"),
    ],
)
def test_faulty_splits_are_rejected(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_splits(written(tmp_path, split(**change)))
    with pytest.raises(DataError, match="expected unique names, not two splits named '1'"):
        read_splits(written(tmp_path, split(), split()))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.json", None, r"split file .*none\.json is missing"),
        ("other.json", b'{"format": "something"}', "its checksum is missing"),
        ("cut.json", b'{"format": ', "is not a split file, or is damaged"),
        ("evil.pkl", b"cos\nsystem\n(S'true'\ntR.", r"asks for os\.system"),
        ("empty.pkl", pickle.dumps({}), "expected at least 1 item"),
    ],
)
def test_other_files_are_rejected(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_splits(tmp_path / name)


def test_splits_of_other_data_and_unknown_classes_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="got splits of 'birds', expected splits of 'cars'"):
        Oodml(str(written(tmp_path, split(), dataset="birds"))).split(table(), fold=0)
    path = written(tmp_path, split(test=["Audi 1000", "Saab 9"]))
    with pytest.raises(
        DataError, match=r"names 2 classes that 'cars' does not have: 'Audi 1000', 'Saab 9'\. .*'Audi 100'"
    ):
        Oodml(str(path)).split(table(), fold=0)


def test_distances_of_other_images_and_the_data_s_own_split_are_said(tmp_path: Path) -> None:
    own = split(train=list(NAMES[:3]), test=list(NAMES[3:]), fitted=[], validation=[])
    facts = Oodml(str(written(tmp_path, own, dataset_fingerprint="f"))).split(table(), fold=0).facts
    assert facts["kind"] == "default"
    assert facts["distance_by"] == "a network, ON OTHER IMAGES"
    same = replace(table(), fingerprint="f")
    assert Oodml(str(tmp_path / "splits.json")).split(same, fold=0).facts["distance_by"] == "a network"


def test_names_that_differ_in_punctuation_alone_are_told_apart_by_their_exact_words(tmp_path: Path) -> None:
    two = table(("A-4", "A 4", "B", "C"))
    exact = split(train=["A-4", "B"], test=["A 4", "C"], fitted=[], validation=[])
    assert Oodml(str(written(tmp_path, exact))).split(two, fold=0).train.tolist() == [0, 1, 4, 5]
    with pytest.raises(DataError, match=r"names 1 class that 'cars' does not have: 'A\.4'"):
        vague = split(train=["A.4", "B"], test=["C"], fitted=[], validation=[])
        Oodml(str(written(tmp_path, vague))).split(two, fold=0)
    twice = split(train=["Fiat 500", "BMW X6"], test=["Fiat-500", "Audi 100"], fitted=[], validation=[])
    with pytest.raises(DataError, match="share classes, such as 'Fiat 500'"):
        Oodml(str(written(tmp_path, twice))).split(table(), fold=0)


def test_a_file_that_changed_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, split())
    digest = read_splits(path).sha256
    assert Oodml(str(path), splits_sha256=digest).num_folds == 1
    written(tmp_path, split(distance=3.25))
    with pytest.raises(ConfigError, match="has changed: got SHA-256"):
        Oodml(str(path), splits_sha256=digest).split(table(), fold=0)
