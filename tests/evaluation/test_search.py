"""Keys, narrowing, and the routes of the search that a CPU with memory to spare does not take by itself."""

import copy
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from dmlbench.evaluation.evaluate import evaluate
from dmlbench.evaluation.search import candidates
from dmlbench.evaluation.search.candidates import (
    PADDING,
    TopK,
    column_of,
    kth_bound,
    marked,
    pack,
    settle,
    value_of,
)
from dmlbench.evaluation.search.unit_vectors import UnitSearch
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
        found = settle(keys | marks, lambda r, c: similarity[r, c], k=k, slack=slack, by_mark=by_mark)[:, :k]
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


def test_tiles_are_halved_until_the_device_has_memory_and_results_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(2)
    queries, gallery = embedding_set(rng.normal(size=(50, 10))), embedding_set(rng.normal(size=(80, 10)), start=30)
    host = UnitSearch(queries, gallery)
    device = on_tensors(host)
    entries, sizes, tiles = candidates.entries_above, [], []

    def small_memory(similarity: torch.Tensor, floor: np.ndarray, *, first_column: int) -> object:
        assert not [tile for tile in tiles if tile() is not None], "a tile is held while its halves are computed"
        tiles.append(weakref.ref(similarity))
        sizes.append(similarity.shape[1])
        if similarity.shape[1] > 15:
            raise torch.OutOfMemoryError("faked")
        return entries(similarity, floor, first_column=first_column)

    expected = columns_found(host, 60)
    assert np.array_equal(columns_found(device, 60), expected)
    monkeypatch.setattr(candidates, "entries_above", small_memory)
    assert np.array_equal(columns_found(device, 60), expected)
    assert sizes == [80, *2 * [40, 20, 10, 10, 20, 10, 10]]

    def no_memory(*operands: object, **options: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("faked")

    monkeypatch.setattr(candidates, "entries_above", no_memory)
    with pytest.raises(RunError, match=r"no memory left for a tile of one item; .* or set evaluation\.device"):
        columns_found(device, 60)


def test_a_gallery_beyond_the_device_is_moved_there_tile_by_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = embedding_set(np.random.default_rng(6).normal(size=(90, 6)))
    host = UnitSearch(sets, None, tile_bytes=30_000)
    move = torch.Tensor.to

    def small_memory(tensor: torch.Tensor, *arguments: object) -> torch.Tensor:
        if len(tensor) == 90:
            raise torch.OutOfMemoryError("faked")
        return move(tensor, *arguments)

    expected = columns_found(host, 7)
    monkeypatch.setattr(torch.Tensor, "to", small_memory)
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


def test_the_torch_setting_of_threads_survives() -> None:
    threads = torch.get_num_threads()
    evaluate(embedding_set(np.random.default_rng(4).normal(size=(40, 3))), None, EvaluationSpec())
    assert torch.get_num_threads() == threads


@pytest.mark.slow
@pytest.mark.parametrize("work", ["sop:128", "million:128", "collections"])
def test_the_peak_stays_within_the_setting(repository: Path, work: str) -> None:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the peak is read from Linux's /proc")
    script = str(repository / "scripts" / "bench_evaluation.py")
    command = [sys.executable, script, "--child", work, "--threads", "2", "--scale", "0.3"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[1]) <= EvaluationSpec().tile_bytes
