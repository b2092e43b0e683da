"""Inputs of the projection of a trained model, computed once for each image, to train the projection alone."""

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from dmlbench.evaluation.embeddings.embed import check_finite
from dmlbench.experiment import Setup
from dmlbench.models.net import PooledModel
from dmlbench.models.pooling.base import Pooled, Pooling
from dmlbench.models.projection import Projection
from dmlbench.runtime import Precision, autocast
from dmlbench.types import IntArray, RunError


@dataclass(frozen=True)
class CachedFeatures:
    """Features of images, from which a projection makes embeddings.

    Attributes:
        values: [N, C] if the projection follows the pooling, else the last maps [N, C, H, W]; in main memory.
        pooling: of the maps; None if ``values`` are vectors.
        batch_size: images whose embeddings are computed at once without gradients.
    """

    values: Tensor
    pooling: Pooling | None
    projection: Projection
    device: torch.device
    precision: Precision
    batch_size: int

    def embeddings(self, positions: Tensor, projection: Projection) -> Tensor:
        """Embeddings [B, D] float32 of the images at ``positions`` [B], with gradients to the projection."""
        values = self.values[positions].to(self.device)
        with autocast(self.device, self.precision):
            rows: Tensor = projection(values) if self.pooling is None else self.pooling(values, projection).embedding
        return projection.finished(rows.to(torch.float32))

    @torch.no_grad()
    def all_embeddings(self, projection: Projection) -> Tensor:
        """Embeddings [N, D] of all images, in main memory."""
        parts = torch.arange(len(self.values)).split(self.batch_size)
        return torch.cat([self.embeddings(part, projection).cpu() for part in parts])


def cache_features(setup: Setup, rows: IntArray, *, memory_bytes: int, describe: str) -> CachedFeatures:
    """Pass images through the network once and keep the inputs of its projection.

    The first batch tells whether vectors suffice: the projection is called once, with vectors, and its result is the
    embedding.

    Args:
        setup: a run with a linear head, in evaluation mode.
        rows: [N] of its table.
        memory_bytes: limit of the features.
        describe: the run, for messages.
    """
    model = setup.model
    assert isinstance(model, PooledModel)
    seen: dict[str, Any] = {}

    def projected(_: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
        seen["projections"].append((arguments[0], output))

    def pooled(_: nn.Module, arguments: tuple[Any, ...], output: Pooled) -> None:
        seen["maps"], seen["embedding"] = arguments[0], output.embedding

    memory_format = torch.channels_last if setup.settings.channels_last else torch.contiguous_format
    hooks = [model.projection.register_forward_hook(projected), model.pooling.register_forward_hook(pooled)]
    values: Tensor | None = None
    pools_first, done = True, 0
    bar = tqdm(desc="features", total=len(rows), disable=not sys.stderr.isatty(), unit="image", leave=False)
    try:
        for batch in setup.batches(rows):
            seen["projections"] = []
            with torch.no_grad(), autocast(setup.device, setup.settings.precision):
                model(batch.images.to(setup.device).contiguous(memory_format=memory_format))
            if values is None:
                calls = seen["projections"]
                pools_first = len(calls) == 1 and calls[0][0].ndim == 2 and calls[0][1] is seen["embedding"]
            part = seen["projections"][0][0] if pools_first else seen["maps"]
            if values is None:
                needed = len(rows) * part[0].numel() * part.element_size()
                if needed > memory_bytes:
                    raise RunError(
                        f"{describe}: {_what(model, pools_first)} of {len(rows):,} images need "
                        f"{needed / 2**30:.2f} GiB, memory_bytes allows {memory_bytes / 2**30:.2f} GiB. Set "
                        f"memory_bytes={needed} or more."
                    )
                values = torch.empty((len(rows), *part.shape[1:]), dtype=part.dtype)
            values[done : done + len(part)] = part.cpu()
            check_finite(values[done : done + len(part)].flatten(1), batch.ids, what=f"{describe}: features")
            done += len(part)
            bar.update(len(part))
    finally:
        bar.close()
        for hook in hooks:
            hook.remove()
    assert values is not None and done == len(rows)
    return CachedFeatures(
        values, None if pools_first else model.pooling, model.projection, setup.device, setup.settings.precision,
        setup.eval_batch_size,
    )  # fmt: skip


def _what(model: PooledModel, pools_first: bool) -> str:
    if pools_first:
        return "pooled features"
    return f"the last maps (pooling {type(model.pooling).__name__} needs the projection's result, so they are kept)"
