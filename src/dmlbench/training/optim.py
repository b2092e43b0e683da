"""Optimizers over named parameter groups, warm-up freezing, schedules and gradient clipping."""

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from dmlbench.types import ConfigError, closest

# Every parameter that is trained belongs to one.
GROUPS = ("backbone", "pooling", "head", "distance", "loss", "regularizer")

ClipForm = Literal["plain", "decayed"]

NamedGroups = Mapping[str, Iterable[tuple[str, Parameter]]]


@dataclass(frozen=True)
class OptimizerSettings:
    """Optimizer, learning rates and weight decay."""

    optimizer: Callable[..., Optimizer]
    lr: float
    weight_decay: float = 0.0  # as the optimizer means it (Adam, SGD, RMSprop: L2 in the gradient; AdamW: decoupled)
    decay_batch_norm: bool = False  # weights and biases of normalization layers (batch, layer, group norm)
    decay_biases: bool = False  # all other vectors and scalars: biases, margins, GeM's power, class tokens
    without_decay: Sequence[str] = ()
    lr_multipliers: Mapping[str, float] = field(default_factory=dict)  # by group, or by module of the loss
    layer_decay: float | None = None  # factor on the backbone's learning rate for each layer above

    def __post_init__(self) -> None:
        if not 0 < self.lr <= torch.finfo(torch.float32).max:
            raise ConfigError(f"optim.lr: got {self.lr}, expected a positive number in the range of float32.")
        if self.weight_decay < 0:
            raise ConfigError(f"optim.weight_decay: got {self.weight_decay}, expected at least 0.")
        if self.layer_decay is not None and not 0 < self.layer_decay <= 1:
            raise ConfigError(f"optim.layer_decay: got {self.layer_decay}, expected a number in (0, 1] or null.")
        for name, factor in self.lr_multipliers.items():
            if not factor >= 0:
                raise ConfigError(
                    f"optim.lr_multipliers.{name}: got {factor}, expected at least 0. With 0, it is not trained."
                )
        for name in sorted({"lr", "weight_decay"} & getattr(self.optimizer, "keywords", {}).keys()):
            raise ConfigError(
                f"optim.optimizer.{name}: every group has its own, so it has no effect. Set optim.{name}."
            )
        try:  # before data are read
            self.optimizer([Parameter(torch.zeros(1, 1))])
        except (TypeError, ValueError) as error:
            raise ConfigError(f"optim.optimizer: {error}. Change its arguments.") from error


def parameter_groups(model_groups: NamedGroups, objective: nn.Module) -> dict[str, list[tuple[str, Parameter]]]:
    """The model's groups ("backbone", "pooling", "head", "distance"), the objective's "loss" and "regularizer"."""
    groups = {name: list(members) for name, members in model_groups.items()}
    groups |= {"loss": [], "regularizer": []}
    for name, parameter in objective.named_parameters():
        if parameter.requires_grad:
            groups[_objective_group(name)].append((f"objective.{name}", parameter))
    return {name: members for name, members in groups.items() if members}


def _objective_group(name: str) -> str:
    # Proxies have rates of their own, which the label embeddings of ZSR do not share, but those of S2SD's heads do.
    return "regularizer" if name.startswith("regularizers.") and ".objectives." not in name else "loss"


_DECOUPLED = ("Adafactor", "Muon")
"""torch's optimizers that decouple weight decay from the gradient and have no flag that says so."""
_NORMALIZATION = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def _is_norm_of_timm(layer: type[nn.Module]) -> bool:
    """Such as ``RmsNorm``, which is no subclass of torch's."""
    return layer.__module__.startswith("timm.layers.") and "Norm" in layer.__name__


def make_optimizer(
    groups: NamedGroups,
    settings: OptimizerSettings,
    *,
    modules: Iterable[nn.Module],
    layers: Mapping[str, int] | None = None,
) -> Optimizer:
    """An optimizer in which every trainable parameter falls in exactly one named group.

    A group appears twice where part of it does not decay: as "backbone" and as "backbone, no decay". A multiplier for a
    module of the loss, such as "network" of HIST, makes a group of that name. With ``layer_decay`` the backbone has
    such groups for each layer, from the top down, and layer l of L learns at lr * layer_decay^(L - 1 - l).

    Args:
        modules: own all parameters and normalization layers.
        layers: of every parameter of the group "backbone" by name, 0 for the lowest; needed for ``layer_decay``.

    Source:
        Layer-wise decay: Clark et al. 2020, ELECTRA; Bao et al. 2022, BEiT, whose layers timm follows.
    """
    own = [key for key in settings.lr_multipliers if key not in GROUPS]
    groups = _with_modules_of_loss(groups, own)
    for name in settings.without_decay:
        if name not in GROUPS:
            raise ConfigError(f"optim.without_decay: got the unknown group '{name}': {closest(name, GROUPS)}")
    decay = settings.layer_decay
    if decay is not None and (not layers or not groups.get("backbone")):
        raise ConfigError(
            f"optim.layer_decay: got {decay} with a frozen backbone, expected null. Unfreeze the backbone or set null."
        )
    of_normalization = {
        id(p)
        for module in modules
        for layer in module.modules()
        if isinstance(layer, _NORMALIZATION) or _is_norm_of_timm(type(layer))
        for p in layer.parameters(recurse=False)
    }
    seen: dict[int, str] = {}
    result: list[dict[str, Any]] = []
    for group, members in groups.items():
        by_layer = layers if group == "backbone" and decay is not None and layers else {}
        top = max(by_layer.values(), default=0)
        # By the number of layers above, and whether their weight decays.
        parts: dict[tuple[int, bool], list[Parameter]] = {}
        for name, parameter in members:
            if id(parameter) in seen:
                raise ValueError(f"parameter {name} of group '{group}' is also in group '{seen[id(parameter)]}'")
            seen[id(parameter)] = group
            is_vector = parameter.numel() == max(parameter.shape, default=1)  # GeM's power has the shape of a map
            decays = settings.decay_biases or not is_vector
            if id(parameter) in of_normalization:
                decays = settings.decay_batch_norm
            rests = not decays or (("loss" if group in own else group) in settings.without_decay)
            parts.setdefault((top - by_layer[name] if by_layer else 0, rests), []).append(parameter)
        lr = settings.lr * settings.lr_multipliers.get(group, 1.0)
        for (above, rests), parameters in sorted(parts.items(), key=lambda part: part[0]):
            layer = f", layer {top - above}" if by_layer else ""
            result.append(
                {
                    "params": parameters,
                    "lr": lr * (decay or 1.0) ** above,
                    "weight_decay": 0.0 if rests else settings.weight_decay,
                    "name": group + layer + (", no decay" if rests else ""),
                }
            )
    if not result:
        raise ConfigError("the model has no trainable parameters. Unfreeze part of it or set fit=untrained.")
    return settings.optimizer(result)


def _with_modules_of_loss(groups: NamedGroups, modules: Iterable[str]) -> dict[str, list[tuple[str, Parameter]]]:
    """Move the parameters of ``modules`` from the group "loss" to one group per module."""
    result = {group: list(members) for group, members in groups.items()}
    for module in modules:
        of_loss = result.get("loss", [])
        result[module] = [member for member in of_loss if member[0].startswith(f"objective.loss.{module}.")]
        if not result[module]:
            known = {name.split(".")[2] for name, _ in of_loss if name.count(".") > 2}
            raise ConfigError(
                f"optim.lr_multipliers: got '{module}', expected a group or a module of this loss: "
                f"{closest(module, [*GROUPS, *sorted(known)])}"
            )
        result["loss"] = [member for member in of_loss if not member[0].startswith(f"objective.loss.{module}.")]
    return {group: members for group, members in result.items() if members}


@contextlib.contextmanager
def frozen(
    groups: Collection[str], model: nn.Module, objective: nn.Module, *, training: bool = False
) -> Iterator[None]:
    """Freeze groups of parameters within the block: no gradients.

    Frozen modules are in evaluation mode meanwhile (running statistics rest); with ``training`` they keep their mode.
    The objective stays in training mode: a cross-batch memory fills although the loss's parameters rest.
    """
    modules = [m for name, m in model.named_children() if (name if name in GROUPS else "head") in groups]
    modes = [(module, module.training) for module in modules]
    parameters = [p for module in modules for p in module.parameters()]
    parameters += [p for name, p in objective.named_parameters() if _objective_group(name) in groups]
    parameters = [p for p in parameters if p.requires_grad]
    for parameter in parameters:
        parameter.requires_grad_(False)
    for module in modules:
        module.train(training and module.training)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)
        for module, mode in modes:
            module.train(mode)


def check_warmup(groups: Collection[str], model: nn.Module, objective: nn.Module) -> None:
    """Raise ConfigError if the groups contain all trainable parameters, or groups are given that contain none."""
    parameters = [p for module in (model, objective) for p in module.parameters() if p.requires_grad]
    with frozen(groups, model, objective):
        if groups and all(p.requires_grad for p in parameters):
            raise ConfigError(
                f"fit.warmup_frozen: got {', '.join(groups)}, expected a group with trainable parameters. Set "
                "fit.warmup_steps=0."
            )
        if not any(p.requires_grad for p in parameters):
            raise ConfigError(
                f"fit.warmup_frozen: got {', '.join(groups)}, which freezes every trainable parameter of the model "
                "and loss. Remove a group or set fit.warmup_steps=0."
            )


@dataclass(frozen=True)
class WarmupCosine:
    """Factor on the base learning rates, for ``LambdaLR``: a linear rise to 1, then half a cosine down.

    After t of T = ``total_steps``, of which W are warm-up, with factors a at the start and b at the end:

        t < W:   a + (1 - a) t / W
        t >= W:  b + (1 - b) (1 + cos(pi (t - W) / (T - W))) / 2

    Source: Goyal et al. 2017, section 2.2 (gradual warm-up); Loshchilov & Hutter 2017, equation 5 (cosine).
    """

    warmup_steps: int
    total_steps: int
    start_factor: float
    final_factor: float

    def __post_init__(self) -> None:
        if self.warmup_steps < 0 or self.warmup_steps >= self.total_steps > 0:
            raise ConfigError(
                f"schedule.warmup_steps: got {self.warmup_steps}, expected below the {self.total_steps} steps in total."
            )
        if not 0 < self.start_factor <= 1:
            raise ConfigError(f"schedule.start_factor: got {self.start_factor}, expected a number in (0, 1].")
        if not 0 <= self.final_factor <= 1:
            raise ConfigError(f"schedule.final_factor: got {self.final_factor}, expected a number in [0, 1].")

    def __call__(self, step: int) -> float:
        """The factor after ``step`` steps."""
        if step < self.warmup_steps:
            return self.start_factor + (1 - self.start_factor) * step / self.warmup_steps
        share = min((step - self.warmup_steps) / max(self.total_steps - self.warmup_steps, 1), 1.0)
        return self.final_factor + (1 - self.final_factor) * (1 + math.cos(math.pi * share)) / 2


class HarmonicPlateau(ReduceLROnPlateau):
    """``ReduceLROnPlateau`` of 2R / (1 + R) where R is the monitored score.

    This is the harmonic mean of R@1 and NMI with NMI = 1, by which ProxyNCA++'s code lowers the learning rate in its
    first stage (euwern/proxynca_pp, train.py). A relative threshold asks for something else of it than of R.
    """

    def step(self, metrics: Any, epoch: int | None = None) -> None:  # type: ignore[override]  # as its base's
        super().step(2 * metrics / (1 + metrics), epoch)


def step_schedule(schedule: LRScheduler | ReduceLROnPlateau | None, *, score: float | None) -> None:
    """Advance a schedule: one that watches the score at validations (``score`` given), any other at every step."""
    if isinstance(schedule, ReduceLROnPlateau):
        if score is not None:
            schedule.step(score)
    elif schedule is not None and score is None:
        schedule.step()


def clip_gradients(
    optimizer: Optimizer, *, norm: float | None, value: float | None, form: ClipForm = "plain"
) -> Tensor:
    """Clip the gradients of an optimizer's parameters; returns their total norm before, on their device.

    "plain" clips by value, then by total norm; weight decay is added afterwards by the optimizer. "decayed", as in the
    GSP study's code (gradient_transformers.py): within ``decay_added``, clip by norm, then by value.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if value is not None and form == "plain":
        torch.nn.utils.clip_grad_value_(parameters, value)
    total = torch.nn.utils.clip_grad_norm_(parameters, math.inf if norm is None else norm)
    if value is not None and form == "decayed":
        torch.nn.utils.clip_grad_value_(parameters, value)
    return total


@contextlib.contextmanager
def decay_added(optimizer: Optimizer, form: ClipForm) -> Iterator[None]:
    """Add L2 decay to the gradients instead of in the optimizer, within the block; "plain" changes nothing."""
    if form == "plain":
        yield
        return
    decoupled = type(optimizer).__name__ in _DECOUPLED
    if decoupled or any(group.get("decoupled_weight_decay") for group in optimizer.param_groups):
        raise ConfigError(
            f"fit.clip_form: got decayed with {type(optimizer).__name__}, which does not add decay to the gradient. "
            "Set fit.clip_form=plain or optim=adam."
        )
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        decay, group["weight_decay"] = group["weight_decay"], 0.0
        for p in group["params"]:
            if p.grad is not None and decay:
                p.grad.add_(p.detach(), alpha=decay)
    try:
        yield
    finally:
        for group, decay in zip(optimizer.param_groups, decays, strict=True):
            group["weight_decay"] = decay
