"""Gradients of batches that do not fit on the device: a batch in parts (GradCache), or several in turn."""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from dmlbench.models.net import MetricModel
from dmlbench.runtime import random_state, restore_random_state
from dmlbench.training.deferred_metrics import BatchValues
from dmlbench.types import Batch, ConfigError, ModelOutput

Forward = Callable[[Tensor], ModelOutput]
Keys = Callable[[Tensor], Tensor]
"""From images [N, 3, H, W] to embeddings [N, D] without gradients."""
Scale = Callable[[Tensor], Tensor]
"""From a loss to what is differentiated, as ``GradScaler.scale``."""


def accumulate_gradients(
    model: MetricModel, objective: nn.Module, next_batch: Callable[[], Batch], *, step: int, forward: Forward,
    keys: Keys | None = None, accumulate: int = 1, forward_batch: int | None = None, scale: Scale | None = None,
) -> list[BatchValues]:  # fmt: skip
    """Add the gradient of the mean loss of ``accumulate`` batches to every parameter's ``grad``.

    The loss of each batch is its own: rows of different batches are not compared. For that, raise the sampler's batch
    and set ``forward_batch``: a batch of more images is embedded in parts without a graph; the loss is taken of all
    embeddings and side outputs and differentiated down to them; then each part is embedded again with its graph and
    continues the backward pass: d loss / d parameters is the sum over parts of (d output / d parameters)^T d loss / d
    output. The second pass draws the same random numbers, and what ``observe`` changed is put back meanwhile.

    A batch norm that is training normalizes each part by the part's own mean and variance, as several devices would;
    the gradient is that of this computation. With ``batch_norm: stats`` or ``all``, parts are computed as in the whole
    batch.

    Args:
        model: ``observe`` may change what ``forward`` reads in ``model.observer`` only, and returns numbers for the
            log, or None.
        forward: the model in the precision and memory format of the training.
        keys: embeds second views, without changes and random numbers; None where the objective wants none.
        forward_batch: images per forward pass; None takes a batch at once.
        scale: of the gradients; the returned losses are not scaled.

    Source: Gao et al., Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup, 2021 (GradCache),
    section 3.2.
    """
    values: list[BatchValues] = []
    for _ in range(accumulate):
        batch = next_batch()
        parts = 1 if forward_batch is None else math.ceil(len(batch.images) / forward_batch)
        side: dict[str, Tensor] = {}
        if keys is not None:
            assert batch.second_views is not None  # as the objective wants keys, the batches were made with them
            side["keys"] = torch.cat([keys(part) for part in batch.second_views.tensor_split(parts)])

        def backward(output: ModelOutput, batch: Batch = batch, side: dict[str, Tensor] = side) -> None:
            noted = model.observe(output, step=step) or {}
            losses = objective(ModelOutput(output.embedding, {**output.side, **side}), batch.labels, step=step)
            loss = losses["loss"] / accumulate
            (loss if scale is None else scale(loss)).backward()
            values.append(BatchValues({name: value.detach() for name, value in losses.items()}, noted))

        if parts == 1:
            backward(forward(batch.images))
        else:
            _backward_in_parts(model, batch.images.tensor_split(parts), forward, backward)
    return values


def _backward_in_parts(
    model: MetricModel, parts: Sequence[Tensor], forward: Forward, backward: Callable[[ModelOutput], None]
) -> None:
    assert isinstance(model, nn.Module)
    outputs: list[ModelOutput] = []
    draws: list[dict[str, Any]] = []
    with torch.no_grad():
        for images in parts:
            draws.append(random_state())
            outputs.append(forward(images))
    whole = _joined(outputs, [len(images) for images in parts])
    # A pooling whose prototypes start in this step must pool once more as it did when the loss was taken.
    before = copy.deepcopy(model.observer.state_dict())
    backward(whole)
    after, draws_after = copy.deepcopy(model.observer.state_dict()), random_state()
    model.observer.load_state_dict(before)
    gradients = [None if x.grad is None else x.grad.tensor_split(len(parts)) for x in _tensors(whole)]
    tracking = [m for m in model.modules() if isinstance(m, _NormBase) and m.training and m.track_running_stats]
    for module in tracking:  # they normalize as before, by the statistics of what they are given, but do not note them
        module.track_running_stats = False
    try:
        for i, (images, state) in enumerate(zip(parts, draws, strict=True)):
            restore_random_state(state)
            again = zip(_tensors(forward(images)), gradients, strict=True)
            reached = [(x, split[i]) for x, split in again if split is not None and x.requires_grad]
            torch.autograd.backward([x for x, _ in reached], [gradient for _, gradient in reached])
    finally:
        for module in tracking:
            module.track_running_stats = True
    model.observer.load_state_dict(after)
    restore_random_state(draws_after)


def _tensors(output: ModelOutput) -> list[Tensor]:
    return [output.embedding, *(output.side[name] for name in sorted(output.side))]


def _joined(outputs: Sequence[ModelOutput], sizes: Sequence[int]) -> ModelOutput:
    """All rows of the parts, as leaves of a new graph."""
    for output, size in zip(outputs, sizes, strict=True):
        for name, value in output.side.items():
            if value.ndim == 0 or len(value) != size:
                raise ConfigError(
                    f"the side output '{name}' of shape {tuple(value.shape)} does not have one row for each of the "
                    f"{size} images of a part, so it cannot be joined; set fit.forward_batch=null"
                )

    def leaf(parts: Sequence[Tensor]) -> Tensor:
        rows = torch.cat(list(parts))
        return rows.requires_grad_(rows.is_floating_point())

    side = {name: leaf([output.side[name] for output in outputs]) for name in outputs[0].side}
    return ModelOutput(leaf([output.embedding for output in outputs]), side)
