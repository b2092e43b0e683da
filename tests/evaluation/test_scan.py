"""The search of a set within itself by half of the products against that by all of them."""

import numpy as np
import pytest
import torch

from dmlbench.evaluation.search import unit_vectors
from dmlbench.evaluation.search.candidates import column_of, settle
from dmlbench.evaluation.search.scan import ScanPlan
from dmlbench.evaluation.search.unit_vectors import UnitSearch, unit_rows
from dmlbench.types import EmbeddingSet


def clustered(size: int, *, seed: int, width: int = 6) -> EmbeddingSet:
    """Rows with duplicates next to each other and far apart."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(size, width)) + 2 * rng.normal(size=(9, width))[rng.integers(0, 9, size)]
    rows[size // 2 : size // 2 + 30] = rows[:30]
    rows[5:9] = rows[4]
    return EmbeddingSet(torch.from_numpy(rows).float(), torch.arange(size) % 9, torch.arange(size) * 3)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("k", "rows", "columns"), [(1, 16, 250), (7, 40, 100), (19, 64, 250)])
def test_half_of_the_products_find_what_a_sort_of_float64_products_does(
    k: int, rows: int, columns: int, threads: int
) -> None:
    queries = clustered(250, seed=k)
    unit = unit_rows(queries.rows).astype(np.float64)
    wanted = np.flatnonzero(np.arange(250) % 8 != 3)
    search = UnitSearch(queries, None)

    def finish(part: np.ndarray, keys: np.ndarray) -> np.ndarray:
        return column_of(settle(keys, search.exact(part), k=k, slack=search.slack)[:, :k])

    plan = ScanPlan(rows, columns, threads, by_half=True)
    found = [
        (q, column)
        for part, nearest in search.ranked(k, finish, wanted=wanted, plan=plan)
        for q, column in zip(part.tolist(), nearest.tolist(), strict=True)
    ]
    assert [q for q, _ in found] == wanted.tolist()
    for q, columns_found in found:
        similarity = np.sum(unit[q] * unit, axis=1)
        similarity[q] = -np.inf
        assert columns_found == np.lexsort((np.arange(250), -similarity))[:k].tolist()


def test_candidates_of_later_rows_are_narrowed_to_those_that_others_do_not_rule_out() -> None:
    sizes = []

    def finish(part: np.ndarray, keys: np.ndarray) -> None:
        sizes.append((column_of(keys) >= 0).sum(axis=1).mean())

    rows = torch.randn(600, 8, generator=torch.Generator().manual_seed(0))
    queries = EmbeddingSet(rows, torch.zeros(600), torch.arange(600))
    plan = ScanPlan(32, 600, 1, by_half=True)
    list(UnitSearch(queries, None).ranked(5, finish, wanted=np.arange(600), plan=plan))
    assert max(sizes) < 25  # of 600


def test_halves_serve_a_set_within_itself_whose_similarities_are_symmetric(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queries, gallery = clustered(60, seed=1), clustered(60, seed=2)
    gallery = EmbeddingSet(gallery.rows, gallery.labels, gallery.ids + 1)
    one_way = EmbeddingSet(queries.rows + 50, queries.labels, queries.ids)  # centered, which moves the queries alone

    def uses_halves(search: UnitSearch, *, pays: bool = True) -> bool:
        monkeypatch.setattr(unit_vectors, "_GAIN", 0 if pays else 10**9)
        return search.plan(3, 60).by_half

    assert uses_halves(UnitSearch(queries, None))
    assert not uses_halves(UnitSearch(queries, None), pays=False)
    assert not uses_halves(UnitSearch(queries, gallery))
    assert not uses_halves(UnitSearch(one_way, None))
