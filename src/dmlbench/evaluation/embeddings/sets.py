"""Embedding sets: made from arrays, checked, and the gallery index of each query."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dmlbench.types import EmbeddingSet, IntArray, RunError

if TYPE_CHECKING:
    from pytorch_metric_learning.distances import BaseDistance

MAX_ROWS = 2**31  # indices of a search fit into half of a key

Array = NDArray[Any] | Tensor
Arrays = tuple[Array, Array, Array | None]
"""Rows [N, D] of any floating-point type, labels [N], and ids [N] or None."""

ModelEmbeddings = Sequence[Sequence[EmbeddingSet]]
"""Embeddings of one test set by every model, [fold][repeat]."""

ModelDistances = Sequence[Sequence["BaseDistance | None"]]
"""The distance of each model, [fold][repeat]; None is the Euclidean one of unit vectors."""

logger = logging.getLogger(__name__)


def sets_of_arrays(query: Arrays, gallery: Arrays | None) -> tuple[EmbeddingSet, EmbeddingSet | None]:
    """Sets, rows float32. Without ids, rows are numbered through both sets: no query is in the gallery."""
    queries = _set_of(query, "query", first_id=0)
    if gallery is None:
        return queries, None
    if (query[2] is None) != (gallery[2] is None):
        raise RunError("ids: got them for one of queries and gallery. Give them for both or for neither.")
    return queries, _set_of(gallery, "gallery", first_id=len(queries))


def _set_of(arrays: Arrays, name: str, *, first_id: int) -> EmbeddingSet:
    rows, labels, ids = arrays
    x = _tensor(rows, torch.float32, f"{name} rows")
    numbers = torch.arange(first_id, first_id + len(x)) if ids is None else _tensor(ids, torch.int64, f"{name} ids")
    return EmbeddingSet(x, _tensor(labels, torch.int64, f"{name} labels"), numbers)


def _tensor(values: Array, dtype: torch.dtype, what: str) -> Tensor:
    """Values as ``dtype`` if that is of their kind; memory is shared if possible."""
    if isinstance(values, np.ma.MaskedArray):
        raise RunError(f"{what}: got a masked array, whose mask would be lost. Leave out what it hides.")
    values = values if isinstance(values, Tensor) else np.asarray(values)
    given = values.dtype
    if not isinstance(values, Tensor):
        if values.dtype.kind not in "fiu":
            raise RunError(f"{what}: got {given}, expected numbers.")
        with np.errstate(over="ignore"):  # what is infinite then is found below
            array = np.require(values, np.float32 if values.dtype.kind == "f" else np.int64, ["C", "W"])
        values = torch.from_numpy(array)
    is_number = not (values.is_complex() or values.dtype == torch.bool)
    if not is_number or values.is_floating_point() != dtype.is_floating_point:
        kind = "floating-point" if dtype.is_floating_point else "whole"
        raise RunError(f"{what}: got {given}, expected {kind} numbers.")
    if dtype.is_floating_point and str(given).removeprefix("torch.") != "float32":
        logger.warning("%s are %s; they are evaluated as float32", what, given)
    return values.detach().to_dense().to(dtype)


def self_columns(query_ids: IntArray, gallery_ids: IntArray) -> IntArray:
    """Gallery index [Q] of the item with the query's own id, -1 if the gallery has none."""
    order = np.argsort(gallery_ids, kind="stable")
    ordered = gallery_ids[order]
    twice = np.flatnonzero(ordered[1:] == ordered[:-1])
    if len(twice):
        raise RunError(f"row id {ordered[twice[0]]} occurs more than once in the gallery; ids must be unique")
    place = np.minimum(np.searchsorted(ordered, query_ids), len(ordered) - 1)
    return np.where(ordered[place] == query_ids, order[place], -1).astype(np.int64)


def own_columns(queries: EmbeddingSet, gallery: EmbeddingSet) -> IntArray:
    """``self_columns`` [Q] of two sets that can be searched."""
    check_sets(queries, gallery)
    return self_columns(ids_of(queries), ids_of(gallery))


def check_sets(queries: EmbeddingSet, gallery: EmbeddingSet) -> None:
    """Raise RunError unless both sets hold finite rows of one width, with a label and an id each."""
    named = {"query": queries} if gallery is queries else {"query": queries, "gallery": gallery}
    for name, part in named.items():
        if part.rows.ndim != 2 or not part.rows.shape[:1] == part.labels.shape == part.ids.shape:
            raise RunError(
                f"{name} set needs rows [N, D] with N labels and N ids; got rows {tuple(part.rows.shape)}, "
                f"labels {tuple(part.labels.shape)} and ids {tuple(part.ids.shape)}"
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
    """Raise RunError naming the first of ``ids`` [N] whose row of ``rows`` [N, D] holds a NaN or an infinity."""
    if bool(torch.isfinite(rows.sum(dim=1)).all()):  # one pass; a sum that overflows is looked at more closely
        return
    finite = torch.isfinite(rows).all(dim=1)
    if not bool(finite.all()):
        first = int(torch.nonzero(~finite)[0, 0])
        raise RunError(
            f"{what} of row id {int(ids[first])} holds NaN or infinity ({int((~finite).sum())} of {len(rows)} rows "
            "do); if the model has diverged, lower the learning rate or clip the gradient"
        )


def ids_of(part: EmbeddingSet) -> IntArray:
    """Row ids [N] as int64 on the CPU."""
    return part.ids.detach().cpu().numpy().astype(np.int64)


def labels_of(part: EmbeddingSet) -> IntArray:
    """Labels [N] as int64 on the CPU."""
    return part.labels.detach().cpu().numpy().astype(np.int64)
