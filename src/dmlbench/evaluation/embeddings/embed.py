"""Embeddings of images: computing them batch by batch, and keeping them in one file."""

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
from dmlbench.types import Batch, EmbeddingSet, RunError, not_a_file

ROLE_BOTH, ROLE_QUERY, ROLE_GALLERY = 0, 1, 2
BY_ORDER = {"ids": "by order"}
"""Metadata of a set whose ids only count its rows, because nobody has given any."""
_TENSORS = ("rows", "labels", "ids", "role")
_ABOUT = "about"
"""The one entry of a file's own metadata."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoredEmbeddings:
    """What an embedding file holds: queries, gallery (None: the queries search among themselves) and named strings."""

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
        model: images [B, 3, H, W] on ``device`` to rows [B, D]; already in evaluation mode.
        batches: what to embed; their ids become the set's ids.
        device: where the model lies.
        describe: what is embedded, for the progress bar and messages.
        progress: whether to show a bar.
        count: number of images to come, where it is known: the result is then allocated once.

    Returns:
        rows [N, D] float32 and labels, ids [N] int64, on the CPU.

    Raises:
        RunError: a row holds NaN or infinity (the message names its id); there are no images, or not ``count``.
        ValueError: ``model`` is a module in training mode or returns something else than rows.
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
    """Write one safetensors file, whole or not at all: tensors rows, labels, ids and role (0 both, 1 query, 2 gallery).

    Raises:
        RunError: queries and gallery differ in width.
        OSError: the folder cannot be written or the disk is full.
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
    """Write the state of a distance next to the embeddings that it compares, atomically.

    Raises:
        OSError: the folder cannot be written or the disk is full.
    """
    atomic_write(path, save({name: x.detach().cpu().contiguous() for name, x in distance.state_dict().items()}))


def load_distance(path: str | os.PathLike[str], distance: nn.Module) -> None:
    """Put a distance where ``save_distance`` left it.

    Raises:
        RunError: the file is missing, damaged, or of another distance.
    """
    path = Path(path)
    if what := not_a_file(path):
        raise RunError(f"{path} is {what}, not a file; remove the run's folder and run it again")
    if not path.is_file():
        raise RunError(
            f"there is no {path}, without which its embeddings cannot be compared; embed the images again "
            "(from_checkpoint=true), or remove the run's folder and run it again: what is complete is skipped"
        )
    try:
        with safe_open(path, framework="pt") as file:
            distance.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 - no mapping
    except PermissionError as error:
        raise RunError(f"{path} cannot be read ({error.strerror}); make it readable") from error
    except SafetensorError as error:
        raise RunError(f"{path} is truncated or damaged ({error}); remove the run's folder and run it again") from error
    except RuntimeError as error:
        raise RunError(f"{path} is the state of another distance: {' '.join(str(error).split())}") from error


def load_embeddings(path: str | os.PathLike[str]) -> StoredEmbeddings:
    """Read a file of ``save_embeddings``.

    Raises:
        RunError: the file is missing, truncated, or not an embedding file.
    """
    path = Path(path)
    if what := not_a_file(path):
        raise RunError(f"{path} is {what}, not a file; remove the run's folder and run it again")
    if not path.is_file():
        raise RunError(f"there is no embedding file {path}; run `dmlbench train` for this config first")
    try:
        with safe_open(path, framework="pt") as file:
            missing = [name for name in _TENSORS if name not in file.keys()]  # noqa: SIM118 - not a mapping
            if missing:
                raise RunError(f"{path} is not an embedding file: it has no tensor '{missing[0]}'")
            tensors = {name: file.get_tensor(name) for name in _TENSORS}
            metadata = dict(file.metadata() or {})  # in earlier files as it is
            if _ABOUT in metadata:
                metadata = json.loads(metadata[_ABOUT])
    except PermissionError as error:
        raise RunError(f"{path} cannot be read ({error.strerror}); make it readable") from error
    except SafetensorError as error:
        raise RunError(f"{path} is truncated or damaged ({error}); remove the run's folder and run it again") from error
    role = tensors["role"]
    sizes = {len(tensor) for tensor in tensors.values()}
    others = [tensors[name] for name in _TENSORS if name != "rows"]
    if any(tensor.ndim != 1 or tensor.is_floating_point() for tensor in others):
        raise RunError(f"{path} is not an embedding file: labels, ids and role must be whole numbers [N]")
    if not tensors["rows"].is_floating_point():
        raise RunError(
            f"{path} is not an embedding file: its rows are {tensors['rows'].dtype}, no floating-point numbers"
        )
    known = (role >= ROLE_BOTH) & (role <= ROLE_GALLERY)
    if len(sizes) != 1 or tensors["rows"].ndim != 2 or not bool(known.all()):
        raise RunError(f"{path} is not an embedding file: rows, labels, ids and role do not fit together")

    def part(code: int) -> EmbeddingSet:
        chosen = role == code
        return EmbeddingSet(tensors["rows"][chosen], tensors["labels"][chosen], tensors["ids"][chosen])

    if bool((role == ROLE_BOTH).all()):
        return StoredEmbeddings(part(ROLE_BOTH), None, metadata)
    if bool((role == ROLE_BOTH).any()):
        raise RunError(f"{path} mixes rows that are both query and gallery with rows that are one of them")
    return StoredEmbeddings(part(ROLE_QUERY), part(ROLE_GALLERY), metadata)
