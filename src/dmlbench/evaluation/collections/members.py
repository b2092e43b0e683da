"""Tiles of pairwise similarities of one run, whatever its distance: what the ranking of joined embeddings is made of.

Letters: Q queries, N gallery items, T queries and W gallery items of a tile.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from dmlbench.evaluation.search.candidates import ExactSimilarity
from dmlbench.evaluation.search.pairwise import PairwiseSimilarity
from dmlbench.evaluation.search.similarity import FloatRows
from dmlbench.evaluation.search.unit_vectors import UnitSearch
from dmlbench.types import EmbeddingSet, IntArray

if TYPE_CHECKING:
    from pytorch_metric_learning.distances import BaseDistance

Members = Sequence[Sequence[EmbeddingSet]]
"""Embeddings of one test set, indexed [fold][repeat]."""

Distances = Sequence[Sequence["BaseDistance | None"]]
"""The distance of each run, [fold][repeat]; None is the Euclidean one of unit vectors."""


@dataclass(frozen=True)
class PairTile:
    """Similarities of a tile's queries to consecutive gallery items.

    Attributes:
        value: [T, W] float32, larger is nearer, up to a constant per query.
        error: two values of a row that are more than ``2 * error`` apart are in the right order.
        largest: bound of the size of every value.
    """

    value: FloatRows
    error: float
    largest: float


class Member(Protocol):
    """What the ranking of joined embeddings asks of a run."""

    def tile(self, part: IntArray, start: int, stop: int, *, out: FloatRows) -> PairTile:
        """Similarities of the queries ``part`` [T] to gallery items start .. stop - 1, held in ``out`` [T, W]."""
        ...

    def exact(self, part: IntArray) -> ExactSimilarity:
        """The float64 similarities that decide, of pairs (place in ``part``, gallery index)."""
        ...


@dataclass(frozen=True)
class UnitMember:
    """A run whose rows are compared as unit vectors."""

    search: UnitSearch

    def tile(self, part: IntArray, start: int, stop: int, *, out: FloatRows) -> PairTile:
        """See ``Member``."""
        self.search.similarities(part, start, stop, out=out)
        return PairTile(out, self.search.product.error, self.search.product.largest)

    def exact(self, part: IntArray) -> ExactSimilarity:
        """See ``Member``."""
        return self.search.exact(part)


@dataclass(frozen=True)
class DistanceMember:
    """A run with a pairwise distance of its own."""

    similarity: PairwiseSimilarity

    def tile(self, part: IntArray, start: int, stop: int, *, out: FloatRows) -> PairTile:
        """See ``Member``; the error is the distance's own, and float32's of rounding its values."""
        value = self.similarity(part, slice(start, stop))
        out[...] = value
        largest = float(np.abs(value).max(initial=0.0))
        relative = 1.02 * self.similarity.relative + 2.0**-24
        return PairTile(out, largest * relative + self.similarity.absolute + 2.0**-149, 1.01 * largest)

    def exact(self, part: IntArray) -> ExactSimilarity:
        """See ``Member``."""
        return self.similarity.exact(part)
