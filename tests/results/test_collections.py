"""Collections of fold models: the concatenated rows themselves and closed forms as oracles."""

import itertools

import numpy as np
import pandas as pd
import pytest
import torch

from dmlbench.evaluation.concatenated import concatenated_scores
from dmlbench.evaluation.evaluate import EvaluationSpec, evaluate
from dmlbench.evaluation.search import MIN_TILE_BYTES
from dmlbench.evaluation.similarity import unit_rows
from dmlbench.results.collections import collections, confidence_interval, summarize
from dmlbench.types import ConfigError, EmbeddingSet, RunError

RECALL_AT = (1, 2, 4)


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


@pytest.mark.parametrize("offset", [0.0, 5.0])
@pytest.mark.parametrize("with_gallery", [False, True])
def test_concatenated_equals_evaluation_of_the_concatenated_rows(with_gallery: bool, offset: float) -> None:
    members = runs(offset=offset)
    galleries = runs(size=90, start=40, offset=offset) if with_gallery else None
    if galleries is not None:  # an id that both hold has one label
        galleries = [[EmbeddingSet(g.rows, g.labels, g.ids + 100) for g in fold] for fold in galleries]
    spec = EvaluationSpec(RECALL_AT)
    found = concatenated_scores(members, galleries, spec=spec)
    assert len(found) == 81
    for choice, evaluation in found.items():
        queries = joined([members[f][r] for f, r in enumerate(choice)])
        gallery = None if galleries is None else joined([galleries[f][r] for f, r in enumerate(choice)])
        expected = evaluate(queries, gallery, spec)
        for name, values in expected.per_query.items():
            np.testing.assert_array_equal(evaluation.per_query[name], values, err_msg=f"{choice} {name}")


def test_tiles_and_threads_cannot_change_a_score() -> None:
    members = runs(folds=3, repeats=2, size=50)
    threads = torch.get_num_threads()
    frames = []
    for count, tile_bytes in ((1, MIN_TILE_BYTES), (2, 60_000), (2, 2**24)):
        torch.set_num_threads(count)
        frames.append(collections(members, recall_at=RECALL_AT, tile_bytes=tile_bytes))
    torch.set_num_threads(threads)
    for frame in frames[1:]:
        pd.testing.assert_frame_equal(frame, frames[0], check_exact=True)


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
    with pytest.raises(RunError, match="for every run"):
        collections(members, scores=scores[:1], recall_at=(1,))


def test_folds_may_have_different_numbers_of_repeats() -> None:
    members = runs(folds=3, repeats=2, size=30)
    frame = collections([members[0], members[1][:1], members[2]], recall_at=(1,))
    assert len(frame) == 4
    assert frame["repeat_fold1"].tolist() == [0, 0, 0, 0]


def test_one_collection_has_no_std() -> None:
    summary = summarize(collections(runs(folds=2, repeats=1, size=30), recall_at=(1,)))
    assert all(value["std"] is None for value in summary.values())
    assert "repeat_fold0" not in summary
    with pytest.raises(ConfigError, match="no collection"):
        summarize(pd.DataFrame())


def test_members_of_different_test_sets_are_refused_with_the_first_difference() -> None:
    members = runs(folds=2, repeats=2, size=30)
    other = members[1][0]
    ids = other.ids.clone()
    ids[7] = 99
    members[1][0] = EmbeddingSet(other.rows, other.labels, ids)
    with pytest.raises(RunError, match=r"query ids of fold 1, repeat 0 differ .* position 7 \(99 instead of 7\)"):
        collections(members)
    members[1][0] = EmbeddingSet(other.rows[:5], other.labels[:5], other.ids[:5])
    with pytest.raises(RunError, match="count 5 and those of fold 0, repeat 0 30"):
        collections(members)
    with pytest.raises(RunError, match="fold 1 has no run"):
        collections([members[0], []])
    with pytest.raises(RunError, match="no fold"):
        collections([])
    with pytest.raises(ConfigError, match="collections, more than"):
        collections([members[0]] * 13)


def test_interval_is_the_t_interval_of_the_design() -> None:
    scores = [[0.50, 0.52, 0.54], [0.40, 0.40, 0.43], [0.61, 0.60, 0.62], [0.30, 0.33, 0.30]]
    interval = confidence_interval(scores)
    assert interval is not None
    variance = np.var(scores, axis=1, ddof=1)
    half = 2.306004135204166 * np.sqrt(variance.sum()) / (4 * np.sqrt(3))  # t quantile 0.975 with 8 degrees of freedom
    assert interval == pytest.approx((np.mean(scores) - half, np.mean(scores) + half), abs=1e-12)
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
