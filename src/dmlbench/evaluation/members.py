"""Tiles of pairwise similarities of one run, whatever its distance: what the ranking of joined embeddings is made of.

Letters: Q queries, N gallery items, T queries and W gallery items of a tile.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dmlbench.evaluation.candidates import ExactSimilarity
from dmlbench.evaluation.search import UnitSearch
from dmlbench.evaluation.sets import check_sets
from dmlbench.evaluation.similarity import FloatRows
from dmlbench.types import EmbeddingSet, IntArray, RunError

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


class DistanceMember:
    """A run with a pairwise distance of its own, whose values in its own precision decide.

    Args:
        queries: rows [Q, D]; the distance is computed on their device.
        gallery: rows [N, D].
        distance: larger is nearer if ``is_inverted``. What it separates by rounding alone may depend on the tile.

    Raises:
        RunError: the sets cannot be searched.
    """

    def __init__(self, queries: EmbeddingSet, gallery: EmbeddingSet, distance: "BaseDistance") -> None:
        check_sets(queries, gallery)
        state = [x for x in (*distance.parameters(), *distance.buffers()) if x.is_floating_point()]
        self.distance = distance
        dtype = state[0].dtype if state else torch.float64
        self.queries = queries.rows.to(dtype)
        self.gallery = gallery.rows.to(self.queries.device, dtype)

    def tile(self, part: IntArray, start: int, stop: int, *, out: FloatRows) -> PairTile:
        """See ``Member``; float32 rounds the distance's values.

        Raises:
            RunError: a value is not finite.
        """
        value = self._similarities(part, self.gallery[start:stop])
        out[...] = value
        largest = float(np.abs(value).max(initial=0.0))
        if not np.isfinite(largest):
            raise RunError(f"{type(self.distance).__name__} gave NaN or infinity for finite embeddings")
        return PairTile(out, largest * 2.0**-24 + 2.0**-149, largest)

    def exact(self, part: IntArray) -> ExactSimilarity:
        """See ``Member``; a query's row is computed against all items that are asked for."""

        def similarity(rows: IntArray, columns: IntArray) -> NDArray[np.float64]:
            wanted_rows, row = np.unique(rows, return_inverse=True)
            wanted_columns, column = np.unique(columns, return_inverse=True)
            index = torch.from_numpy(wanted_columns).to(self.gallery.device)
            return self._similarities(part[wanted_rows], self.gallery[index])[row, column]

        return similarity

    def _similarities(self, part: IntArray, gallery: Tensor) -> NDArray[np.float64]:
        with torch.inference_mode():
            matrix = self.distance(self.queries[torch.from_numpy(part).to(self.queries.device)], gallery)
        sign = 1.0 if self.distance.is_inverted else -1.0
        return sign * matrix.to("cpu", torch.float64).numpy()
