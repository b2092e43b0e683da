"""Tiles of similarities of one fold model, whatever its distance: what the ranking of joined embeddings adds up.

Letters: M models, Q queries, N gallery items, T queries and W gallery items of a tile, C items that matter.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from dmlbench.evaluation.embeddings.sets import ModelDistances, ModelEmbeddings
from dmlbench.evaluation.search.pairwise import PairwiseSimilarity, ranks_like_unit_vectors
from dmlbench.evaluation.search.similarity import FloatRows
from dmlbench.evaluation.search.top_k import ExactSimilarity, Tile
from dmlbench.evaluation.search.unit_vectors import MIN_TILE_BYTES, UnitSearch, unit_search
from dmlbench.types import IntArray


class Near(NamedTuple):
    """What some sum of models may need of a tile: n items, those of one query after those of the other.

    Attributes:
        value: [M, n] float32 similarities; like ``reach`` an array, or a tensor where tiles lie on an accelerator.
        column: [n] gallery items, ascending for each query.
        counts: [T] items of each query.
        reach: [T, S] values that the sums of at least k items reach.
    """

    value: Any
    column: IntArray
    counts: IntArray
    reach: Any


@dataclass(frozen=True)
class Bounds:
    """What is known of the float32 similarities of a tile.

    Attributes:
        error: two values of a row that are more than ``2 * error`` apart are in the right order.
        largest: bound of the size of every value.
    """

    error: float
    largest: float


class FoldModel(Protocol):
    """What the ranking of joined embeddings asks of a model."""

    @property
    def device(self) -> torch.device:
        """Where similarities are computed."""
        ...

    def similarities(self, part: IntArray, start: int, stop: int, *, out: Tile) -> Bounds:
        """Float32 similarities of queries ``part`` [T] to gallery items start .. stop - 1 into ``out`` [T, W], larger
        being nearer, right up to a constant per query."""
        ...

    def exact(self, part: IntArray) -> ExactSimilarity:
        """The float64 similarities that decide, of pairs (place in ``part``, gallery index)."""
        ...

    def held_rows(self) -> tuple[FloatRows, FloatRows] | None:
        """Unit rows of the queries [Q, D] and the gallery [N, D], where they are held and decide by themselves."""
        ...


@dataclass(frozen=True)
class UnitModel:
    """A model whose rows are compared as unit vectors."""

    search: UnitSearch

    @property
    def device(self) -> torch.device:
        """See ``FoldModel``."""
        return self.search.device

    def similarities(self, part: IntArray, start: int, stop: int, *, out: Tile) -> Bounds:
        """See ``FoldModel``."""
        self.search.similarities(part, start, stop, out=out)
        return Bounds(self.search.product.error, self.search.product.largest)

    def exact(self, part: IntArray) -> ExactSimilarity:
        """See ``FoldModel``."""
        return self.search.exact(part)

    def held_rows(self) -> tuple[FloatRows, FloatRows] | None:
        """See ``FoldModel``."""
        queries, gallery = self.search.query.held, self.search.gallery.held
        return None if queries is None or gallery is None else (queries, gallery)


@dataclass(frozen=True)
class DistanceModel:
    """A model with a pairwise distance of its own."""

    similarity: PairwiseSimilarity

    @property
    def device(self) -> torch.device:
        """See ``FoldModel``."""
        return self.similarity.device

    def similarities(self, part: IntArray, start: int, stop: int, *, out: Tile) -> Bounds:
        """See ``FoldModel``; the error is the distance's own, and float32's of rounding its values."""
        value = self.similarity.tile(part, slice(start, stop))
        (out if isinstance(out, Tensor) else torch.from_numpy(out)).copy_(value)
        largest = float(value.abs().max())
        relative = 1.02 * self.similarity.relative + 2.0**-24
        return Bounds(largest * relative + self.similarity.absolute + 2.0**-149, 1.01 * largest)

    def exact(self, part: IntArray) -> ExactSimilarity:
        """See ``FoldModel``."""
        return self.similarity.exact(part)

    def held_rows(self) -> None:
        """See ``FoldModel``."""


def fold_models(
    queries: ModelEmbeddings,
    galleries: ModelEmbeddings | None,
    distances: ModelDistances | None,
    *,
    tile_bytes: int,
    device: torch.device,
) -> list[FoldModel]:
    """The models, fold by fold, searched on ``device``; they hold unit rows in at most half of ``tile_bytes``."""
    share = max(2 * tile_bytes // sum(map(len, queries)), MIN_TILE_BYTES)  # of which a quarter may be held
    models: list[FoldModel] = []
    for fold, repeats in enumerate(queries):
        for repeat, rows in enumerate(repeats):
            gallery = None if galleries is None else galleries[fold][repeat]
            distance = None if distances is None else distances[fold][repeat]
            if distance is not None and not ranks_like_unit_vectors(distance):
                models.append(
                    DistanceModel(PairwiseSimilarity(rows, rows if gallery is None else gallery, distance, device))
                )
            else:
                models.append(UnitModel(unit_search(rows, gallery, back_end="torch", tile_bytes=share, device=device)))
    return models
