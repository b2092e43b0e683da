"""Read embedding files of other code: .safetensors, .npz, .npy and .pt, never unpickled."""

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from dmlbench.evaluation.embeddings.embed import BY_ORDER, StoredEmbeddings, load_embeddings
from dmlbench.evaluation.embeddings.sets import Array, Arrays, sets_of_arrays
from dmlbench.runtime import reason_of
from dmlbench.types import RunError

ROWS, LABELS, IDS = ("rows", "embeddings", "features", ""), ("labels", "targets"), ("ids",)
"""Names under which a file may hold each part; a nameless array counts as rows."""

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
    """
    if gallery is None and gallery_labels is not None:
        raise RunError(f"gallery_labels ({gallery_labels}) belongs to a gallery; give gallery=<file> too")
    parts = _read(path)
    if "role" in parts and Path(path).suffix == ".safetensors":  # only ``save_embeddings`` writes them
        if labels is not None or gallery is not None:
            raise RunError(f"{path} says itself what is query and gallery; leave labels and gallery away")
        return load_embeddings(path)
    query = _arrays(path, parts, labels, "labels")
    others = None if gallery is None else _arrays(gallery, _read(gallery), gallery_labels, "gallery_labels")
    return StoredEmbeddings(*sets_of_arrays(query, others), dict(BY_ORDER) if query[2] is None else {})


def _arrays(path: str | Path, parts: dict[str, Array], labels: str | Path | None, option: str) -> Arrays:
    """Rows, labels and ids; ``option`` is the key that names the file ``labels``."""
    rows, inside = _part(path, parts, ROWS), _part(path, parts, LABELS)
    if rows is None:
        raise RunError(f"{path} holds no {' or '.join(map(repr, ROWS[:-1]))} but {list(parts)}; rename its embeddings")
    if labels is not None and inside is not None:
        raise RunError(f"{path} holds labels and {labels} was given too; leave one of them away")
    if labels is not None:
        inside = _part(labels, _read(labels), (*LABELS, ""))
    if inside is None:
        raise RunError(f"{labels or path} holds no labels; add them as 'labels', or give {option}=<file>")
    return rows, inside, _part(path, parts, IDS)


def _part(path: str | Path, parts: dict[str, Array], names: tuple[str, ...]) -> Array | None:
    found = [name for name in names if name in parts]
    if len(found) > 1:
        raise RunError(f"{path} holds {' and '.join(map(repr, found))}: which one is meant? Remove the others")
    return parts[found[0]] if found else None


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
            loaded = torch.load(path, map_location="cpu", weights_only=True)
        else:
            loaded = np.load(path, allow_pickle=False)
            if not isinstance(loaded, np.ndarray):
                with loaded:
                    return {name: loaded[name] for name in loaded.files}
    except Exception as error:  # readers of damaged files raise almost anything
        raise RunError(f"{path} is truncated or damaged: {reason_of(error)}") from error
    if isinstance(loaded, dict):
        return {str(name): value for name, value in loaded.items() if isinstance(value, torch.Tensor)}
    if not isinstance(loaded, np.ndarray | torch.Tensor):
        raise RunError(f"{path} holds a {type(loaded).__name__}; save a tensor, or a dictionary of tensors")
    return {"": loaded}
