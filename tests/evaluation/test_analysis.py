"""Tables of queries and classes, and the hardest queries, against loops."""

import io

import numpy as np
import pandas as pd
import pytest
import torch

from dmlbench.evaluation.evaluate import evaluate, hardest_queries, per_class_table, per_query_table, to_csv
from dmlbench.types import ConfigError, EmbeddingSet


def example() -> EmbeddingSet:
    rng = np.random.default_rng(3)
    labels = np.append(rng.integers(0, 4, 39), 9)  # class 9 has one image
    return EmbeddingSet(torch.from_numpy(rng.normal(size=(40, 3)).astype(np.float32)), torch.from_numpy(labels),
                        torch.from_numpy(rng.permutation(40) + 100))  # fmt: skip


def test_class_scores_are_means_over_the_queries_of_the_class_that_have_a_positive() -> None:
    queries = example()
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
    queries = example()
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
    queries = example()
    evaluation = evaluate(queries)
    for count, metric, message in ((0, "map_at_r", "at least 1"), (1, "nmi", "'nmi' is no score of single queries")):
        with pytest.raises(ConfigError, match=message):
            hardest_queries(queries, None, evaluation, count=count, metric=metric)


def test_tables_read_back_to_the_same_numbers() -> None:
    queries = example()
    table = per_query_table(queries, evaluate(queries))
    back = pd.read_csv(io.BytesIO(to_csv(table)), dtype=str, keep_default_na=False)  # pandas' own reading rounds
    assert list(back) == list(table)
    for name in table:
        np.testing.assert_array_equal([float(text) for text in back[name]], table[name])
