"""The similarity that decides, the product that proposes, keys, narrowing, and routes for devices without memory."""

import copy
import math
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from dmlbench.evaluation.search import candidates, unit_vectors
from dmlbench.evaluation.search.candidates import (
    PADDING,
    TopK,
    column_of,
    kth_bound,
    marked,
    order_exactly,
    pack,
    value_of,
)
from dmlbench.evaluation.search.scan import ScanPlan, strict_float32_products
from dmlbench.evaluation.search.unit_vectors import (
    UnitSearch,
    exact_similarities,
    fast_product,
    hold_unit_rows,
    unit_rows,
)
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.types import EmbeddingSet, RunError


def embedding_set(rows: np.ndarray, start: int = 0) -> EmbeddingSet:
    labels = torch.arange(len(rows)) % 7
    return EmbeddingSet(torch.from_numpy(rows.astype(np.float32)), labels, torch.arange(start, start + len(rows)))


def columns_found(search: UnitSearch, k: int) -> np.ndarray:
    return np.concatenate([found for _, found in search.nearest(k, wanted=np.arange(len(search.query)))])


def on_tensors(search: UnitSearch) -> UnitSearch:
    """The code of an accelerator, on tensors of the CPU."""
    result = copy.copy(search)
    result.on_host = False
    return result


def test_halving_sum_equals_exact_summation_for_every_width() -> None:
    rng = np.random.default_rng(0)
    for width in (0, 1, 2, 3, 7, 8, 100):
        terms = rng.normal(size=(5, width))
        expected = [math.fsum(row) for row in terms]
        np.testing.assert_allclose(unit_vectors.halving_sum(terms.copy()), expected, rtol=1e-13, atol=1e-15)


def test_a_pair_has_the_same_bits_alone_and_among_others() -> None:
    rng = np.random.default_rng(1)
    source = torch.from_numpy(rng.normal(size=(700, 300)).astype(np.float32))
    rows, made_anew = hold_unit_rows(source, within_bytes=10**6), hold_unit_rows(source, within_bytes=10**5)
    assert rows.held is not None and made_anew.held is None
    left, right = rng.integers(0, 700, (2, 3000))
    together = exact_similarities(rows, rows, left, right)
    alone = [exact_similarities(rows, rows, left[i : i + 1], right[i : i + 1])[0] for i in range(0, 3000, 37)]
    assert together[::37].tolist() == alone
    assert np.array_equal(exact_similarities(made_anew, made_anew, left, right), together)


def test_unit_rows_do_not_depend_on_their_neighbors_and_keep_zero_rows() -> None:
    rows = torch.randn(50, 33, generator=torch.Generator().manual_seed(0))
    assert np.array_equal(unit_rows(rows)[13:20], unit_rows(rows[13:20]))
    np.testing.assert_allclose(np.linalg.norm(unit_rows(rows), axis=1), 1, atol=1e-6)
    assert not unit_rows(torch.zeros(2, 3)).any()


@pytest.mark.parametrize("offset", [0.0, 1.0, 100.0, 1e4])
@pytest.mark.parametrize("dimension", [3, 64, 512])
def test_fast_product_ranks_within_its_stated_error(offset: float, dimension: int) -> None:
    rng = np.random.default_rng(dimension)
    rows = unit_rows(torch.from_numpy((rng.normal(size=(80, dimension)) + offset).astype(np.float32)))
    product = fast_product(*(hold_unit_rows(torch.from_numpy(x), within_bytes=10**6) for x in (rows[:20], rows)))
    fast = (product.query(rows[:20]) @ product.gallery(rows).T).astype(np.float64)
    exact = rows[:20].astype(np.float64) @ rows.astype(np.float64).T
    deviation = fast - exact
    deviation -= deviation.mean(axis=1, keepdims=True)  # a constant per query changes no ranking
    assert np.abs(deviation).max() <= 2 * product.error
    assert np.abs(fast).max() <= product.largest + product.error
    if offset >= 100:
        assert product.error < 1e-6  # the plain product of nearly parallel rows would err by far more


@pytest.mark.parametrize(("name", "value", "strict"), [("allow_tf32", True, False), ("fp32_precision", "tf32", "ieee")])
def test_products_are_float32_inside_whichever_interface_allowed_less(
    name: str, value: bool | str, strict: bool | str
) -> None:
    matmul = torch.backends.cuda.matmul
    try:
        before = getattr(matmul, name)
    except AttributeError:
        pytest.skip(f"this PyTorch has no {name}")
    setattr(matmul, name, value)
    try:
        with strict_float32_products():
            assert getattr(matmul, name) == strict
        assert getattr(matmul, name) == value
    finally:
        setattr(matmul, name, before)
    assert torch.get_float32_matmul_precision() == "highest"


def test_keys_sort_by_value_then_column_and_give_both_back() -> None:
    rng = np.random.default_rng(0)
    value = rng.choice(np.array([-3.5, -1e-30, -0.0, 1e-30, 0.25, 2.0], dtype=np.float32), 300)
    column = rng.permutation(2**31 - 2 - np.arange(300))
    keys = pack(value, column)
    assert np.array_equal(value_of(keys), value)
    assert np.array_equal(column_of(keys), column)
    order = np.argsort(keys)
    expected = np.lexsort((column, np.signbit(value), -value))  # -0.0 behind 0.0 does no harm: both are near ties
    assert np.array_equal(order, expected)
    assert pack(np.array([-np.inf], dtype=np.float32), np.array([3])) == PADDING
    assert value_of(np.array([PADDING])) == -np.inf
    assert column_of(np.array([PADDING])) == -1


@pytest.mark.parametrize("width", [5, 63, 700])
@pytest.mark.parametrize("k", [1, 4, 60])
def test_narrowing_keeps_the_k_largest_of_every_row(width: int, k: int) -> None:
    rng = np.random.default_rng(width + k)
    similarity = rng.normal(size=(9, width)).astype(np.float32).round(1)  # many ties
    similarity[2, : width // 2] = -np.inf
    bound = kth_bound(similarity, k)
    top = TopK(9, k, slack=0.05)
    for start in range(0, width, 40):
        top.add(similarity[:, start : start + 40], first_column=100 + start)
    for row, kept in zip(similarity, column_of(top.keys), strict=True):
        finite = np.flatnonzero(row > -np.inf)
        kth = np.sort(row[finite])[-k] if len(finite) >= k else -np.inf
        needed = finite[row[finite] >= kth - np.float32(0.05)]
        assert set(needed + 100) <= set(kept.tolist())
        assert set(kept[kept >= 0].tolist()) <= set(finite + 100)
    assert all((row >= b).sum() >= k for row, b in zip(similarity, bound[:, 0], strict=True) if b > -np.inf)


@pytest.mark.parametrize("by_mark", [False, True])
def test_float32_noise_cannot_change_the_places_that_matter(by_mark: bool) -> None:
    rng = np.random.default_rng(0)
    shape, slack = (2000, 8), 0.25
    column = rng.permuted(np.tile(np.arange(8), (2000, 1)), axis=1)
    similarity = rng.integers(0, 3, shape).astype(np.float64)  # by row and column; many tie
    true = np.take_along_axis(similarity, column, axis=1)
    keys = pack((true + rng.uniform(-0.49, 0.49, shape) * slack).astype(np.float32), column)
    marks = rng.random(shape) < 0.5
    order = np.lexsort((column, -true), axis=1)
    for k in (1, 3, 8, 9):
        found = order_exactly(keys | marks, lambda r, c: similarity[r, c], k=k, slack=slack, by_mark=by_mark)[:, :k]
        assert np.array_equal(marked(found), np.take_along_axis(marks, order, axis=1)[:, :k])
        if not by_mark:
            assert np.array_equal(column_of(found), np.take_along_axis(column, order, axis=1)[:, :k])


@pytest.mark.parametrize("offset", [0.0, 8.0])
def test_unit_rows_made_anew_rank_as_those_that_are_held(offset: float) -> None:
    rng = np.random.default_rng(1)
    rows = (rng.normal(size=(150, 12)) + offset) * rng.uniform(0.01, 100, (150, 1))
    rows[70:90] = rows[:20]
    sets = embedding_set(rows)
    held, anew = (UnitSearch(sets, None, tile_bytes=size) for size in (2**24, 4096))
    assert held.query.held is not None and anew.query.held is None
    assert np.array_equal(columns_found(held, 9), columns_found(anew, 9))


def test_tiles_are_halved_until_the_device_has_memory_and_results_stay(limit_memory) -> None:
    rng = np.random.default_rng(2)
    queries, gallery = embedding_set(rng.normal(size=(50, 10))), embedding_set(rng.normal(size=(80, 10)), start=30)
    host = UnitSearch(queries, gallery)
    device = on_tensors(host)
    tiles: list[weakref.ref[torch.Tensor]] = []

    def width(similarity: torch.Tensor, floor: np.ndarray) -> int:
        assert not [tile for tile in tiles if tile() is not None], "a tile is held while its halves are computed"
        tiles.append(weakref.ref(similarity))
        return similarity.shape[1]

    expected = columns_found(host, 60)
    assert np.array_equal(columns_found(device, 60), expected)
    sizes = limit_memory(candidates, "entries_above", width, 15)
    assert np.array_equal(columns_found(device, 60), expected)
    assert sizes == [80, *2 * [40, 20, 10, 10, 20, 10, 10]]
    limit_memory(candidates, "entries_above", lambda similarity, floor: similarity.shape[1], 0)
    with pytest.raises(RunError, match=r"out of memory for a tile of one item\. .* or set evaluation\.device"):
        columns_found(device, 60)


def test_a_gallery_beyond_the_device_is_moved_there_tile_by_tile(limit_memory) -> None:
    sets = embedding_set(np.random.default_rng(6).normal(size=(90, 6)))
    host = UnitSearch(sets, None, tile_bytes=30_000)
    expected = columns_found(host, 7)
    limit_memory(torch.Tensor, "to", lambda tensor, *_: len(tensor), 89)
    assert np.array_equal(columns_found(on_tensors(host), 7), expected)


def test_more_neighbors_than_2048_are_found() -> None:
    sets = embedding_set(np.random.default_rng(3).normal(size=(2300, 4)))
    queries = EmbeddingSet(sets.rows[:5], sets.labels[:5], sets.ids[:5])
    host = UnitSearch(queries, sets)
    exact = -(host.query.take(slice(0, 5)).astype(np.float64) @ host.gallery.take(slice(0, 2300)).astype(np.float64).T)
    exact[np.arange(5), np.arange(5)] = np.inf
    expected = np.argsort(exact, axis=1, kind="stable")[:, :2200]
    for search in (host, on_tensors(host)):
        assert np.array_equal(columns_found(search, 2200), expected)


# A set within itself by half of the products


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
        return column_of(order_exactly(keys, search.exact(part), k=k, slack=search.slack)[:, :k])

    search.plan = lambda *_: ScanPlan(rows, columns, threads, by_half=True)
    found = [
        (q, column)
        for part, nearest in search.ranked(k, finish, wanted=wanted)
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
    search = UnitSearch(queries, None)
    search.plan = lambda *_: ScanPlan(32, 600, 1, by_half=True)
    list(search.ranked(5, finish, wanted=np.arange(600)))
    assert max(sizes) < 25  # of 600


def test_halves_serve_a_set_within_itself_whose_similarities_are_symmetric(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.slow
@pytest.mark.parametrize("work", ["sop:128", "million:128", "collections"])
def test_the_peak_stays_within_the_setting(repository: Path, work: str) -> None:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the peak is read from Linux's /proc")
    script = str(repository / "scripts" / "bench_evaluation.py")
    command = [sys.executable, script, "--child", work, "--threads", "2", "--scale", "0.3"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[1]) <= EvaluationSpec().tile_bytes
