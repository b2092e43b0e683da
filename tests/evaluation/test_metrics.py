"""Scores of single queries against loops."""

import numpy as np
import pytest

from dmlbench.evaluation.metrics import registry
from dmlbench.evaluation.metrics.registry import METRICS, TABLE, query_scores, score_named, scores_of
from dmlbench.evaluation.relevance import positives_per_query
from dmlbench.types import ConfigError


def test_scores_equal_their_definitions_spelled_out_as_loops() -> None:
    rng = np.random.default_rng(0)
    relevant = rng.random((40, 12)) < 0.3
    positives = rng.integers(1, 13, size=40)
    scores = query_scores(relevant, positives, scores_of(registry.DEFAULT_METRICS, (1, 3, 50)))
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


def test_scores_of_whole_rankings_equal_their_definitions_spelled_out_as_loops() -> None:
    rng = np.random.default_rng(2)
    relevant = rng.random((12, 1300)) < 0.02
    relevant[:, 1200] = True  # beyond the thousandth place
    positives = relevant.sum(axis=1)
    scores = query_scores(relevant, positives, scores_of(("map", "oodml_map_at_1000")))
    assert list(scores) == ["map", "oodml_map_at_1000"]
    for q in range(12):
        ranks = np.flatnonzero(relevant[q]) + 1
        precision = [(i + 1) / rank for i, rank in enumerate(ranks)]
        within = [value for value, rank in zip(precision, ranks, strict=True) if rank <= 1000]
        assert len(within) < len(precision)
        assert scores["map"][q] == pytest.approx(sum(precision) / positives[q], abs=1e-14)
        assert scores["oodml_map_at_1000"][q] == pytest.approx(sum(within) / (positives[q] + 1), abs=1e-14)


def test_a_ranking_is_as_deep_as_its_scores_need() -> None:
    def of(*metrics: str) -> int:
        return registry.depth(np.array([3, 7]), 5000, scores_of(metrics, (1, 4)))

    assert (of("map_at_r"), of("oodml_map_at_1000", "nmi"), of("map", "oodml_map_at_1000")) == (7, 1000, 5000)
    assert registry.depth(np.array([2]), 9, scores_of(["oodml_map_at_1000"])) == 9


def test_scores_are_listed_in_one_order_whatever_the_order_they_are_asked_in() -> None:
    assert registry.score_names(scores_of(["nmi", "recall_at_k", "recall_at_3", "map"], (1, 5))) == (
        "recall_at_1", "recall_at_3", "recall_at_5", "map", "nmi"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (["odml_map_at_1000"], "did you mean 'oodml_map_at_1000'"),
        (["recal_at_10"], "'recal_at_10' is not a score"),
        (["recall_at_0"], "'recall_at_0' is not a score"),
        (["p_at_10"], "'p_at_10' is not a score"),
        (["nmi", "nmi"], "expected each name once"),
        ([], "expected at least one of p_at_1"),
    ],
)
def test_unknown_repeated_and_absent_metrics_are_refused(metrics: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        scores_of(metrics)
    assert len(scores_of(list(METRICS), (7,))) == len(TABLE)


def test_scores_have_the_same_bits_however_many_places_are_known() -> None:
    rng = np.random.default_rng(1)
    relevant = rng.random((30, 200)) < 0.4
    positives = np.full(30, 90)
    short = query_scores(relevant[:, :90], positives, scores_of(registry.DEFAULT_METRICS, (1,)))
    long = query_scores(relevant, positives, scores_of(registry.DEFAULT_METRICS, (1,)))
    assert all(np.array_equal(short[name], long[name]) for name in short)


def test_positives_leave_out_the_query_only_where_the_gallery_holds_it() -> None:
    gallery = np.array([5, 5, 7, 9])
    found = positives_per_query(np.array([5, 5, 7, 8, 9]), gallery, np.array([0, -1, 2, -1, -1]))
    assert found.tolist() == [1, 2, 0, 0, 1]


def test_skipped_queries_do_not_count_in_the_mean() -> None:
    assert registry.mean_scores({"p_at_1": np.array([1.0, np.nan, 0.0])}) == {"p_at_1": 0.5}


@pytest.mark.parametrize("values", [(0,), (2, 1), (1, 1), (-3,), (1.5,), ("1",)])
def test_recall_at_refuses_values_that_are_not_increasing_and_positive(values: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="recall_at"):
        scores_of(registry.DEFAULT_METRICS, values)


def random_rankings() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    relevant = rng.random((50, 30)) < 0.3
    return relevant, np.maximum(1, relevant.sum(axis=1) + rng.integers(0, 5, size=50))


def test_precision_at_10_is_the_share_of_relevant_items_among_the_first_ten() -> None:
    relevant, positives = random_rankings()
    found = query_scores(relevant, positives, [score_named("precision_at_10")])["precision_at_10"]
    assert found.tolist() == [sum(row[:10]) / 10 for row in relevant.tolist()]
    short = query_scores(np.array([[True, True]]), np.array([2]), [score_named("precision_at_10")])
    assert short["precision_at_10"].tolist() == [0.2]


def test_map_at_10_divides_by_what_ten_places_can_hold() -> None:
    relevant, positives = random_rankings()
    found = query_scores(relevant, positives, [score_named("map_at_10")])["map_at_10"]
    for row, r, value in zip(relevant, positives, found, strict=True):
        total = sum(sum(row[: i + 1]) / (i + 1) for i in range(10) if row[i])
        assert value == pytest.approx(total / min(r, 10), abs=1e-15)
    perfect = np.arange(30) < 25
    assert query_scores(perfect[None], np.array([25]), [score_named("map_at_10")])["map_at_10"].tolist() == [1.0]


def test_ndcg_at_10_equals_scikit_learn() -> None:
    from sklearn.metrics import ndcg_score

    relevant, _ = random_rankings()
    relevant[:, 0] |= ~relevant.any(axis=1)
    found = query_scores(relevant, relevant.sum(axis=1), [score_named("ndcg_at_10")])["ndcg_at_10"]
    by_rank = -np.arange(30, dtype=float)
    expected = [ndcg_score(row[None].astype(float), by_rank[None], k=10) for row in relevant]
    np.testing.assert_allclose(found, expected, atol=1e-14)


def test_every_entry_of_the_table_says_what_it_is() -> None:
    for metric in TABLE:
        assert metric.formula and metric.source and metric.label
        assert ("{k}" in metric.label) == metric.takes_k
    assert score_named("ndcg_at_5").label == "NDCG@5"
