"""Search by any distance of pytorch-metric-learning: tiles propose, exact values decide, as among unit vectors.

A tile's values are compared on the scale f(s) = sign(s) log(1 + |s| / unit), which keeps their order and turns an error
relative to the value into a constant one, so that the search of unit vectors' parts serve.

Letters: Q queries, T of them in a tile, N gallery items, W of them in a tile, k places that matter.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from dmlbench.evaluation.embeddings.sets import ids_of, self_columns
from dmlbench.evaluation.search.on_device import tiles_on_host
from dmlbench.evaluation.search.pairwise import PairwiseSimilarity
from dmlbench.evaluation.search.parallel import num_threads
from dmlbench.evaluation.search.scan import BYTES_PER_WAITING, ScanPlan, ScanState, scan
from dmlbench.evaluation.search.top_k import (
    MAX_GALLERY,
    ExactSimilarity,
    Keys,
    Tile,
    pack,
)
from dmlbench.evaluation.search.unit_vectors import BYTES_PER_CANDIDATE
from dmlbench.types import EmbeddingSet, IntArray, RunError

if TYPE_CHECKING:
    from pytorch_metric_learning.distances import BaseDistance

Result = TypeVar("Result")

_BLOCKS = 256  # that a large set is taken in: what an interruption costs is about one of them
_MIN_ROWS, _MAX_ROWS = 64, 256  # queries of a tile
_TILE_ENTRIES = 2**22
_LIMIT = 16.0  # of the scale; what lies beyond e^16 units is decided exactly
_PROBE = 8


@dataclass(frozen=True)
class PairwiseSearch:
    """Two sets, or one within itself, ready to be searched by a distance.

    Attributes:
        similarity: what compares them.
        own_column: [Q] gallery index that a query must not find, or -1.
        num_gallery: N.
        within: whether the queries are the gallery.
        unit: of the scale, in the distance's own numbers.
        free_bytes: memory for tiles and candidates.
        on_host: whether tiles are arrays on the host; else tensors on ``device``.
        bar: counts pairs.
    """

    similarity: PairwiseSimilarity
    own_column: IntArray
    num_gallery: int
    within: bool
    unit: float
    free_bytes: int
    on_host: bool
    bar: tqdm = field(default_factory=lambda: tqdm(disable=True))

    @property
    def device(self) -> torch.device:
        """Where tiles are computed."""
        return self.similarity.device

    @property
    def slack(self) -> float:
        """Twice the error of the float32 values on the scale: of the tile, and of rounding them."""
        tile = max(self.similarity.relative, self.similarity.absolute / self.unit)
        return 2 * 1.02 * (tile + _LIMIT * 2.0**-24)

    def exact(self, part: IntArray) -> ExactSimilarity:
        """The values that decide, of pairs whose first member counts within ``part`` [T]."""
        return self.similarity.exact(part)

    def similarities(self, part: IntArray, start: int, stop: int, *, out: Tile) -> None:
        """Values on the scale of the queries ``part`` [T] and gallery items start .. stop - 1 into ``out`` [T, W]."""
        there = out if isinstance(out, Tensor) else torch.from_numpy(out)
        there.copy_(self._scaled(part, slice(start, stop)))

    def keys_of(self, query: int, columns: IntArray) -> Keys:
        """Keys [1, C] of one query and the gallery items ``columns`` [C]."""
        return pack(self._scaled(np.array([query]), columns).cpu().numpy(), columns[None])

    def _scaled(self, part: IntArray, columns: slice | IntArray) -> Tensor:
        with torch.inference_mode():
            value = self.similarity.tile(part, columns)
            size = value.abs().div_(self.unit).log1p_().clamp_(max=_LIMIT)
            result = size.copysign_(value).to(torch.float32)
        with tqdm.get_lock():
            self.bar.update(result.numel())
        return result

    def ranked(
        self,
        k: int,
        finish: Callable[[IntArray, Keys], Result],
        *,
        wanted: IntArray,
        state: ScanState | None = None,
    ) -> Iterator[tuple[IntArray, Result]]:
        """See ``scan``."""
        return scan(self, k, finish, wanted=wanted, plan=self.plan(k, len(wanted)), state=state)

    def plan(self, k: int, num_wanted: int) -> ScanPlan:
        """How the scan is shared out: by half where a distance is the same for both sides of a pair and the candidates
        of all queries fit into memory."""
        size, threads = self.num_gallery, num_threads() if self.on_host else 1
        entries = max(1, min(_TILE_ENTRIES, self.free_bytes // (2 * threads * self.similarity.bytes_per_pair)))
        rows = max(2 * k, _MIN_ROWS, size // _BLOCKS)
        pays = self.within and self.similarity.symmetric and 4 * num_wanted >= 3 * size and rows < size
        if pays and entries >= rows and BYTES_PER_WAITING * k * size <= self.free_bytes // 4:
            return ScanPlan(rows, max(1, min(size, entries // rows)), threads, by_half=True)
        candidates = self.free_bytes // (2 * threads * BYTES_PER_CANDIDATE * min(size, k + k // 4 + 8))
        rows = max(1, min(_MAX_ROWS, num_wanted, entries, candidates))
        return ScanPlan(rows, max(1, min(size, entries // rows)), threads)

    def num_pairs(self, k: int, num_wanted: int, *, done: int = 0) -> int:
        """Pairs that ``ranked`` compares behind the ``done`` of its state."""
        plan = self.plan(k, num_wanted)
        if not plan.by_half:
            return (num_wanted - done) * self.num_gallery
        starts = range(done * plan.rows, self.num_gallery, plan.rows)
        return sum(min(plan.rows, self.num_gallery - start) * (self.num_gallery - start) for start in starts)


def pairwise_search(
    queries: EmbeddingSet,
    gallery: EmbeddingSet | None,
    distance: "BaseDistance",
    *,
    tile_bytes: int,
    bar: tqdm | None = None,
    device: torch.device | None = None,
) -> PairwiseSearch:
    """Check two sets (or one, searched within itself); where tiles are computed, ``PairwiseSimilarity`` says.

    Raises:
        RunError: the sets cannot be searched, or the distance gives NaN.
    """
    reference = queries if gallery is None else gallery
    similarity = PairwiseSimilarity(queries, reference, distance, device)
    if len(reference) > MAX_GALLERY:
        raise RunError(f"the gallery has {len(reference)} rows, more than {MAX_GALLERY}; search it in parts")
    own = self_columns(ids_of(queries), ids_of(reference))
    return PairwiseSearch(
        similarity,
        own,
        len(reference),
        gallery is None,
        _unit(similarity, len(queries), len(reference)),
        tile_bytes,
        tiles_on_host(similarity.device),
        tqdm(disable=True) if bar is None else bar,
    )


def _unit(similarity: PairwiseSimilarity, num_queries: int, num_gallery: int) -> float:
    """Of the scale: where the error's absolute part equals its relative one, and else a usual value; any is right."""
    if similarity.absolute and similarity.relative:
        return similarity.absolute / similarity.relative
    some = [np.linspace(0, size - 1, min(size, _PROBE)).astype(np.int64) for size in (num_queries, num_gallery)]
    value: Tensor = similarity.tile(some[0], some[1]).abs()
    return float(value.median()) or float(value.max()) or 1.0
