"""Compute embeddings batch by batch; save and load them."""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from tqdm import tqdm

from dmlbench.device_copies import to_device
from dmlbench.evaluation.embeddings.sets import check_finite
from dmlbench.runtime import atomic_write
from dmlbench.types import Batch, EmbeddingSet, RunError

ROLE_BOTH, ROLE_QUERY, ROLE_GALLERY = 0, 1, 2
BY_ORDER = {"ids": "by order"}
"""Metadata of a set whose ids only count its rows, because nobody has given any."""
_ABOUT = "about"
"""The one entry of a file's own metadata."""


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
        count: number of images.

    Returns:
        rows [N, D] float32 and labels, ids [N] int64, on the CPU.
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
