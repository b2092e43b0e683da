"""Similarities of unit vectors that are the same bits on every machine, and the error of a fast product of them.

THE similarity of two rows is the float64 inner product of their float32 unit vectors, summed in one fixed order.
Letters: N set, D dimensions, M pairs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dmlbench.types import IntArray

FloatRows = NDArray[np.float32]

_CHUNK_BYTES = 2**19  # float64 products held at once: stays in a core's second-level cache
_MEAN_ROWS = 512
_FLOAT64_ERROR = 4e-15  # of ``exact_similarities`` itself: (log2 D + 2) 2^-53, for any D below 2^30


def halving_sum(terms: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sum ``terms`` [M, D] over D by halves, in place; the order, and so every bit, depends on D alone."""
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

    The bits of a row do not depend on the others. Zero rows stay zero: their similarity to everything is 0.
    """
    return _divided(rows, row_norms(rows))


def row_norms(rows: Tensor) -> NDArray[np.float64]:
    """Lengths [N] of rows [N, D]."""
    norm = np.empty(len(rows))
    for start, part in _float64_parts(rows):
        part *= part
        norm[start : start + len(part)] = np.sqrt(halving_sum(part))
    return norm


def _float64_parts(rows: Tensor) -> Iterator[tuple[int, NDArray[np.float64]]]:
    """(index of the first row, float64 copy) a few rows at a time."""
    step = max(1, _CHUNK_BYTES // (8 * max(1, rows.shape[1])))
    for start in range(0, len(rows), step):
        part = rows[start : start + step].detach().to("cpu", torch.float32).numpy()
        yield start, part.astype(np.float64)


def _divided(rows: Tensor, norm: NDArray[np.float64]) -> FloatRows:
    result = np.empty(tuple(rows.shape), dtype=np.float32)
    for start, part in _float64_parts(rows):
        length = norm[start : start + len(part), None]
        part /= np.where(length == 0, 1.0, length)
        result[start : start + len(part)] = part
    return result


@dataclass(frozen=True)
class UnitRows:
    """Unit rows [N, D] of an embedding set, held in memory or recomputed when needed.

    Attributes:
        source: [N, D] rows as given.
        norm: [N] their lengths.
        held: [N, D] all unit rows, or None.
    """

    source: Tensor
    norm: NDArray[np.float64]
    held: FloatRows | None

    def __len__(self) -> int:
        return len(self.source)

    @property
    def width(self) -> int:
        return int(self.source.shape[1])

    def part(self, start: int, stop: int) -> FloatRows:
        """Unit rows start .. stop - 1."""
        return (
            self.held[start:stop] if self.held is not None else _divided(self.source[start:stop], self.norm[start:stop])
        )

    def take(self, index: IntArray) -> FloatRows:
        """Unit rows ``index`` [M]: [M, D]."""
        if self.held is not None:
            return self.held[index]
        return _divided(self.source[torch.from_numpy(index).to(self.source.device)], self.norm[index])

    def parts(self) -> Iterator[FloatRows]:
        """All rows in order, a few at a time."""
        step = max(1, _CHUNK_BYTES // (4 * max(1, self.width)))
        return (self.part(start, start + step) for start in range(0, len(self), step))


def hold_unit_rows(rows: Tensor, *, within_bytes: int) -> UnitRows:
    """Unit rows of ``rows`` [N, D], held if they take at most ``within_bytes``."""
    norm = row_norms(rows)
    return UnitRows(rows, norm, _divided(rows, norm) if 4 * rows.numel() <= within_bytes else None)


def exact_similarities(left: UnitRows, right: UnitRows, rows: IntArray, columns: IntArray) -> NDArray[np.float64]:
    """THE similarities [M] of the pairs (left[rows], right[columns]): products exact in float64, summed by halving."""
    result = np.empty(len(rows))
    step = max(1, _CHUNK_BYTES // (8 * max(1, left.width)))
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        terms = left.take(rows[part]).astype(np.float64)
        terms *= right.take(columns[part])
        result[part] = halving_sum(terms)
    return result


@dataclass(frozen=True)
class FastProduct:
    """A float32 product that ranks every query's gallery as the exact similarities do, up to ``error``.

    ``query(x) @ gallery(y).T`` of unit rows x [Q, D], y [N, D] differs from the similarities by one constant per query
    and otherwise by at most ``error``, whatever the order of summation.

    Attributes:
        mean: [D] subtracted from both sides, or None: the operands are the unit rows themselves.
        error: two values of a row that are more than ``2 * error`` apart are in the right order.
        largest: bound of the absolute values.
    """

    mean: NDArray[np.float64] | None
    error: float
    largest: float

    def query(self, rows: FloatRows) -> FloatRows:
        """Left operand of unit rows [Q, D]: [Q, D] or [Q, D + 1]."""
        if self.mean is None:
            return rows
        result = _centered(rows, self.mean)
        result[:, -1] = 1.0
        return result

    def gallery(self, rows: FloatRows) -> FloatRows:
        """Right operand of unit rows [N, D]: [N, D] or [N, D + 1]."""
        return rows if self.mean is None else _centered(rows, self.mean)


def fast_product(query: UnitRows, gallery: UnitRows) -> FastProduct:
    """Choose the operands with the smaller error for unit rows ``query`` [Q, D] and ``gallery`` [N, D].

    Plain operands err by at most (D + 4) 2^-24: one rounding per product and addition, and those of centered rows.
    Embeddings of an untrained or collapsed model all point the same way, and that error would exceed their differences.
    With the gallery's mean m, x = m + dx and y = m + dy: x.y = x.m + m.dy + dx.dy, where x.m is the same for all y; so
    the operands [dx, 1] and [dy, m.dy] rank alike and err in proportion to their own, then small, sizes.

    Source of the bound: Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., eq. 3.5.
    """
    roundings = 1.01 * (query.width + 4) * 2.0**-24
    plain = FastProduct(None, roundings + _FLOAT64_ERROR, 1.001)
    # any vector would be right, so that of some rows is as good as the mean of all
    some = np.arange(0, len(gallery), max(1, len(gallery) // _MEAN_ROWS))
    mean = np.asarray(gallery.take(some).mean(axis=0, dtype=np.float64))
    if np.linalg.norm(mean) < 0.5:  # the rows point many ways: nothing to gain
        return plain
    longest_query = longest_gallery = offset = 0.0
    for part in query.parts():
        longest_query = max(longest_query, _largest_length(_centered(part, mean)[:, :-1]))
    for part in gallery.parts():
        centered = _centered(part, mean)
        longest_gallery = max(longest_gallery, _largest_length(centered[:, :-1]))
        offset = max(offset, float(np.abs(centered[:, -1]).max()))
    largest = longest_query * longest_gallery + offset
    if largest >= 1:
        return plain
    return FastProduct(mean, roundings * largest + _FLOAT64_ERROR, largest)


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
    return 1.001 * float(np.sqrt(np.einsum("nd,nd->n", rows, rows).max(initial=0.0)))


@contextmanager
def strict_float32_products() -> Iterator[None]:
    """Matrix products of float32 tensors are float32 products inside: no TF32, no bf16."""
    back_ends: list[Any] = [torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)]
    # PyTorch has the newer interface, which keeps a precision for each of them, from 2.9 on
    held = [(back_end, back_end.fp32_precision) for back_end in back_ends if hasattr(back_end, "fp32_precision")]
    previous = None
    try:
        previous = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
    except RuntimeError:  # set by the newer interface, with which the older one refuses to work
        for back_end, _ in held:
            back_end.fp32_precision = "ieee"
    try:
        yield
    finally:
        if previous is not None:
            torch.set_float32_matmul_precision(previous)
        for back_end, value in held:
            back_end.fp32_precision = value
