"""The similarity that decides, and the proven error of the product that proposes."""

import math

import numpy as np
import pytest
import torch

from dmlbench.evaluation.search.scan import strict_float32_products
from dmlbench.evaluation.search.unit_vectors import (
    exact_similarities,
    fast_product,
    halving_sum,
    hold_unit_rows,
    unit_rows,
)


def test_halving_sum_equals_exact_summation_for_every_width() -> None:
    rng = np.random.default_rng(0)
    for width in (0, 1, 2, 3, 7, 8, 100):
        terms = rng.normal(size=(5, width))
        expected = [math.fsum(row) for row in terms]
        np.testing.assert_allclose(halving_sum(terms.copy()), expected, rtol=1e-13, atol=1e-15)


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
