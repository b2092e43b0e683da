"""The one training loop: step, validate, stop early, checkpoint; resumed runs continue to the very same numbers.

That holds for one kind of processor and one number of threads: another number moves weights by some 1e-5 over a run.
"""

import logging
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from tqdm import tqdm

from dmlbench.models.head import MetricModel
from dmlbench.runtime import Precision, autocast, peak_memory_bytes, random_state, restore_random_state
from dmlbench.training.checkpoint import load_checkpoint, save_checkpoint
from dmlbench.training.following import FollowingCopy
from dmlbench.training.large_batch import accumulate_gradients
from dmlbench.training.log import History, Logger
from dmlbench.training.optim import (
    GROUPS,
    ClipForm,
    check_schedule,
    check_warmup,
    clip_gradients,
    decay_added,
    frozen,
    step_schedule,
)
from dmlbench.training.readings import Readings
from dmlbench.training.signals import StopSignal
from dmlbench.transfers import batch_on
from dmlbench.types import Batch, ConfigError, ModelOutput, NotFollowed, RunError, check_choice, closest

log = logging.getLogger(__name__)

LAST, BEST, HISTORY = "last.ckpt", "best.ckpt", "history.csv"

Follow = Callable[[int, float], bool]
"""From the step of a validation and the best score so far to whether the training is to go on."""


class Batches(Protocol):
    """An endless iterator of batches that knows where it stands."""

    def __next__(self) -> Batch: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


_WARMUP_CHOICES = {
    "warmup_schedule": ("runs", "rests"),
    "warmup_batch_norm": ("frozen", "updated"),
}


@dataclass(frozen=True)
class FitSettings:
    """Length, selection and numerics of a training; times in optimizer steps.

    Attributes:
        max_steps: upper limit; 0 leaves the model untrained.
        validate_every: steps between validations; the last step is always followed by one.
        patience: validations without improvement after which training stops; None never stops early.
        min_improvement: by how much a score must exceed the best one to count as better.
        collapse_ratio: in (0, 1); training stops at a validation whose score is at most this share of the best one;
            None never does.
        monitor: name of the validation score that is maximized.
        warmup_steps: first steps in which the groups of ``warmup_frozen`` are not trained.
        warmup_frozen: of "backbone", "pooling", "head", "distance" (AVSL's alpha and beta), "loss" (proxies) and
            "regularizer"; see ``training.optim``.
        warmup_schedule: whether the learning rate schedule "runs" or "rests" during the warm-up.
        warmup_batch_norm: whether running statistics of frozen parts stay "frozen" in the warm-up or are "updated".
        accumulate: batches of which an optimizer step takes the mean loss (see ``training.large_batch``).
        forward_batch: images per forward pass, for batches that do not fit on the device; None takes a batch at once.
            The gradient is that of the whole batch but for batch norms that are training (see there).
        clip_norm, clip_value: limits of the gradient's total norm and of its entries, or None.
        clip_form: "plain" or "decayed", see ``training.optim.clip_gradients``.
        precision: "float32" or "bf16" (autocast of the network; losses and distances stay float32).
        channels_last: memory format of the images and the network.
        compile: whether ``torch.compile`` makes kernels of its own of the network's training passes. Weights move by
            rounding; evaluation is computed as without.
        checkpoint_every: steps between checkpoints, on top of those at validations; None saves at validations only.
        log_every: steps between logged training losses. A GPU is waited for as often, so that a loss which is not
            finite stops the training at most so many steps later.
        keep: which checkpoints stay when the run is complete.
    """

    max_steps: int
    validate_every: int
    patience: int | None = None
    min_improvement: float = 0.0
    collapse_ratio: float | None = None
    monitor: str = "map_at_r"
    warmup_steps: int = 0
    warmup_frozen: Sequence[str] = ("backbone", "pooling")
    warmup_schedule: Literal["runs", "rests"] = "runs"
    warmup_batch_norm: Literal["frozen", "updated"] = "frozen"
    accumulate: int = 1
    forward_batch: int | None = None
    clip_norm: float | None = None
    clip_value: float | None = None
    clip_form: ClipForm = "plain"
    precision: Precision = "float32"
    channels_last: bool = False
    compile: bool = False
    checkpoint_every: int | None = None
    log_every: int = 10
    keep: Literal["best", "last", "both", "none"] = "best"

    def __post_init__(self) -> None:
        positive = ("validate_every", "patience", "accumulate", "forward_batch", "checkpoint_every", "log_every")
        for name in ("max_steps", "warmup_steps", *positive):
            value, limit = getattr(self, name), int(name in positive)
            if value is not None and value < limit:
                raise ConfigError(f"fit.{name} ({value}) must be at least {limit}")
        if not self.min_improvement >= 0:
            raise ConfigError(f"fit.min_improvement ({self.min_improvement}) must be at least 0")
        if self.collapse_ratio is not None and not 0 < self.collapse_ratio < 1:
            raise ConfigError(f"fit.collapse_ratio: got {self.collapse_ratio}, expected a number in (0, 1) or null.")
        for name, choices in _WARMUP_CHOICES.items():
            check_choice(f"fit.{name}", getattr(self, name), choices)
        for name in ("clip_norm", "clip_value"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"fit.{name} ({value}) must be positive, or null for no clipping")
        if self.warmup_steps and self.warmup_steps >= self.max_steps > 0:
            raise ConfigError(
                f"fit.warmup_steps ({self.warmup_steps}) leaves nothing of fit.max_steps ({self.max_steps}) to train "
                "the whole network; lower it"
            )
        for name in self.warmup_frozen:
            if name not in GROUPS:
                raise ConfigError(f"fit.warmup_frozen names the group '{name}': {closest(name, GROUPS)}")
        if self.warmup_steps and not self.warmup_frozen:
            raise ConfigError(
                f"fit.warmup_frozen is empty, so fit.warmup_steps ({self.warmup_steps}) would do nothing; name the "
                "groups to freeze or set fit.warmup_steps=0"
            )


@dataclass
class FitResult:
    """Where a training stands, and at its end what came out; saved in every checkpoint."""

    step: int = 0
    best_step: int = 0
    best_score: float = -math.inf
    validations_without_improvement: int = 0
    stop_reason: str = ""
    wall_s: float = 0.0


def fit(
    model: MetricModel,
    objective: nn.Module,
    batches: Batches,
    validate: Callable[[], Mapping[str, float]] | None,
    optimizer: Optimizer,
    settings: FitSettings,
    run_dir: Path,
    *,
    device: torch.device,
    schedule: LRScheduler | None = None,
    loggers: Sequence[Logger] = (),
    picture: Callable[[], NDArray[np.uint8]] | None = None,
    data_fingerprint: str = "",
    stop: StopSignal | None = None,
    follow: Follow | None = None,
) -> FitResult:
    """Train until ``max_steps`` or until the monitored score stops improving, then restore the best weights.

    Without ``validate`` nothing is selected: the weights of the last step are the result.

    Continues from ``run_dir/last.ckpt`` where there is one. Leaves ``best.ckpt`` (weights) and ``last.ckpt`` (all that
    the next step depends on).

    Where the objective has a ``key_momentum``, a copy of the model follows it with that momentum, one move after every
    step, and the objective is given what it makes of the batches' second views.

    ``loggers`` are started here, told of all that the history has, and closed by the caller. They also get what differs
    between two runs of the same numbers: images trained on per second of training (without validations and checkpoints)
    since they were last told, and the largest memory so far. For them alone there is ``picture``, which returns one
    [H, W, 3] of what ``validate`` has just computed.

    ``follow`` is told of every validation but the last, once its checkpoint is written, and says whether to go on.

    Raises:
        ConfigError: the schedule waits for falling scores; the warm-up leaves nothing to train; a batch cannot be taken
            in parts.
        Diverged: a loss is not finite.
        RunError: a checkpoint cannot be read or written, or a logger cannot write.
        NotFollowed: ``follow`` said no.
        Preempted: SIGTERM or Ctrl-C came; ``last.ckpt`` holds the step that was just finished.
    """
    assert isinstance(model, nn.Module)
    stop = stop or StopSignal()
    check_schedule(schedule)
    if settings.warmup_steps:
        check_warmup(settings.warmup_frozen, model, objective)
    parts_of_state = {"model": model, "objective": objective, "optimizer": optimizer, "batches": batches}
    if schedule is not None:
        parts_of_state["schedule"] = schedule
    momentum: float | None = getattr(objective, "key_momentum", None)
    copied = None if momentum is None else FollowingCopy(model, momentum)
    if copied is not None:
        parts_of_state["following_copy"] = copied
    state = _restore(run_dir, parts_of_state, data_fingerprint)
    history = History(run_dir / HISTORY, resume_step=state.step)
    logged_group = next((group for group in optimizer.param_groups if group["lr"] > 0), optimizer.param_groups[0])
    for logger in loggers:
        logger.start(state.step)
    memory_format = torch.channels_last if settings.channels_last else torch.contiguous_format

    network = torch.compile(model) if settings.compile else model
    readings = Readings()
    read_every = 1 if device.type == "cpu" else settings.log_every  # on a CPU nothing is waited for
    intervals = [n for n in (settings.validate_every, settings.checkpoint_every) if n]

    trained_images, trained_s = 0, 0.0  # since the loggers were last told

    def next_batch() -> Batch:
        nonlocal trained_images
        batch = batch_on(next(batches), device)
        trained_images += len(batch.images)
        return batch

    def forward(images: Tensor) -> ModelOutput:
        with autocast(device, settings.precision):
            output: ModelOutput = network(images.contiguous(memory_format=memory_format))
        return output

    def keys_of(images: Tensor) -> Tensor:
        assert copied is not None
        with autocast(device, settings.precision):
            return copied(images.contiguous(memory_format=memory_format))

    goes_on = True
    started = time.monotonic() - state.wall_s
    bar = tqdm(total=settings.max_steps, initial=state.step, unit="step", disable=not sys.stderr.isatty(), leave=False)
    if state.step:
        log.info("resumed at step %d (best %.4f at step %d)", state.step, state.best_score, state.best_step)

    with stop:  # a signal waits until a step is done and saved
        while goes_on and not state.stop_reason and state.step < settings.max_steps:
            step, step_started = state.step + 1, time.monotonic()
            model.train()
            objective.train()
            optimizer.zero_grad(set_to_none=True)
            in_warmup = step <= settings.warmup_steps
            rests = in_warmup and settings.warmup_schedule == "rests"
            updated = settings.warmup_batch_norm == "updated"
            with frozen(settings.warmup_frozen if in_warmup else (), model, objective, training=updated):
                values = accumulate_gradients(
                    model, objective, next_batch, step=step, forward=forward, keys=copied and keys_of,
                    accumulate=settings.accumulate, forward_batch=settings.forward_batch,
                )  # fmt: skip
                with decay_added(optimizer, settings.clip_form):
                    norm = clip_gradients(
                        optimizer, norm=settings.clip_norm, value=settings.clip_value, form=settings.clip_form
                    )
                    optimizer.step()
            if copied is not None:
                copied.follow()
            if not rests:
                step_schedule(schedule, score=None)
            if step == settings.warmup_steps:
                log.info("step %d: warm-up over, the whole network trains from here", step)

            state.step = step
            last_step = step == settings.max_steps
            readings.add(step, values, norm)
            if last_step or any(step % n == 0 for n in (read_every, *intervals)):
                readings.read()
            trained_s += time.monotonic() - step_started  # where it is logged, a GPU has been waited for
            logged = readings.last if step % settings.log_every == 0 else {}
            scalars = {f"train/{name}": value for name, value in logged.items()}
            measured: dict[str, float] = {}  # not the same in another run of the same numbers
            if logged:
                measured = {"images_per_s": trained_images / trained_s, "peak_memory_bytes": peak_memory_bytes(device)}
                trained_images, trained_s = 0, 0.0
            drawn = None
            is_better = False
            if last_step:
                state.stop_reason = "max_steps"
            if validate is None and last_step:
                is_better, state.best_step = True, step
            elif validate is not None and (step % settings.validate_every == 0 or last_step):
                scores = validate()
                score = scores[settings.monitor]
                is_better = score > state.best_score + settings.min_improvement
                if is_better:
                    state.best_step, state.best_score = step, score
                state.validations_without_improvement = 0 if is_better else state.validations_without_improvement + 1
                if not rests:
                    step_schedule(schedule, score=score)
                drawn = picture() if loggers and picture else None
                scalars |= {f"val/{name}": value for name, value in scores.items()}
                scalars["lr"] = logged_group["lr"]
                log.info("step %d: loss %.4f, %s %.4f (best %.4f at %d)", step, readings.last["loss"], settings.monitor,
                         score, state.best_score, state.best_step)  # fmt: skip
                if settings.patience and state.validations_without_improvement >= settings.patience:
                    state.stop_reason = "early_stopping"
                elif settings.collapse_ratio and score <= settings.collapse_ratio * state.best_score:
                    state.stop_reason = "collapse"
            if scalars:
                history.log(step, scalars)
                for logger in loggers:
                    logger.log(step, scalars | measured)
                    if drawn is not None:
                        logger.image(step, "val/nearest", drawn)
            bar.update()
            bar.set_postfix(loss=f"{readings.last.get('loss', math.nan):.3f}", best=f"{state.best_score:.4f}",
                            lr=f"{logged_group['lr']:.1e}")  # fmt: skip
            state.wall_s = time.monotonic() - started
            if state.stop_reason or stop.requested or any(step % n == 0 for n in intervals):
                readings.read()  # of a step that a signal ended
                _save(run_dir, state, parts_of_state, data_fingerprint, is_best=is_better)
                if stop.requested:
                    break
                if follow is not None and f"val/{settings.monitor}" in scalars and not state.stop_reason:
                    goes_on = follow(step, state.best_score)

    bar.close()
    history.close()
    if not goes_on:
        raise NotFollowed(
            f"{run_dir} was stopped at step {state.step}; the same configuration continues it", state.step
        )
    if not settings.max_steps:
        state.stop_reason = "untrained"
    elif state.best_step:
        best = load_checkpoint(run_dir / BEST)
        model.load_state_dict(best["model"])
        objective.load_state_dict(best["objective"])
    return state


def _save(run_dir: Path, state: FitResult, parts: Mapping[str, Any], data_fingerprint: str, *, is_best: bool) -> None:
    """``last.ckpt`` first: if a kill falls between the two files, ``_restore`` finds the best weights in it."""
    states = {name: part.state_dict() for name, part in parts.items()}
    rest = {"progress": asdict(state), "random": random_state(), "data_fingerprint": data_fingerprint}
    save_checkpoint(run_dir / LAST, states | rest)
    if is_best:
        _save_best(run_dir, state, states)


def _save_best(run_dir: Path, state: FitResult, states: Mapping[str, Any]) -> None:
    best = {"step": state.best_step, "score": state.best_score}
    save_checkpoint(run_dir / BEST, {"model": states["model"], "objective": states["objective"], **best})


def _restore(run_dir: Path, parts: Mapping[str, Any], data_fingerprint: str) -> FitResult:
    """Put every part where ``last.ckpt`` left it; without one, a fresh start."""
    if not (run_dir / LAST).exists():
        return FitResult()
    saved = load_checkpoint(run_dir / LAST)
    if saved.get("data_fingerprint") != data_fingerprint:
        raise RunError(
            f"{run_dir / LAST} was trained on other data (fingerprint {saved.get('data_fingerprint')!r:.16}, now "
            f"{data_fingerprint!r:.16}); delete it to start this run from its beginning, or choose another "
            "paths.output_dir or dataset.name"
        )
    try:
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        state = FitResult(**saved["progress"])
        restore_random_state(saved["random"])
    except (KeyError, TypeError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise RunError(
            f"{run_dir / LAST} does not fit this configuration: {reason}; delete it to start this run again"
        ) from error
    if state.best_step == state.step:  # best.ckpt may not have been written any more
        _save_best(run_dir, state, saved)
    elif state.best_step and not (run_dir / BEST).exists():
        raise RunError(f"{run_dir / BEST} is gone; delete {LAST} too, to start this run from its beginning")
    return state
