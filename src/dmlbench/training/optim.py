"""Optimizers over named parameter groups: rates per group, no weight decay on batch norm, warm-up of some groups."""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from dmlbench.types import ConfigError, closest

NamedGroups = Mapping[str, Iterable[tuple[str, Parameter]]]


@dataclass(frozen=True)
class OptimizerSettings:
    """How parameters are updated.

    Attributes:
        optimizer: ``optimizer(parameter_groups) -> torch.optim.Optimizer`` with everything but rates and decay bound.
        lr: base learning rate, > 0.
        weight_decay: decay as the optimizer means it (Adam, SGD, RMSprop: L2 in the gradient; AdamW: decoupled).
        decay_batch_norm: whether the affine parameters of normalization layers and biases (all vectors and
            scalars) decay too; the GSP framework excludes them.
        lr_multipliers: factor on ``lr`` per group; a group that is not named has factor 1.
    """

    optimizer: Callable[..., Optimizer]
    lr: float
    weight_decay: float = 0.0
    decay_batch_norm: bool = False
    lr_multipliers: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ConfigError(f"optim.lr ({self.lr}) must be positive")
        if self.weight_decay < 0:
            raise ConfigError(f"optim.weight_decay ({self.weight_decay}) must not be negative")


def parameter_groups(model_groups: NamedGroups, objective: nn.Module) -> dict[str, list[tuple[str, Parameter]]]:
    """The model's groups ("backbone", "pooling", "head") and the objective's parameters as the group "loss"."""
    groups = {name: list(members) for name, members in model_groups.items()}
    groups["loss"] = [(f"objective.{name}", p) for name, p in objective.named_parameters() if p.requires_grad]
    return {name: members for name, members in groups.items() if members}


def make_optimizer(groups: NamedGroups, settings: OptimizerSettings) -> Optimizer:
    """An optimizer in which every trainable parameter falls in exactly one named group.

    A group appears twice where part of it does not decay: as "backbone" and as "backbone, no decay".

    Raises:
        ConfigError: a rate multiplier names a group that does not exist; nothing is trainable.
        ValueError: a parameter is in two groups (a defect of the model).
    """
    known = ("backbone", "pooling", "head", "loss")
    for name in settings.lr_multipliers:
        if name not in known:
            raise ConfigError(f"optim.lr_multipliers names the group '{name}': {closest(name, known)}")
    seen: dict[int, str] = {}
    result: list[dict[str, Any]] = []
    for group, members in groups.items():
        decaying: list[Parameter] = []
        resting: list[Parameter] = []
        for name, parameter in members:
            if id(parameter) in seen:
                raise ValueError(f"parameter {name} of group '{group}' is also in group '{seen[id(parameter)]}'")
            seen[id(parameter)] = group
            is_vector = parameter.numel() == max(parameter.shape, default=1)  # GeM's power has the shape of a map
            rests = is_vector and not settings.decay_batch_norm
            (resting if rests else decaying).append(parameter)
        lr = settings.lr * settings.lr_multipliers.get(group, 1.0)
        for suffix, parameters, decay in (("", decaying, settings.weight_decay), (", no decay", resting, 0.0)):
            if parameters:
                result.append({"params": parameters, "lr": lr, "weight_decay": decay, "name": group + suffix})
    if not result:
        raise ConfigError("the model has no trainable parameter; unfreeze part of it or use fit=untrained")
    return settings.optimizer(result)


@contextlib.contextmanager
def frozen(module: nn.Module, *, active: bool = True) -> Iterator[None]:
    """Freeze a module for a while: no gradients, evaluation mode (running statistics of batch norm stand still)."""
    if not active:
        yield
        return
    flags = [(p, p.requires_grad) for p in module.parameters()]
    training = module.training
    for parameter, _ in flags:
        parameter.requires_grad_(False)
    module.eval()
    try:
        yield
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
        module.train(training)


def step_schedule(schedule: LRScheduler | ReduceLROnPlateau | None, *, score: float | None) -> None:
    """Advance a schedule: one that watches the score at validations (``score`` given), any other at every step."""
    if isinstance(schedule, ReduceLROnPlateau):
        if score is not None:
            schedule.step(score)
    elif schedule is not None and score is None:
        schedule.step()


def clip_gradients(parameters: list[Parameter], *, norm: float | None, value: float | None) -> float:
    """Clip by value, then by total norm; returns the total norm before its clipping (None: no limit).

    The order is that of the GSP framework, whose code sets both to 10.
    """
    if value is not None:
        torch.nn.utils.clip_grad_value_(parameters, value)
    return float(torch.nn.utils.clip_grad_norm_(parameters, math.inf if norm is None else norm))
