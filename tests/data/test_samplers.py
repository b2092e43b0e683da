"""The class-balanced sampler: what a batch and an epoch hold, and that its state is enough to go on."""

from collections import Counter
from itertools import islice

import numpy as np
import pytest

from dmlbench.data.samplers import ClassBalancedBatchSampler, IndexBatch
from dmlbench.types import ConfigError, IntArray, RunError

SIZES = [1, 3, 4, 9, 17, 20, 20, 21]  # images of each class


def labels_of(sizes: list[int], *, seed: int = 0) -> IntArray:
    labels = np.repeat(10 * np.arange(len(sizes)) + 5, sizes)  # not contiguous on purpose
    return np.random.default_rng(seed).permutation(labels)


def sampler_of(sizes: list[int], p: int, k: int, *, seed: int = 0) -> ClassBalancedBatchSampler:
    return ClassBalancedBatchSampler(labels_of(sizes), classes_per_batch=p, images_per_class=k, seed=seed)


def epoch_of(sampler: ClassBalancedBatchSampler, epoch: int) -> list[IndexBatch]:
    """Batches of one epoch of a sampler that stands at the beginning of epoch 0."""
    batches = []
    for batch in sampler:
        if batch.epoch > epoch:
            return batches
        if batch.epoch == epoch:
            batches.append(batch)
    raise AssertionError("the sampler does not end")


@pytest.mark.parametrize(("p", "k"), [(2, 4), (3, 2), (8, 1), (1, 5), (5, 30)])
def test_a_batch_has_p_distinct_classes_of_k_images_side_by_side(p: int, k: int) -> None:
    sampler = sampler_of(SIZES, p, k)
    for batch in islice(sampler, 50):
        classes = sampler.labels[batch.rows].reshape(p, k)
        assert (classes == classes[:, :1]).all()
        assert len(set(classes[:, 0])) == p
        assert batch.rows.dtype == np.int64


@pytest.mark.parametrize(("p", "k"), [(2, 4), (3, 2), (8, 1), (1, 5)])
@pytest.mark.parametrize("epoch", [0, 3])
def test_images_and_groups_come_without_replacement_until_they_are_used_up(p: int, k: int, epoch: int) -> None:
    sampler = sampler_of(SIZES, p, k)
    batches = epoch_of(sampler, epoch)
    assert [b.index for b in batches] == list(range(len(batches)))
    rows = np.concatenate([b.rows for b in batches])
    groups = Counter((sampler.labels[rows].reshape(-1, k)[:, 0]).tolist())
    times = Counter(rows.tolist())
    left = []
    for number, size in enumerate(SIZES):
        label = 10 * number + 5
        available = max(size // k, 1)
        assert groups[label] <= available
        left += [label] * (groups[label] < available)
        images = np.flatnonzero(sampler.labels == label)
        most = max(times[int(i)] for i in images)
        assert most <= 1 if size >= k else most <= -(-k // size)
    assert len(left) < p  # the epoch ends only when too few classes have groups left


def test_a_pass_goes_once_through_every_class_that_has_groups() -> None:
    sampler = sampler_of([8] * 6, 3, 2)
    batches = epoch_of(sampler, 0)
    assert len(batches) == len(sampler) == 8  # 6 classes x 4 groups / 3
    for first, second in zip(batches[0::2], batches[1::2], strict=True):
        assert len(set(sampler.labels[np.concatenate([first.rows, second.rows])])) == 6


def test_classes_that_a_pass_left_over_come_first_in_the_next() -> None:
    sampler = sampler_of([4] * 5, 3, 2)
    first, second = (set(sampler.labels[batch.rows].tolist()) for batch in islice(sampler, 2))
    assert set(np.unique(sampler.labels)) - first <= second


def test_a_small_class_is_filled_from_its_own_images_evenly() -> None:
    sampler = sampler_of([3, 10], 2, 8)
    batch = next(sampler)
    small = [int(r) for r in batch.rows if sampler.labels[r] == 5]
    assert sorted(Counter(small).values()) == [2, 3, 3]


def test_the_remainder_that_sits_out_changes_from_epoch_to_epoch() -> None:
    sampler = sampler_of([5, 5], 2, 4)
    seen: set[int] = set()
    for batch in islice(sampler, 12):
        seen |= set(batch.rows.tolist())
    assert len(seen) == 10


def test_an_epoch_depends_on_the_seed_and_its_number_only() -> None:
    def rows(seed: int, count: int) -> list[list[int]]:
        return [b.rows.tolist() for b in islice(sampler_of(SIZES, 3, 2, seed=seed), count)]

    assert rows(0, 60) == rows(0, 60)
    assert rows(0, 10) != rows(1, 10)
    jumped = sampler_of(SIZES, 3, 2)
    jumped.load_state_dict({**jumped.state_dict(), "epoch": 3, "index": 0})
    expected = [b.rows.tolist() for b in epoch_of(sampler_of(SIZES, 3, 2), 3)]
    assert [b.rows.tolist() for b in islice(jumped, len(expected))] == expected


@pytest.mark.parametrize("taken", [0, 1, 7, 200])
def test_a_resumed_sampler_goes_on_with_the_very_batches(taken: int) -> None:
    whole = [b.rows.tolist() for b in islice(sampler_of(SIZES, 3, 2), taken + 40)]
    first = sampler_of(SIZES, 3, 2)
    for _ in range(taken):
        next(first)
    second = sampler_of(SIZES, 3, 2)
    second.load_state_dict(first.state_dict())
    assert [b.rows.tolist() for b in islice(second, 40)] == whole[taken:]


def test_the_state_after_a_batch_is_known_however_many_were_taken_since() -> None:
    sampler = sampler_of(SIZES, 3, 2)
    kept = []
    for batch in islice(sampler, 30):
        assert sampler.state_after(batch) == sampler.state_dict()
        kept.append((batch, sampler.state_dict()))
    assert all(sampler.state_after(batch) == state for batch, state in kept)


def test_the_state_of_another_run_is_refused_with_both_values() -> None:
    state = sampler_of(SIZES, 3, 2, seed=7).state_dict()
    for other, message in [
        (sampler_of(SIZES, 3, 2, seed=8), "seed = 7, this run has 8"),
        (sampler_of(SIZES, 4, 2, seed=7), "classes_per_batch = 3, this run has 4"),
        (sampler_of(SIZES, 3, 1, seed=7), "images_per_class = 2, this run has 1"),
        (sampler_of([*SIZES, 2], 3, 2, seed=7), "fingerprint = "),
    ]:
        with pytest.raises(RunError, match=message):
            other.load_state_dict(state)
    with pytest.raises(RunError, match="batch 999 of epoch 0"):
        sampler_of(SIZES, 3, 2, seed=7).load_state_dict({**state, "index": 999})


def test_more_classes_than_there_are_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"classes_per_batch \(9\) exceeds the 8 training classes; lower"):
        sampler_of(SIZES, 9, 1)
    with pytest.raises(ConfigError, match=r"images_per_class \(0\)"):
        sampler_of(SIZES, 2, 0)


def test_planning_an_epoch_of_sop_size_takes_a_fraction_of_a_second() -> None:
    import time

    random = np.random.default_rng(0)
    labels = np.concatenate([np.arange(11_318), np.arange(11_318), random.integers(0, 11_318, 59_551 - 2 * 11_318)])
    start = time.perf_counter()
    sampler = ClassBalancedBatchSampler(labels, classes_per_batch=8, images_per_class=4, seed=0)
    assert time.perf_counter() - start < 1.0
    assert len(sampler) >= 11_318 // 8
