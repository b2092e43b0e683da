"""Which gallery items may be among the k nearest, and their exact order: float32 values propose, float64 ones decide.

Letters: Q queries of a tile, W columns, C candidates of a query, k places that matter.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dmlbench.evaluation.similarity import FloatRows
from dmlbench.types import IntArray

_SORT_COLUMNS = (
    2048  # up to here numpy's vectorized sort is as fast as its partition, and with many equal values faster
)
_PARALLEL_ENTRIES = 2**20  # smaller tiles are partitioned sooner than threads are started

ExactSimilarity = Callable[[IntArray, IntArray], NDArray[np.float64]]
"""Float64 similarities [M] of M pairs (row of the tile [M], column [M])."""


@dataclass(frozen=True)
class Candidates:
    """Gallery items that may be among the k nearest of a tile's queries, padded to one width.

    Attributes:
        column: [Q, C] gallery index; -1 where ``value`` is -inf.
        value: [Q, C] float32 similarity, larger is nearer; -inf is padding.
    """

    column: IntArray
    value: FloatRows


def narrow(similarity: FloatRows, k: int, *, slack: float) -> Candidates:
    """Columns of ``similarity`` [Q, W] whose value reaches the k-th largest of its row less ``slack``; -inf never does.

    With slack = twice the error of the values, these contain the k nearest for certain.
    """
    width = similarity.shape[1]
    if k >= width:
        mask = similarity > -np.inf
    else:
        kth = kth_largest(similarity, k)
        # float32 minus float32 rounds; nextafter keeps the threshold on the safe side
        mask = similarity >= np.nextafter(kth - np.float32(slack), np.float32(-np.inf), dtype=np.float32)
        if not np.isfinite(kth).all():
            mask &= similarity > -np.inf
    flat = np.flatnonzero(mask)
    return _pad(flat // width, flat % width, similarity.reshape(-1)[flat], len(similarity))


def kth_largest(values: FloatRows, k: int) -> FloatRows:
    """The k-th largest value of each row: [Q, W] -> [Q, 1]; large tiles are shared out to torch's number of threads."""
    place = values.shape[1] - k
    if values.shape[1] <= _SORT_COLUMNS:
        return np.sort(values, axis=1)[:, place, None]

    def of(part: FloatRows) -> FloatRows:
        return np.partition(part, place, axis=1)[:, place, None]

    threads = torch.get_num_threads()
    if threads == 1 or values.size < _PARALLEL_ENTRIES:
        return of(values)
    with ThreadPoolExecutor(threads) as pool:  # numpy releases the interpreter lock while it partitions
        return np.concatenate(list(pool.map(of, np.array_split(values, threads))))


def _pad(row: IntArray, column: IntArray, value: FloatRows, num_rows: int) -> Candidates:
    """Candidates from entries sorted by row."""
    count = np.bincount(row, minlength=num_rows)
    place = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    columns = np.full((num_rows, int(count.max(initial=0))), -1, dtype=np.int64)
    values = np.full(columns.shape, -np.inf, dtype=np.float32)
    columns[row, place] = column
    values[row, place] = value
    return Candidates(columns, values)


def narrow_on_device(similarity: Tensor, k: int, slack: float) -> Candidates:
    """``narrow`` for a tile on an accelerator: only the candidates travel."""
    if similarity.device.type == "cpu":
        return narrow(similarity.numpy(), k, slack=slack)
    threshold = torch.full((len(similarity), 1), -torch.inf, device=similarity.device)
    if k < similarity.shape[1]:
        kth = torch.topk(similarity, k, dim=1, sorted=True).values[:, -1:]
        threshold = torch.nextafter(kth - slack, torch.full_like(kth, -torch.inf))
    found = torch.nonzero((similarity >= threshold) & (similarity > -torch.inf))
    value = similarity[found[:, 0], found[:, 1]]
    row, column = found.cpu().numpy().T
    return _pad(row, column, value.cpu().numpy(), len(similarity))


def merge(left: Candidates | None, right: Candidates, k: int, slack: float) -> Candidates:
    """Candidates of the union of two parts of the gallery."""
    if left is None:
        return right
    column = np.concatenate([left.column, right.column], axis=1)
    return narrow_again(Candidates(column, np.concatenate([left.value, right.value], axis=1)), k, slack=slack)


def narrow_again(candidates: Candidates, k: int, *, slack: float) -> Candidates:
    """``narrow`` among candidates that were too many."""
    chosen = narrow(candidates.value, k, slack=slack)
    padding = chosen.column < 0
    column = np.take_along_axis(candidates.column, np.where(padding, 0, chosen.column), axis=1)
    return Candidates(np.where(padding, -1, column), chosen.value)


def above(similarity: FloatRows, floor: FloatRows) -> Candidates:
    """Columns of ``similarity`` [Q, W] whose value is at least ``floor`` [Q, 1], which is above -inf."""
    width = similarity.shape[1]
    flat = np.flatnonzero(similarity >= floor)
    return _pad(flat // width, flat % width, similarity.reshape(-1)[flat], len(similarity))


def settle(
    candidates: Candidates,
    exact: ExactSimilarity,
    *,
    k: int,
    slack: float,
    relevant: NDArray[np.bool_] | None = None,
) -> tuple[IntArray, NDArray[np.bool_] | None]:
    """Order candidates by (exact similarity descending, column ascending); only near ones are computed exactly.

    Args:
        candidates: [Q, C], as ``narrow`` gives them.
        exact: float64 similarities of (row, column) pairs.
        k: places that matter; the order beyond may be that of the float32 values.
        slack: values further apart than this are in the right order.
        relevant: [Q, C] whether a candidate is of the query's class. Where given, a run of near values that is all
            relevant or all irrelevant is left as it is: no score depends on the order within.

    Returns:
        Columns [Q, C] in order, padding (-1) last, and ``relevant`` in the same order.
    """
    num_rows, width = candidates.value.shape
    if num_rows * width == 0:
        return candidates.column, relevant
    order = np.argsort(-candidates.value, axis=1, kind="stable")
    value = np.take_along_axis(candidates.value, order, axis=1)
    column = np.take_along_axis(candidates.column, order, axis=1)
    marks = None if relevant is None else np.take_along_axis(relevant, order, axis=1)

    present = value > -np.inf
    level = np.where(present, value, np.float32(0)).astype(np.float64)
    near = np.zeros((num_rows, width), dtype=bool)  # linked to the one before
    near[:, 1:] = (level[:, :-1] - level[:, 1:] <= slack) & present[:, 1:]
    chain = np.cumsum(~near.reshape(-1)) - 1  # [Q * C]; the first place of a row always starts a chain
    open_link = near if marks is None else near & (np.diff(marks, axis=1, prepend=marks[:, :1]) != 0)
    undecided = np.zeros(int(chain[-1]) + 1, dtype=bool)
    undecided[chain[open_link.reshape(-1)]] = True
    first_place = np.flatnonzero(~near.reshape(-1)) % width
    undecided &= first_place < k
    place = np.flatnonzero(undecided[chain])
    if len(place):
        flat_column = column.reshape(-1)
        similarity = exact(place // width, flat_column[place])
        source = place[np.lexsort((flat_column[place], -similarity, chain[place]))]
        flat_column[place] = flat_column[source]
        if marks is not None:
            flat_marks = marks.reshape(-1)
            flat_marks[place] = flat_marks[source]
    return column, marks
