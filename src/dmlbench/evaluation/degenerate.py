"""Signs of collapsed embeddings, which scores do not show: zero vectors, equal rows, queries that ties decide."""

import numpy as np
import torch
from numpy.typing import NDArray

from dmlbench.evaluation.relevance import Relevance
from dmlbench.evaluation.search.unit_rows import unit_rows
from dmlbench.types import EmbeddingSet, IntArray

SHARE = 0.01
"""Shares of equal rows, and of queries decided by ties, up to this are not worth a word."""
_PLACES, _NEAR = 1e5, 2e-7
"""Equal unit vectors agree in so many places; a direction with many lengths rounds to similarities so near."""
_QUERIES, _TILE = 2000, 256


def degeneracies(
    queries: EmbeddingSet, gallery: EmbeddingSet, relevance: Relevance, *, cosine: bool
) -> tuple[str, ...]:
    """What is degenerate about embeddings, a phrase each.

    Args:
        queries: rows [Q, D].
        gallery: rows [N, D]; may be ``queries``.
        relevance: of both.
        cosine: whether they are compared as unit vectors; else ties are not counted.
    """
    found = []
    parts = [("queries", queries)] if gallery is queries else [("queries", queries), ("gallery items", gallery)]
    for name, part in parts:
        if zeros := int((_lengths(part) == 0).sum()):
            found.append(f"{zeros} of {len(part)} {name} are zero vectors, similar to nothing")
    first, inverse, counts = _groups(gallery)
    equal = int(counts[counts > 1].sum())
    if equal <= SHARE * len(gallery):
        return tuple(found)
    found.append(f"{100 * equal / len(gallery):.1f} % of the embeddings are equal to another one")
    share = tie_share(queries, gallery.rows[torch.from_numpy(first)], inverse, relevance) if cosine else 0.0
    if share > SHARE:
        found.append(f"ties, broken by the gallery's order, decide {100 * share:.1f} % of the queries")
    return tuple(found)


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


def tie_share(queries: EmbeddingSet, distinct: torch.Tensor, group: IntArray, relevance: Relevance) -> float:
    """Share of the queries whose first R places hold relevant and other items that are equally similar.

    Args:
        queries: rows [Q, D]; at most 2,000 of them, evenly spaced, are looked at.
        distinct: one row of each group of equal gallery rows [G, D].
        group: of each gallery row [N].
        relevance: of queries and gallery.
    """
    valid = relevance.valid[:: max(1, -(-len(relevance.valid) // _QUERIES))]
    gallery, rows = unit_rows(distinct), unit_rows(queries.rows[torch.from_numpy(valid)])
    tied = 0
    for start in range(0, len(valid), _TILE):
        part = valid[start : start + _TILE]
        tied += int(_tied(rows[start : start + _TILE] @ gallery.T, part, group, relevance).sum())
    return tied / len(valid)


def _tied(
    similarity: NDArray[np.float32], queries: IntArray, group: IntArray, relevance: Relevance
) -> NDArray[np.bool_]:
    values = similarity[:, group]
    own = relevance.own_column[queries]
    held = np.flatnonzero(own >= 0)
    values[held, own[held]] = -np.inf
    order = np.argsort(-values, axis=1, kind="stable")
    values = np.take_along_axis(values, order, axis=1)
    relevant = relevance.relevant(queries, order)
    last = np.take_along_axis(values, relevance.positives[queries, None] - 1, axis=1)  # at place R
    differ = (
        (relevant[:, 1:] != relevant[:, :-1])
        & (values[:, :-1] - values[:, 1:] <= _NEAR)
        & (values[:, 1:] >= last - _NEAR)
    )
    return differ.any(axis=1)
