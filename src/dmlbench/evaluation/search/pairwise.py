"""Exact search by any distance of pytorch-metric-learning: fast values with a known error propose, exact ones decide.

Fast values are compared on the scale f(s) = sign(s) log(1 + |s| / unit), which keeps their order and turns a relative
error into a constant one.

Optional attributes of a distance, beyond pytorch-metric-learning's ``BaseDistance``:

- ``is_symmetric``: True if d(x, y) and d(y, x) are bit-equal;
- ``float32_error(queries, gallery) -> (relative, absolute)``: for rows [Q, D] and [N, D], the float32 matrix differs
  from exact arithmetic by at most ``relative * |value| + absolute`` (relative below 0.02; absolute may be infinite:
  then float64 decides all). ``pairwise_distance`` must be the same function, and a copy in float64 possible;
- ``tiles(dtype, device)``: an object that computes the distance's matrices, and pairs by ``pairs(x, y) -> [M]``; a
  subclass that changes the distance must override it;
- ``shortlist_rows``: see ``rerank``.

Letters: Q queries, T of them in a tile, N gallery items, W of them in a tile, D dimensions, M pairs, k places.
"""

import copy
import hashlib
import logging
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dmlbench.evaluation.search.candidates import Keys, Tile, pack
from dmlbench.evaluation.search.scan import BYTES_PER_CANDIDATE, BYTES_PER_WAITING, ScanPlan, Search, halved_where_full
from dmlbench.evaluation.search.unit_vectors import TILE_BYTES, BackEnd, UnitSearch
from dmlbench.types import EmbeddingSet, IntArray, RunError

if TYPE_CHECKING:
    from pytorch_metric_learning.distances import BaseDistance

_PAIRS = 128  # compared exactly at a time; always as many, so that libraries take the same way through every pair
_COLUMNS = 16  # the same for a matrix of one row
_BLOCKS = 64  # of a scan by half: half of a block's square is computed for nothing, a share of 1/64 in all
_MIN_ROWS, _MAX_ROWS = 64, 256  # queries of a tile
_TILE_ENTRIES = 2**22
_LIMIT = 16.0  # of the scale; what lies beyond e^16 units is decided exactly
_PROBE = 8

logger = logging.getLogger(__name__)


def ranks_like_unit_vectors(distance: "BaseDistance") -> bool:
    """Whether ``distance`` ranks as the Euclidean distance of unit vectors; exact types only, no subclasses."""
    if not _is_lp_or_product(distance) or not distance.normalize_embeddings or distance.p != 2:
        return False
    return bool(distance.power == 1 if distance.is_inverted else distance.power > 0)


def is_symmetric(distance: "BaseDistance") -> bool:
    """Whether d(x, y) and d(y, x) are known to be bit-equal."""
    return _is_lp_or_product(distance) or bool(getattr(distance, "is_symmetric", False))


def _is_lp_or_product(distance: "BaseDistance") -> bool:
    from pytorch_metric_learning.distances import CosineSimilarity, DotProductSimilarity, LpDistance

    return type(distance) in (LpDistance, CosineSimilarity, DotProductSimilarity)


class PairwiseSearch(Search):
    """Queries and gallery, compared by a distance.

    With ``float32_error``, tiles are float32, and float64 values of the rows, computed on the CPU ``_PAIRS`` pairs at a
    time, decide. Otherwise tiles are float64 (or the precision of the distance's parameters), and the distance's matrix
    of one query and ``_COLUMNS`` gallery items in that precision decides. Equal rows get the same bits either way.

    Args:
        gallery: None searches the queries among themselves.
        tile_bytes: memory for tiles and candidates.
        device: where tiles are computed; ignored for a distance with parameters and without ``float32_error``, which
            runs where these are. None: the device of the parameters, or of the queries.
    """

    def __init__(
        self,
        queries: EmbeddingSet,
        gallery: EmbeddingSet | None,
        distance: "BaseDistance",
        *,
        tile_bytes: int,
        device: torch.device | None = None,
    ) -> None:
        reference = queries if gallery is None else gallery
        self.distance = distance
        self._within, self._symmetric = gallery is None, is_symmetric(distance)
        self._sign = 1.0 if distance.is_inverted else -1.0
        self._sets = (queries.rows.detach(), reference.rows.detach().to(queries.rows.device))
        state = [x for x in (*distance.parameters(), *distance.buffers()) if x.is_floating_point()]
        self._has_state = bool(state)
        lies = state[0].device if state else queries.rows.device
        self._bounded = hasattr(distance, "float32_error")
        there = device if device is not None and (self._bounded or not state) else lies
        super().__init__(queries, reference, there, tile_bytes)
        if self._bounded:
            if any(x.dtype != torch.float32 or x.device != self.device for x in state):
                distance = copy.deepcopy(distance).to(self.device, torch.float32)
            self._sets = (self._sets[0].float(), self._sets[1].float())  # these define the values
            dtype = torch.float32
            self._tiles, self._exact = _tiles_and_pairs(distance, self.device)
        else:
            self._tiles = self._exact = distance
            dtype = state[0].dtype if state else torch.float64
        self._queries = self._sets[0].to(self.device, dtype)
        self._gallery = self._queries if gallery is None else self._sets[1].to(self.device, dtype)
        self._relative = self._absolute = 0.0  # a tile's value errs by this share of it, and this much
        if self._bounded:
            self._relative, self._absolute = distance.float32_error(self._queries, self._gallery)
            logger.debug("float32 values are right up to %.1e of them and %.1e", self._relative, self._absolute)
        self._places = _places_of_content(self._sets[:1] if self._within else self._sets)
        self._unit = self._scale_unit()
        # twice the error of the float32 values on the scale: of the tile, and of rounding them
        self.slack = 2 * 1.02 * (max(self._relative, self._absolute / self._unit) + _LIMIT * 2.0**-24)

    def _scale_unit(self) -> float:
        """Where the error's absolute part equals its relative one, else a typical value; any unit is correct.

        A typical value must lie well within the scale's limit: beyond it, exact values decide.
        """
        some = [np.linspace(0, len(x) - 1, min(len(x), _PROBE)).astype(np.int64) for x in self._sets]
        balance = self._absolute / self._relative if self._relative else 0.0
        if balance:
            number = min(map(len, some))
            pairs = some[0][:number], some[1][::-1][:number] + len(self._sets[0])
            value = self._exact(*map(self._rows_at, pairs)).abs()
        else:
            value = self.tile(some[0], some[1]).abs()
        typical = float(value.median()) or float(value.max()) or 1.0
        return max(balance, typical * math.exp(-_LIMIT / 2)) if balance else typical

    def tile(self, part: IntArray, columns: slice | IntArray) -> Tensor:
        """Similarities [T, W] float64 of the queries ``part`` [T] to the gallery items ``columns`` [W]."""
        index = columns if isinstance(columns, slice) else torch.from_numpy(columns).to(self.device)
        with torch.inference_mode(), torch.autocast(self.device.type, enabled=False):
            value = self._tiles(self._queries[torch.from_numpy(part).to(self.device)], self._gallery[index])
            return self._checked(value.to(torch.float64)) * self._sign

    def similarities(self, part: IntArray, start: int, stop: int, *, out: Tile) -> None:
        there = torch.as_tensor(out)

        def work(first: int, last: int) -> None:
            there[:, first - start : last - start] = self._scaled(part, slice(first, last))

        halved_where_full(work, start, stop, device=self.device)

    def bounded_similarities(self, part: IntArray, start: int, stop: int, *, out: Tile) -> tuple[float, float]:
        """The signed values of the distance, which add up over models."""
        value = self.tile(part, slice(start, stop))
        torch.as_tensor(out).copy_(value)
        largest = float(value.abs().max())
        relative = 1.02 * self._relative + 2.0**-24
        return largest * relative + self._absolute + 2.0**-149, 1.01 * largest

    def keys_of(self, query: int, columns: IntArray) -> Keys:
        """Keys [1, C] of one query and the gallery items ``columns`` [C]."""
        return pack(self._scaled(np.array([query]), columns).cpu().numpy(), columns[None])

    def _scaled(self, part: IntArray, columns: slice | IntArray) -> Tensor:
        with torch.inference_mode():
            value = self.tile(part, columns)
            return value.abs().div_(self._unit).log1p_().clamp_(max=_LIMIT).copysign_(value).to(torch.float32)

    def _checked(self, value: Tensor) -> Tensor:
        if not bool(torch.isfinite(value).all()):
            raise RunError(f"{type(self.distance).__name__} returned NaN or infinity: its state is damaged.")
        return value

    def plan(self, k: int, num_wanted: int) -> ScanPlan:
        """By half where the distance is symmetric and the candidates of all queries fit into memory."""
        size, threads = self.num_gallery, self.threads
        # a distance of unknown implementation may expand pairs
        expands = not self._bounded and not _is_lp_or_product(self.distance)
        bytes_per_pair = 40 + (2 * self._queries.element_size() * self._queries.shape[1] if expands else 0)
        entries = max(1, min(_TILE_ENTRIES, self.free_bytes // (2 * threads * bytes_per_pair)))
        rows = max(2 * k, _MIN_ROWS, size // _BLOCKS)
        pays = self._within and self._symmetric and 4 * num_wanted >= 3 * size and rows < size
        if pays and entries >= rows**2 and BYTES_PER_WAITING * k * size <= self.free_bytes // 4:
            return ScanPlan(rows, min(size, entries // rows), threads, by_half=True)
        candidates = self.free_bytes // (2 * threads * BYTES_PER_CANDIDATE * min(size, k + k // 4 + 8))
        rows = max(1, min(_MAX_ROWS, num_wanted, entries, candidates))
        return ScanPlan(rows, max(1, min(size, entries // rows)), threads)

    def exact_pairs(self, queries: IntArray, columns: IntArray) -> NDArray[np.float64]:
        first, second = self._places[0][queries], self._places[-1][columns]
        if self._symmetric:
            first, second = np.minimum(first, second), np.maximum(first, second)
        size = sum(map(len, self._sets))
        pairs, which = np.unique(first * size + second, return_inverse=True)
        with torch.inference_mode(), torch.autocast("cpu", enabled=False):
            compare = self._by_pairs if self._bounded else self._by_rows
            value = self._checked(compare(pairs // size, pairs % size).to("cpu", torch.float64)) * self._sign
        return np.asarray(value.numpy()[which])

    def _by_pairs(self, first: IntArray, second: IntArray) -> Tensor:
        """Values [M] of pairs of places by the float64 copy."""
        result = torch.empty(len(first), dtype=torch.float64)
        for start in range(0, len(first), _PAIRS):
            left, right = (self._rows_at(_filled(x[start : start + _PAIRS], _PAIRS)) for x in (first, second))
            result[start : start + _PAIRS] = self._exact(left, right)[: len(first) - start]
        return result

    def _by_rows(self, first: IntArray, second: IntArray) -> Tensor:
        """Values [M] of pairs of places, the first ones ascending, by matrices of one row."""
        dtype = self._queries.dtype
        device = self.device if self._has_state else torch.device("cpu")  # sums there have an order of their own
        result = torch.empty(len(first), dtype=dtype)
        starts = np.flatnonzero(np.diff(first, prepend=-1))
        for start, stop in zip(starts, [*starts[1:], len(first)], strict=True):
            left = self._rows_at(first[start : start + 1]).to(device, dtype)
            for at in range(start, stop, _COLUMNS):
                chosen = second[at : min(at + _COLUMNS, stop)]
                right = self._rows_at(_filled(chosen, _COLUMNS)).to(device, dtype)
                result[at : at + len(chosen)] = self._exact(left, right)[0, : len(chosen)].cpu()
        return result

    def _rows_at(self, places: IntArray) -> Tensor:
        """Rows [M, D] float64 on the CPU; places of the gallery follow those of the queries."""
        queries, gallery = self._sets
        result = torch.empty(len(places), queries.shape[1], dtype=torch.float64)
        behind = torch.from_numpy(places >= len(queries))
        index, on_device = torch.from_numpy(places).to(queries.device), behind.to(queries.device)
        result[~behind] = queries[index[~on_device]].to("cpu", torch.float64)
        result[behind] = gallery[index[on_device] - len(queries)].to("cpu", torch.float64)
        return result


def search_by(
    distance: "BaseDistance | None",
    queries: EmbeddingSet,
    gallery: EmbeddingSet | None,
    *,
    back_end: BackEnd = "auto",
    tile_bytes: int = TILE_BYTES,
    device: torch.device | None = None,
) -> UnitSearch | PairwiseSearch:
    """The search by ``distance``: among unit vectors if that ranks alike (None: the distance of unit vectors)."""
    if distance is None or ranks_like_unit_vectors(distance):
        return UnitSearch(queries, gallery, back_end=back_end, tile_bytes=tile_bytes, device=device)
    return PairwiseSearch(queries, gallery, distance, tile_bytes=tile_bytes, device=device)


def _tiles_and_pairs(
    distance: "BaseDistance", device: torch.device
) -> tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]:
    """Matrices in float32 on ``device``, and values of pairs in float64 on the CPU."""
    if hasattr(distance, "tiles"):
        in_double = distance.tiles(dtype=torch.float64, device="cpu")
        return distance.tiles(dtype=torch.float32, device=device), in_double.pairs
    exact = copy.deepcopy(distance).double().cpu()

    def pairs(left: Tensor, right: Tensor) -> Tensor:
        value: Tensor = exact.pairwise_distance(exact.maybe_normalize(left), exact.maybe_normalize(right))
        return value**exact.power

    return distance, pairs


def _filled(places: IntArray, count: int) -> IntArray:
    return np.pad(places, (0, count - len(places)), mode="edge")


def _places_of_content(sets: Sequence[Tensor]) -> list[IntArray]:
    """For every row of every set, the place of the first equal row, counted through all sets."""
    seen: dict[bytes, int] = {}
    result, offset = [], 0
    for rows in sets:
        places = np.empty(len(rows), dtype=np.int64)
        for start in range(0, len(rows), 1024):
            part = rows[start : start + 1024].to("cpu", torch.float64).numpy()
            for place, row in enumerate(part, start):
                digest = hashlib.blake2b(row.tobytes(), digest_size=16).digest()
                places[place] = seen.setdefault(digest, place + offset)
        offset += len(rows)
        result.append(places)
    return result
