"""The search of a set within itself by half of the products against that by all of them."""

import numpy as np
import pytest
import torch

from dmlbench.evaluation.search import halves, unit_vectors
from dmlbench.evaluation.search.candidates import column_of, settle
from dmlbench.evaluation.search.halves import ranked_by_halves
from dmlbench.evaluation.search.similarity import unit_rows
from dmlbench.evaluation.search.unit_vectors import UnitSearch, unit_search
from dmlbench.types import EmbeddingSet


def clustered(size: int, *, seed: int, width: int = 6) -> EmbeddingSet:
    """Rows with duplicates next to each other and far apart."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(size, width)) + 2 * rng.normal(size=(9, width))[rng.integers(0, 9, size)]
    rows[size // 2 : size // 2 + 30] = rows[:30]
    rows[5:9] = rows[4]
    return EmbeddingSet(torch.from_numpy(rows).float(), torch.arange(size) % 9, torch.arange(size) * 3)


def nearest_by_halves(searched: UnitSearch, k: int, wanted: np.ndarray) -> dict[int, list[int]]:
    found = {}
    for part, column in ranked_by_halves(
        searched,
        k,
        lambda part, keys: settle(keys, searched.exact(part), k=k, slack=searched.slack)[0][:, :k],
        wanted=wanted,
    ):
        found.update(zip(part.tolist(), column.tolist(), strict=True))
    return found


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("k", "block", "entries"), [(1, 16, 2**23), (7, 40, 4000), (19, 64, 2**23)])
def test_half_of_the_products_find_what_a_sort_of_float64_products_does(
    k: int, block: int, entries: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(halves, "_block_rows", lambda size: block)
    monkeypatch.setattr(halves, "_TILE_ENTRIES", entries)
    monkeypatch.setattr(halves, "num_threads", lambda: threads)
    queries = clustered(250, seed=k)
    unit = unit_rows(queries.rows).astype(np.float64)
    wanted = np.flatnonzero(np.arange(250) % 8 != 3)
    found = nearest_by_halves(unit_search(queries, None), k, wanted)
    assert list(found) == wanted.tolist()
    for q, columns in found.items():
        similarity = np.sum(unit[q] * unit, axis=1)
        similarity[q] = -np.inf
        assert columns == np.lexsort((np.arange(250), -similarity))[:k].tolist()


def test_candidates_of_later_rows_are_narrowed_to_those_that_others_do_not_rule_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(halves, "_block_rows", lambda size: 32)
    sizes = []

    def finish(part: np.ndarray, keys: np.ndarray) -> None:
        sizes.append((column_of(keys) >= 0).sum(axis=1).mean())

    rows = torch.randn(600, 8, generator=torch.Generator().manual_seed(0))
    queries = EmbeddingSet(rows, torch.zeros(600), torch.arange(600))
    list(ranked_by_halves(unit_search(queries, None), 5, finish, wanted=np.arange(600)))
    assert max(sizes) < 25  # of 600


def test_halves_serve_a_set_within_itself_alone_and_only_where_both_sides_see_one_similarity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queries, gallery = clustered(60, seed=1), clustered(60, seed=2)
    gallery = EmbeddingSet(gallery.rows, gallery.labels, gallery.ids + 1)
    one_way = EmbeddingSet(queries.rows + 50, queries.labels, queries.ids)  # centered, which moves the queries alone
    called = []
    monkeypatch.setattr(unit_vectors, "ranked_by_halves", lambda *_, **__: iter(called.append(1) or ()))

    def uses_halves(search: UnitSearch, *, pays: bool = True) -> bool:
        monkeypatch.setattr(unit_vectors, "halves_pay", lambda *_, **__: pays)
        called.clear()
        list(search.ranked(7, lambda part, keys: None, wanted=np.arange(60)))
        return bool(called)

    assert uses_halves(unit_search(queries, None))
    assert not uses_halves(unit_search(queries, None), pays=False)
    assert not uses_halves(unit_search(queries, gallery))
    assert not uses_halves(unit_search(one_way, None))
