"""Sequences of splits against those of the study's public code, and distances against ones computed from scratch."""

import itertools
from typing import Any

import numpy as np
import pytest

from dmlbench.oodml.frechet import frechet_distance
from dmlbench.oodml.split_sequence import ClassFeatures, Step, alike_halves, exchange, pick_evenly, removal
from dmlbench.types import DataError

CASES = ["swap0", "swap1", "swap2", "removal0", "removal1"]


@pytest.mark.parametrize("case", CASES)
def test_classes_and_distances_are_those_of_the_public_code(golden, golden_meta, case: str) -> None:
    """Recorded features have one row a class."""
    stored: dict[str, Any] = golden("ood_splits_fid", f"{case}_")
    stored |= next(entry for entry in golden_meta("ood_splits_fid")["cases"] if entry["case"] == case)
    labels = np.concatenate([stored["train_cls"], stored["test_cls"]])
    features = ClassFeatures.of(np.concatenate([stored["train_feats"], stored["test_feats"]]), labels)
    train, test = stored["train_cls"].tolist(), stored["test_cls"].tolist()
    count, per_step, memory = stored["N_SWAPS"], stored["SWAPS_PER_ITER"], stored["HISTORY"]
    if case.startswith("swap"):
        reverse = stored["inverse"]
        found = list(
            exchange(features, train, test, steps=count - 1, per_step=per_step, memory=memory, reverse=reverse)
        )
        assert [abs(key) for key in stored["keys"]] == [step.count for step in found]
    else:
        rule = {"keep": 0, "rule": "exchange_first"}
        found = list(removal(features, train, test, steps=count - 1, per_step=per_step, memory=memory, **rule))
    assert len(found) == count
    for step, train_classes, test_classes in zip(found, stored["train_splits"], stored["test_splits"], strict=True):
        assert list(step.train) == sorted(train_classes[train_classes >= 0].tolist())
        assert list(step.test) == sorted(test_classes[test_classes >= 0].tolist())
    # the public code adds 1e-8 to the diagonals under the root
    np.testing.assert_allclose([step.distance for step in found], stored["fids"], rtol=1e-6)


def classes_of_images(over: str, *, dimension: int = 6) -> ClassFeatures:
    generator = np.random.default_rng(1)
    labels = np.repeat(np.arange(40), generator.integers(2, 7, 40))
    centers = generator.normal(size=(40, dimension)) * 3 + 100
    return ClassFeatures.of(centers[labels] + generator.normal(size=(len(labels), dimension)), labels, over=over)


def from_scratch(features: ClassFeatures, step: Step) -> float:
    if features.over == "class_means":
        halves = [features.means[list(half)] for half in (step.train, step.test)]
    else:
        halves = [
            np.concatenate([features.rows[features.start[c] : features.start[c + 1]] for c in half])
            for half in (step.train, step.test)
        ]
    return frechet_distance(*halves)


@pytest.mark.parametrize("over", ["class_means", "samples"])
@pytest.mark.parametrize("dimension", [6, 60])
def test_distances_on_the_way_are_those_from_scratch(over: str, dimension: int) -> None:
    features = classes_of_images(over, dimension=dimension)
    away = list(exchange(features, range(20), range(20, 40), steps=8, per_step=2))
    further = list(removal(features, away[-1].train, away[-1].test, steps=20, per_step=1, keep=0.7))
    assert len(further[-1].train) == 14
    for step in (*away, *further):
        assert step.distance == pytest.approx(from_scratch(features, step), rel=1e-9)
        assert not set(step.train) & set(step.test)
    assert away[-1].distance > away[0].distance
    assert further[-1].distance > away[-1].distance
    nearer = list(exchange(features, range(20), range(20, 40), steps=4, memory=30, reverse=True))
    assert nearer[-1].distance < nearer[0].distance == away[0].distance


def test_removal_takes_the_classes_nearest_to_the_center_of_the_other_half() -> None:
    features = classes_of_images("class_means")
    steps = list(removal(features, range(20), range(20, 40), steps=3, per_step=2, keep=0.5))
    assert len(steps) == 4
    for before, after in itertools.pairwise(steps):
        for own, other, left in ((before.train, before.test, after.train), (before.test, before.train, after.test)):
            center = np.mean([features.means[c] for c in other], axis=0)
            far = sorted(own, key=lambda c: np.linalg.norm(features.means[c] - center))
            assert set(own) - set(left) == set(far[:2])


def test_splits_are_picked_evenly_with_the_default_one() -> None:
    equal = [Step("default", 0, (1,), (2,), 1.0), Step("exchanged", 2, (3,), (4,), 5.0)]
    picked = pick_evenly([*equal, Step("exchanged", 4, (1,), (2,), 1.0)], 2)
    assert [step.kind for step in picked] == ["default", "exchanged"]
    steps = [
        Step("default" if distance == 30 else "exchanged", i, (i,), (i + 100,), distance)
        for i, distance in enumerate([30.0, 31, 40, 50, 55, 70, 90, 10, 20, 88])
    ]
    assert [step.distance for step in pick_evenly(steps, 5)] == [10, 30, 50, 70, 90]
    assert [step.distance for step in pick_evenly(steps, 3)] == [10, 30, 90]
    assert [step.distance for step in pick_evenly(steps, 2)] in ([10, 30], [30, 90])
    assert len(pick_evenly(steps, 10)) == 10
    for count in (1, 11):
        with pytest.raises(DataError, match=f"picks: got {count}, expected 2 to 10"):
            pick_evenly(steps, count)


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        (range(21), range(20, 40), "share 1 class, such as 20"),
        (range(20), [30], "test half: got 1 class,"),
        (range(20), [30, 77], "1 classes of the test half have no features, such as 77"),
    ],
)
def test_errors_of_halves(train, test, message: str) -> None:
    with pytest.raises(DataError, match=message):
        list(exchange(classes_of_images("class_means"), train, test, steps=1))


def test_a_way_ends_when_no_class_is_left_to_exchange() -> None:
    features = classes_of_images("class_means")
    found = list(exchange(features, range(3), range(20, 24), steps=50, per_step=1, memory=100))
    assert [step.count for step in found] == [0, 1, 2, 3]


def test_a_way_ends_before_halves_that_occurred_before() -> None:
    features = classes_of_images("class_means")
    found = list(exchange(features, range(6), range(20, 26), steps=24))
    assert 1 < len(found) == len({frozenset((step.train, step.test)) for step in found}) < 25
    swapped = Step("exchanged", 12, found[0].test, found[0].train, found[0].distance)
    assert swapped not in pick_evenly([*found, swapped], len(found))


def test_halves_of_the_same_classes_are_nearer() -> None:
    features = classes_of_images("samples")
    alike = [alike_halves(features, range(40), seed=seed) for seed in range(3)]
    (default,) = exchange(features, range(20), range(20, 40), steps=0)
    assert max(alike) < default.distance
    assert len(set(alike)) == 3
    assert alike[0] == alike_halves(features, range(40), seed=0)
