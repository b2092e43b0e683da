"""Compute embeddings batch by batch; save and load them; read files of other code, never unpickled."""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn
from tqdm import tqdm

from dmlbench.device_copies import to_device
from dmlbench.evaluation.embeddings.sets import Array, Arrays, check_finite, sets_of_arrays
from dmlbench.runtime import atomic_write, reason_of
from dmlbench.types import Batch, EmbeddingSet, RunError

ROLE_BOTH, ROLE_QUERY, ROLE_GALLERY = 0, 1, 2
BY_ORDER = {"ids": "by order"}
"""Metadata of a set whose ids only count its rows, because nobody has given any."""
_ABOUT = "about"
"""The one entry of a file's own metadata."""
ROWS, LABELS, IDS = ("rows", "embeddings", "features", ""), ("labels", "targets"), ("ids",)
"""Names under which a file may hold each part; a nameless array counts as rows."""

SUFFIXES = (".safetensors", ".npz", ".npy", ".pt", ".pth")


@dataclass(frozen=True)
class StoredEmbeddings:
    """Contents of an embedding file; without a gallery, the queries search among themselves."""

    queries: EmbeddingSet
    gallery: EmbeddingSet | None
    metadata: dict[str, str]


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
        f"there is no {path}, without which its embeddings cannot be compared; embed the images again "
        "(from_checkpoint=true), or remove the run's folder and run it again: what is complete is skipped",
    )
    try:
        distance.load_state_dict(state)
    except RuntimeError as error:
        raise RunError(f"{path} is the state of another distance: {' '.join(str(error).split())}") from error


def load_embeddings(path: str | os.PathLike[str]) -> StoredEmbeddings:
    """Read a file of ``save_embeddings``."""
    tensors, metadata = _read(path, f"there is no embedding file {path}; run `dmlbench train` for this config first")
    rows, labels, ids, role = (tensors.get(name, torch.empty(())) for name in ("rows", "labels", "ids", "role"))
    if (
        rows.ndim != 2
        or not rows.is_floating_point()
        or any(x.shape != rows.shape[:1] or x.is_floating_point() for x in (labels, ids, role))
        or role.unique().tolist() not in ([ROLE_BOTH], [ROLE_QUERY, ROLE_GALLERY])
    ):
        raise RunError(
            f"{path} is not an embedding file: expected floating-point rows [N, D], and [N] whole numbers labels, ids "
            "and role: 0 of all rows, or 1 of queries and 2 of gallery items"
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
        raise RunError(f"{path} cannot be read ({error.strerror}); make it readable") from error
    except SafetensorError as error:
        raise RunError(f"{path} is truncated or damaged ({error}); remove the run's folder and run it again") from error


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
    parts = _read_arrays(path)
    if "role" in parts and Path(path).suffix == ".safetensors":  # only ``save_embeddings`` writes them
        if labels is not None or gallery is not None:
            raise RunError(f"{path} says itself what is query and gallery; leave labels and gallery away")
        return load_embeddings(path)
    query = _arrays(path, parts, labels, "labels")
    others = None if gallery is None else _arrays(gallery, _read_arrays(gallery), gallery_labels, "gallery_labels")
    return StoredEmbeddings(*sets_of_arrays(query, others), dict(BY_ORDER) if query[2] is None else {})


def _arrays(path: str | Path, parts: dict[str, Array], labels: str | Path | None, option: str) -> Arrays:
    """Rows, labels and ids; ``option`` is the key that names the file ``labels``."""
    rows, inside = _part(path, parts, ROWS), _part(path, parts, LABELS)
    if rows is None:
        raise RunError(f"{path} holds no {' or '.join(map(repr, ROWS[:-1]))} but {list(parts)}; rename its embeddings")
    if labels is not None and inside is not None:
        raise RunError(f"{path} holds labels and {labels} was given too; leave one of them away")
    if labels is not None:
        inside = _part(labels, _read_arrays(labels), (*LABELS, ""))
    if inside is None:
        raise RunError(f"{labels or path} holds no labels; add them as 'labels', or give {option}=<file>")
    return rows, inside, _part(path, parts, IDS)


def _part(path: str | Path, parts: dict[str, Array], names: tuple[str, ...]) -> Array | None:
    found = [name for name in names if name in parts]
    if len(found) > 1:
        raise RunError(f"{path} holds {' and '.join(map(repr, found))}: which one is meant? Remove the others")
    return parts[found[0]] if found else None


def _read_arrays(path: str | Path) -> dict[str, Array]:
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
