"""Collections of fold models: the concatenated rows themselves and closed forms as oracles."""

import itertools
from collections.abc import Sequence

import numpy as np
import pandas as pd
import pytest
import torch
from pytorch_metric_learning.distances import CosineSimilarity, LpDistance, SNRDistance
from scipy import stats

from dmlbench.evaluation.collections import concatenated
from dmlbench.evaluation.collections.concatenated import concatenated_scores
from dmlbench.evaluation.evaluate import evaluate
from dmlbench.evaluation.metrics.registry import DEFAULT_METRICS, query_scores, scores_of
from dmlbench.evaluation.search import scan
from dmlbench.evaluation.search.pairwise import search_by
from dmlbench.evaluation.search.unit_vectors import MIN_TILE_BYTES, exact_similarities, hold_unit_rows, unit_rows
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.results.collections import (
    collections,
    confidence_interval,
    holm,
    p_value_text,
    paired_difference,
    summarize,
)
from dmlbench.types import ConfigError, EmbeddingSet, RunError

RECALL_AT = (1, 2, 4)
Members = list[list[EmbeddingSet]]


def runs(
    *, folds: int = 4, repeats: int = 3, size: int = 70, start: int = 0, offset: float = 0.0
) -> list[list[EmbeddingSet]]:
    """Members that resemble each other, with duplicates: the second half repeats the first in every run."""
    rng = np.random.default_rng(start)
    base = rng.normal(size=(size, 8))
    base[size // 2 : 2 * (size // 2)] = base[: size // 2]
    labels = torch.from_numpy(rng.integers(0, 9, size))
    ids = torch.arange(start, start + size)
    result = []
    for fold in range(folds):
        result.append([])
        for repeat in range(repeats):
            noise = np.random.default_rng(1000 * fold + repeat)
            rows = np.tanh(base @ noise.normal(size=(8, 6 + fold))) + offset  # equal images stay equal; widths differ
            result[-1].append(EmbeddingSet(torch.from_numpy(rows.astype(np.float32)), labels, ids))
    return result


def joined(members: list[EmbeddingSet]) -> EmbeddingSet:
    rows = np.concatenate([unit_rows(member.rows) for member in members], axis=1)
    return EmbeddingSet(torch.from_numpy(rows), members[0].labels, members[0].ids)


@pytest.fixture(params=["numpy", "numba", "tensors"])
def ranked_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """All ways to rank collections, one after the other; that of an accelerator on tensors of the CPU."""
    if request.param == "tensors":
        monkeypatch.setattr(scan, "tiles_on_host", lambda device: False)
    elif request.param == "numba":
        pytest.importorskip("numba", reason="extra fast")
    else:
        monkeypatch.setattr(concatenated, "numba_rank", lambda: None)
    return str(request.param)


def evaluate_sum(
    members: Members, galleries: Members | None, choice: tuple[int, ...], spec: EvaluationSpec
) -> dict[str, np.ndarray]:
    """Scores by a full sort of the sums, fold by fold, of the members' exact similarities."""
    query, gallery = members[0][0], (galleries or members)[0][0]
    n, total = len(gallery), np.zeros((len(query), len(gallery)))
    for f, r in enumerate(choice):
        x, y = (hold_unit_rows(m[f][r].rows, within_bytes=10**9) for m in (members, galleries or members))
        pairs = np.divmod(np.arange(total.size), n)
        total += exact_similarities(x, y, *pairs).reshape(total.shape)
    relevant = np.zeros(total.shape, dtype=bool)
    for q in range(len(query)):
        order = np.lexsort((np.arange(n), -total[q]))
        order = order[(gallery.ids != query.ids[q]).numpy()[order]]
        relevant[q, : len(order)] = (gallery.labels == query.labels[q]).numpy()[order]
    positives = relevant.sum(axis=1)
    scores = query_scores(relevant, np.maximum(positives, 1), scores_of(DEFAULT_METRICS, spec.recall_at))
    return {name: np.where(positives > 0, values, np.nan) for name, values in scores.items()}


def ties(folds: Sequence[int], size: int, *, classes: int, gallery: bool) -> list[list[EmbeddingSet]]:
    """Members of few different rows, some of zero length, so that sums tie exactly or differ by rounding alone."""
    rng = np.random.default_rng(size + gallery)
    codes = rng.integers(-1, 2, size=(size, 3))
    # sizes of classes differ widely, and some queries have no positive
    labels = torch.from_numpy(np.minimum(rng.geometric(0.4, size), classes))
    result = []
    for fold, repeats in enumerate(folds):
        mixings = [np.random.default_rng(100 * fold + repeat).normal(size=(3, 5)) for repeat in range(repeats)]
        rows = [torch.from_numpy((codes @ mixing).astype(np.float32)) for mixing in mixings]
        result.append([EmbeddingSet(r, labels, torch.arange(size) + 1000 * gallery) for r in rows])
    return result


@pytest.mark.fast_sample(4)
@pytest.mark.parametrize("folds", [(1, 1, 1, 1), (5,), (2, 1, 4), (4, 10)])
@pytest.mark.parametrize("with_gallery", [False, True])
def test_ties_and_every_number_of_folds_and_repeats_match_the_joined_rows(
    ranked_by: str, folds: tuple[int, ...], with_gallery: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(concatenated, "_COLUMNS", 17)  # several gallery tiles
    members = ties(folds, 40, classes=6, gallery=False)
    galleries = ties(folds, 53, classes=6, gallery=True) if with_gallery else None
    spec = EvaluationSpec((1, 3, 60), tile_bytes=200_000)  # more places than there are items
    joint, own = concatenated_scores(members, galleries, spec=spec, own=True)
    for choice in list(joint)[:: max(1, len(joint) // 9)]:
        expected = evaluate_sum(members, galleries, choice, spec)
        for name, values in expected.items():
            np.testing.assert_array_equal(joint[choice].per_query[name], values, err_msg=f"{choice} {name}")
    for f, r in itertools.product(range(len(folds)), range(min(folds))):
        expected_own = evaluate(members[f][r], None if galleries is None else galleries[f][r], spec)
        for name, values in expected_own.per_query.items():
            np.testing.assert_array_equal(own[f][r].per_query[name], values, err_msg=f"own {f} {r} {name}")


@pytest.mark.parametrize("offset", [0.0, 5.0])
def test_numba_numpy_and_tensor_ranking_give_the_same_bits(offset: float, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba", reason="extra fast")
    metrics = ("p_at_1", "recall_at_k", "r_precision", "map_at_r", "map")
    spec = EvaluationSpec((1, 5), metrics=metrics)
    found = []
    for ranking, on_host in ((concatenated.numba_rank, True), (lambda: None, True), (lambda: None, False)):
        monkeypatch.setattr(concatenated, "numba_rank", ranking)
        monkeypatch.setattr(scan, "tiles_on_host", lambda device, on_host=on_host: on_host)
        for members, galleries in (
            (runs(size=90, offset=offset), None),
            (ties((2, 3), 60, classes=5, gallery=False), ties((2, 3), 80, classes=5, gallery=True)),
        ):
            joint, own = concatenated_scores(members, galleries, spec=spec, own=True)
            found.append([*joint.values(), *itertools.chain.from_iterable(own)])
    for compiled, plain, tensors in zip(*(itertools.chain(*found[i : i + 2]) for i in (0, 2, 4)), strict=True):
        for name, values in plain.per_query.items():
            assert compiled.per_query[name].tobytes() == values.tobytes() == tensors.per_query[name].tobytes(), name


def test_a_tile_may_have_more_queries_than_half_of_what_16_bits_count(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba", reason="extra fast")
    monkeypatch.setattr(concatenated, "_TILE_ROWS", 40_000)
    spec = EvaluationSpec((1,), metrics=("p_at_1", "map_at_r"), tile_bytes=2**33)
    members = ties((1, 1), 40_000, classes=5, gallery=False)
    galleries = [[EmbeddingSet(one.rows[:6], one.labels[:6], one.ids[:6] + 10**6) for one in fold] for fold in members]
    found = []
    for ranking in (concatenated.numba_rank, lambda: None):
        monkeypatch.setattr(concatenated, "numba_rank", ranking)
        (joint,) = concatenated_scores(members, galleries, spec=spec)[0].values()
        found.append(joint.per_query["map_at_r"])
    np.testing.assert_array_equal(*found)


def test_collections_halve_their_tiles_until_the_device_has_memory(limit_memory, monkeypatch) -> None:
    members = runs(size=90, offset=0.0)
    expected, _ = concatenated_scores(members, spec=EvaluationSpec())
    monkeypatch.setattr(scan, "tiles_on_host", lambda device: False)
    sizes = limit_memory(concatenated, "select", lambda value, *_: value.shape[1], 30)
    found, _ = concatenated_scores(members, spec=EvaluationSpec())
    assert max(sizes) > 60 and sorted(sizes)[0] <= 30
    assert {choice: x.scores for choice, x in found.items()} == {choice: x.scores for choice, x in expected.items()}


@pytest.mark.fast_sample(4)
@pytest.mark.parametrize("offset", [0.0, 5.0])
@pytest.mark.parametrize("with_gallery", [False, True])
def test_concatenated_equals_evaluation_of_the_concatenated_rows(
    ranked_by: str, with_gallery: bool, offset: float
) -> None:
    members = runs(offset=offset)
    galleries = runs(size=90, start=40, offset=offset) if with_gallery else None
    if galleries is not None:  # an id that both hold has one label
        galleries = [[EmbeddingSet(g.rows, g.labels, g.ids + 100) for g in fold] for fold in galleries]
    spec = EvaluationSpec(RECALL_AT)
    found, _ = concatenated_scores(members, galleries, spec=spec)
    assert len(found) == 81
    for choice, evaluation in list(found.items())[::4]:
        queries = joined([members[f][r] for f, r in enumerate(choice)])
        gallery = None if galleries is None else joined([galleries[f][r] for f, r in enumerate(choice)])
        expected = evaluate(queries, gallery, spec)
        for name, values in expected.per_query.items():
            np.testing.assert_array_equal(evaluation.per_query[name], values, err_msg=f"{choice} {name}")


@pytest.mark.parametrize("with_gallery", [False, True])
def test_copies_within_a_fold_are_ranked_once(with_gallery: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sides = [ties((3, 2), 40, classes=6, gallery=gallery) for gallery in (False, True)[: 1 + with_gallery]]
    for side in sides:
        side[0][2] = EmbeddingSet(side[0][0].rows.clone(), side[0][0].labels, side[0][0].ids)
    ranked = []
    monkeypatch.setattr(concatenated, "search_by", lambda *args, **kw: ranked.append(1) or search_by(*args, **kw))
    joint, own = concatenated_scores(*sides, spec=EvaluationSpec((1, 3)), own=True)
    assert (len(ranked), len(joint), list(map(len, own))) == (4, 6, [3, 2])
    for choice, found in joint.items():
        expected = evaluate_sum(sides[0], sides[1] if with_gallery else None, choice, EvaluationSpec((1, 3)))
        for name, values in expected.items():
            np.testing.assert_array_equal(found.per_query[name], values, err_msg=f"{choice} {name}")
    assert own[0][2] is own[0][0] and own[1][0].scores != own[1][1].scores
    if with_gallery:  # the same queries, another gallery
        sides[1][0][2] = sides[1][0][1]
        concatenated_scores(*sides, spec=EvaluationSpec((1, 3)))
        assert len(ranked) == 4 + 5


def test_equal_embeddings_with_different_distances_are_not_copies() -> None:
    members = ties((3, 2), 40, classes=6, gallery=False)
    members[0][2] = members[0][0]
    distances = [[None, None, LpDistance(normalize_embeddings=False, p=1)], [None, None]]
    _, own = concatenated_scores(members, spec=EvaluationSpec((1, 3)), distances=distances, own=True)
    assert own[0][2].scores != own[0][0].scores


def test_tiles_and_threads_cannot_change_a_score(ranked_by: str) -> None:
    members = runs(folds=3, repeats=2, size=50)
    threads = torch.get_num_threads()
    frames = []
    for count, tile_bytes in ((1, MIN_TILE_BYTES), (2, 60_000), (2, 2**24)):
        torch.set_num_threads(count)
        frames.append(collections(members, recall_at=RECALL_AT, tile_bytes=tile_bytes))
    torch.set_num_threads(threads)
    for frame in frames[1:]:
        pd.testing.assert_frame_equal(frame, frames[0], check_exact=True)


@pytest.mark.parametrize("tile_bytes", [MIN_TILE_BYTES, 2**24])
def test_members_with_distances_of_their_own_rank_by_the_sum_of_these(ranked_by: str, tile_bytes: int) -> None:
    members = runs(folds=2, repeats=2, size=40)
    distances = [[LpDistance(normalize_embeddings=False, p=1), SNRDistance()], [None, CosineSimilarity()]]
    found, _ = concatenated_scores(members, spec=EvaluationSpec((1, 3), tile_bytes=tile_bytes), distances=distances)
    matrices = []
    for fold, choices in zip(members, distances, strict=True):
        matrices.append([])
        for member, distance in zip(fold, choices, strict=True):
            rows = member.rows.double()
            unit = torch.from_numpy(unit_rows(member.rows)).double()
            given = unit @ unit.T if distance is None else distance(rows, rows)
            matrices[-1].append(given if distance is None or distance.is_inverted else -given)
    labels = members[0][0].labels
    for (a, b), evaluation in found.items():
        total = (matrices[0][a] + matrices[1][b]).numpy().round(9)  # duplicates tie but for rounding
        for q in range(40):
            order = [g for g in np.argsort(-total[q], kind="stable") if g != q]
            marks = (labels[order] == labels[q]).numpy()
            if marks.any():
                assert evaluation.per_query["p_at_1"][q] == marks[0]
                assert evaluation.per_query["r_precision"][q] == pytest.approx(marks[: marks.sum()].mean())
    with pytest.raises(RunError, match=r"distances: got .* one for each run, or None"):
        collections(members, distances=distances[:1])


def test_separated_mean_and_std_have_their_closed_forms() -> None:
    members = runs()
    frame = collections(members, recall_at=RECALL_AT)
    own = np.array(
        [[evaluate(m, None, EvaluationSpec(RECALL_AT)).scores["map_at_r"] for m in fold] for fold in members]
    )
    summary = summarize(frame)["separated_map_at_r"]
    assert summary["mean"] == pytest.approx(own.mean(), abs=1e-14)
    assert summary["std"] == pytest.approx(np.sqrt(own.var(axis=1).sum()) / 4, abs=1e-14)
    assert len(frame) == 81
    assert frame[[f"repeat_fold{f}" for f in range(4)]].to_numpy().tolist() == [
        list(choice) for choice in itertools.product(range(3), repeat=4)
    ]


def test_given_scores_are_used_and_must_be_complete() -> None:
    members = runs(folds=2, repeats=2, size=30)
    names = ("p_at_1", "recall_at_1", "r_precision", "map_at_r")
    scores = [[dict.fromkeys(names, 0.25 * (2 * f + r)) for r in range(2)] for f in range(2)]
    frame = collections(members, scores=scores, recall_at=(1,))
    assert frame["separated_p_at_1"].tolist() == [0.25, 0.375, 0.375, 0.5]
    with pytest.raises(RunError, match="lack 'recall_at_2'"):
        collections(members, scores=scores, recall_at=(1, 2))
    with pytest.raises(RunError, match=r"scores: got .* one for each run, or None"):
        collections(members, scores=scores[:1], recall_at=(1,))


def test_folds_may_have_different_numbers_of_repeats() -> None:
    members = runs(folds=3, repeats=2, size=30)
    frame = collections([members[0], members[1][:1], members[2]], recall_at=(1,))
    assert len(frame) == 4
    assert frame["repeat_fold1"].tolist() == [0, 0, 0, 0]
    one = summarize(frame[:1])
    assert "repeat_fold0" not in one and all(value["std"] is None for value in one.values())


def test_members_of_different_test_sets_are_rejected() -> None:
    members = runs(folds=2, repeats=2, size=30)
    other = members[1][0]
    swapped = EmbeddingSet(other.rows, other.labels, other.ids.flip(0))
    shorter = EmbeddingSet(other.rows[:5], other.labels[:5], other.ids[:5])
    for wrong in (swapped, shorter):
        with pytest.raises(RunError, match="query ids of fold 1, repeat 0 differ from those of fold 0"):
            collections([members[0], [wrong]])
    with pytest.raises(RunError, match="query labels of fold 1, repeat 0 differ from those of fold 0"):
        collections([members[0], [EmbeddingSet(other.rows, other.labels + 1, other.ids)]])
    with pytest.raises(RunError, match="gallery ids of fold 1, repeat 0 differ from those of fold 0"):
        collections(members, [members[0], [swapped, other]])
    for empty in ([members[0], []], []):
        with pytest.raises(RunError, match="at least one of every fold"):
            collections(empty)
    with pytest.raises(ConfigError, match="expected at most 16384"):
        collections([members[0]] * 15)


def test_interval_is_the_t_interval_of_the_design() -> None:
    scores = [[0.50, 0.52, 0.54], [0.40, 0.40, 0.43], [0.61, 0.60, 0.62], [0.30, 0.33, 0.30]]
    interval = confidence_interval(scores)
    assert interval is not None
    variance = np.var(scores, axis=1, ddof=1)
    half = 2.306004135204166 * np.sqrt(variance.sum()) / (4 * np.sqrt(3))  # t quantile 0.975 with 8 degrees of freedom
    assert interval == pytest.approx((np.mean(scores) - half, np.mean(scores) + half), abs=1e-12)
    uneven = [[0.5, 0.6], [0.4, 0.7, 0.4], [0.3, 0.2, 0.2, 0.5]]  # 1 + 2 + 3 degrees of freedom
    half = 2.4469118511449692 * np.sqrt(0.005 / 2 + 0.03 / 3 + 0.02 / 4) / 3
    assert confidence_interval(uneven) == pytest.approx((0.45 - half, 0.45 + half), abs=1e-12)
    assert confidence_interval([[0.5], [0.4]]) is None
    with pytest.raises(ConfigError, match="level"):
        confidence_interval(scores, level=95)


def test_scores_of_whole_sets_are_averaged_over_the_members_of_a_collection() -> None:
    members = runs(folds=2, repeats=2)
    spec = EvaluationSpec(RECALL_AT)
    own = [[dict(evaluate(m, None, spec).scores, nmi=0.1 * f + 0.01 * r) for r, m in enumerate(fold)]
           for f, fold in enumerate(members)]  # fmt: skip
    frame = collections(members, scores=own, recall_at=RECALL_AT)
    assert frame["separated_nmi"].tolist() == pytest.approx([0.05, 0.055, 0.055, 0.06])
    assert "concatenated_nmi" not in frame


@pytest.mark.parametrize("level", [0.95, 0.5])
@pytest.mark.parametrize("over", ["repeats within folds", "folds"])
def test_of_one_fold_or_one_repeat_is_the_paired_t_interval(over: str, level: float) -> None:
    if over == "folds":
        a, b = np.random.default_rng(2).normal(0.5, 0.1, (2, 4))
    else:
        rng = np.random.default_rng(0)
        a = rng.normal(0.6, 0.1, 5)
        b = a + rng.normal(0.02, 0.01, 5)
    keys = [(i, 0) if over == "folds" else (0, i) for i in range(len(a))]
    for first, second in ((a, b), (b, a)):
        found = paired_difference(
            dict(zip(keys, first, strict=True)), dict(zip(keys, second, strict=True)), level=level
        )
        test = stats.ttest_rel(second, first)
        expected = test.confidence_interval(level)
        assert found.interval == pytest.approx((expected.low, expected.high), abs=1e-12)
        assert found.p_value == pytest.approx(test.pvalue, rel=1e-9)
        assert found.difference == pytest.approx(second.mean() - first.mean(), abs=1e-15)
        assert found.n_pairs == len(a)
        assert found.over == over


def test_what_fold_and_seed_do_to_both_configs_does_not_widen_the_interval() -> None:
    rng = np.random.default_rng(1)
    shared = {(f, r): 0.5 + 0.1 * f + rng.normal(0, 0.05) for f in range(4) for r in range(3)}
    own = {key: rng.normal(0.03, 0.002) for key in shared}
    found = paired_difference(shared, {key: shared[key] + own[key] for key in shared})
    deviations = [np.var([own[f, r] for r in range(3)], ddof=1) for f in range(4)]
    half = stats.t.ppf(0.975, 8) * np.sqrt(sum(deviations)) / (4 * np.sqrt(3))
    mean = np.mean(list(own.values()))
    assert found.interval == pytest.approx((mean - half, mean + half), abs=1e-12)
    assert found.second - found.first == pytest.approx(mean, abs=1e-12)


def test_folds_weigh_alike_whatever_their_number_of_pairs() -> None:
    first = {(0, 0): 0.0, (0, 1): 0.0, (1, 0): 0.0}
    found = paired_difference(first, {(0, 0): 0.1, (0, 1): 0.3, (1, 0): 0.4})
    assert found.difference == pytest.approx(0.3)
    assert found.interval is None
    assert paired_difference({(0, 0): 0.1}, {(0, 0): 0.2}).interval is None


def test_holm_corrects_for_the_number_of_p_values() -> None:
    # 4 * 0.005, 3 * 0.01, 2 * 0.03, then no smaller than the one before
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.9]) == [1.0, 1.0] and holm([]) == []
    assert holm([0.01, None, 0.04]) == [0.02, None, 0.04]


@pytest.mark.parametrize(
    ("p_value", "text"),
    [
        (0.0496, "0.0496"),
        (0.04996, "0.04996"),
        (0.0504, "0.05"),
        (0.0449, "0.045"),
        (0.05, "0.05"),
        (1.234e-8, "1.2e-08"),
    ],
)
def test_p_values_tell_their_side_of_the_level(p_value, text) -> None:
    assert p_value_text(p_value) == text


def test_differences_that_no_seed_changes_have_no_interval() -> None:
    first = {(0, 0): 0.5, (0, 1): 0.5, (1, 0): 0.6, (1, 1): 0.6}
    for second, difference in ((dict.fromkeys(first, 0.75), 0.2), (first, 0.0)):
        found = paired_difference(first, second)
        assert found.difference == pytest.approx(difference)
        assert found.interval is None and found.p_value is None


def test_runs_without_a_partner_are_refused_by_name() -> None:
    with pytest.raises(RunError, match=r"fold0_rep1, fold2_rep0"):
        paired_difference({(0, 0): 0.1, (0, 1): 0.1}, {(0, 0): 0.1, (2, 0): 0.1})
    with pytest.raises(RunError, match="all"):
        paired_difference({}, {})
