"""Distances of features in one dimension, with the closed form (m - m')^2 + (s - s')^2 of means and stds."""

from collections.abc import Callable, Sequence
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest

from dmlbench.data.split_file import FORMAT
from dmlbench.oodml.features import Features
from dmlbench.oodml.split_sequence import ClassFeatures, alike_halves
from dmlbench.runtime import read_json, write_json
from dmlbench.types import ImageTable


def closed_form(a: Sequence[float], b: Sequence[float]) -> float:
    return float((np.mean(a) - np.mean(b)) ** 2 + (np.std(a, ddof=1) - np.std(b, ddof=1)) ** 2)


def distances_of_halves(classes: Sequence[Sequence[float]], *, over: str = "class_means") -> set[float]:
    """Every distance between two halves of the images of each class."""
    found = set()
    for drawn in product(*(combinations(range(len(images)), len(images) // 2) for images in classes)):
        halves: tuple[list[float], list[float]] = [], []
        for images, firsts in zip(classes, drawn, strict=True):
            for half, is_first in zip(halves, (True, False), strict=True):
                part = [value for i, value in enumerate(images) if (i in firsts) is is_first]
                half += [float(np.mean(part))] if over == "class_means" else part
        found.add(round(closed_form(*halves), 9))
    return found


def features_of(classes: Sequence[Sequence[float]], roles: Sequence[str], *, name: str = "line") -> Features:
    """Features whose class c, named after its number, has the given images and role."""
    labels = np.repeat(np.arange(len(classes)), [len(images) for images in classes])
    table = ImageTable(
        name=name, root="", paths=np.array([f"{i}.png" for i in range(len(labels))]), labels=labels,
        class_names=tuple(str(c) for c in range(len(classes))), role=np.array(roles)[labels],
    )  # fmt: skip
    return Features(table, np.concatenate(classes, dtype=np.float64)[:, None], "a ruler", "digest")


@pytest.mark.parametrize("over", ["class_means", "samples"])
def test_images_of_the_same_classes_are_halved_class_by_class(over: str) -> None:
    classes = [[0.0, 1.0, 5.0], [90.0, 70.0], [10.0, 13.0, 14.0, 22.0]]
    features = features_of(classes, ["train", "train", "test"])
    by_class = ClassFeatures.of(features.rows, features.table.labels, over=over)
    found = {round(alike_halves(by_class, [0, 2], seed=seed), 9) for seed in range(200)}
    assert sorted(found) == pytest.approx(sorted(distances_of_halves([classes[0], classes[2]], over=over)))


def test_removal_begins_at_the_furthest_split(
    command: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two exchanges sort the classes, further ones mix them again. Two classes have images that differ, one has one."""
    values = [0, 1, 2, 20, 21, 3, 4, 22, 23, 24]
    classes = [[value - 3.0, value + 3.0] if c in (2, 9) else [float(value)] * 2 for c, value in enumerate(values)]
    classes[1] = [1.0]
    features = features_of(classes, ["train"] * 5 + ["test", "query", "gallery", "test", "test"])
    monkeypatch.setattr("dmlbench.oodml.splits.features_of", lambda args: features)
    monkeypatch.setattr("dmlbench.oodml.splits.draw_progression", lambda *_, **__: None)
    steps = ["exchanges=4", "reversed_exchanges=0", "removals=2", "per_step=1", "keep=0.5", "points=0"]
    command("oodml", "splits", *steps, "picks=7", f"output={tmp_path}/splits.json")
    stored = read_json(tmp_path / "splits.json")
    halves = {
        (split["kind"], split["count"]): [sorted(values[int(c)] for c in split[half]) for half in ("train", "test")]
        for split in stored["splits"]
    }
    assert halves["default", 0] == [[0, 1, 2, 20, 21], [3, 4, 22, 23, 24]]
    assert halves["exchanged", 2] == [[0, 1, 2, 3, 4], [20, 21, 22, 23, 24]]
    assert halves["removed", 1] == [[0, 1, 2, 3], [21, 22, 23, 24]]
    assert halves["removed", 2] == [[0, 1, 2], [22, 23, 24]]
    way = [*(("exchanged", i) for i in (1, 2, 3, 4)), ("removed", 1), ("removed", 2)]
    assert [(step["kind"], step["count"]) for step in stored["way"]] == [("default", 0), *way]
    possible = distances_of_halves([images for images in classes if len(images) > 1])
    assert len(stored["alike"]) == 5 and {round(distance, 9) for distance in stored["alike"]} <= possible
    assert all(split["fitted"] + split["validation"] == split["train"] for split in stored["splits"])
    assert {(len(split["train"]), len(split["validation"])) for split in stored["splits"]} == {(5, 1), (4, 1), (3, 0)}


CLASSES = [[0.0, 2.0], [4.0, 8.0], [10.0, 30.0], [5.0, 7.0, 9.0], [50.0], [60.0, 61.0]]


@pytest.mark.parametrize("over", ["class_means", "samples"])
def test_given_splits_are_measured_over_class_means_or_samples(
    over: str, command: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = features_of(CLASSES, ["train"] * 3 + ["test"] * 3)
    monkeypatch.setattr("dmlbench.oodml.distances.features_of", lambda args: features)
    given = [("a", "01", "23"), ("b", "01", "45"), ("c", "05", "12")]
    splits = [
        {"name": name, "kind": "exchanged", "distance": i, "train": [*train], "test": [*test]}
        for i, (name, train, test) in enumerate(given)
    ]
    write_json(tmp_path / "a.json", {"format": FORMAT, "dataset": "line", "measured_by": "eye", "splits": splits})
    command("oodml", "distances", f"splits={tmp_path}/a.json", f"over={over}", f"output={tmp_path}/b.json")
    expected = []
    for split in splits:
        halves = [[CLASSES[int(c)] for c in split[half]] for half in ("train", "test")]
        rows = [np.concatenate(half) if over == "samples" else [np.mean(images) for images in half] for half in halves]
        expected.append(closed_form(*rows))
    measured = read_json(tmp_path / "b.json")
    assert [one["here"] for one in measured["distances"]] == pytest.approx(expected)
    assert np.argsort(expected).tolist() == [0, 2, 1]
    assert measured["spearman"] == pytest.approx(0.5)  # 1 - 6 (0 + 1 + 1) / (3 (9 - 1)) of two neighbors exchanged


def test_the_train_half_of_one_data_set_is_measured_against_the_test_half_of_another(
    command: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = features_of(CLASSES, ["train", "train", "test", "test", "train", "test"], name="first")
    second = features_of(CLASSES, ["train", "train", "gallery", "query", "test", "train"], name="second")
    monkeypatch.setattr(
        "dmlbench.oodml.distances.features_of",
        lambda args: first if "cars196" in args.dataset["table"]["_target_"] else second,
    )
    printed = command("oodml", "distances", "train=cars196", "dataset=sop", f"output={tmp_path}/a.json")
    expected = closed_form([1, 6, 50], [20, 7, 50])
    assert read_json(tmp_path / "a.json")["distance"] == pytest.approx(expected)
    assert f"train half of first, test half of second: {expected:.4f}, measured by a ruler" in printed
