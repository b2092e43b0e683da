"""The samplers: what a batch and an epoch hold, and that their state is enough to go on."""

from collections import Counter
from functools import partial
from itertools import islice

import numpy as np
import pytest
from effective import published_table

from dmlbench.data.batches import samplers
from dmlbench.types import ConfigError, IntArray, RunError

SIZES = [1, 3, 4, 9, 17, 20, 20, 21]  # images of each class


def labels_of(sizes: list[int], *, seed: int = 0) -> IntArray:
    labels = np.repeat(10 * np.arange(len(sizes)) + 5, sizes)  # not contiguous on purpose
    return np.random.default_rng(seed).permutation(labels)


def sampler_of(sizes: list[int], p: int, k: int, *, seed: int = 0) -> samplers.ClassBalancedBatchSampler:
    return samplers.ClassBalancedBatchSampler(labels_of(sizes), classes_per_batch=p, images_per_class=k, seed=seed)


def epoch_of(sampler: samplers.ClassBalancedBatchSampler, epoch: int) -> list[samplers.IndexBatch]:
    """Batches of one epoch of a sampler that stands at the beginning of it or of an earlier one."""
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


def test_a_pass_goes_once_through_every_class_that_has_groups_those_left_over_first() -> None:
    sampler = sampler_of([8] * 6, 3, 2)
    batches = epoch_of(sampler, 0)
    assert len(batches) == len(sampler) == 8  # 6 classes x 4 groups / 3
    for first, second in zip(batches[0::2], batches[1::2], strict=True):
        assert len(set(sampler.labels[np.concatenate([first.rows, second.rows])])) == 6
    sampler = sampler_of([4] * 5, 3, 2)
    first, second = (set(sampler.labels[batch.rows].tolist()) for batch in islice(sampler, 2))
    assert set(np.unique(sampler.labels)) - first <= second


def test_a_small_class_is_filled_from_its_own_images_evenly() -> None:
    sampler = sampler_of([3, 10], 2, 8)
    batch = next(sampler)
    small = [int(r) for r in batch.rows if sampler.labels[r] == 5]
    assert sorted(Counter(small).values()) == [2, 3, 3]


def test_the_state_of_another_run_is_refused_with_both_values() -> None:
    state = sampler_of(SIZES, 3, 2, seed=7).state_dict()
    for other, message in [
        (sampler_of(SIZES, 3, 2, seed=8), "got seed=7, expected 8 as in this run"),
        (sampler_of(SIZES, 4, 2, seed=7), "got classes_per_batch=3, expected 4"),
        (sampler_of(SIZES, 3, 1, seed=7), "got images_per_class=2, expected 1"),
        (sampler_of([*SIZES, 2], 3, 2, seed=7), "got fingerprint="),
        (KINDS["equal_class"](labels_of(SIZES), seed=7), "got kind=ClassBalancedBatchSampler, expected Equal"),
    ]:
        with pytest.raises(RunError, match=message):
            other.load_state_dict(state)
    with pytest.raises(RunError, match="batch 999 of epoch 0"):
        sampler_of(SIZES, 3, 2, seed=7).load_state_dict({**state, "index": 999})


BALANCED = {
    "class_balanced": samplers.ClassBalancedBatchSampler,
    "equal_class": samplers.EqualClassBatchSampler,
    "split_class": samplers.SplitClassBatchSampler,
    "rotating": samplers.RotatingClassBatchSampler,
    "independent": samplers.IndependentClassBatchSampler,
    "repeating": samplers.RepeatingClassBatchSampler,
    "full_class": samplers.FullClassBatchSampler,
}
KINDS = {kind: partial(cls, classes_per_batch=3, images_per_class=2) for kind, cls in BALANCED.items()} | {
    "random_class": partial(samplers.RandomClassBatchSampler, classes_per_batch=3, batch_size=6),
    "random": partial(samplers.RandomBatchSampler, batch_size=6),
}


@pytest.mark.parametrize(
    ("kind", "sizes", "message"),
    [
        (
            "class_balanced",
            {"classes_per_batch": 9},
            r"sampler\.classes_per_batch: got 9, expected at most 8, the training classes of",
        ),
        ("class_balanced", {"images_per_class": 0}, r"images_per_class: got 0, expected at least 1"),
        (
            "rotating",
            {"images_per_class": 40},
            r"images_per_class=40\), expected at most 95, the number of training images\. Lower it",
        ),
        (
            "random",
            {"batch_size": 96},
            r"got 96 \(sampler\.batch_size=96\), expected at most 95, the number of training images",
        ),
    ],
)
def test_batches_that_the_images_cannot_fill_are_rejected(kind: str, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KINDS[kind](labels_of(SIZES), seed=0, **sizes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("taken", [0, 5, 33])
def test_every_kind_resumes_with_the_very_batches_and_depends_on_its_seed(kind: str, taken: int) -> None:
    make = KINDS[kind]
    whole = [b.rows.tolist() for b in islice(make(labels_of(SIZES), seed=0), taken + 40)]
    assert all(len(rows) == 6 for rows in whole)
    first = make(labels_of(SIZES), seed=0)
    for _ in range(taken):
        next(first)
    second = make(labels_of(SIZES), seed=0)
    second.load_state_dict(first.state_dict())
    assert [b.rows.tolist() for b in islice(second, 40)] == whole[taken:]
    assert [b.rows.tolist() for b in islice(make(labels_of(SIZES), seed=1), taken + 40)] != whole


@pytest.mark.parametrize("kind", ["rotating", "independent"])
def test_balanced_kinds_draw_every_class_equally_often_whatever_its_size(kind: str) -> None:
    sampler = KINDS[kind](labels_of(SIZES), seed=0)
    counts: Counter[int] = Counter()
    batches = 2000
    for batch in islice(sampler, batches):
        classes = sampler.labels[batch.rows].reshape(3, 2)
        assert (classes == classes[:, :1]).all()
        assert len(set(classes[:, 0].tolist())) == 3
        counts.update(classes[:, 0].tolist())
    expected = batches * 3 / len(SIZES)
    # Draws without replacement within a batch vary less than independent ones: chi-square with 7 degrees, 0.1 %.
    assert sum((count - expected) ** 2 / expected for count in counts.values()) < 24.3


def test_rotating_takes_the_images_of_a_class_without_replacement() -> None:
    sampler = samplers.RotatingClassBatchSampler(labels_of([7] * 6), classes_per_batch=2, images_per_class=2, seed=3)
    rounds: dict[int, list[int]] = {}
    for batch in epoch_of(sampler, 0):
        for label, pair in zip(
            sampler.labels[batch.rows][::2].tolist(), batch.rows.reshape(2, 2).tolist(), strict=True
        ):
            rounds.setdefault(label, []).extend(pair)
    assert max(len(rows) for rows in rounds.values()) > 3  # some class was drawn more than once
    for rows in rounds.values():
        for start in range(0, len(rows), 6):  # three pairs of seven images, then a new shuffle
            assert len(set(rows[start : start + 6])) == len(rows[start : start + 6])


def test_rotating_has_as_many_batches_as_the_public_code() -> None:
    for images in (24, 25, 23):  # while the number of images taken plus a batch is below N
        sampler = samplers.RotatingClassBatchSampler(
            labels_of([images - 20, 10, 10]), classes_per_batch=2, images_per_class=2, seed=0
        )
        taken, batches = 0, 0
        while taken + 4 < images:
            taken, batches = taken + 4, batches + 1
        assert len(sampler) == batches


def test_independent_draws_images_with_replacement_and_uniformly() -> None:
    sampler = samplers.IndependentClassBatchSampler(labels_of([4] * 3), classes_per_batch=3, images_per_class=3, seed=0)
    rows = np.concatenate([b.rows for b in islice(sampler, 1500)])
    counts = np.bincount(rows, minlength=12)
    assert ((counts - len(rows) / 12) ** 2 / (len(rows) / 12)).sum() < 31.3  # chi-square, 11 degrees, 0.1 %
    assert any(len(set(b.rows.tolist())) < 9 for b in islice(sampler, 20))


def test_repeating_draws_classes_and_images_with_replacement_and_uniformly() -> None:
    sampler = samplers.RepeatingClassBatchSampler(
        labels_of([4, 8, 12]), classes_per_batch=3, images_per_class=2, seed=0
    )
    batches = [b.rows for b in islice(sampler, 3000)]
    classes = sampler.labels[np.stack(batches)].reshape(-1, 3, 2)
    assert (classes[..., 0] == classes[..., 1]).all()
    counts = np.unique(classes[..., 0], return_counts=True)[1]
    assert ((counts - 3000) ** 2 / 3000).sum() < 13.8  # chi-square, 2 degrees, 0.1 %
    for rows_of, size in zip(np.unique(sampler.labels), (4, 8, 12), strict=True):
        rows = np.concatenate(batches)
        times = np.unique(rows[sampler.labels[rows] == rows_of], return_counts=True)[1]
        assert len(times) == size
        assert ((times - 6000 / size) ** 2 / (6000 / size)).sum() < 31.3  # chi-square, at most 11 degrees, 0.1 %
    assert np.mean([len(set(row)) for row in classes[..., 0].tolist()]) == pytest.approx(
        3 * (1 - (2 / 3) ** 3), abs=0.05
    )


def test_repeating_has_batches_and_classes_of_a_batch_as_the_public_code() -> None:
    """len(sampler) of datasampler/class_random_sampler.py, and its mean number of classes of a batch over an epoch."""
    for images, num_classes, per_batch, batches, classes in (
        (5_864, 100, 56, 52, 42.4), (8_054, 98, 56, 71, 42.2), (59_551, 11_318, 56, 531, 55.87),
        (5_864, 100, 54, 54, 41.7),
    ):  # fmt: skip
        labels = np.arange(images) % num_classes
        sampler = samplers.RepeatingClassBatchSampler(labels, classes_per_batch=per_batch, images_per_class=2, seed=0)
        assert len(sampler) == batches
        drawn = [len(set(sampler.labels[b.rows].tolist())) for b in epoch_of(sampler, 0)]
        assert np.mean(drawn) == pytest.approx(classes, abs=1.2)


def test_random_class_batches_come_from_a_few_classes_of_any_share() -> None:
    sampler = samplers.RandomClassBatchSampler(labels_of([9] * 10), classes_per_batch=4, batch_size=12, seed=0)
    kinds = [len(set(sampler.labels[b.rows].tolist())) for b in islice(sampler, 200)]
    assert max(kinds) == 4
    assert min(kinds) >= 2
    shares = {tuple(sorted(Counter(sampler.labels[b.rows].tolist()).values())) for b in islice(sampler, 50)}
    assert len(shares) > 5


@pytest.mark.parametrize("kind", ["class_balanced", "equal_class", "split_class"])
def test_any_two_classes_are_equally_often_in_the_first_batch_of_an_epoch(kind: str) -> None:
    sampler = BALANCED[kind](labels_of([4] * 8), classes_per_batch=4, images_per_class=2, seed=0)
    together = np.zeros((8, 8))
    for batch in islice((batch for batch in sampler if batch.index == 0), 500):
        present = np.isin(np.unique(sampler.labels), sampler.labels[batch.rows])
        together += np.outer(present, present) / 500
    of_pairs = together[np.triu_indices(8, 1)]
    np.testing.assert_allclose(of_pairs, of_pairs.mean(), atol=0.1)  # 4 standard errors


def test_used_up_images_are_shuffled_again() -> None:
    labels = np.repeat([0, 1], [30, 90])
    sampler = samplers.EqualClassBatchSampler(labels, classes_per_batch=2, images_per_class=1, seed=0)
    rows = np.concatenate([batch.rows for batch in epoch_of(sampler, 0)])
    first, second = rows[rows < 30].reshape(2, 30).tolist()
    assert sorted(first) == sorted(second) and first != second


def test_random_batches_hold_every_image_once_an_epoch() -> None:
    sampler = samplers.RandomBatchSampler(labels_of([50, 3]), batch_size=10, seed=0)
    for epoch in range(2):
        batches = epoch_of(samplers.RandomBatchSampler(labels_of([50, 3]), batch_size=6, seed=0), epoch)
        rows = np.concatenate([b.rows for b in batches])
        assert len(set(rows.tolist())) == len(rows) == 48
    assert len(sampler) == 5


def test_classes_come_equally_often_and_their_images_evenly_however_unequal_they_are() -> None:
    """By a loop, yetigurbuz/generalized-sum-pooling b765b889, tensorflow/framework/datasets/samplers.py:6-113."""
    sampler = samplers.EqualClassBatchSampler(labels_of(SIZES), classes_per_batch=4, images_per_class=2, seed=0)
    average = sum(SIZES) / len(SIZES)
    rounds = int(average // 2) + (average % 2 > 0)  # pick_repeats
    batches = epoch_of(sampler, 0)
    assert len(batches) == rounds * len(SIZES) // 4  # 6 rounds of 8 classes
    groups = np.concatenate([b.rows for b in batches]).reshape(-1, 2)
    labels = sampler.labels[groups]
    assert (labels == labels[:, :1]).all()
    visits = labels[:, 0].reshape(rounds, len(SIZES))
    assert all(len(set(one)) == len(SIZES) for one in visits)  # a round visits each class once
    assert len({tuple(one) for one in visits.tolist()}) > 1
    for label in np.unique(labels):
        images = groups[labels[:, 0] == label].ravel()
        queue: set[int] = set()
        for image in images:  # no image comes again before all others of its class
            if not queue:
                queue = set(np.flatnonzero(sampler.labels == label).tolist())
            assert image in queue
            queue.remove(image)


@pytest.mark.parametrize(
    ("name", "count", "size", "vary", "length"),
    [
        ("cars196", 10, 7, False, 118),
        ("sop", 15, 6, False, 1510),
        ("inshop", 14, 4, False, 571),
        ("cub200", 6, 9, False, 117),
        ("cub200", 6, 9, True, 123),  # mean of 150, 134, 117, 112, 112, 112
    ],
)
def test_epochs_of_libc_are_as_long_as_its_own(name: str, count: int, size: int, vary: bool, length: int) -> None:
    """Lengths of dvl-tum/intra_batch a1ae3de8, combine_sampler.py, run on classes of these sizes."""
    table = published_table(name)
    labels = table.labels[table.role == "train"]
    sampler = samplers.SplitClassBatchSampler(
        labels, classes_per_batch=count, images_per_class=size, seed=0, vary_classes=vary
    )
    assert len(sampler) == length


def test_a_batch_without_divisors_has_no_other_number_of_groups() -> None:
    with pytest.raises(ConfigError, match=r"vary_classes: got true with batches of 7 images"):
        samplers.SplitClassBatchSampler(
            labels_of(SIZES), classes_per_batch=1, images_per_class=7, seed=0, vary_classes=True
        )


def test_groups_hold_every_image_and_are_completed_from_their_own_class() -> None:
    sampler = samplers.SplitClassBatchSampler(labels_of(SIZES), classes_per_batch=3, images_per_class=4, seed=0)
    groups = np.concatenate([b.rows for b in epoch_of(sampler, 1)]).reshape(-1, 4)
    labels = sampler.labels[groups]
    assert (labels == labels[:, :1]).all()
    assert set(groups.ravel()) == set(range(sum(SIZES)))
    found = Counter(labels[:, 0].tolist())
    expected = {10 * i + 5: len([*range(0, max(size, 4), 4), *([0] * (max(size, 4) % 4 == 0))])
                for i, size in enumerate(SIZES)}  # fmt: skip
    more = sum(found.values()) - sum(expected.values())
    assert 0 <= more < 3 and all(found[label] >= number for label, number in expected.items())


def test_batches_of_libc_may_have_another_number_of_classes_each_epoch() -> None:
    labels = labels_of([60] * 8)
    sampler = samplers.SplitClassBatchSampler(
        labels, classes_per_batch=2, images_per_class=6, seed=0, vary_classes=True
    )
    sizes = set()
    for epoch in range(12):
        rows = np.stack([b.rows for b in epoch_of(sampler, epoch)])
        assert rows.shape[1] == 12
        sizes.add(
            next(size for size in (6, 4, 3, 2) if np.ptp(sampler.labels[rows].reshape(-1, size), axis=1).max() == 0)
        )
    assert sizes == {2, 3, 4, 6}
    few = samplers.SplitClassBatchSampler(
        labels_of([2] * 6), classes_per_batch=6, images_per_class=9, seed=0, vary_classes=True
    )
    assert all(len(batch.rows) == 54 for epoch in range(12) for batch in epoch_of(few, epoch))


# Recorded from gedml 0.2.2, MPerClassFullSampler (core/samplers/m_per_class_full_sampler.py), which zbr17/AVSL fd2686e4
# names in link_margin.yaml: classes of each batch for classes of 9, 4, 5, 2 and 8 images, m=2, batch_size=6.
FULL_CLASSES = [[0, 1, 2], [0, 3, 4], [1, 2, 3], [0, 1, 4], [2, 3, 4], [0, 1, 2]]


def test_full_class_batches_have_the_classes_of_the_public_code() -> None:
    sampler = samplers.FullClassBatchSampler(
        np.repeat(np.arange(5), [9, 4, 5, 2, 8]), classes_per_batch=3, images_per_class=2, seed=0
    )
    epoch = [next(sampler).rows for _ in range(len(sampler))]
    assert [sorted(set(sampler.labels[rows].tolist())) for rows in epoch] == FULL_CLASSES
    images = Counter(row for rows in epoch for row in rows.tolist() if sampler.labels[row] in (0, 4))
    assert set(images.values()) == {1}  # classes that have 4 x 2 images repeat none
    small = [
        Counter(row for b in epoch_of(sampler, e) for row in b.rows.tolist() if row in (18, 19)) for e in (1, 2, 3)
    ]
    assert any(times[18] != times[19] for times in small)  # with replacement


@pytest.mark.parametrize(("images", "classes", "steps"), [(5_864, 100, 31), (8_054, 98, 43), (59_551, 11_318, 251)])
def test_full_class_epochs_are_as_long_as_the_public_codes(images: int, classes: int, steps: int) -> None:
    """Recorded likewise, m=4, batch_size=180, for images dealt to classes in turn."""
    labels = np.sort(np.arange(images) % classes)
    assert len(samplers.FullClassBatchSampler(labels, classes_per_batch=45, images_per_class=4, seed=0)) == steps
