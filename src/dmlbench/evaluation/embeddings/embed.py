"""Embedding sets: computed batch by batch, made from arrays, checked, saved, and read from files, never unpickled."""

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn
from tqdm import tqdm

from dmlbench.device_copies import to_device
from dmlbench.runtime import atomic_write, reason_of
from dmlbench.types import Batch, Diverged, EmbeddingSet, IntArray, RunError

if TYPE_CHECKING:
    from pytorch_metric_learning.distances import BaseDistance

ROLE_BOTH, ROLE_QUERY, ROLE_GALLERY = 0, 1, 2
BY_ORDER = {"ids": "by order"}
"""Metadata of a set whose ids only count its rows, because nobody has given any."""
OWN_DISTANCE = "distance"
"""Entry of a file's metadata: what compares its rows, where that is not the Euclidean distance of unit vectors."""
_ABOUT = "about"
"""The one entry of a file's own metadata."""
ROWS, LABELS, IDS = ("rows", "embeddings", "features", ""), ("labels", "targets"), ("ids",)
"""Names under which a file may hold each part; a nameless array counts as rows."""

SUFFIXES = (".safetensors", ".npz", ".npy", ".pt", ".pth")
MAX_ROWS = 2**31  # indices of a search fit into half of a key

Array = NDArray[Any] | Tensor
Arrays = tuple[Array, Array, Array | None]
"""Rows [N, D] of any floating-point type, labels [N], and ids [N] or None."""

ModelEmbeddings = Sequence[Sequence[EmbeddingSet]]
"""Embeddings of one test set by every model, [fold][repeat]."""

ModelDistances = Sequence[Sequence["BaseDistance | None"]]
"""The distance of each model, [fold][repeat]; None is the Euclidean one of unit vectors."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoredEmbeddings:
    """Contents of an embedding file; without a gallery, the queries search among themselves."""

    queries: EmbeddingSet
    gallery: EmbeddingSet | None
    metadata: dict[str, str]
    class_names: list[str] | None = None  # by label, of labels that are text


def embed(
    model: Callable[[Tensor], Tensor],
    batches: Iterable[Batch],
    *,
    device: torch.device,
    describe: str,
    count: int,
    progress: bool = False,
) -> EmbeddingSet:
    """Embed every image of ``batches`` once, in their order, without gradients.

    Args:
        model: images [B, 3, H, W] on ``device`` to rows [B, D]; in evaluation mode.
        describe: what is embedded, for the progress bar and messages.

    Returns rows [N, D] float32 and labels, ids [N] int64, on the CPU; RunError unless there are ``count`` images.
    """
    rows: Tensor | None = None
    labels: list[Tensor] = []
    ids: list[Tensor] = []
    done = 0
    with torch.inference_mode():
        for batch in tqdm(batches, desc=describe, disable=not progress, unit="batch", leave=False):
            part = model(to_device(batch.images, device)).to("cpu", torch.float32)
            check_finite(part, batch.ids, what=f"{describe}: embedding")
            rows = torch.empty(count, part.shape[1]) if rows is None else rows
            rows[done : done + len(part)] = part
            done += len(part)
            labels.append(batch.labels.to(torch.int64))
            ids.append(batch.ids.to(torch.int64))
    if rows is None or done != count:
        raise RunError(f"{describe}: got {done} images, expected {count or 'at least 1'}.")
    # outside inference mode, so that the set may take part in anything later
    return EmbeddingSet(rows.clone(), torch.cat(labels), torch.cat(ids))


def save_embeddings(
    path: str | os.PathLike[str], queries: EmbeddingSet, gallery: EmbeddingSet | None, metadata: Mapping[str, str]
) -> None:
    """Write one safetensors file atomically: tensors rows, labels, ids and role (0 both, 1 query, 2 gallery)."""
    sets = [queries] if gallery is None else [queries, gallery]
    codes = [ROLE_BOTH] if gallery is None else [ROLE_QUERY, ROLE_GALLERY]
    tensors = {
        "rows": torch.cat([part.rows.detach().to("cpu", torch.float32) for part in sets]),
        "labels": torch.cat([part.labels.to("cpu", torch.int64) for part in sets]),
        "ids": torch.cat([part.ids.to("cpu", torch.int64) for part in sets]),
        "role": torch.cat([torch.full((len(p),), c, dtype=torch.uint8) for p, c in zip(sets, codes, strict=True)]),
    }
    # safetensors writes several entries in an order that differs from file to file: equal sets shall give equal files
    about = {_ABOUT: json.dumps(dict(metadata), sort_keys=True)}
    atomic_write(path, save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata=about))


def save_distance(path: str | os.PathLike[str], distance: nn.Module) -> None:
    """Write the state of a distance atomically."""
    atomic_write(path, save({name: x.detach().cpu().contiguous() for name, x in distance.state_dict().items()}))


def load_distance(path: str | os.PathLike[str], distance: nn.Module) -> None:
    """Load the state of ``save_distance`` into ``distance``."""
    state, _ = _read(
        path,
        f"{path} is missing, and the run's embeddings cannot be compared without it. Embed the images again "
        "(from_checkpoint=true), or remove the run's folder and run it again.",
    )
    try:
        distance.load_state_dict(state)
    except RuntimeError as error:
        raise RunError(f"{path} is the state of another distance: {' '.join(str(error).split())}") from error


def load_embeddings(path: str | os.PathLike[str]) -> StoredEmbeddings:
    """Read a file of ``save_embeddings``."""
    tensors, metadata = _read(path, f"{path} is missing. Run `dmlbench train` for this config first.")
    rows, labels, ids, role = (tensors.get(name, torch.empty(())) for name in ("rows", "labels", "ids", "role"))
    if (
        rows.ndim != 2
        or not rows.is_floating_point()
        or any(x.shape != rows.shape[:1] or x.is_floating_point() for x in (labels, ids, role))
        or role.unique().tolist() not in ([ROLE_BOTH], [ROLE_QUERY, ROLE_GALLERY])
    ):
        raise RunError(
            f"{path} is not an embedding file: expected floating-point rows [N, D], and labels, ids and role [N] as "
            "whole numbers. The role is 0 for all rows, or 1 for queries and 2 for gallery items."
        )
    if _ABOUT in metadata:  # the metadata of earlier files is not nested
        metadata = json.loads(metadata[_ABOUT])
    both, queries, gallery = (
        EmbeddingSet(rows[role == code], labels[role == code], ids[role == code])
        for code in (ROLE_BOTH, ROLE_QUERY, ROLE_GALLERY)
    )
    return StoredEmbeddings(queries, gallery, metadata) if len(queries) else StoredEmbeddings(both, None, metadata)


def _read(path: str | os.PathLike[str], missing: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file; RunError ``missing`` if there is none."""
    if not Path(path).is_file():
        raise RunError(missing)
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            return tensors, dict(file.metadata() or {})
    except PermissionError as error:
        raise RunError(f"{path} cannot be read ({error.strerror}). Make it readable.") from error
    except SafetensorError as error:
        raise RunError(
            f"{path} is truncated or damaged ({error}). Remove the run's folder and run it again."
        ) from error


def read_embeddings(
    path: str | Path,
    labels: str | Path | None = None,
    *,
    gallery: str | Path | None = None,
    gallery_labels: str | Path | None = None,
) -> StoredEmbeddings:
    """Queries and gallery from files.

    Args:
        path: rows, and labels and ids if they are inside: an array "rows" (or "embeddings", "features"), "labels" (or
            "targets") and "ids" by name, or one nameless array of rows. A file of ``save_embeddings``, with its roles,
            may hold the gallery too.
        labels: file of the labels, if they are not inside.
        gallery: file of a separate gallery; None searches the queries among themselves.
        gallery_labels: file of its labels.
    """
    if gallery is None and gallery_labels is not None:
        raise RunError(f"gallery_labels: got {gallery_labels}, but no gallery. Set gallery=<file>, too.")
    parts = _read_arrays(path)
    if "role" in parts and Path(path).suffix == ".safetensors":  # only ``save_embeddings`` writes them
        if labels is not None or gallery is not None:
            raise RunError(f"{path} already holds labels and roles. Leave labels and gallery out.")
        return load_embeddings(path)
    query = _arrays(path, parts, labels, "labels")
    others = None if gallery is None else _arrays(gallery, _read_arrays(gallery), gallery_labels, "gallery_labels")
    query, others, names = _numbered(query, others)
    try:
        sets = sets_of_arrays(query, others)
    except RunError as error:
        files = path if gallery is None else f"{path}, {gallery}"
        raise RunError(f"{files}: {error}") from None
    return StoredEmbeddings(*sets, dict(BY_ORDER) if query[2] is None else {}, names)


def _arrays(path: str | Path, parts: dict[str, Array], labels: str | Path | None, option: str) -> Arrays:
    """Rows, labels and ids; ``option`` is the key that names the file ``labels``."""
    rows, inside = _part(path, parts, ROWS), _part(path, parts, LABELS)
    if rows is None:
        raise RunError(
            f"{path}: got {list(parts)}, expected {' or '.join(map(repr, ROWS[:-1]))}. Rename its embeddings."
        )
    if labels is not None and inside is not None:
        raise RunError(f"{path} holds labels, and {labels} was given, too. Leave one of them out.")
    if labels is not None:
        inside = _part(labels, _read_arrays(labels), (*LABELS, ""))
    if inside is None:
        raise RunError(f"{labels or path} holds no labels. Add them as 'labels', or set {option}=<file>.")
    return rows, inside, _part(path, parts, IDS)


def _part(path: str | Path, parts: dict[str, Array], names: tuple[str, ...]) -> Array | None:
    found = [name for name in names if name in parts]
    if len(found) > 1:
        raise RunError(f"{path}: got {' and '.join(map(repr, found))}, expected one of them. Remove the others.")
    return parts[found[0]] if found else None


def _read_arrays(path: str | Path) -> dict[str, Array]:
    """Arrays of a file by name; "" if the file holds one nameless array."""
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise RunError(f"{path}: unknown file type, expected one of {', '.join(SUFFIXES)}.")
    if not path.is_file():
        raise RunError(f"{path} is missing.")
    try:
        if path.suffix == ".safetensors":
            return dict(load_file(path))
        if path.suffix in (".pt", ".pth"):
            loaded = torch.load(path, map_location="cpu", weights_only=True)
        else:
            loaded = np.load(path, allow_pickle=False)
            if not isinstance(loaded, np.ndarray):
                with loaded:
                    return {name: loaded[name] for name in loaded.files}
    except Exception as error:  # readers of damaged files raise almost anything
        if "allow_pickle" in str(error):
            raise RunError(
                f"{path}: got an array of Python objects, expected numbers or text. Save it with .astype(str)."
            ) from error
        raise RunError(f"{path} is truncated or damaged: {reason_of(error)}") from error
    if isinstance(loaded, dict):
        for name, value in loaded.items():
            if name in (*ROWS, *LABELS, *IDS) and not isinstance(value, torch.Tensor):
                raise RunError(f"{path}: '{name}' is of type {type(value).__name__}, expected a tensor. Convert it.")
        return {str(name): value for name, value in loaded.items() if isinstance(value, torch.Tensor)}
    if not isinstance(loaded, np.ndarray | torch.Tensor):
        raise RunError(f"{path}: got {type(loaded).__name__}, expected a tensor or a dictionary of tensors.")
    return {"": loaded}


def sets_of_arrays(query: Arrays, gallery: Arrays | None) -> tuple[EmbeddingSet, EmbeddingSet | None]:
    """Checked sets, rows float32, labels numbers; names of classes are numbered in their sorted order.

    Without ids, rows are numbered through both sets: no query is in the gallery.
    """
    query, gallery, _ = _numbered(query, gallery)
    queries = _set_of(query, "query", first_id=0)
    if gallery is None:
        check_sets(queries, queries)
        return queries, None
    if (query[2] is None) != (gallery[2] is None):
        raise RunError("ids: got ids for only one of queries and gallery. Give ids for both or for neither.")
    others = _set_of(gallery, "gallery", first_id=len(queries))
    check_sets(queries, others)
    return queries, others


def _numbered(query: Arrays, gallery: Arrays | None) -> tuple[Arrays, Arrays | None, list[str] | None]:
    """The same with numbers for labels that are text, and the classes' sorted names; None for other labels."""
    given = [query[1]] if gallery is None else [query[1], gallery[1]]
    names = [np.asarray(labels) for labels in given if not isinstance(labels, Tensor)]
    if len(names) < len(given) or any(labels.dtype.kind != "U" or labels.ndim != 1 for labels in names):
        return query, gallery, None
    classes, numbers = np.unique(np.concatenate(names), return_inverse=True)
    query = query[0], numbers[: len(names[0])], query[2]
    return query, gallery and (gallery[0], numbers[len(names[0]) :], gallery[2]), classes.tolist()


def _set_of(arrays: Arrays, name: str, *, first_id: int) -> EmbeddingSet:
    rows, labels, ids = arrays
    x = _tensor(rows, torch.float32, f"{name} rows")
    numbers = torch.arange(first_id, first_id + len(x)) if ids is None else _tensor(ids, torch.int64, f"{name} ids")
    return EmbeddingSet(x, _tensor(labels, torch.int64, f"{name} labels"), numbers)


def _tensor(values: Array, dtype: torch.dtype, what: str) -> Tensor:
    """Values as ``dtype`` if that is of their kind; memory is shared if possible."""
    if isinstance(values, np.ma.MaskedArray):
        raise RunError(f"{what}: got a masked array, expected one without a mask. Remove the masked values.")
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
        logger.info("%s are %s; they are evaluated as float32", what, given)
    return values.detach().to_dense().to(dtype)


def self_columns(query_ids: IntArray, gallery_ids: IntArray) -> IntArray:
    """Gallery index [Q] of the item with the query's own id, -1 if the gallery has none."""
    order = np.argsort(gallery_ids, kind="stable")
    ordered = gallery_ids[order]
    twice = np.flatnonzero(ordered[1:] == ordered[:-1])
    if len(twice):
        raise RunError(f"ids: got {ordered[twice[0]]} more than once in the gallery, expected unique ids.")
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
        shape = tuple(part.rows.shape)
        if len(shape) != 2 or not shape[1]:
            raise RunError(f"{name} rows: got shape {shape}, expected [N, D].")
        for what, values in (("labels", part.labels), ("ids", part.ids)):
            if tuple(values.shape) != shape[:1]:
                raise RunError(
                    f"{name} {what}: got shape {tuple(values.shape)}, expected ({shape[0]},), one for each row."
                )
        if not 0 < len(part) < MAX_ROWS:
            raise RunError(f"{name} rows: got {len(part)}, expected 1 to {MAX_ROWS - 1}.")
        check_finite(part.rows, part.ids, what=f"{name} embedding")
    if queries.rows.shape[1] != gallery.rows.shape[1]:
        raise RunError(
            f"got queries with {queries.rows.shape[1]} dimensions and a gallery with {gallery.rows.shape[1]}, expected "
            "the same. Embed both with the same model."
        )


def check_finite(rows: Tensor, ids: Tensor, *, what: str) -> None:
    """Raise Diverged naming the first of ``ids`` [N] whose row of ``rows`` [N, D] holds a NaN or an infinity."""
    if bool(torch.isfinite(rows.sum(dim=1)).all()):  # one pass; a sum that overflows is looked at more closely
        return
    finite = torch.isfinite(rows).all(dim=1)
    if not bool(finite.all()):
        first = int(torch.nonzero(~finite)[0, 0])
        raise Diverged(
            f"{what} of row id {int(ids[first])} holds NaN or infinity ({int((~finite).sum())} of {len(rows)} rows "
            "do). If the model has diverged, lower the learning rate or clip the gradient."
        )


def ids_of(part: EmbeddingSet) -> IntArray:
    """Row ids [N] as int64 on the CPU."""
    return part.ids.detach().cpu().numpy().astype(np.int64)


def labels_of(part: EmbeddingSet) -> IntArray:
    """Labels [N] as int64 on the CPU."""
    return part.labels.detach().cpu().numpy().astype(np.int64)
