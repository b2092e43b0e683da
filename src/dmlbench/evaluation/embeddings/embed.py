"""Compute embeddings batch by batch; save and load them."""

import json
import logging
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
_TENSORS = ("rows", "labels", "ids", "role")
_ABOUT = "about"
"""The one entry of a file's own metadata."""

logger = logging.getLogger(__name__)


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
    progress: bool = False,
    count: int | None = None,
) -> EmbeddingSet:
    """Embed every image of ``batches`` once, in their order, without gradients.

    Args:
        model: images [B, 3, H, W] on ``device`` to rows [B, D]; in evaluation mode.
        batches: images, labels and ids.
        device: the model's.
        describe: what is embedded, for the progress bar and messages.
        progress: whether to show a bar.
        count: number of images, if known: the result is then allocated once.

    Returns:
        rows [N, D] float32 and labels, ids [N] int64, on the CPU.

    Raises:
        RunError: a row holds NaN or infinity; there are no images, or not ``count``.
    """
    if isinstance(model, nn.Module) and model.training:
        raise ValueError("the model is in training mode; call model.eval() before embed(...)")
    rows: Tensor | None = None
    labels: list[Tensor] = []
    ids: list[Tensor] = []
    done = 0
    with torch.inference_mode():
        for batch in tqdm(batches, desc=describe, disable=not progress, unit="batch", leave=False):
            part = model(to_device(batch.images, device))
            if part.ndim != 2 or len(part) != len(batch.ids):
                raise ValueError(f"the model must return rows [{len(batch.ids)}, D]; got shape {tuple(part.shape)}")
            part = part.to("cpu", torch.float32)
            check_finite(part, batch.ids, what=f"{describe}: embedding")
            end = done + len(part)
            if count is not None and end > count:
                raise RunError(f"{describe}: more than the {count} images announced; the split and the loader disagree")
            if rows is None:
                rows = torch.empty(count if count is not None else end, part.shape[1])
            elif end > len(rows):
                rows = torch.cat([rows, torch.empty(max(end, 2 * len(rows)) - len(rows), rows.shape[1])])
            rows[done:end] = part
            labels.append(batch.labels.to(torch.int64))
            ids.append(batch.ids.to(torch.int64))
            done = end
    if rows is None:
        raise RunError(f"{describe}: there is no image to embed")
    if count is not None and done != count:
        raise RunError(f"{describe}: {done} images came and {count} were announced; the split and the loader disagree")
    logger.debug("%s: %d rows of %d numbers", describe, done, rows.shape[1])
    # outside inference mode, so that the set may take part in anything later
    return EmbeddingSet(rows[:done].clone(), torch.cat(labels).clone(), torch.cat(ids).clone())


def save_embeddings(
    path: str | os.PathLike[str], queries: EmbeddingSet, gallery: EmbeddingSet | None, metadata: Mapping[str, str]
) -> None:
    """Write one safetensors file atomically: tensors rows, labels, ids and role (0 both, 1 query, 2 gallery).

    Raises:
        RunError: queries and gallery differ in width.
    """
    sets = [queries] if gallery is None else [queries, gallery]
    if len({part.rows.shape[1] for part in sets}) > 1:
        raise RunError(f"queries have {sets[0].rows.shape[1]} dimensions and the gallery {sets[1].rows.shape[1]}")
    codes = [ROLE_BOTH] if gallery is None else [ROLE_QUERY, ROLE_GALLERY]
    tensors = {
        "rows": torch.cat([part.rows.detach().to("cpu", torch.float32) for part in sets]),
        "labels": torch.cat([part.labels.to("cpu", torch.int64) for part in sets]),
        "ids": torch.cat([part.ids.to("cpu", torch.int64) for part in sets]),
        "role": torch.cat([torch.full((len(p),), c, dtype=torch.uint8) for p, c in zip(sets, codes, strict=True)]),
    }
    # safetensors writes several entries in an order that differs from file to file: equal sets shall give equal files
    about = {_ABOUT: json.dumps(dict(metadata), sort_keys=True)}
    data = save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata=about)
    atomic_write(path, data)


def save_distance(path: str | os.PathLike[str], distance: nn.Module) -> None:
    """Write the state of a distance atomically."""
    atomic_write(path, save({name: x.detach().cpu().contiguous() for name, x in distance.state_dict().items()}))


def load_distance(path: str | os.PathLike[str], distance: nn.Module) -> None:
    """Load the state of ``save_distance`` into ``distance``.

    Raises:
        RunError: the file is missing, damaged, or of another distance.
    """
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
    """Read a file of ``save_embeddings``.

    Raises:
        RunError: the file is missing, truncated, or not an embedding file.
    """
    tensors, metadata = _read(path, f"there is no embedding file {path}; run `dmlbench train` for this config first")
    if missing := [name for name in _TENSORS if name not in tensors]:
        raise RunError(f"{path} is not an embedding file: it has no tensor '{missing[0]}'")
    rows, *whole = (tensors[name] for name in _TENSORS)
    labels, ids, role = whole
    if not (
        rows.ndim == 2
        and rows.is_floating_point()
        and all(x.shape == (len(rows),) and not x.is_floating_point() for x in whole)
        and bool(((role >= ROLE_BOTH) & (role <= ROLE_GALLERY)).all())
    ):
        raise RunError(
            f"{path} is not an embedding file: expected floating-point rows [N, D] with whole numbers labels, ids and "
            f"role (0 to 2) [N]"
        )
    if _ABOUT in metadata:  # the metadata of earlier files is not nested
        metadata = json.loads(metadata[_ABOUT])

    def part(code: int) -> EmbeddingSet:
        chosen = role == code
        return EmbeddingSet(rows[chosen], labels[chosen], ids[chosen])

    both = role == ROLE_BOTH
    if bool(both.all()):
        return StoredEmbeddings(part(ROLE_BOTH), None, metadata)
    if bool(both.any()):
        raise RunError(f"{path} mixes rows that are both query and gallery with rows that are one of them")
    return StoredEmbeddings(part(ROLE_QUERY), part(ROLE_GALLERY), metadata)


def _read(path: str | os.PathLike[str], missing: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file.

    Raises:
        RunError: the file is damaged or cannot be read; ``missing`` if there is none.
    """
    path = Path(path)
    if not path.is_file():
        raise RunError(missing)
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            return tensors, dict(file.metadata() or {})
    except PermissionError as error:
        raise RunError(f"{path} cannot be read ({error.strerror}); make it readable") from error
    except SafetensorError as error:
        raise RunError(f"{path} is truncated or damaged ({error}); remove the run's folder and run it again") from error
