"""Which gallery items are relevant to which queries, and signs of collapsed embeddings, which scores do not show."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dmlbench.evaluation.embeddings.embed import ids_of, labels_of, own_columns
from dmlbench.evaluation.metrics.registry import Score, depth
from dmlbench.evaluation.search.candidates import ExactSimilarity, Keys, column_of, marked, order_exactly
from dmlbench.evaluation.search.unit_vectors import unit_rows
from dmlbench.types import EmbeddingSet, IntArray, RunError

_SHARE = 0.01  # of equal rows, and of queries decided by ties: up to this not worth a word
_PLACES, _NEAR = 1e5, 2e-7  # in which equal unit vectors agree; a direction of many lengths rounds to values so near
_QUERIES, _TILE = 2000, 256
_LEAST_SPREAD = 1e-3  # of unit vectors; rounding to float32 moves a cosine by as much as a difference of 3e-4
_ROUNDED = "the embeddings differ so little that rounding can decide their order"


@dataclass(frozen=True)
class Relevance:
    """Relevant items of every query, and how many places of a ranking the scores need."""

    query_labels: IntArray  # [Q]
    gallery_labels: IntArray  # [N]
    own_column: IntArray  # [Q] gallery index of the query itself, or -1
    positives: IntArray  # R [Q]
    valid: IntArray  # [V] queries with a positive, ascending
    k: int  # first places of a ranking that the scores need

    @property
    def n_skipped_queries(self) -> int:
        return len(self.query_labels) - len(self.valid)

    def p_at_1_by_chance(self) -> tuple[float, float]:
        """Mean and standard deviation of P@1 over random rankings."""
        searched = len(self.gallery_labels) - (self.own_column[self.valid] >= 0)
        share = self.positives[self.valid] / searched
        return float(share.mean()), float(np.sqrt((share * (1 - share)).sum()) / len(share))

    def relevant(self, queries: IntArray, columns: IntArray) -> NDArray[np.bool_]:
        """Whether gallery items ``columns`` [T, C] match the labels of ``queries`` [T]; False at padding (-1)."""
        return (self.gallery_labels[columns] == self.query_labels[queries, None]) & (columns >= 0)

    def relevant_by_rank(
        self, queries: IntArray, keys: Keys, exact: ExactSimilarity, *, slack: float
    ) -> NDArray[np.bool_]:
        """Whether the items at the first min(k, N) places of candidates [T, C] match the labels of ``queries`` [T].

        Values further apart than ``slack`` are in the right order; ``exact`` decides the others.
        """
        found = self.relevant(queries, column_of(keys))
        ordered = order_exactly(keys | found, exact, k=self.k, slack=slack, by_mark=True)
        return marked(ordered)[:, : self.k]


def relevance_of(queries: EmbeddingSet, gallery: EmbeddingSet, scores: Sequence[Score]) -> Relevance:
    """Check two sets against each other and count the positives; RunError where no query has one."""
    own = own_columns(queries, gallery)
    query_labels, gallery_labels = labels_of(queries), labels_of(gallery)
    held = np.flatnonzero(own >= 0)
    differs = held[query_labels[held] != gallery_labels[own[held]]]
    if len(differs):
        first = differs[0]
        raise RunError(
            f"row id {ids_of(queries)[first]}: got label {query_labels[first]} as a query and "
            f"{gallery_labels[own[first]]} in the gallery, expected the same. Embed both from one table."
        )
    positives = positives_per_query(query_labels, gallery_labels, own)
    valid = np.flatnonzero(positives > 0)
    if len(valid) == 0:
        raise RunError(
            f"none of the {len(queries)} queries has another item of its class among the {len(gallery)} gallery "
            "items. Scores need classes with at least two images."
        )
    k = depth(positives, len(gallery), scores)
    return Relevance(query_labels, gallery_labels, own, positives, valid, k)


def positives_per_query(query_labels: IntArray, gallery_labels: IntArray, own_column: IntArray) -> IntArray:
    """R [Q]: gallery items of each query's class, without the query itself (``own_column`` [Q], else -1)."""
    classes, counts = np.unique(gallery_labels, return_counts=True)
    place = np.minimum(np.searchsorted(classes, query_labels), len(classes) - 1)
    found = np.where(classes[place] == query_labels, counts[place], 0)
    return (found - (own_column >= 0)).astype(np.int64)


def degeneracies(queries: EmbeddingSet, gallery: EmbeddingSet, relevance: Relevance, *, cosine: bool) -> list[str]:
    """What is degenerate about embeddings, a phrase each; ties are counted where ``cosine`` compares them."""
    found = []
    parts = [("queries", queries)] if gallery is queries else [("queries", queries), ("gallery items", gallery)]
    for name, part in parts:
        if zeros := int((_lengths(part) == 0).sum()):
            found.append(f"{zeros} of {len(part)} {name} are zero vectors, similar to nothing")
    first, inverse, counts = _groups(gallery)
    equal = int(counts[counts > 1].sum())
    if equal <= _SHARE * len(gallery):
        return [*found, _ROUNDED] if cosine and _spread(gallery) < _LEAST_SPREAD else found
    found.append(f"{100 * equal / len(gallery):.1f} % of the embeddings are equal to another one")
    share = _tie_share(queries, gallery.rows[torch.from_numpy(first)], inverse, relevance) if cosine else 0.0
    if share > _SHARE:
        found.append(f"ties, broken by the gallery's order, decide {100 * share:.1f} % of the queries")
    return found


def _spread(part: EmbeddingSet) -> float:
    """Root mean square distance of unit vectors from their mean, by at most 2,000 of them."""
    rows = part.rows[:: max(1, len(part) // _QUERIES)].to("cpu", torch.float64)
    rows = torch.nn.functional.normalize(rows[rows.any(dim=1)])
    return float((rows - rows.mean(dim=0)).square().sum(dim=1).mean().sqrt()) if len(rows) else 0.0


def _lengths(part: EmbeddingSet) -> torch.Tensor:
    return torch.linalg.vector_norm(part.rows, dim=1, dtype=torch.float64)


def _groups(part: EmbeddingSet) -> tuple[IntArray, IntArray, IntArray]:
    """Equal unit vectors: index of the first of each group [G], group of each row [N], sizes [G].

    Rows are equal if four random projections of them are, which takes a hundredth of comparing them.
    """
    directions = torch.randn(part.rows.shape[1], 4, generator=torch.Generator().manual_seed(0)).to(part.rows.device)
    length = _lengths(part).clamp_min(1e-300)[:, None]
    places = (part.rows.float() @ directions / length * _PLACES).round().to("cpu", torch.int64).numpy()
    keys = places @ np.array([1, 10**9 + 7, 998_244_353, 10**6 + 3])
    _, first, inverse, counts = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
    return first, inverse, counts


def _tie_share(queries: EmbeddingSet, distinct: torch.Tensor, group: IntArray, relevance: Relevance) -> float:
    """Share of the queries whose first R places hold relevant and other items that are equally similar.

    At most 2,000 queries, evenly spaced, are looked at. ``distinct`` [G, D] has one row of each group of equal gallery
    rows, ``group`` [N] the group of each.
    """
    valid = relevance.valid[:: max(1, -(-len(relevance.valid) // _QUERIES))]
    gallery, rows = unit_rows(distinct), unit_rows(queries.rows[torch.from_numpy(valid)])
    tied = 0
    for start in range(0, len(valid), _TILE):
        part = valid[start : start + _TILE]
        values = (rows[start : start + _TILE] @ gallery.T)[:, group]
        own = relevance.own_column[part]
        held = np.flatnonzero(own >= 0)
        values[held, own[held]] = -np.inf
        order = np.argsort(-values, axis=1, kind="stable")
        values = np.take_along_axis(values, order, axis=1)
        relevant = relevance.relevant(part, order)
        last = np.take_along_axis(values, relevance.positives[part, None] - 1, axis=1)  # at place R
        differ = (
            (relevant[:, 1:] != relevant[:, :-1])
            & (values[:, :-1] - values[:, 1:] <= _NEAR)
            & (values[:, 1:] >= last - _NEAR)
        )
        tied += int(differ.any(axis=1).sum())
    return tied / len(valid)
