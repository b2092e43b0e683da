"""Scores of single queries against loops."""

import numpy as np
import pytest

from dmlbench.evaluation.metrics import check_recall_at, mean_scores, positives_per_query, query_scores
from dmlbench.types import ConfigError


def test_scores_equal_their_definitions_spelled_out_as_loops() -> None:
    rng = np.random.default_rng(0)
    relevant = rng.random((40, 12)) < 0.3
    positives = rng.integers(1, 13, size=40)
    scores = query_scores(relevant, positives, recall_at=(1, 3, 50))
    for q in range(40):
        total, hits = 0.0, 0
        for r in range(int(positives[q])):
            if relevant[q, r]:
                hits += 1
                total += hits / (r + 1)
        assert scores["map_at_r"][q] == pytest.approx(total / positives[q], abs=1e-15)
        assert scores["r_precision"][q] == pytest.approx(hits / positives[q], abs=1e-15)
        assert scores["p_at_1"][q] == float(relevant[q, 0])
        assert scores["recall_at_3"][q] == float(any(relevant[q, :3]))
        assert scores["recall_at_50"][q] == float(any(relevant[q]))


def test_scores_have_the_same_bits_however_many_places_are_known() -> None:
    rng = np.random.default_rng(1)
    relevant = rng.random((30, 200)) < 0.4
    positives = np.full(30, 90)
    short = query_scores(relevant[:, :90], positives, recall_at=(1,))
    long = query_scores(relevant, positives, recall_at=(1,))
    assert all(np.array_equal(short[name], long[name]) for name in short)


def test_positives_leave_out_the_query_only_where_the_gallery_holds_it() -> None:
    gallery = np.array([5, 5, 7, 9])
    found = positives_per_query(np.array([5, 5, 7, 8, 9]), gallery, np.array([0, -1, 2, -1, -1]))
    assert found.tolist() == [1, 2, 0, 0, 1]


def test_skipped_queries_do_not_count_in_the_mean() -> None:
    assert mean_scores({"p_at_1": np.array([1.0, np.nan, 0.0])}) == {"p_at_1": 0.5}


@pytest.mark.parametrize("values", [(0,), (2, 1), (1, 1), (-3,)])
def test_recall_at_refuses_values_that_are_not_increasing_and_positive(values: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="recall_at"):
        check_recall_at(values)
