"""Gradients of batches that do not fit on the device: a batch in parts (GradCache), or several in turn."""

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from dmlbench.models.net import MetricModel
from dmlbench.ranks import ONE, Ranks
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
    ranks: Ranks = ONE,
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

    Several ``ranks`` embed a part of the batch each, with its graph, and gather the outputs. Every rank differentiates
    the loss of the whole batch down to them and continues from its own rows. Gradients are summed over ranks.

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
    assert isinstance(model, nn.Module)
    both = (model.parameters(), objective.parameters())
    parameters = [] if ranks.size == 1 else [*dict.fromkeys(itertools.chain(*both))]
    for number in range(accumulate):
        batch = next_batch()
        parts = 1 if forward_batch is None else math.ceil(len(batch.images) / forward_batch)
        side: dict[str, Tensor] = {}
        if keys is not None:
            assert batch.second_views is not None  # as the objective wants keys, the batches were made with them
            side["keys"] = ranks.gathered(torch.cat([keys(part) for part in batch.second_views.tensor_split(parts)]))

        def backward(output: ModelOutput, batch: Batch = batch, side: dict[str, Tensor] = side) -> None:
            noted = model.observe(output, step=step) or {}
            losses = objective(ModelOutput(output.embedding, {**output.side, **side}), batch.labels, step=step)
            loss = losses["loss"] / accumulate
            (loss if scale is None else scale(loss)).backward()
            values.append(BatchValues({name: value.detach() for name, value in losses.items()}, noted))

        if parts == ranks.size == 1:
            backward(forward(batch.images))
            continue
        outputs, draws = [], []
        with ranks.own_draws(step * accumulate + number, batch.images.device), torch.set_grad_enabled(parts == 1):
            for images in batch.images.tensor_split(parts):
                draws.append(random_state())
                outputs.append(forward(images))
        whole = _joined(outputs, ranks)
        # A pooling whose prototypes start in this step must pool once more as it did when the loss was taken.
        before = copy.deepcopy(model.observer.state_dict()) if parts > 1 else {}
        with ranks.first_only(parameters):
            backward(whole)
        gradients = [None if x.grad is None else ranks.own(x.grad).tensor_split(parts) for x in _tensors(whole)]
        if parts == 1:
            _backward_from(outputs[0], gradients, 0)
        else:
            _backward_again(model, batch.images.tensor_split(parts), draws, before, gradients, forward)
    ranks.sum_gradients(parameters)
    return values


def _backward_from(output: ModelOutput, gradients: Sequence[Sequence[Tensor] | None], part: int) -> None:
    """Continue the backward pass from a part's outputs, with the gradients of all parts."""
    rows = zip(_tensors(output), gradients, strict=True)
    reached = [(x, of_parts[part]) for x, of_parts in rows if of_parts is not None and x.requires_grad]
    torch.autograd.backward([x for x, _ in reached], [gradient for _, gradient in reached])


def _backward_again(
    model: MetricModel, parts: Sequence[Tensor], draws: Sequence[dict[str, Any]], before: dict[str, Any],
    gradients: Sequence[Sequence[Tensor] | None], forward: Forward,
) -> None:  # fmt: skip
    """Embed each part once more as in the first pass, with its graph, and continue the backward pass."""
    assert isinstance(model, nn.Module)
    after, draws_after = copy.deepcopy(model.observer.state_dict()), random_state()
    model.observer.load_state_dict(before)
    tracking = [m for m in model.modules() if isinstance(m, _NormBase) and m.training and m.track_running_stats]
    for module in tracking:  # they normalize as before, by the statistics of what they are given, but do not note them
        module.track_running_stats = False
    try:
        for i, (images, state) in enumerate(zip(parts, draws, strict=True)):
            restore_random_state(state)
            _backward_from(forward(images), gradients, i)
    finally:
        for module in tracking:
            module.track_running_stats = True
    model.observer.load_state_dict(after)
    restore_random_state(draws_after)


def _tensors(output: ModelOutput) -> list[Tensor]:
    return [output.embedding, *(output.side[name] for name in sorted(output.side))]


def _joined(outputs: Sequence[ModelOutput], ranks: Ranks) -> ModelOutput:
    """All rows of the parts of all ranks, as leaves of a new graph."""
    for output in outputs:
        for name, value in output.side.items():
            if value.ndim == 0 or len(value) != (size := len(output.embedding)):
                raise ConfigError(
                    f"side output '{name}': got the shape {tuple(value.shape)}, expected one row for each of the "
                    f"{size} images of a part. Set fit.forward_batch=null, and use one process."
                )

    def leaf(parts: Sequence[Tensor]) -> Tensor:
        rows = ranks.gathered(torch.cat([*parts]))
        return rows.requires_grad_(rows.is_floating_point())

    side = {name: leaf([output.side[name] for output in outputs]) for name in outputs[0].side}
    return ModelOutput(leaf([output.embedding for output in outputs]), side)
