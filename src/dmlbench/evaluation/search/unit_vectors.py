"""Exact nearest-neighbor search among unit vectors; no back end, tile or thread count changes the results.

THE similarity of two rows is the float64 inner product of their float32 unit vectors, summed in one fixed order: the
same bits on every machine. Ties are ordered by gallery index. A float32 product decides what it separates by more than
twice its proven rounding error; only nearer pairs are computed exactly.

Letters: Q queries, N gallery items, D dimensions, M pairs, k items wanted, T queries and W gallery items of a tile.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import isqrt
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dmlbench.evaluation.search.candidates import PADDING, FloatRows, Found, Keys, Tile, floor_below, pack
from dmlbench.evaluation.search.scan import BYTES_PER_CANDIDATE, BYTES_PER_WAITING, ScanPlan, Search, moved_to
from dmlbench.types import ConfigError, EmbeddingSet, IntArray, check_choice

BackEnd = Literal["auto", "torch", "faiss"]

TILE_BYTES = 512 * 2**20
MIN_TILE_BYTES = 4096
_TILE_ENTRIES = 2**21  # similarities of a tile on a CPU: 8 MiB; smaller ones make the product arrange rows more often
_HALF_TILE_ENTRIES = 2**23  # of a scan by half, whose tiles have few rows
_DEVICE_ENTRIES = 2**31 - 1  # that torch finds non-zero ones among
_BYTES_PER_ENTRY = 10  # of a tile: similarity, mask, maxima of groups, room of the allocator
_WIDE = 8192  # galleries up to here are one tile wide
_MIN_TILE_ROWS = 64  # fewer rows than this make the matrix product slow: narrow the gallery tile instead
_BLOCK_ROWS = 512  # of a scan by half; of more, turning a tile over takes long
_GAIN = 25_000  # twice the multiplications that take as long as keeping a candidate of a later row (measured)
_FAISS_EXTRA = 8  # neighbors asked beyond k, so that near ties at rank k seldom need a second search
_CHUNK_BYTES = 2**19  # float64 products held at once: stays in a core's second-level cache
_MEAN_ROWS = 512
_FLOAT64_ERROR = 4e-15  # of ``exact_similarities`` itself: (log2 D + 2) 2^-53, for any D below 2^30

logger = logging.getLogger(__name__)


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
    """Unit rows [N, D] of an embedding set, held in memory or recomputed when needed."""

    source: Tensor  # [N, D] rows as given
    norm: NDArray[np.float64]  # [N] their lengths
    held: FloatRows | None  # [N, D] all unit rows

    def __len__(self) -> int:
        return len(self.source)

    @property
    def width(self) -> int:
        return int(self.source.shape[1])

    def take(self, index: IntArray | slice) -> FloatRows:
        """Unit rows ``index`` [M]: [M, D]."""
        if self.held is not None:
            return self.held[index]
        at = index if isinstance(index, slice) else torch.from_numpy(index).to(self.source.device)
        return _divided(self.source[at], self.norm[index])

    def parts(self) -> Iterator[FloatRows]:
        """All rows in order, a few at a time."""
        step = max(1, _CHUNK_BYTES // (4 * max(1, self.width)))
        return (self.take(slice(start, start + step)) for start in range(0, len(self), step))


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
    """

    mean: NDArray[np.float64] | None  # [D] subtracted from both sides; None: the operands are the unit rows themselves
    error: float  # two values of a row that are more than twice as far apart are in the right order
    largest: float  # bound of the absolute values

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


def check_tile_bytes(tile_bytes: int) -> None:
    if tile_bytes < MIN_TILE_BYTES:
        raise ConfigError(f"tile_bytes: got {tile_bytes}, expected at least {MIN_TILE_BYTES} (default: {TILE_BYTES}).")


class UnitSearch(Search):
    """Unit rows of queries and gallery.

    Rows are held where they take at most a quarter of ``tile_bytes``, else computed for every tile.

    Args:
        gallery: None searches the queries among themselves.
        back_end: of the float32 pass. "auto" is "torch", the fastest wherever we measured; faiss searches on a CPU.
        tile_bytes: bound of the memory beyond the sets.
        device: where the float32 products run; None: the device of the queries.
    """

    def __init__(
        self,
        queries: EmbeddingSet,
        gallery: EmbeddingSet | None,
        *,
        back_end: BackEnd = "auto",
        tile_bytes: int = TILE_BYTES,
        device: torch.device | None = None,
    ) -> None:
        check_tile_bytes(tile_bytes)
        check_choice("back_end", back_end, get_args(BackEnd))
        reference = queries if gallery is None else gallery
        super().__init__(queries, reference, device or queries.rows.device, tile_bytes)
        self.gallery = self._held(reference.rows, tile_bytes)
        self.query = self.gallery if gallery is None else self._held(queries.rows, tile_bytes)
        self.product = fast_product(self.query, self.gallery)
        self.slack = 2 * self.product.error
        # the product's right side [N, D] or [N, D + 1], or None: computed for every tile
        self.operand = self.gallery.held
        if self.product.mean is not None and self.operand is not None:
            size = 4 * self.num_gallery * (self.gallery.width + 1)
            fits = self.free_bytes - size >= tile_bytes // 4
            self.operand = self.product.gallery(self.operand) if fits else None
            self.free_bytes -= size if fits else 0
        self.by_faiss = back_end == "faiss" and self.on_host and self.operand is not None
        if back_end == "faiss" and not self.by_faiss:
            logger.info("searching with torch: faiss needs a CPU and more tile_bytes than %d", tile_bytes)

    def _held(self, rows: Tensor, tile_bytes: int) -> UnitRows:
        unit = hold_unit_rows(rows, within_bytes=self.free_bytes - 3 * tile_bytes // 4)
        self.free_bytes -= 0 if unit.held is None else unit.held.nbytes
        return unit

    def plan(self, k: int, num_wanted: int) -> ScanPlan:
        """By half where those products, and keeping the candidates of later rows, are faster than all products."""
        size = self.num_gallery
        threads = 1 if self.by_faiss else self.threads
        free = self.free_bytes // (2 * threads)  # half for the tile, half for its candidates
        entries = max(1, free // _BYTES_PER_ENTRY)
        rows = min(size // 8 + 1, _BLOCK_ROWS)  # half of a block's square is computed for nothing
        by_half = (
            self.gallery is self.query
            and self.product.mean is None  # products relative to a mean tell of the query only
            and self.on_host
            and not self.by_faiss
            and 4 * num_wanted >= 3 * size
            and size * self.gallery.width >= _GAIN * k
            and rows >= 2 * k
            and entries >= rows**2
            and BYTES_PER_WAITING * k * size <= self.free_bytes // 4
        )
        if by_half:
            return ScanPlan(rows, min(size, min(entries, _HALF_TILE_ENTRIES) // rows), threads, by_half=True)
        entries = min(entries, _TILE_ENTRIES if self.on_host else _DEVICE_ENTRIES)
        rows, columns = _tile_shape(num_wanted, size, entries)
        if not self.on_host:  # where the queries go, too
            rows = min(rows, free // (4 * self.gallery.width))
        rows = min(rows, free // (BYTES_PER_CANDIDATE * min(size, k + k // 4 + 8)))
        return ScanPlan(max(1, rows), columns, threads)

    def candidates(self, part: IntArray, k: int, *, columns: int) -> Keys:
        """See ``Search``; where faiss cut near ties, by all products."""
        if not self.by_faiss or self.operand is None:
            return super().candidates(part, k, columns=columns)
        query = self.product.query(self.query.take(part))
        keys, complete = _faiss_candidates(query, self.operand, self.own_column[part], k, self.slack)
        if complete.all():
            return keys
        dense = super().candidates(part[~complete], k, columns=columns)
        result = np.full((len(part), max(keys.shape[1], dense.shape[1])), PADDING)
        result[complete, : keys.shape[1]] = keys[complete]
        result[~complete, : dense.shape[1]] = dense
        return result

    @cached_property
    def _operand_there(self) -> Tensor | None:
        """The operand on ``device``, if it fits."""
        return moved_to(self.device, None if self.operand is None else torch.from_numpy(self.operand))

    def similarities(self, part: IntArray, start: int, stop: int, *, out: Tile) -> None:
        query = self.product.query(self.query.take(part))
        if self.operand is None:
            right: Tile = self.product.gallery(self.gallery.take(slice(start, stop)))
        else:
            right = (self.operand if self._operand_there is None else self._operand_there)[start:stop]
        if isinstance(out, Tensor):
            torch.mm(torch.as_tensor(query, device=out.device), torch.as_tensor(right, device=out.device).T, out=out)
        else:  # numpy took 0.7 to 0.9 of the time of torch's product on an AMD EPYC with AVX-512
            np.matmul(query, np.asarray(right).T, out=out)

    def bounded_similarities(self, part: IntArray, start: int, stop: int, *, out: Tile) -> tuple[float, float]:
        self.similarities(part, start, stop, out=out)
        return self.product.error, self.product.largest

    def held_rows(self) -> tuple[FloatRows, FloatRows] | None:
        if self.query.held is None or self.gallery.held is None:
            return None
        return self.query.held, self.gallery.held

    def exact_pairs(self, queries: IntArray, columns: IntArray) -> NDArray[np.float64]:
        return exact_similarities(self.query, self.gallery, queries, columns)


def _tile_shape(num_queries: int, num_gallery: int, entries: int) -> tuple[int, int]:
    """Rows and columns of a tile of at most ``entries``: the gallery's width where that leaves enough rows."""
    if num_gallery <= _WIDE and entries // num_gallery >= min(_MIN_TILE_ROWS, num_queries):
        return max(1, min(num_queries, entries // num_gallery)), num_gallery
    rows = max(1, min(num_queries, isqrt(entries)))
    return rows, max(1, min(num_gallery, entries // rows))


def _faiss_candidates(
    query: FloatRows, gallery: FloatRows, own_column: IntArray, k: int, slack: float
) -> tuple[Keys, NDArray[np.bool_]]:
    """Candidates [T, C] by faiss and, per query [T], whether they are known to be complete.

    Faiss orders ties against the index and cuts them at its k, so a query is complete only if the last neighbor that
    faiss returned is below the floor.
    """
    import faiss

    wanted = min(len(gallery), k + 1 + _FAISS_EXTRA)
    value, column = faiss.knn(query, gallery, wanted, metric=faiss.METRIC_INNER_PRODUCT)
    other = column != own_column[:, None]
    complete = np.full(len(query), wanted == len(gallery))
    if not complete.all():
        # without the query itself at least k of the k + 1 + extra neighbors are left, in descending order
        place = np.argmax(np.cumsum(other, axis=1) == k, axis=1)[:, None]
        complete |= (value[:, -1:] < floor_below(np.take_along_axis(value, place, axis=1), slack))[:, 0]
    return Found(other.sum(axis=1), pack(value[other], column[other])).padded(), complete
