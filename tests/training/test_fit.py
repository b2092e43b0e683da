"""The loop on a model of one linear layer: every rule of stopping, selecting and resuming, without images."""

import logging
import math
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_models import CountedBatches
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from dmlbench.losses.contrastive_c1 import ContrastiveC1
from dmlbench.losses.objective import Objective
from dmlbench.models.net import PooledModel
from dmlbench.models.pooling.gsp import Gsp
from dmlbench.models.projection import Projection
from dmlbench.models.resnet_cifar import ResNet20
from dmlbench.training.fit import BEST, LAST, FitResult, FitSettings, fit
from dmlbench.training.log import read_history
from dmlbench.training.optim import WarmupCosine
from dmlbench.training.signals import EXIT_PREEMPTED, Preempted, StopSignal
from dmlbench.types import Batch, ConfigError, ModelOutput, RunError


class ToyModel(nn.Module):
    def __init__(self, *, batch_norm: bool = True) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4) if batch_norm else nn.Tanh())
        self.pooling = nn.Identity()
        self.head = nn.Linear(4, 2)
        self.observed: list[int] = []

    def forward(self, images: Tensor) -> ModelOutput:
        return ModelOutput(self.head(self.pooling(self.backbone(images.flatten(1)))))

    @property
    def observer(self) -> nn.Module:
        return self.pooling

    def observe(self, output: ModelOutput, *, step: int) -> None:
        self.observed.append(step)


class SquaredNorm(nn.Module):
    """A loss with a parameter, as a proxy loss has."""

    def __init__(self) -> None:
        super().__init__()
        self.target = nn.Parameter(torch.ones(2))

    def forward(self, embeddings: Tensor, labels: Tensor, indices_tuple: Any = None) -> Tensor:
        noise = torch.rand(())  # of the global generator: a resumed run must draw the same
        return ((embeddings - self.target * noise) ** 2).mean()


class ToyBatches(CountedBatches):
    """``before`` is called with the number of batches drawn so far."""

    def __init__(self, before: Callable[[int], object] = lambda step: None) -> None:
        self.before = before

    def __next__(self) -> Batch:
        self.before(self.step)
        self.step += 1
        images = torch.randn(8, 1, 2, 2, generator=torch.Generator().manual_seed(self.step))
        return Batch(images, torch.arange(8) % 2, torch.arange(8))


SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "none": lambda optimizer: None,
    "falling plateau": lr_scheduler.ReduceLROnPlateau,
    "plateau": partial(lr_scheduler.ReduceLROnPlateau, mode="max", patience=0),
    "cosine": partial(lr_scheduler.CosineAnnealingLR, T_max=20),
    "step": partial(lr_scheduler.StepLR, step_size=3, gamma=0.5),
    "multi_step": partial(lr_scheduler.MultiStepLR, milestones=[3, 6, 14], gamma=0.5),
    "warmup_cosine": partial(lr_scheduler.LambdaLR, lr_lambda=WarmupCosine(6, 20, 0.1, 0.0)),
}


def _train(
    run_dir: Path, scores: Iterator[float] | None = None, *, batches: ToyBatches | None = None,
    stop: StopSignal | None = None, schedule: str = "none", lr: float = 0.1, batch_norm: bool = True, **settings: Any,
) -> tuple[FitResult, ToyModel, Objective]:  # fmt: skip
    torch.manual_seed(0)
    run_dir.mkdir(exist_ok=True)
    model, objective = ToyModel(batch_norm=batch_norm), Objective(SquaredNorm())
    optimizer = torch.optim.Adam([*model.parameters(), *objective.parameters()], lr=lr)

    def validate() -> dict[str, float]:
        return {"map_at_r": -model.head.weight.abs().sum().item() if scores is None else next(scores)}

    values = {"max_steps": 20, "validate_every": 5, "log_every": 1} | settings
    result = fit(
        model, objective, batches or ToyBatches(), validate, optimizer, FitSettings(**values), run_dir,
        device=torch.device("cpu"), schedule=SCHEDULES[schedule](optimizer), stop=stop,
    )  # fmt: skip
    return result, model, objective


def test_training_stops_after_patience_and_restores_the_best_weights(tmp_path) -> None:
    scores = iter([0.1, 0.5, 0.4, 0.5, 0.3, 0.9])
    result, model, _ = _train(tmp_path, scores, max_steps=100, patience=3)
    assert (result.stop_reason, result.step, result.best_step, result.best_score) == ("early_stopping", 25, 10, 0.5)
    best = torch.load(tmp_path / BEST, weights_only=True)
    assert best["step"] == 10
    assert all(torch.equal(value, best["model"][name]) for name, value in model.state_dict().items())


def test_warm_up_trains_head_and_loss_only_and_then_ends(tmp_path, caplog) -> None:
    torch.manual_seed(0)
    fresh = ToyModel().state_dict()
    caplog.set_level(logging.INFO)
    _, model, objective = _train(tmp_path / "a", max_steps=6, warmup_steps=5, validate_every=5, scores=iter([1.0, 0.0]))
    state = model.state_dict()  # the best is that of step 5, the last one of the warm-up
    assert all(torch.equal(state[name], fresh[name]) for name in state if name.startswith("backbone"))
    assert not torch.equal(state["head.weight"], fresh["head.weight"])
    assert not torch.equal(objective.loss.target, torch.ones(2))
    assert "warm-up over" in caplog.text
    _, later, _ = _train(tmp_path / "b", max_steps=6, warmup_steps=5, validate_every=6, scores=iter([1.0]))
    assert not torch.equal(later.state_dict()["backbone.0.weight"], fresh["backbone.0.weight"])


@pytest.mark.parametrize(
    ("groups", "resting"),
    [(["head"], {"head"}), (["loss"], {"loss"}), (["backbone", "head"], {"backbone", "head"})],
)
def test_warm_up_freezes_the_groups_it_is_told_to(tmp_path, groups: list[str], resting: set[str]) -> None:
    torch.manual_seed(0)
    fresh = ToyModel().state_dict() | {"loss.target": torch.ones(2)}
    _, model, objective = _train(tmp_path, iter([1.0, 0.0]), max_steps=6, warmup_steps=5, warmup_frozen=groups)
    trained = model.state_dict() | objective.state_dict()
    weights = {"backbone": "backbone.0.weight", "head": "head.weight", "loss": "loss.target"}
    assert {group for group, name in weights.items() if torch.equal(trained[name], fresh[name])} == resting


@pytest.mark.parametrize("groups", [("backbone",), ()])
def test_after_a_warm_up_another_optimizer_may_begin(tmp_path, groups: tuple[str, ...]) -> None:
    """yetigurbuz/generalized-sum-pooling b765b889, tensorflow/framework/solvers/model_trainer.py:374-420: a warm-up
    optimizer of its own, then one without its moments."""
    settings = {"max_steps": 6, "validate_every": 6, "warmup_steps": 3, "warmup_frozen": groups}
    _, model, _ = _train(tmp_path, iter([1.0]), batch_norm=False, reset_after_warmup=True, **settings)
    torch.manual_seed(0)
    naive, loss, batches = ToyModel(batch_norm=False), SquaredNorm(), ToyBatches()
    for step in range(1, 7):
        if step in (1, 4):
            optimizer = torch.optim.Adam([*naive.parameters(), *loss.parameters()], lr=0.1)
        optimizer.zero_grad()
        batch = next(batches)
        loss(naive(batch.images).embedding, batch.labels).backward()
        if step <= 3 and groups:
            for p in naive.backbone.parameters():
                p.grad = None
        optimizer.step()
    for name, value in naive.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value)


def test_running_statistics_of_a_frozen_backbone_move_in_warm_up_where_asked_for(tmp_path) -> None:
    """As in euwern/proxynca_pp 217233d2, train.py:403-418 (the model stays in training mode)."""
    settings = {"max_steps": 6, "warmup_steps": 5}
    means = {}
    for name in ("frozen", "updated"):
        _, model, _ = _train(tmp_path / name, iter([1.0, 0.0]), warmup_batch_norm=name, **settings)
        means[name] = model.backbone[1].running_mean  # of step 5, the last one of the warm-up
    torch.manual_seed(0)
    fresh, batches = ToyModel(), ToyBatches()
    for _ in range(5):
        fresh(next(batches).images)
    assert torch.equal(means["frozen"], torch.zeros(4))
    assert torch.allclose(means["updated"], fresh.backbone[1].running_mean)


def test_a_schedule_that_rests_in_warm_up_starts_after_it(tmp_path) -> None:
    """As in gedml 0.2.2, base_trainer.py:330-339 (step_schedulers), where no scheduler steps while is_warm_up."""
    for name, expected in (("runs", 0.1 * 0.5**3), ("rests", 0.1 * 0.5**2)):  # 3 steps a halving, of 9 or of 9 - 3
        run_dir, settings = tmp_path / name, {"schedule": "step", "validate_every": 9, "warmup_schedule": name}
        _train(run_dir, iter([1.0]), max_steps=9, warmup_steps=3, **settings)
        saved = torch.load(run_dir / LAST, weights_only=True)
        assert saved["optimizer"]["param_groups"][0]["lr"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("scores", "settings", "expected"),
    [
        ([0.5, 0.505, 0.506], {"patience": 2, "min_improvement": 0.01}, ("early_stopping", 15, 5)),
        ([0.1, 0.2, 0.3], {"max_steps": 12}, ("max_steps", 12, 12)),  # the last step is off the interval
        ([0.5, 0.301, 0.3], {"collapse_ratio": 0.6}, ("collapse", 15, 5)),  # gedml 0.2.2, base_manager.py:297
        ([0.0, -0.2, 0.1, 0.2], {"collapse_ratio": 0.6}, ("collapse", 10, 5)),  # the best so far is no collapse
    ],
)
def test_ends_of_trainings(tmp_path, scores: list[float], settings: dict[str, Any], expected: tuple[Any, ...]) -> None:
    result, _, _ = _train(tmp_path, iter(scores), **{"max_steps": 100, **settings})
    assert (result.stop_reason, result.step, result.best_step) == expected


def test_warm_up_that_would_train_nothing_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"fit\.warmup_frozen: got backbone, head, loss, which freezes every"):
        _train(tmp_path, warmup_steps=2, warmup_frozen=["backbone", "head", "loss"])
    _train(tmp_path, max_steps=3, warmup_frozen=["backbone", "head", "loss"])  # without a warm-up it says nothing


def test_plateau_of_falling_scores_is_refused_before_the_first_step(tmp_path) -> None:
    batches = ToyBatches()
    with pytest.raises(ConfigError, match=r"schedule\.mode: got min, expected max"):
        _train(tmp_path, batches=batches, schedule="falling plateau")
    assert batches.step == 0


@pytest.mark.fast_sample(4)
@pytest.mark.parametrize(
    ("stop_at", "changes"),
    [
        *[(stop_at, {}) for stop_at in (1, 4, 5, 19)],
        *[(7, {"schedule": schedule}) for schedule in list(SCHEDULES)[2:]],
        (9, {"accumulate": 2, "forward_batch": 3}),  # in the midst of step 5
        *[(7, {"ema": 0.9, "warmup_steps": 3}), (7, {"precision": "fp16", "clip_norm": 1.0, "schedule": "step"})],
    ],
)
def test_resumed_training_ends_in_the_same_bits(tmp_path, stop_at: int, changes: dict[str, Any]) -> None:
    """Stopped when batch ``stop_at`` had been drawn: the schedule, the sampler and the draws go on from there."""
    whole_dir, resumed_dir = tmp_path / "whole", tmp_path / "resumed"
    whole, model, objective = _train(whole_dir, **changes)

    class Killed(Exception):
        pass

    def killed(step: int) -> None:
        if step == stop_at:
            raise Killed

    with pytest.raises(Killed):
        _train(resumed_dir, batches=ToyBatches(killed), checkpoint_every=1, **changes)
    resumed, model2, objective2 = _train(resumed_dir, checkpoint_every=1, **changes)
    assert (resumed.step, resumed.best_step, resumed.best_score) == (whole.step, whole.best_step, whole.best_score)
    for ours, theirs in ((model, model2), (objective, objective2)):
        assert all(torch.equal(value, theirs.state_dict()[name]) for name, value in ours.state_dict().items())
    last, last2 = (torch.load(run_dir / LAST, weights_only=True) for run_dir in (whole_dir, resumed_dir))
    for part, key in (("gradient_scaler", "precision"), ("averaged_weights", "ema")):
        assert (part in last) == (key in changes)
        torch.testing.assert_close(last.get(part), last2.get(part), rtol=0, atol=0)
    history = read_history(whole_dir / "history.csv")
    assert history == read_history(resumed_dir / "history.csv")
    rates = {value for _, name, value in history if name == "lr"}
    assert (len(rates) > 1) == (changes.get("schedule", "none") != "none")


def test_training_in_parts_ends_with_the_weights_of_whole_batches(tmp_path) -> None:
    _, model, objective = _train(tmp_path / "whole", iter([1.0]), max_steps=5, batch_norm=False)
    _, model2, objective2 = _train(tmp_path / "parts", iter([1.0]), max_steps=5, batch_norm=False, forward_batch=3)
    for ours, theirs in ((model, model2), (objective, objective2)):
        for name, value in ours.state_dict().items():
            torch.testing.assert_close(theirs.state_dict()[name], value, msg=lambda m, n=name: f"{n}: {m}")


def test_steps_count_optimizer_steps_of_several_batches(tmp_path) -> None:
    batches = ToyBatches()
    result, model, _ = _train(tmp_path, iter([0.1, 0.2]), batches=batches, max_steps=4, validate_every=2, accumulate=3)
    assert (result.step, batches.step) == (4, 12)
    assert model.observed == [step for step in (1, 2, 3, 4) for _ in range(3)]
    saved = torch.load(tmp_path / LAST, weights_only=True)
    assert (saved["progress"]["step"], saved["batches"]["step"]) == (4, 12)
    assert {step for step, _, _ in read_history(tmp_path / "history.csv")} == {1, 2, 3, 4}


def test_best_weights_survive_a_kill_between_the_two_checkpoints(tmp_path, monkeypatch) -> None:
    resumed_dir = tmp_path / "resumed"
    whole, model, _ = _train(tmp_path / "whole", iter([0.1, 0.9, 0.2, 0.3]))
    import dmlbench.training.fit as fit_module

    save = fit_module.save_checkpoint

    def killed_at_best_of_step_10(path: Path, state: dict[str, Any]) -> None:
        if path.name == BEST and state["step"] == 10:
            raise KeyboardInterrupt
        save(path, state)

    monkeypatch.setattr(fit_module, "save_checkpoint", killed_at_best_of_step_10)
    with pytest.raises(KeyboardInterrupt):
        _train(resumed_dir, iter([0.1, 0.9]))
    assert torch.load(resumed_dir / BEST, weights_only=True)["step"] == 5
    monkeypatch.undo()
    resumed, model2, _ = _train(resumed_dir, iter([0.2, 0.3]))
    assert resumed.best_step == whole.best_step == 10
    assert all(torch.equal(v, model2.state_dict()[k]) for k, v in model.state_dict().items())


def test_sigterm_saves_the_step_it_was_in_and_exits_with_its_own_code(tmp_path) -> None:
    def terminated(step: int) -> None:
        if step == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    with StopSignal().installed() as stop, pytest.raises(Preempted) as info:
        _train(tmp_path, batches=ToyBatches(terminated), stop=stop)
    assert info.value.code == EXIT_PREEMPTED
    saved = torch.load(tmp_path / LAST, weights_only=True)
    assert saved["progress"]["step"] == 7


def test_nan_stops_the_run_naming_step_and_part(tmp_path) -> None:
    class Poisoned(ToyBatches):
        def __next__(self) -> Batch:
            batch = super().__next__()
            return Batch(batch.images * math.nan, batch.labels, batch.ids) if self.step == 3 else batch

    with pytest.raises(RunError, match=r"step 3: loss = nan, dml = nan"):
        _train(tmp_path, batches=Poisoned())


def test_no_steps_leave_the_model_untrained(tmp_path) -> None:
    torch.manual_seed(0)
    fresh = ToyModel().state_dict()
    result, model, _ = _train(tmp_path, max_steps=0)
    assert (result.stop_reason, result.step) == ("untrained", 0)
    assert all(torch.equal(value, fresh[name]) for name, value in model.state_dict().items())


def test_checkpoint_of_another_model_is_refused(tmp_path) -> None:
    _train(tmp_path, max_steps=5, batch_norm=False)
    with pytest.raises(RunError, match=r"does not fit this configuration[\s\S]*backbone\.1\.weight"):
        _train(tmp_path, max_steps=10)


@pytest.mark.parametrize(
    "changes",
    [
        *[{"max_steps": -1}, {"validate_every": 0}, {"patience": 0}, {"clip_norm": 0.0}, {"warmup_steps": 20}],
        *[{"accumulate": 0}, {"forward_batch": 0}, {"warmup_frozen": ["neck"]}, {"warmup_frozen": "head"}],
        {"warmup_frozen": [], "warmup_steps": 1},
        {"collapse_ratio": 1.0},
        *[{"warmup_schedule": "x"}, {"warmup_batch_norm": "x"}, {"precision": "x"}],
    ],
)
def test_impossible_settings_are_refused_by_name(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        FitSettings(**({"max_steps": 20, "validate_every": 5} | changes))


@pytest.mark.slow
def test_compiled_passes_move_weights_by_rounding_alone(tmp_path) -> None:
    """Through the start of GSP's prototypes and a frozen warm-up, which change what is compiled.

    In float64: in float32 batch norm makes of rounding a percent of the smallest gradients, whoever rounds.
    """

    def weights(compile: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = PooledModel(ResNet20(), Gsp(16, 4, memory_rows=16), Projection(64, 16)).double()
        objective = Objective(ContrastiveC1())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        settings = FitSettings(max_steps=4, validate_every=4, warmup_steps=1, compile=compile)
        run_dir = tmp_path / str(compile)
        run_dir.mkdir()
        fit(model, objective, Images(), None, optimizer, settings, run_dir, device=torch.device("cpu"))
        return model.state_dict()

    class Images(ToyBatches):
        def __next__(self) -> Batch:
            self.step += 1
            generator = torch.Generator().manual_seed(self.step)
            images = torch.rand(8, 3, 16, 16, dtype=torch.float64, generator=generator)
            return Batch(images, torch.arange(8) % 4, torch.arange(8))

    plain, compiled = weights(False), weights(True)
    assert plain.keys() == compiled.keys()
    for name, value in plain.items():
        torch.testing.assert_close(compiled[name], value, rtol=1e-6, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


class Recorder:
    """A logger that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def start(self, step: int) -> None:
        self.told.append(("start", step))

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self.told.append(("log", step, dict(scalars)))

    def image(self, step: int, name: str, picture: Any) -> None:
        self.told.append(("image", step, name, picture.mean()))

    def summary(self, step: int, scores: Mapping[str, float]) -> None:
        raise AssertionError("of a whole run, which fit does not know")

    def close(self) -> None:
        raise AssertionError("whoever made it closes it")


def test_loggers_are_told_the_history_and_the_speed_of_training_without_validations(tmp_path, monkeypatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("dmlbench.training.fit.time.monotonic", lambda: now[0])

    def slow(step: int) -> None:
        now[0] += 0.5  # 8 images

    def validate() -> dict[str, float]:
        now[0] += 100.0
        return {"map_at_r": now[0]}

    def train(loggers: list[Recorder], **settings: Any) -> None:
        model, objective = ToyModel(), Objective(SquaredNorm())
        fit(
            model, objective, ToyBatches(slow), validate, torch.optim.SGD(model.parameters(), lr=0.1),
            FitSettings(**{"max_steps": 6, "validate_every": 3, "log_every": 2} | settings), tmp_path,
            device=torch.device("cpu"), loggers=loggers, picture=lambda: np.full((4, 5, 3), 7, np.uint8),
        )  # fmt: skip

    recorder = Recorder()
    train([recorder])
    assert recorder.told[0] == ("start", 0)
    logged = {step: scalars for kind, step, scalars, *_ in recorder.told[1:] if kind == "log"}
    assert sorted(logged) == [2, 3, 4, 6]
    assert [logged[step].pop("images_per_s") for step in (2, 4, 6)] == [16.0, 16.0, 16.0]
    assert all(logged[step].pop("peak_memory_bytes") > 10_000_000 for step in (2, 4, 6))
    history = read_history(tmp_path / "history.csv")  # has neither: they differ from run to run
    assert [(step, name, value) for step, told in logged.items() for name, value in told.items()] == history
    assert [told for told in recorder.told if told[0] == "image"] == [("image", n, "val/nearest", 7.0) for n in (3, 6)]
    again = Recorder()
    train([again], max_steps=8)
    assert again.told == [("start", 6)]  # it had ended
