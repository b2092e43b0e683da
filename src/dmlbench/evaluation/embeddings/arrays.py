"""Convert numpy arrays and torch tensors to embedding sets."""

import logging
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dmlbench.types import EmbeddingSet, RunError

Array = NDArray[Any] | Tensor

_ROWS_IN_ERRORS = 5

logger = logging.getLogger(__name__)


def embedding_set(rows: Array, labels: Array, ids: Array | None, *, what: str) -> EmbeddingSet:
    """An embedding set: rows float32, labels and ids (row numbers if None) int64.

    Args:
        rows: [N, D] floating point of any width and byte order.
        labels: [N] whole numbers.
        ids: [N] whole numbers, or None.
        what: name of the set in messages.

    Raises:
        RunError: wrong types, shapes or lengths, NaN or infinity, repeated ids.
    """
    x = _float_rows(rows, what)
    y = _whole_numbers(labels, f"{what} labels")
    numbers = torch.arange(len(x)) if ids is None else _whole_numbers(ids, f"{what} ids")
    for name, values in (("labels", y), ("ids", numbers)):
        if len(values) != len(x):
            raise RunError(f"the {what} set has {len(x)} rows but {len(values)} {name}; give one for every row")
    if len(torch.unique(numbers)) < len(numbers):
        values, counts = torch.unique(numbers, return_counts=True)
        raise RunError(f"{what} id {int(values[counts > 1][0])} occurs more than once; ids must be unique")
    return EmbeddingSet(x, y, numbers)


def with_distinct_ids(
    queries: EmbeddingSet, gallery: EmbeddingSet | None, *, given: tuple[bool, bool]
) -> tuple[EmbeddingSet, EmbeddingSet | None]:
    """Number the gallery on from the queries if neither has ids, so that no query is left out of its search.

    Raises:
        RunError: only one of the two has ids, or there are fewer than two rows to compare.
    """
    if gallery is None:
        if len(queries) < 2:
            raise RunError(f"{len(queries)} rows cannot be searched among themselves; give at least 2, or a gallery")
        return queries, None
    if given[0] != given[1]:
        raise RunError(
            f"the {'query' if given[0] else 'gallery'} set has ids and the other has none: whether a query is in the "
            "gallery cannot be told; give ids for both or for neither"
        )
    if not given[0]:
        numbers = torch.arange(len(queries), len(queries) + len(gallery))
        gallery = EmbeddingSet(gallery.rows, gallery.labels, numbers)
    return queries, gallery


def _float_rows(rows: Array, what: str) -> Tensor:
    x = _tensor(rows, f"{what} rows")
    if not x.is_floating_point():
        raise RunError(
            f"{what} rows are {_kind(rows)}; embeddings are floating-point numbers: convert them if they are meant "
            "as such, for instance to float32"
        )
    if x.ndim != 2 or x.shape[1] == 0:
        raise RunError(f"{what} rows must be a matrix [N, D]; got shape {tuple(x.shape)}")
    if x.dtype != torch.float32:
        logger.warning("%s rows are %s; they are evaluated as float32", what, _kind(rows))
    result = x.to(torch.float32)
    bad = torch.nonzero(~torch.isfinite(result).all(dim=1))[:, 0].tolist()
    if bad:
        listing = ", ".join(map(str, bad[:_ROWS_IN_ERRORS])) + (" and more" if len(bad) > _ROWS_IN_ERRORS else "")
        raise RunError(
            f"{len(bad)} of {len(x)} {what} rows hold NaN, infinity or more than float32 can (row numbers {listing}); "
            "leave them out, or fix the model that produces them"
        )
    return result


def _whole_numbers(values: Array, what: str) -> Tensor:
    x = _tensor(values, what)
    if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise RunError(f"{what} are {_kind(values)}; they must be whole numbers, for instance int64")
    if x.ndim != 1:
        raise RunError(f"{what} must be a list [N]; got shape {tuple(x.shape)}")
    return x.to("cpu", torch.int64)


def _tensor(values: Array, what: str) -> Tensor:
    """A tensor that shares memory if possible, in native byte order."""
    if isinstance(values, Tensor):
        if values.layout != torch.strided:
            raise RunError(f"{what} are sparse; make them dense, as by values.to_dense()")
        return values.detach()
    if isinstance(values, np.ma.MaskedArray):
        raise RunError(f"{what} are a masked array, whose mask would be lost; leave out what it hides")
    values = np.asarray(values)
    if values.dtype.kind not in "fiubc":
        text = "; numpy.unique(names, return_inverse=True)[1] numbers names" if values.dtype.kind in "USO" else ""
        raise RunError(f"{what} are {_kind(values)}; they must be numbers{text}")
    array = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("="))
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:
        array = array.astype(np.float64)  # torch has no longer one
    if array.dtype.kind == "u" and array.dtype.itemsize == 8:
        if array.size and int(array.max()) > np.iinfo(np.int64).max:
            raise RunError(f"{what} reach {int(array.max())}; they must fit into int64")
        array = array.astype(np.int64)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _kind(values: Array) -> str:
    if isinstance(values, Tensor):
        return str(values.dtype).removeprefix("torch.")
    return {"U": "strings", "S": "bytes", "O": "Python objects"}.get(values.dtype.kind, values.dtype.name)
