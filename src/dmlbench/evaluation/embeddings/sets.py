"""Checks of embedding sets, and the gallery index of each query."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dmlbench.types import EmbeddingSet, IntArray, RunError

if TYPE_CHECKING:
    from pytorch_metric_learning.distances import BaseDistance

MAX_ROWS = 2**31  # indices of a search fit into half of a key

ModelEmbeddings = Sequence[Sequence[EmbeddingSet]]
"""Embeddings of one test set by every model, [fold][repeat]."""

ModelDistances = Sequence[Sequence["BaseDistance | None"]]
"""The distance of each model, [fold][repeat]; None is the Euclidean one of unit vectors."""


def self_columns(query_ids: IntArray, gallery_ids: IntArray) -> IntArray:
    """Gallery index [Q] of the item with the query's own id, -1 if the gallery has none.

    Raises:
        RunError: an id occurs twice in the gallery.
    """
    order = np.argsort(gallery_ids, kind="stable")
    ordered = gallery_ids[order]
    twice = np.flatnonzero(ordered[1:] == ordered[:-1])
    if len(twice):
        raise RunError(f"row id {ordered[twice[0]]} occurs more than once in the gallery; ids must be unique")
    if len(ordered) == 0:
        return np.full(len(query_ids), -1, dtype=np.int64)
    place = np.minimum(np.searchsorted(ordered, query_ids), len(ordered) - 1)
    return np.where(ordered[place] == query_ids, order[place], -1).astype(np.int64)


def own_columns(queries: EmbeddingSet, gallery: EmbeddingSet) -> IntArray:
    """``self_columns`` [Q] of two sets that can be searched.

    Raises:
        RunError: see ``check_sets`` and ``self_columns``.
    """
    check_sets(queries, gallery)
    return self_columns(ids_of(queries), ids_of(gallery))


def check_sets(queries: EmbeddingSet, gallery: EmbeddingSet) -> None:
    """Raises RunError unless both sets hold finite rows of one width, with a label and an id each."""
    named = {"query": queries} if gallery is queries else {"query": queries, "gallery": gallery}
    for name, part in named.items():
        if part.rows.ndim != 2 or not len(part.rows) == len(part.labels) == len(part.ids):
            raise RunError(
                f"{name} set needs rows [N, D] with N labels and N ids; got rows {tuple(part.rows.shape)}, "
                f"{len(part.labels)} labels and {len(part.ids)} ids"
            )
        if not 0 < len(part) < MAX_ROWS:
            raise RunError(f"the {name} set has {len(part)} rows, expected 1 to {MAX_ROWS - 1}")
        check_finite(part.rows, part.ids, what=f"{name} embedding")
    if queries.rows.shape[1] != gallery.rows.shape[1]:
        raise RunError(
            f"queries have {queries.rows.shape[1]} dimensions and the gallery has {gallery.rows.shape[1]}; "
            "embed both with the same model"
        )


def check_finite(rows: Tensor, ids: Tensor, *, what: str) -> None:
    """Raises RunError naming the first of ``ids`` [N] whose row of ``rows`` [N, D] holds a NaN or an infinity."""
    if bool(torch.isfinite(rows.sum(dim=1)).all()):  # one pass; a sum that overflows is looked at more closely
        return
    finite = torch.isfinite(rows).all(dim=1)
    if not bool(finite.all()):
        first = int(torch.nonzero(~finite)[0, 0])
        raise RunError(
            f"{what} of row id {int(ids[first])} holds NaN or infinity ({int((~finite).sum())} of {len(rows)} rows "
            "do); the model has diverged: lower the learning rate or clip the gradient"
        )


def ids_of(part: EmbeddingSet) -> IntArray:
    """Row ids [N] as int64 on the CPU."""
    return part.ids.detach().cpu().numpy().astype(np.int64)


def labels_of(part: EmbeddingSet) -> IntArray:
    """Labels [N] as int64 on the CPU."""
    return part.labels.detach().cpu().numpy().astype(np.int64)
