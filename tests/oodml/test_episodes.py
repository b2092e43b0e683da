"""Which images are the support of an episode: own draws, and published file names as far as they can be resolved."""

import dataclasses
import pickle
from pathlib import Path

import numpy as np
import pytest

from dmlbench.oodml.episodes import check_shots, drawn_support, read_official
from dmlbench.types import ConfigError, DataError, ImageTable


def test_own_episodes_take_k_images_of_each_class_and_differ() -> None:
    labels = np.arange(30) % 3
    support = drawn_support(labels, shots=4, seed=1, episode=0)
    assert np.unique(labels[support], return_counts=True)[1].tolist() == [4, 4, 4] and len(set(support)) == 12
    assert np.array_equal(support, drawn_support(labels, shots=4, seed=1, episode=0))
    others = [drawn_support(labels, shots=4, seed=s, episode=e) for s, e in ((1, 1), (2, 0))]
    assert not any(np.array_equal(support, other) for other in others)


def test_shots_must_leave_two_images_in_every_class() -> None:
    labels = np.array([4, 4, 4, 4, 7, 7, 7, 7, 7])
    names = [f"class {i}" for i in range(8)]
    check_shots(labels, [2], names)
    with pytest.raises(ConfigError, match=r"got 3, expected at most 2. .* class 'class 4' has 4"):
        check_shots(labels, [2, 3], names)
    with pytest.raises(ConfigError, match=r"got 1, expected at least 2"):
        check_shots(labels, [1], names)


PATHS = ("cars_train/00001.jpg", "cars_test/00001.jpg", "cars_test/00002.jpg", "cars_train/00003.jpg",
         "cars_train/00002.jpg", "cars_test/00003.jpg", "cars_test/00009.jpg")  # fmt: skip


def official_table() -> ImageTable:
    labels = np.array([0, 0, 0, 0, 1, 1, 1])
    return ImageTable("cars196", "", np.array(PATHS), labels, ("Ram C/V Van", "BMW"), np.array(["test"] * 7))


def official_file(folder: Path, files: dict[str, list[str]], test: tuple[str, ...] = ("Ram C-V Van", "BMW")) -> Path:
    path = folder / "splits.pkl"
    path.write_bytes(pickle.dumps({1: {"test": list(test), "test_episodes": {2: {0: files}}}}))
    return path


@pytest.mark.parametrize("order", [["cars_train", "cars_test"], ["cars_test", "cars_train"]])
def test_a_name_in_both_folders_and_its_renamed_twin(tmp_path: Path, order: list[str]) -> None:
    path = official_file(tmp_path, {"Ram C-V Van": ["00001.jpg", "00001_2.jpg"], "BMW": ["00002.jpg", "00003.jpg"]})
    found = read_official(path, order).support(official_table(), np.arange(7), shots=2, episode=0)
    assert found.tolist() == [0, 1, 4, 5]


def test_the_order_of_merging_tells_whose_file_kept_its_name(tmp_path: Path) -> None:
    path = official_file(tmp_path, {"Ram C-V Van": ["00001.jpg", "00003.jpg"], "BMW": ["00002.jpg", "00003.jpg"]})
    for order, kept in ((["cars_train", "cars_test"], 0), (["cars_test", "cars_train"], 1)):
        found = read_official(path, order).support(official_table(), np.arange(7), shots=2, episode=0)
        assert found.tolist() == [kept, 3, 4, 5]


def test_unresolved_names_raise_errors(tmp_path: Path) -> None:
    order, table, rows = ["cars_train", "cars_test"], official_table(), np.arange(7)
    good = {"Ram C-V Van": ["00001.jpg", "00002.jpg"], "BMW": ["00002.jpg", "00003.jpg"]}
    for given in ([], ["cars_train", "cars_train"]):
        with pytest.raises(ConfigError, match=r"merge_order: got \[.*, expected \[<folder>,<folder>\]"):
            read_official(official_file(tmp_path, good), given)
    for files, message in (
        ({**good, "BMW": ["00002.jpg", "00004.jpg"]}, "'00004.jpg' of class 'BMW' .* is not in any of the folders"),
        ({**good, "BMW": ["00002.jpg", "00002_2.jpg"]}, "'00002_2.jpg' .* is not in both of the folders"),
        ({**good, "BMW": ["00002.jpg", "00002.jpg"]}, "got 3 images in an episode of 2 shots, expected 4"),
        ({"BMW": ["00002.jpg", "00003.jpg"]}, "an episode with other classes than its split"),
    ):
        with pytest.raises(DataError, match=message):
            read_official(official_file(tmp_path, files), order).support(table, rows, shots=2, episode=0)
    read = read_official(official_file(tmp_path, good), order)
    for shots, episode, message in (
        (5, 0, "got 5, expected one of 2 in 'splits.pkl'"),
        (2, 1, "episodes: expected at most 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            read.support(table, rows, shots=shots, episode=episode)
    with pytest.raises(DataError, match="got 0 splits with the 1 test classes of cars196"):
        read.support(table, rows[:4], shots=2, episode=0)
    merged = dataclasses.replace(table, paths=np.array([f"{i}/{path[-9:]}" for i, path in enumerate(PATHS)]))
    with pytest.raises(DataError, match="Restore the original folders"):
        read.support(merged, rows, shots=2, episode=0)
    (tmp_path / "other.pkl").write_bytes(pickle.dumps({1: {"test": []}}))
    with pytest.raises(DataError, match="holds no splits with test_episodes"):
        read_official(tmp_path / "other.pkl", order)
