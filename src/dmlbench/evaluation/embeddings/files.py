"""Read embedding files of other code: .safetensors, .npz, .npy and .pt, never unpickled."""

import pickle
import struct
import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from dmlbench.evaluation.embeddings.arrays import Array, embedding_set, with_distinct_ids
from dmlbench.evaluation.embeddings.embed import BY_ORDER, StoredEmbeddings, load_embeddings
from dmlbench.runtime import reason_of
from dmlbench.types import EmbeddingSet, RunError

ROWS, LABELS, IDS = ("rows", "embeddings", "features"), ("labels", "targets"), ("ids",)
"""Names under which a file may hold each part."""

_DAMAGED = (
    SafetensorError, zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, ValueError,
    LookupError, TypeError, AttributeError, AssertionError, struct.error, tokenize.TokenError,  # of broken headers
)  # fmt: skip

SUFFIXES = (".safetensors", ".npz", ".npy", ".pt", ".pth")


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

    Raises:
        RunError: a file is missing, damaged, of an unknown type, lacks a part, or cannot be evaluated.
    """
    if gallery is None and gallery_labels is not None:
        raise RunError(f"gallery_labels ({gallery_labels}) belongs to a gallery; give gallery=<file> too")
    parts = _read(path)
    if "role" in parts and Path(path).suffix == ".safetensors":  # only ``save_embeddings`` writes them
        if labels is not None or gallery is not None:
            raise RunError(f"{path} says itself what is query and gallery; leave labels and gallery away")
        return load_embeddings(path)
    queries, has_ids = _embedding_set(path, parts, labels, "query")
    about = {} if has_ids else dict(BY_ORDER)
    if gallery is None:
        return StoredEmbeddings(*with_distinct_ids(queries, None, given=(has_ids, False)), about)
    other, gallery_has_ids = _embedding_set(gallery, _read(gallery), gallery_labels, "gallery")
    return StoredEmbeddings(*with_distinct_ids(queries, other, given=(has_ids, gallery_has_ids)), about)


def _embedding_set(
    path: str | Path, parts: dict[str, Array], labels: str | Path | None, what: str
) -> tuple[EmbeddingSet, bool]:
    """The set, and whether the file has ids."""
    rows = _part(path, parts, ROWS)
    if rows is None:
        raise RunError(f"{path} holds no {' or '.join(map(repr, ROWS))} but {_listing(parts)}; rename its embeddings")
    inside = _part(path, parts, LABELS)
    if labels is not None and inside is not None:
        raise RunError(f"{path} holds labels and {labels} was given too; leave one of them away")
    if labels is not None:
        beside = _read(labels)
        inside = beside[""] if "" in beside else _part(labels, beside, LABELS)
        if inside is None:
            raise RunError(f"{labels} holds no 'labels' but {_listing(beside)}")
    if inside is None:
        option = "labels" if what == "query" else "gallery_labels"
        raise RunError(f"{path} holds no labels; add them as 'labels', or give {option}=<file>")
    ids = _part(path, parts, IDS)
    return embedding_set(rows, inside, ids, what=what), ids is not None


def _part(path: str | Path, parts: dict[str, Array], names: tuple[str, ...]) -> Array | None:
    """The array under one of ``names``; a nameless one counts as rows."""
    found = [name for name in (*names, *([""] if names is ROWS else [])) if name in parts]
    if len(found) > 1:
        raise RunError(f"{path} holds {' and '.join(map(repr, found))}: which one is meant? Remove the others")
    return parts[found[0]] if found else None


def _listing(parts: dict[str, Array]) -> str:
    return ", ".join(repr(name) if name else "one nameless array" for name in parts) or "nothing"


def _read(path: str | Path) -> dict[str, Array]:
    """Arrays of a file by name; "" if the file holds one nameless array."""
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise RunError(f"{path} is of an unknown kind; known: {', '.join(SUFFIXES)}")
    if not path.is_file():
        raise RunError(f"there is no file {path}")
    try:
        if path.suffix == ".safetensors":
            return dict(load_file(path))
        if path.suffix in (".pt", ".pth"):
            return _tensors(path, torch.load(path, map_location="cpu", weights_only=True))
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return {"": loaded}
        with loaded:
            return {name: loaded[name] for name in loaded.files}
    except (pickle.UnpicklingError, *_DAMAGED) as error:
        if isinstance(error, pickle.UnpicklingError) or (isinstance(error, ValueError) and "pickle" in str(error)):
            raise RunError(
                f"{path} is damaged, or holds Python objects, which are never loaded; save arrays or tensors of numbers"
            ) from error
        raise RunError(f"{path} is truncated or damaged: {reason_of(error)}") from error


def _tensors(path: Path, loaded: Any) -> dict[str, Array]:
    if isinstance(loaded, torch.Tensor):
        return {"": loaded}
    if not isinstance(loaded, dict):
        raise RunError(f"{path} holds a {type(loaded).__name__}; save a tensor, or a dictionary of tensors")
    return {str(name): value for name, value in loaded.items() if isinstance(value, torch.Tensor)}
