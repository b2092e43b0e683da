"""Similarities of unit vectors that are the same numbers on every machine, and the error of a fast product of them.

THE similarity of two rows is the float64 inner product of their float32 unit vectors, summed in one fixed order.
Letters: N set, D dimensions, M pairs.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dmlbench.types import IntArray

FloatRows = NDArray[np.float32]

_CHUNK_BYTES = 2**20  # float64 products held at once: stays in a core's second-level cache
_FLOAT64_ERROR = 4e-15  # of ``exact_similarities`` itself: (log2 D + 2) 2^-53, for any D below 2^30

logger = logging.getLogger(__name__)


def halving_sum(terms: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sum ``terms`` [M, D] over D by adding the second half to the first until one column is left; destroys ``terms``.

    Only elementwise additions take part, so the order, and with it every bit, depends on D alone.
    """
    width = terms.shape[1]
    if width == 0:
        return np.zeros(len(terms))
    while width > 1:
        half = (width + 1) // 2
        terms[:, : width - half] += terms[:, half:width]
        width = half
    return terms[:, 0].copy()


def unit_rows(rows: Tensor) -> FloatRows:
    """Rows of unit length [N, D], float32: float64 division by the float64 norm, rounded once.

    The same row gives the same bits wherever it stands. A row of zeros has no direction: it stays zero (similarity 0 to
    everything) and is reported in the log.
    """
    source = rows.detach().to("cpu", torch.float32).numpy()
    result = np.empty(source.shape, dtype=np.float32)
    step = max(1, _CHUNK_BYTES // (8 * max(1, source.shape[1])))
    zeros = 0
    for start in range(0, len(source), step):
        part = source[start : start + step].astype(np.float64)
        norm = np.sqrt(halving_sum(part * part))
        zeros += int((norm == 0).sum())
        result[start : start + step] = part / np.where(norm == 0, 1.0, norm)[:, None]
    if zeros:
        logger.warning("%d of %d embeddings are zero vectors; their similarity to everything is 0", zeros, len(source))
    return result


def exact_similarities(left: FloatRows, right: FloatRows, rows: IntArray, columns: IntArray) -> NDArray[np.float64]:
    """THE similarities [M] of the pairs (left[rows], right[columns]): products exact in float64, summed by halving."""
    result = np.empty(len(rows))
    step = max(1, _CHUNK_BYTES // (8 * max(1, left.shape[1])))
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        terms = left[rows[part]].astype(np.float64)
        terms *= right[columns[part]]
        result[part] = halving_sum(terms)
    return result


@dataclass(frozen=True)
class FastProduct:
    """Operands of a float32 product that ranks every query's gallery as the exact similarities do, up to ``error``.

    ``query @ gallery.T`` differs from the similarities by one constant per query, which no ranking sees, and otherwise
    by at most ``error``, whatever the order of summation.

    Attributes:
        query: [Q, D] or [Q, D + 1] float32.
        gallery: [N, D] or [N, D + 1] float32.
        error: two values of a row that are more than ``2 * error`` apart are in the right order.
        largest: bound of the size of every value.
    """

    query: FloatRows
    gallery: FloatRows
    error: float
    largest: float


def fast_product(query: FloatRows, gallery: FloatRows) -> FastProduct:
    """Choose the operands with the smaller error for unit rows ``query`` [Q, D] and ``gallery`` [N, D].

    Plain operands err by at most (D + 3) 2^-24: one rounding per product and addition, at most D in a row. Embeddings
    of an untrained or collapsed model all point the same way, and that error would exceed their differences. With the
    gallery's mean m, x = m + dx and y = m + dy: x.y = x.m + m.dy + dx.dy, where x.m is the same for all y; so the
    operands [dx, 1] and [dy, m.dy] rank alike and err in proportion to their own, then small, sizes.

    Source of the bound: Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., eq. 3.5. At D = 128 it is
    8e-6, some ten times what is met in practice: the difference makes a few more pairs be computed twice and can never
    cost a result.
    """
    dimension = query.shape[1]
    roundings = 1.01 * (dimension + 4) * 2.0**-24  # products and sums; operands and the added column rounded once each
    mean = np.asarray(np.mean(gallery, axis=0, dtype=np.float64))
    if np.linalg.norm(mean) < 0.5:  # the rows point many ways: nothing to gain
        return FastProduct(query, gallery, roundings + _FLOAT64_ERROR, 1.001)
    centered_query = _centered(query, mean)
    centered_query[:, dimension] = 1.0
    centered_gallery = _centered(gallery, mean)
    largest = _largest_length(centered_query[:, :-1]) * _largest_length(centered_gallery[:, :-1])
    largest += float(np.abs(centered_gallery[:, -1]).max())
    error = roundings * largest
    if error >= roundings:
        return FastProduct(query, gallery, roundings + _FLOAT64_ERROR, 1.001)
    return FastProduct(centered_query, centered_gallery, error + _FLOAT64_ERROR, largest)


def _centered(rows: FloatRows, mean: NDArray[np.float64]) -> FloatRows:
    """[N, D] -> [N, D + 1]: rows less their mean, and the product of that difference with the mean."""
    result = np.empty((len(rows), rows.shape[1] + 1), dtype=np.float32)
    step = max(1, _CHUNK_BYTES // (8 * rows.shape[1]))
    for start in range(0, len(rows), step):
        difference = rows[start : start + step] - mean
        result[start : start + step, :-1] = difference
        result[start : start + step, -1] = difference @ mean
    return result


def _largest_length(rows: FloatRows) -> float:
    """Largest Euclidean length of a row, rounded up."""
    return 1.001 * float(np.sqrt(np.einsum("nd,nd->n", rows, rows).max(initial=0.0)))


@contextmanager
def strict_float32_products() -> Iterator[None]:
    """Matrix products of float32 tensors are float32 products inside (no TF32, no bf16), whatever is set outside."""
    previous = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(previous)
