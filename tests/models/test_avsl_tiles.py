"""AVSL's tiles: against the formula over all pairs at once, in every mode, type, size and under threads."""

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import get_args

import pytest
import torch
from numpy.testing import assert_allclose
from small_models import avsl_distance, avsl_rows

from dmlbench.models import avsl_tiles
from dmlbench.models.avsl_distance import Inference
from dmlbench.models.avsl_tiles import AvslTiles
from dmlbench.runtime import single_threaded_torch


@pytest.fixture(autouse=True)
def _one_thread():
    with single_threaded_torch():  # chunks as small as here are slow in several
        yield


def sample(queries, gallery, **options):
    """A distance, and rows of queries and of a gallery."""
    distance = avsl_distance(**options)
    return distance, avsl_rows(distance, queries), avsl_rows(distance, gallery, seed=1)


def all_pairs(distance, queries, gallery):
    with torch.no_grad():
        return distance.compute(queries[:, None], gallery[None])


# 16 pairs per chunk, so that both axes have several chunks and odd ends
def small_chunks(distance, **options):
    dtype = options.get("dtype") or distance.alpha.dtype
    return AvslTiles(distance, buffer_bytes=16 * distance.level_size * dtype.itemsize, **options)


@pytest.mark.parametrize("variant", ["official", "paper"])
@pytest.mark.parametrize("inference", get_args(Inference))
@pytest.mark.parametrize("num_levels", [2, 3, 4])
def test_tiles_are_the_formula_over_all_pairs(num_levels, inference, variant):
    distance, x, y = sample(9, 11, num_levels=num_levels, inference=inference, variant=variant)
    expected = all_pairs(distance, x, y)
    for tiles in (AvslTiles(distance), small_chunks(distance)):
        assert_allclose(tiles(x, y), expected, rtol=1e-12, atol=1e-14)
        found = tiles.pairs(x.repeat(5, 1), y[:9].repeat(5, 1))
        assert_allclose(found, expected.diagonal().repeat(5), rtol=1e-12, atol=1e-14)
    narrow = small_chunks(distance, dtype=torch.float32)(x.float(), y.float())
    assert narrow.dtype == torch.float32
    assert_allclose(narrow.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("queries", "gallery"), [(0, 3), (3, 0), (0, 0), (1, 1), (1, 200), (200, 1), (3, 53), (37, 2)])
@pytest.mark.parametrize("inference", ["rectified", "concat"])
def test_any_number_of_rows(queries, gallery, inference):
    distance, x, y = sample(queries, gallery, level_size=7, inference=inference)
    for tiles in (AvslTiles(distance), small_chunks(distance)):
        found = tiles(x, y)
        assert found.shape == (queries, gallery)
        assert_allclose(found, all_pairs(distance, x, y), rtol=1e-12, atol=1e-14)


def test_compute_mat_without_grad_is_that_with_grad_in_the_rows_type():
    distance, x, y = sample(5, 6)
    with_grad = distance.compute_mat(x, y)
    assert with_grad.requires_grad
    with torch.no_grad():
        found = distance.compute_mat(x, y)
    assert found.dtype == torch.float64 and not found.requires_grad
    assert_allclose(found, with_grad.detach(), rtol=1e-12, atol=1e-14)
    single = avsl_distance().float()
    with torch.no_grad():
        assert single.compute_mat(x.float(), y.float()).dtype == torch.float32
        assert single.compute_mat(x, y).dtype == torch.float64
    assert single.edges.dtype == torch.float32  # the model's own is left as it is


@pytest.mark.parametrize("inference", ["rectified", "reliable"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_images_are_0_apart_and_equally_far_from_others(inference, dtype):
    distance = avsl_distance(level_size=64, inference=inference)
    x, y = avsl_rows(distance, 3).to(dtype), avsl_rows(distance, 101, seed=1).to(dtype)
    y[[0, 13, 50, 99, 100]] = y[7].clone()
    x[1] = y[7]
    for tiles in (AvslTiles(distance, dtype=dtype), small_chunks(distance, dtype=dtype)):
        found = tiles(x, y)[:, [0, 7, 13, 50, 99, 100]]
        assert (found[1] == 0).all()
        # to the last bit with MKL and oneDNN, as promised there; to rounding with any library
        assert_allclose(found, found[:, :1].expand_as(found), rtol=1e-6 if dtype == torch.float32 else 1e-14, atol=0)
        if torch.backends.mkl.is_available():
            assert (found == found[:, :1]).all()


def test_threads_have_their_own_arrays():
    distance = avsl_distance()
    rows = [avsl_rows(distance, 20, seed=seed) for seed in range(8)]
    tiles = small_chunks(distance)
    alone = [tiles(x, rows[0]) for x in rows]
    with ThreadPoolExecutor(4) as pool:
        for found, expected in zip(pool.map(lambda x: tiles(x, rows[0]), rows), alone, strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("first", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("second", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_one_object_serves_under_every_mode(first, second):
    distance, x, y = sample(4, 5)
    with first():
        tiles = distance.tiles()
        one = tiles(x, y)
    with second():
        two = tiles(x.requires_grad_(), y)
        assert not two.requires_grad
    assert torch.equal(one.clone(), two.clone())


def test_later_training_does_not_change_tiles():
    distance = avsl_distance()
    x = avsl_rows(distance, 4)
    tiles = distance.tiles()
    before = tiles(x, x)
    with torch.no_grad():
        distance.edges.add_(torch.eye(24))
        distance.alpha.add_(1)
    assert torch.equal(tiles(x, x), before)
    assert not torch.equal(distance.tiles()(x, x), before)


@pytest.mark.parametrize("num_levels", [2, 4])
def test_what_the_compiler_fuses_is_the_formula(num_levels):
    distance, x, y = sample(5, 6, num_levels=num_levels)
    (e, c), (f, d) = distance.levels(x), distance.levels(y)
    with torch.no_grad():
        scaled, beta = distance.gain * distance.alpha * c[:, None, 1:], distance.gain * distance.beta
        found = avsl_tiles._rectified(e[:, None], scaled, f[None], d[None], beta, distance.normalized_edges().mT)
    assert_allclose(found, all_pairs(distance, x, y), rtol=1e-12, atol=1e-14)


def test_a_chunk_that_cannot_be_compiled_is_computed_and_said_so_once(monkeypatch, caplog):
    def broken(*_):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(avsl_tiles, "_compiled", lambda: broken)
    monkeypatch.setattr(AvslTiles, "_can_compile", True)
    distance, x, y = sample(9, 11)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            found = small_chunks(distance, compiled=True)(x, y)
    assert_allclose(found, all_pairs(distance, x, y), rtol=1e-12, atol=1e-14)
    assert [record.message for record in caplog.records if "no compiler" in record.message] == [
        "torch.compile failed for AVSL distances, using slower eager mode: no compiler"
    ]


@pytest.mark.slow
def test_compiled_chunks_are_the_formula_at_every_size(monkeypatch):
    monkeypatch.setattr(AvslTiles, "_can_compile", True)
    distance = avsl_distance(num_levels=2)
    tiles = small_chunks(distance, compiled=True)
    for queries, gallery in ((9, 11), (20, 33)):
        x, y = avsl_rows(distance, queries), avsl_rows(distance, gallery, seed=1)
        assert_allclose(tiles(x, y), all_pairs(distance, x, y), rtol=1e-12, atol=1e-14)
    assert AvslTiles._can_compile, "the compiler failed"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("inference", get_args(Inference))
def test_tiles_on_a_gpu_are_those_on_the_host(inference):
    distance, x, y = sample(40, 50, inference=inference)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        found = small_chunks(distance, device="cuda", dtype=dtype)(x.cuda(), y.cuda())
        assert found.is_cuda
        assert_allclose(found.cpu().double(), all_pairs(distance, x, y), rtol=tolerance, atol=tolerance / 10)


def test_arrays_are_few_and_do_not_grow_with_the_pairs():
    distance = avsl_distance()
    tiles = small_chunks(distance)
    for count in (3, 40):
        tiles(avsl_rows(distance, count), avsl_rows(distance, count, seed=1))
        assert sum(array.nbytes for array in vars(tiles._buffers).values()) == tiles.working_bytes
    assert AvslTiles(distance, buffer_bytes=1).working_bytes == tiles.working_bytes  # of 16 pairs, the least


def test_float64_tiles_of_a_float32_distance_are_exact():
    single = avsl_distance().float()
    x = avsl_rows(single, 8).float()
    exact = single.tiles(dtype=torch.float64)(x, x)
    assert_allclose(exact, all_pairs(avsl_distance().float().double(), x.double(), x.double()), rtol=1e-12, atol=1e-14)


def test_a_tile_is_the_transposed_one_up_to_rounding():
    tiles = avsl_distance(level_size=64).float().tiles()
    x = avsl_rows(avsl_distance(level_size=64), 40).float()
    assert_allclose(tiles(x[:15], x[15:]), tiles(x[15:], x[:15]).T, rtol=1e-5, atol=1e-7)
