"""Scores of embedding sets: recorded values, loops over exact arithmetic, equality of all routes, and their tables."""

import importlib.util
import io
import tracemalloc

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.typing import NDArray

from dmlbench.evaluation.evaluate import (
    Evaluation,
    evaluate,
    hardest_queries,
    per_class_table,
    per_query_table,
    ranks_like_unit_vectors,
    to_csv,
)
from dmlbench.evaluation.metrics.registry import METRICS, score_names, scores_of
from dmlbench.evaluation.search.rerank import nearest
from dmlbench.evaluation.search.unit_vectors import TILE_BYTES, BackEnd, unit_rows
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.types import ConfigError, EmbeddingSet, RunError

CASES = ("single_unbalanced", "single_no_singletons", "query_gallery", "single_large_n_gt_1001", "perfect_clusters")
RECALL_AT = (1, 2, 4, 8, 10, 100)
QUERY_METRICS = ("p_at_1", "recall_at_k", "r_precision", "map_at_r", "map", "oodml_map_at_1000")
BACK_ENDS: tuple[BackEnd, ...] = ("torch", "faiss") if importlib.util.find_spec("faiss") else ("torch",)


def embedding_set(rows: NDArray, labels: NDArray, ids: NDArray | None = None) -> EmbeddingSet:
    ids = np.arange(len(rows)) if ids is None else ids
    return EmbeddingSet(
        torch.from_numpy(np.asarray(rows, dtype=np.float32)),
        torch.from_numpy(np.asarray(labels, dtype=np.int64)),
        torch.from_numpy(np.asarray(ids, dtype=np.int64)),
    )


def by_loops(queries: EmbeddingSet, gallery: EmbeddingSet | None, recall_at: tuple[int, ...]) -> dict[str, list[float]]:
    """Every score from a sorted list per query, with float64 inner products and the rule for ties."""
    reference = queries if gallery is None else gallery
    x, y = unit_rows(queries.rows).astype(np.float64), unit_rows(reference.rows).astype(np.float64)
    scores: dict[str, list[float]] = {name: [] for name in score_names(scores_of(QUERY_METRICS, recall_at))}
    for q in range(len(queries)):
        # equal rows give equal sums here, so duplicates tie
        items = [(-float(np.sum(x[q] * y[g])), g) for g in range(len(reference)) if reference.ids[g] != queries.ids[q]]
        marks = [bool(reference.labels[g] == queries.labels[q]) for _, g in sorted(items)]
        r = sum(marks)
        if r == 0:
            for values in scores.values():
                values.append(np.nan)
            continue
        scores["p_at_1"].append(float(marks[0]))
        scores["r_precision"].append(sum(marks[:r]) / r)
        scores["map_at_r"].append(sum(sum(marks[: i + 1]) / (i + 1) for i in range(r) if marks[i]) / r)
        precision = [sum(marks[: i + 1]) / (i + 1) for i in range(len(marks)) if marks[i]]
        scores["map"].append(sum(precision) / r)
        scores["oodml_map_at_1000"].append(sum(precision[: sum(marks[:1000])]) / (r + 1))
        for k in recall_at:
            scores[f"recall_at_{k}"].append(float(any(marks[:k])))
    return scores


def assert_equals_loops(result: Evaluation, expected: dict[str, list[float]]) -> None:
    assert result.per_query
    for name, values in result.per_query.items():
        np.testing.assert_allclose(values, expected[name], rtol=0, atol=1e-14, err_msg=name)


def difficult_set(seed: int, *, size: int = 90, dimension: int = 6) -> EmbeddingSet:
    """Rows with many exact duplicates across classes, rows one rounding apart, one-image classes, unordered ids."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(size // 3, dimension)).astype(np.float32)
    twins = rows[rng.integers(0, len(rows), size // 3)]
    close = np.nextafter(rows[rng.integers(0, len(rows), size - 2 * (size // 3))], np.float32(9), dtype=np.float32)
    labels = rng.integers(0, 8, size)
    labels[:3] = [100, 101, 102]
    return embedding_set(np.concatenate([rows, twins, close]), labels, rng.permutation(1000)[:size])


def nearly_constant_set() -> EmbeddingSet:
    rng = np.random.default_rng(3)
    return embedding_set(1 + 1e-4 * rng.normal(size=(150, 16)), rng.integers(0, 5, 150))


@pytest.mark.parametrize(
    ("queries", "recall_at", "skipped"),
    [
        *(
            (embedding_set(np.full((size, 4), value), np.arange(size) % 3), (1, 2), 0)
            for size in (6, 40)
            for value in (0.0, 1.0)
        ),
        (nearly_constant_set(), (1, 2, 4, 8), 0),
        *((difficult_set(seed), (1, 2, 5, 500), 3) for seed in range(2)),
    ],
)
def test_scores_equal_loops(queries: EmbeddingSet, recall_at: tuple[int, ...], skipped: int) -> None:
    result = evaluate(queries, None, EvaluationSpec(recall_at))
    assert result.n_skipped_queries >= skipped
    assert_equals_loops(result, by_loops(queries, None, recall_at))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("back_end", ["torch", "faiss"])
def test_scores_equal_recorded_values_of_other_code(golden, golden_meta, case: str, back_end: BackEnd) -> None:
    """golden/metrics.npz: an own brute force in float64 and pytorch-metric-learning 2.9.0."""
    if back_end == "faiss":
        pytest.importorskip("faiss", reason="extra faiss-cpu")
    recorded = golden("metrics", f"{case}_")
    facts = next(c for c in golden_meta("metrics")["cases"] if c["case"] == case)
    queries = embedding_set(recorded["query"], recorded["query_labels"])
    gallery = None
    if not facts["self_excluded"]:
        ids = np.arange(len(recorded["gallery"])) + 10_000
        gallery = embedding_set(recorded["gallery"], recorded["gallery_labels"], ids)
    result = evaluate(queries, gallery, EvaluationSpec(RECALL_AT, back_end, metrics=QUERY_METRICS))
    assert (result.n_query, result.n_gallery) == (facts["n_query"], facts["n_gallery"])
    assert result.n_skipped_queries == facts["queries_without_positive"]
    for k in RECALL_AT:
        assert result.scores[f"recall_at_{k}"] == pytest.approx(recorded[f"np_recall_at_{k}_valid_queries"])
    names = {"p_at_1": "precision_at_1", "r_precision": "r_precision"}
    for ours, theirs in {**names, "map_at_r": "map_at_r"}.items():
        assert result.scores[ours] == pytest.approx(recorded[f"np_{theirs}"], abs=1e-12)
    for ours, theirs in {**names, "map_at_r": "mean_average_precision_at_r"}.items():
        assert result.scores[ours] == pytest.approx(recorded[f"pml_{theirs}"], abs=1e-12)
    assert result.scores["map"] == pytest.approx(float(recorded["np_map_full"]), abs=1e-12)
    if facts["self_excluded"]:
        positives = (queries.labels[:, None] == queries.labels).sum(dim=1).numpy() - 1
        by_positives = result.per_query["oodml_map_at_1000"] * (positives + 1) / np.maximum(positives, 1)
        assert np.nanmean(by_positives) == pytest.approx(float(recorded["np_map_at_1000_div_R"]), abs=1e-12)
    if "oodml_mAP_1000" in recorded:
        # The recorded mean counts queries without a positive as 0; its float32 search swaps near neighbors.
        mean = np.nan_to_num(result.per_query["oodml_map_at_1000"]).mean()
        assert mean == pytest.approx(float(recorded["oodml_mAP_1000"]), abs=1e-7)


@pytest.mark.parametrize("seed", [0, 2])
@pytest.mark.parametrize("separate", [False, True])
def test_whole_rankings_equal_loops_by_every_route(seed: int, separate: bool) -> None:
    """Duplicates, near ties, one-image classes; tiles down to one query; a gallery that holds half of the queries."""
    everything = difficult_set(seed, size=60, dimension=3 + 5 * seed)
    queries, gallery = everything, None
    if separate:
        queries = EmbeddingSet(everything.rows[:40], everything.labels[:40], everything.ids[:40])
        gallery = EmbeddingSet(everything.rows[20:], everything.labels[20:], everything.ids[20:])
    expected = by_loops(queries, gallery, (1, 7, 500))
    results = [
        evaluate(queries, gallery, EvaluationSpec((1, 7, 500), back_end, tile_bytes, QUERY_METRICS))
        for back_end in BACK_ENDS
        for tile_bytes in (4096, 50_000, TILE_BYTES)
    ]
    for result in results:
        assert list(result.per_query) == list(expected)
        assert separate or result.n_skipped_queries >= 3
        assert_equals_loops(result, expected)
        assert result.scores == results[0].scores


def test_metrics_asked_for_do_not_move_the_others() -> None:
    queries = difficult_set(11)
    usual, every = evaluate(queries), evaluate(queries, None, EvaluationSpec(metrics=tuple(METRICS)))
    assert set(every.scores) == {*usual.scores, *score_names(scores_of(tuple(METRICS)))}
    assert {name: every.scores[name] for name in usual.scores} == usual.scores
    assert usual.kmeans is None
    assert every.kmeans is not None and every.kmeans.endswith("seed 0")
    few = evaluate(queries, None, EvaluationSpec(metrics=("inter_class_distance", "map_at_r")))
    assert few.scores == {name: every.scores[name] for name in ("map_at_r", "inter_class_distance")}


def test_memory_of_whole_rankings_is_bounded_by_the_tile() -> None:
    rng = np.random.default_rng(0)
    queries = embedding_set(rng.normal(size=(700, 16)), rng.integers(0, 200, 700))
    tracemalloc.start()  # counts numpy's arrays, not torch's
    try:
        evaluate(queries, None, EvaluationSpec(tile_bytes=2**20, metrics=("map",)))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**20  # all 700 x 700 pairs at once take 33 MB


def test_all_routes_give_equal_bits() -> None:
    """Back ends, tile sizes and thread counts on rows with duplicates and near ties, concentrated and spread."""
    pytest.importorskip("faiss", reason="extra faiss-cpu")
    threads = torch.get_num_threads()
    for offset in (0.0, 30.0):
        base = difficult_set(7, size=120, dimension=24)
        queries = EmbeddingSet(base.rows + offset, base.labels, base.ids)
        results = []
        for count, back_end, tile_bytes in (
            (1, "torch", TILE_BYTES), (2, "torch", 4096), (1, "faiss", 30_000), (2, "faiss", TILE_BYTES),
        ):  # fmt: skip
            torch.set_num_threads(count)
            results.append(evaluate(queries, None, EvaluationSpec((1, 2, 9), back_end, tile_bytes)))
        torch.set_num_threads(threads)
        for other in results[1:]:
            assert other.scores == results[0].scores
            for name, values in results[0].per_query.items():
                assert np.array_equal(other.per_query[name], values, equal_nan=True)


def test_scores_equal_those_of_pytorch_metric_learning() -> None:
    from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

    rng = np.random.default_rng(5)
    labels = rng.integers(0, 12, 300)
    queries = embedding_set(rng.normal(size=(12, 16))[labels] + rng.normal(size=(300, 16)), labels)
    names = {"p_at_1": "precision_at_1", "r_precision": "r_precision", "map_at_r": "mean_average_precision_at_r"}
    calculator = AccuracyCalculator(include=tuple(names.values()), k="max_bin_count", device=torch.device("cpu"))
    theirs = calculator.get_accuracy(torch.from_numpy(unit_rows(queries.rows)), queries.labels)
    ours = evaluate(queries).scores
    assert {name: ours[name] for name in names} == pytest.approx({a: theirs[b] for a, b in names.items()}, abs=1e-6)


def test_unit_euclidean_distances_take_the_exact_route() -> None:
    from pytorch_metric_learning.distances import CosineSimilarity, LpDistance

    queries = difficult_set(1)
    expected = evaluate(queries).per_query["map_at_r"]
    assert not ranks_like_unit_vectors(CosineSimilarity(power=2))  # opposite rows would be as near as equal ones
    for distance in (LpDistance(), LpDistance(power=2), CosineSimilarity()):
        assert ranks_like_unit_vectors(distance)
        assert np.array_equal(evaluate(queries, distance=distance).per_query["map_at_r"], expected, equal_nan=True)


def test_p_at_1_by_chance_is_that_of_random_rankings() -> None:
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 5, 60)
    queries, gallery = embedding_set(np.eye(60), labels), embedding_set(np.eye(60)[20:], labels[20:], np.arange(20, 60))
    for one, ids in ((None, np.arange(60)), (gallery, np.arange(20, 60))):
        hits = [labels[generator.choice(ids[ids != query], 2000)] == labels[query] for query in range(60)]
        drawn = np.mean(hits, axis=0)
        mean, std = evaluate(queries, one).p_at_1_by_chance
        share = np.array([np.mean(labels[ids[ids != query]] == labels[query]) for query in range(60)])
        assert mean == pytest.approx(share.mean(), abs=1e-12)
        assert std == pytest.approx(np.sqrt((share * (1 - share)).sum()) / 60, abs=1e-12)
        assert mean == pytest.approx(np.mean(drawn), abs=4 * std / np.sqrt(2000))
        assert std == pytest.approx(np.std(drawn), rel=0.07)


def test_nearest_orders_by_distance_then_by_gallery_index() -> None:
    queries = difficult_set(2)
    unit = unit_rows(queries.rows).astype(np.float64)
    found = nearest(queries, None, 7, tile_bytes=8192)
    for q in range(len(queries)):
        items = sorted((-float(np.sum(unit[q] * unit[g])), g) for g in range(len(queries)) if g != q)[:7]
        assert found.index[q].tolist() == [g for _, g in items]
        expected = [np.sqrt(max(0.0, 2 + 2 * s)) for s, _ in items]
        np.testing.assert_allclose(found.distance[q], expected, atol=1e-7)
    assert bool((found.distance.diff(dim=1) >= 0).all())


def test_sets_that_cannot_be_evaluated_are_refused_with_the_row_at_fault() -> None:
    ids = np.array([10, 11, 12, 13])
    good, broken = embedding_set(np.eye(4), [0, 0, 1, 1], ids), np.eye(4)
    broken[2, 1] = np.nan
    for queries, gallery, message in (
        (embedding_set(broken, [0, 0, 1, 1], ids), None, "row id 12 holds NaN"),
        (good, embedding_set(np.eye(3), [0, 1, 1]), "4 dimensions and a gallery with 3"),
        (good, embedding_set(np.eye(4)[:2], [0, 1], np.array([5, 5])), "ids: got 5 more than once"),
        (good, embedding_set(np.eye(4)[:2], [1, 1], np.array([11, 20])), "row id 11: got label 0 as a query and 1 in"),
        (embedding_set(np.zeros((0, 4)), []), None, "query rows: got 0, expected 1 to"),
    ):
        with pytest.raises(RunError, match=message):
            evaluate(queries, gallery)


def test_settings_out_of_range_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="tile_bytes"):
        EvaluationSpec(tile_bytes=10)
    with pytest.raises(ConfigError, match="recall_at"):
        EvaluationSpec(recall_at=(4, 2))
    with pytest.raises(ConfigError, match="recall_at: got none, but metrics has recall_at_k"):
        EvaluationSpec(recall_at=())
    assert EvaluationSpec(recall_at=(), metrics=("map_at_r",)).score_names == ("map_at_r",)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[faiss-cpu\]'"):
        evaluate(difficult_set(0), None, EvaluationSpec(back_end="faiss"))
    assert evaluate(difficult_set(0)).n_query == 90  # "auto" does without faiss


# Tables


def lettered() -> EmbeddingSet:
    rng = np.random.default_rng(3)
    labels = np.append(rng.integers(0, 4, 39), 9)  # class 9 has one image
    return embedding_set(rng.normal(size=(40, 3)), labels, rng.permutation(40) + 100)


def test_class_scores_are_means_over_the_queries_of_the_class_that_have_a_positive() -> None:
    queries = lettered()
    evaluation = evaluate(queries)
    table = per_class_table(queries, evaluation, class_names=[f"name {i}" for i in range(10)])
    assert table["label"].tolist() == [0, 1, 2, 3, 9]
    for _, row in table.iterrows():
        chosen = queries.labels.numpy() == row["label"]
        assert row["class"] == f"name {row['label']}"
        assert row["queries"] == chosen.sum()
        if row["label"] == 9:
            assert row["skipped"] == 1 and np.isnan(row["map_at_r"])
        else:
            assert row["skipped"] == 0
            assert row["map_at_r"] == pytest.approx(evaluation.per_query["map_at_r"][chosen].mean())


def test_hardest_queries_come_first_with_what_is_nearest_to_them() -> None:
    queries = lettered()
    evaluation = evaluate(queries)
    scores = evaluation.per_query["map_at_r"]
    found = hardest_queries(queries, None, evaluation, count=100, metric="map_at_r")
    assert len(found) == 39  # the lonely query has no score
    expected = sorted(range(39), key=lambda q: (scores[q], q))
    assert [query.id for query in found] == [int(queries.ids[q]) for q in expected]
    unit = torch.nn.functional.normalize(queries.rows.double())
    for query, q in zip(found[:5], expected, strict=False):
        distances = (unit - unit[q]).norm(dim=1)
        distances[q] = 9
        nearest = int(distances.argmin())
        assert (query.nearest_id, query.nearest_label) == (int(queries.ids[nearest]), int(queries.labels[nearest]))
        assert query.distance == pytest.approx(float(distances[nearest]), abs=1e-6)
        assert query.score == scores[q]


def test_counts_and_metrics_that_make_no_list_are_refused() -> None:
    queries = lettered()
    evaluation = evaluate(queries)
    for count, metric, message in ((0, "map_at_r", "at least 1"), (1, "nmi", "'nmi' is not a score of single queries")):
        with pytest.raises(ConfigError, match=message):
            hardest_queries(queries, None, evaluation, count=count, metric=metric)


def test_tables_read_back_to_the_same_numbers() -> None:
    queries = lettered()
    table = per_query_table(queries, evaluate(queries))
    back = pd.read_csv(io.BytesIO(to_csv(table)), dtype=str, keep_default_na=False)  # pandas' own reading rounds
    assert list(back) == list(table)
    for name in table:
        np.testing.assert_array_equal([float(text) for text in back[name]], table[name])
