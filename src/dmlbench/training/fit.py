"""The training loop: step, validate, stop early, checkpoint. Resumed runs end in the same numbers.

This holds for one CPU model and one number of threads; another number moves weights by some 1e-5 over a run.
"""

import logging
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from tqdm import tqdm

from dmlbench.device_copies import batch_on
from dmlbench.models.net import MetricModel
from dmlbench.ranks import ONE, Ranks
from dmlbench.runtime import (
    Precision,
    network_pass,
    peak_memory_bytes,
    random_state,
    restore_random_state,
    shows_progress,
)
from dmlbench.training.averaged_weights import AveragedWeights
from dmlbench.training.checkpoint import load_checkpoint, save_checkpoint
from dmlbench.training.deferred_metrics import BatchValues, DeferredMetrics
from dmlbench.training.large_batch import accumulate_gradients
from dmlbench.training.log import History, Logger
from dmlbench.training.momentum_encoder import MomentumEncoder
from dmlbench.training.optim import GROUPS, ClipForm, check_warmup, clip_gradients, decay_added, frozen, step_schedule
from dmlbench.training.signals import StopSignal
from dmlbench.types import Batch, ConfigError, Pruned, RunError, check_at_least, check_choice, closest

log = logging.getLogger(__name__)

LAST, BEST, HISTORY = "last.ckpt", "best.ckpt", "history.csv"

OnValidation = Callable[[int, float], bool]
"""From the step of a validation and the best score so far to whether the training is to go on."""


class Batches(Protocol):
    """An endless iterator of batches with a position that can be restored."""

    def __next__(self) -> Batch: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class FitSettings:
    """Length, selection and numerics of a training; times in optimizer steps.

    See ``training.optim`` for warm-up and clipping, ``training.large_batch`` for ``accumulate`` and ``forward_batch``,
    ``training.averaged_weights`` for ``ema``. With ``precision="fp16"`` a ``GradScaler`` scales losses and skips the
    optimizer's step where a gradient is not finite; the schedule and the averages advance nevertheless.
    Losses are read from the GPU every ``log_every`` steps, so a loss that is not finite stops the training at most that
    many steps later.
    """

    max_steps: int  # 0 leaves the model untrained
    validate_every: int  # the last step is always followed by a validation, too
    patience: int | None = None  # validations without improvement after which training stops; None never stops early
    min_improvement: float = 0.0  # by how much a score must exceed the best one to count as better
    collapse_ratio: float | None = None  # in (0, 1); training stops at a score of at most this share of the best one
    monitor: str = "map_at_r"  # validation score that is maximized
    warmup_steps: int = 0
    warmup_frozen: Sequence[str] = ("backbone", "pooling")  # parameter groups that are frozen during the warm-up
    reset_after_warmup: bool = False  # reset the optimizer's state after the warm-up
    warmup_schedule: Literal["runs", "rests"] = "runs"  # of the learning rate, during the warm-up
    warmup_batch_norm: Literal["frozen", "updated"] = "frozen"  # running statistics of frozen parts in the warm-up
    accumulate: int = 1
    forward_batch: int | None = None
    clip_norm: float | None = None
    clip_value: float | None = None
    clip_form: ClipForm = "plain"
    ema: float | None = None  # decay in (0, 1) of an average of the weights, which is scored and saved; None: none
    precision: Precision = "float32"  # bf16, fp16: autocast of the network; losses and distances stay float32
    channels_last: bool = False
    compile: bool = False  # of the training's forward passes; changes weights by rounding
    processes: int = 1  # of torchrun, which sets it; each embeds a part of the batch
    sync_batch_norm: bool = False  # statistics of the whole batch over the GPUs of several processes
    checkpoint_every: int | None = None  # steps between checkpoints, on top of those at validations
    log_every: int = 10  # steps between logged training losses
    keep: Literal["best", "last", "both", "none"] = "best"  # checkpoints of the complete run

    def __post_init__(self) -> None:
        counts = ("validate_every", "patience", "accumulate", "forward_batch", "checkpoint_every", "log_every")
        numbers = ("max_steps", "warmup_steps", "min_improvement")
        check_at_least(1, **{"fit.processes": self.processes})
        for least, names in ((0, numbers), (1, counts)):
            given = {name: getattr(self, name) for name in names}
            check_at_least(least, **{f"fit.{name}": value for name, value in given.items() if value is not None})
        if self.sync_batch_norm and self.processes == 1:
            raise ConfigError(
                "fit.sync_batch_norm: got true, expected false with one process. Start the run with torchrun, or set "
                "fit.sync_batch_norm=false."
            )
        for name in ("clip_norm", "clip_value"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ConfigError(f"fit.{name}: got {value}, expected a positive number or null.")
        check_choice("fit.warmup_schedule", self.warmup_schedule, ("runs", "rests"))
        check_choice("fit.warmup_batch_norm", self.warmup_batch_norm, ("frozen", "updated"))
        check_choice("fit.precision", self.precision, get_args(Precision))
        if self.ema is not None and not 0 < self.ema < 1:
            raise ConfigError(
                f"fit.ema: got {self.ema}, expected a decay in (0, 1) or null. Set one such as 0.999, or fit.ema=null."
            )
        if self.collapse_ratio is not None and not 0 < self.collapse_ratio < 1:
            raise ConfigError(f"fit.collapse_ratio: got {self.collapse_ratio}, expected a number in (0, 1) or null.")
        if self.warmup_steps and self.warmup_steps >= self.max_steps > 0:
            raise ConfigError(f"fit.warmup_steps: got {self.warmup_steps}, expected below max_steps={self.max_steps}.")
        for name in self.warmup_frozen:
            if name not in GROUPS:
                raise ConfigError(f"fit.warmup_frozen: got the unknown group '{name}': {closest(name, GROUPS)}")
        if self.warmup_steps and not self.warmup_frozen and not self.reset_after_warmup:
            raise ConfigError(
                f"fit.warmup_frozen: got no group with fit.warmup_steps={self.warmup_steps}. Add groups such as "
                "backbone, or set fit.warmup_steps=0."
            )


@dataclass
class FitResult:
    """Progress of a training, saved in every checkpoint."""

    step: int = 0
    best_step: int = 0
    best_score: float = -math.inf
    validations_without_improvement: int = 0
    stop_reason: str = ""
    wall_s: float = 0.0
    skipped_steps: int = 0  # by the gradient scaler of fp16, included in ``step``

    def update(self, step: int, score: float, settings: FitSettings) -> bool:
        """Note a validation's score; returns whether it is the best. May end the training."""
        is_better = score > self.best_score + settings.min_improvement
        if is_better:
            self.best_step, self.best_score = step, score
        self.validations_without_improvement = 0 if is_better else self.validations_without_improvement + 1
        if settings.patience and self.validations_without_improvement >= settings.patience:
            self.stop_reason = "early_stopping"
        elif settings.collapse_ratio and not is_better and score <= settings.collapse_ratio * self.best_score:
            self.stop_reason = "collapse"
        return is_better


def check_start(settings: FitSettings, schedule: Any, model: nn.Module, objective: nn.Module) -> None:
    """Raise ConfigError if the schedule minimizes the score, or the warm-up freezes all or nothing."""
    if isinstance(schedule, ReduceLROnPlateau) and schedule.mode != "max":
        raise ConfigError(f"schedule.mode: got {schedule.mode}, expected max, as the monitored score is maximized.")
    if settings.warmup_steps:
        check_warmup(settings.warmup_frozen, model, objective)


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
    on_validation: OnValidation | None = None,
    ranks: Ranks = ONE,
) -> FitResult:
    """Train until ``max_steps`` or until the monitored score stops improving, then restore the best weights.

    Resumes from ``run_dir/last.ckpt`` if it exists. Writes ``best.ckpt`` (weights) and ``last.ckpt`` (all that the
    next step depends on). If the objective has a ``key_momentum``, a momentum encoder embeds the second views.
    With ``settings.ema``, ``validate`` sees and ``best.ckpt`` holds averaged weights; ``last.ckpt`` holds both.

    Args:
        validate: returns scores; without it the weights of the last step are the result.
        picture: returns an image [H, W, 3] of what ``validate`` has just computed, for the loggers.
        loggers: started here, closed by the caller.
        on_validation: called after each validation's checkpoint but the last; False ends the training by ``Pruned``.
        ranks: the first one alone writes files. All validate, with the buffers of the first.

    Raises:
        Diverged: a loss is not finite.
        Preempted: SIGTERM or Ctrl-C came; ``last.ckpt`` holds the step that was just finished.
    """
    assert isinstance(model, nn.Module)
    stop = stop or StopSignal()
    check_start(settings, schedule, model, objective)
    ranks.copy_from_first((*model.parameters(), *model.buffers(), *objective.parameters(), *objective.buffers()))
    parts_of_state = {"model": model, "objective": objective, "optimizer": optimizer, "batches": batches}
    if schedule is not None:
        parts_of_state["schedule"] = schedule
    momentum_encoder = None
    if (momentum := getattr(objective, "key_momentum", None)) is not None:
        momentum_encoder = parts_of_state["momentum_encoder"] = MomentumEncoder(model, momentum)
    averaged = None
    if settings.ema is not None:
        averaged = parts_of_state["averaged_weights"] = AveragedWeights(model, settings.ema)
    scaler = GradScaler(device.type, enabled=settings.precision == "fp16")
    if scaler.is_enabled():
        parts_of_state["gradient_scaler"] = scaler
        # The scaler may skip the first steps of the optimizer.
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
    state = _restore(run_dir, parts_of_state, data_fingerprint, ranks)
    monitor = _Monitor(
        run_dir if ranks.is_first else None, settings, loggers, device, optimizer, resume_step=state.step,
        skipped_steps=state.skipped_steps,
    )  # fmt: skip
    intervals = [n for n in (settings.validate_every, settings.checkpoint_every) if n]

    def next_batch() -> Batch:
        batch = batch_on(next(batches), device)
        monitor.trained_images += len(batch.labels)
        return batch

    formats: Any = {"precision": settings.precision, "channels_last": settings.channels_last}
    forward = network_pass(torch.compile(model) if settings.compile else model, device, **formats)
    keys_of = None if momentum_encoder is None else network_pass(momentum_encoder, device, **formats)
    goes_on = True
    started = time.monotonic() - state.wall_s

    with stop, closing(monitor):  # a signal waits until a step is done and saved
        while goes_on and not state.stop_reason and state.step < settings.max_steps:
            step, step_started = state.step + 1, time.monotonic()
            model.train()
            objective.train()
            optimizer.zero_grad(set_to_none=True)
            if momentum_encoder is not None:
                ranks.copy_from_first(model.buffers())  # keys are embedded by running statistics
            in_warmup = step <= settings.warmup_steps
            scheduled = None if in_warmup and settings.warmup_schedule == "rests" else schedule
            updated = settings.warmup_batch_norm == "updated"
            with frozen(settings.warmup_frozen if in_warmup else (), model, objective, training=updated):
                values = accumulate_gradients(
                    model, objective, next_batch, step=step, forward=forward, keys=keys_of,
                    accumulate=settings.accumulate, forward_batch=settings.forward_batch, scale=scaler.scale,
                    ranks=ranks,
                )  # fmt: skip
                scaler.unscale_(optimizer)
                with decay_added(optimizer, settings.clip_form):
                    norm = clip_gradients(
                        optimizer, norm=settings.clip_norm, value=settings.clip_value, form=settings.clip_form
                    )
                    skipped = _step_scaled(scaler, optimizer, device)
            if averaged is not None:
                averaged.update()
            if momentum_encoder is not None:
                momentum_encoder.update()
            step_schedule(scheduled, score=None)
            if step == settings.warmup_steps:
                log.info("step %d: warm-up over, training the whole network", step)
                if settings.reset_after_warmup:
                    optimizer.state.clear()

            state.step = step
            monitor.end_step(step, values, norm, skipped, time.monotonic() - step_started)
            is_last = step == settings.max_steps
            if is_last:
                state.stop_reason = "max_steps"
            is_better, is_validated = False, False
            if validate is None and is_last:
                is_better, state.best_step = True, step
            elif validate is not None and (step % settings.validate_every == 0 or is_last):
                is_validated = True
                with _averaged(parts_of_state):
                    ranks.copy_from_first(model.buffers())  # each rank's batch norm has seen its own images
                    scores = validate()
                is_better = state.update(step, scores[settings.monitor], settings)
                step_schedule(scheduled, score=scores[settings.monitor])
                monitor.end_validation(state, scores, picture() if loggers and picture else None)
            monitor.write(state)
            state.wall_s = time.monotonic() - started
            if asked := ranks.largest(stop.requested):  # all ranks act on it; a later signal counts in the next step
                stop.requested = asked
            if state.stop_reason or asked or any(step % n == 0 for n in intervals):
                monitor.deferred.read()  # a signal may end a step whose losses were not read
                state.skipped_steps = monitor.deferred.skipped_steps
                if ranks.is_first:
                    _save(run_dir, state, parts_of_state, data_fingerprint, is_best=is_better)
                if asked:
                    break
                if on_validation is not None and is_validated and not state.stop_reason:
                    goes_on = on_validation(step, state.best_score)

    if state.skipped_steps:
        log.info("fp16: %d of %d steps skipped, as gradients were not finite", state.skipped_steps, state.step)
    if not goes_on:
        raise Pruned(f"{run_dir} was pruned at step {state.step}. The same config resumes it.", state.step)
    if not settings.max_steps:
        state.stop_reason = "untrained"
        if ranks.is_first:
            _save_best(run_dir, state, parts_of_state)
    elif state.best_step:
        ranks.same(None)  # once rank 0 has written it
        best = load_checkpoint(run_dir / BEST)
        model.load_state_dict(best["model"])
        objective.load_state_dict(best["objective"])
    return state


def _step_scaled(scaler: GradScaler, optimizer: Optimizer, device: torch.device) -> Tensor | None:
    """Step the optimizer by unscaled gradients; returns whether the scaler skipped it, on the device, or None."""
    if not scaler.is_enabled():
        optimizer.step()
        return None
    one = torch.ones((), device=device)
    before = scaler.scale(one)
    scaler.step(optimizer)
    scaler.update()
    return scaler.scale(one) < before  # only a skipped step lowers the scale


class _Monitor:
    """Progress bar, ``history.csv`` and loggers of a training."""

    def __init__(
        self, run_dir: Path | None, settings: FitSettings, loggers: Sequence[Logger], device: torch.device,
        optimizer: Optimizer, *, resume_step: int, skipped_steps: int,
    ) -> None:  # fmt: skip
        self.deferred = DeferredMetrics(skipped_steps)
        self.trained_images = 0  # since the loggers were last told
        self._trained_s = 0.0
        self._settings, self._loggers, self._device = settings, loggers, device
        self._group = next((group for group in optimizer.param_groups if group["lr"] > 0), optimizer.param_groups[0])
        self._history = None if run_dir is None else History(run_dir / HISTORY, resume_step=resume_step)
        self._scalars: dict[str, float] = {}
        self._picture: NDArray[np.uint8] | None = None
        read_every = 1 if device.type == "cpu" else settings.log_every  # on a CPU nothing is waited for
        self._read_at = [n for n in (read_every, settings.validate_every, settings.checkpoint_every) if n]
        for logger in loggers:
            logger.start(resume_step)
        self._bar = tqdm(
            total=settings.max_steps,
            initial=resume_step,
            unit="step",
            leave=False,
            disable=run_dir is None or not shows_progress(),
        )

    def end_step(
        self, step: int, values: Sequence[BatchValues], norm: Tensor, skipped: Tensor | None, seconds: float
    ) -> None:
        """Keep a step's losses; read them back where they are logged or followed by a validation or checkpoint."""
        self.deferred.add(step, values, norm, skipped)
        if step == self._settings.max_steps or any(step % n == 0 for n in self._read_at):
            self.deferred.read()
        self._trained_s += seconds
        self._scalars, self._picture = {}, None
        if step % self._settings.log_every == 0:
            self._scalars = {f"train/{name}": value for name, value in self.deferred.last.items()}

    def end_validation(self, state: FitResult, scores: Mapping[str, float], picture: NDArray[np.uint8] | None) -> None:
        """Note a validation's scores for the log, and what pictures it."""
        self._picture = picture
        self._scalars |= {f"val/{name}": value for name, value in scores.items()}
        self._scalars["lr"] = self._group["lr"]
        name = self._settings.monitor
        log.info("step %d: loss %.4f, %s %.4f (best %.4f at %d)", state.step, self.deferred.last["loss"], name,
                 scores[name], state.best_score, state.best_step)  # fmt: skip

    def write(self, state: FitResult) -> None:
        """Write the step's scalars to the history and the loggers, and move the bar."""
        measured: dict[str, float] = {}  # not reproducible, so not in history.csv
        if state.step % self._settings.log_every == 0 and self._trained_s:
            rate = self.trained_images / self._trained_s
            measured = {"images_per_s": rate, "peak_memory_bytes": peak_memory_bytes(self._device)}
            self.trained_images, self._trained_s = 0, 0.0
        if self._scalars and self._history is not None:
            self._history.log(state.step, self._scalars)
            for logger in self._loggers:
                logger.log(state.step, self._scalars | measured)
                if self._picture is not None:
                    logger.image(state.step, "val/nearest", self._picture)
        self._bar.update()
        self._bar.set_postfix(loss=f"{self.deferred.last.get('loss', math.nan):.3f}", best=f"{state.best_score:.4f}",
                              lr=f"{self._group['lr']:.1e}")  # fmt: skip

    def close(self) -> None:
        self._bar.close()
        if self._history is not None:
            self._history.close()


def _save(run_dir: Path, state: FitResult, parts: Mapping[str, Any], data_fingerprint: str, *, is_best: bool) -> None:
    """``last.ckpt`` first: if a kill falls between the two files, ``_restore`` finds the best weights in it."""
    states = {name: part.state_dict() for name, part in parts.items()}
    rest = {"progress": asdict(state), "random": random_state(), "data_fingerprint": data_fingerprint}
    save_checkpoint(run_dir / LAST, states | rest)
    if is_best:
        _save_best(run_dir, state, parts)


def _save_best(run_dir: Path, state: FitResult, parts: Mapping[str, Any]) -> None:
    best = {"step": state.best_step, "score": state.best_score}
    with _averaged(parts):  # also the objective, which may share the model's distance
        states = {name: parts[name].state_dict() for name in ("model", "objective")}
        save_checkpoint(run_dir / BEST, states | best)


def _averaged(parts: Mapping[str, Any]) -> AbstractContextManager[None]:
    """The model has its averaged weights within the block, if they are among the parts."""
    averaged: AveragedWeights | None = parts.get("averaged_weights")
    return nullcontext() if averaged is None else averaged.in_model()


def _restore(run_dir: Path, parts: Mapping[str, Any], data_fingerprint: str, ranks: Ranks) -> FitResult:
    """Put every part where ``last.ckpt`` left it; without one, a fresh start."""
    if not ranks.same((run_dir / LAST).exists()):
        return FitResult()
    saved = load_checkpoint(run_dir / LAST)
    if saved.get("data_fingerprint") != data_fingerprint:
        raise RunError(
            f"{run_dir / LAST} was trained on other data (fingerprint {saved.get('data_fingerprint')!r:.16}, now "
            f"{data_fingerprint!r:.16}). Delete it to restart this run, or choose another paths.output_dir or "
            "dataset.name."
        )
    try:
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        state = FitResult(**saved["progress"])
        restore_random_state(saved["random"])
    except (KeyError, TypeError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise RunError(
            f"{run_dir / LAST} does not fit this configuration: {reason}. Delete it to restart this run."
        ) from error
    if state.best_step == state.step:  # the process may have died before it wrote best.ckpt
        if ranks.is_first:
            _save_best(run_dir, state, parts)
    elif state.best_step and not (run_dir / BEST).exists():
        raise RunError(f"{run_dir / BEST} is missing. Delete {LAST}, too, to restart this run.")
    best = f"best {state.best_score:.4f} at step {state.best_step}" if state.best_step else "no validation yet"
    log.info("resumed at step %d (%s)", state.step, best)
    return state
