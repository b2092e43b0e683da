"""The loop on a model of one linear layer: every rule of stopping, selecting and resuming, without images."""

import logging
import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dmlbench.losses.objective import Objective
from dmlbench.training.fit import BEST, LAST, FitResult, FitSettings, fit
from dmlbench.training.log import read_history
from dmlbench.training.signals import EXIT_PREEMPTED, Preempted, StopSignal
from dmlbench.types import Batch, ConfigError, ModelOutput, RunError


class ToyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.pooling = nn.Identity()
        self.head = nn.Linear(4, 2)
        self.observed: list[int] = []

    def forward(self, images: Tensor) -> ModelOutput:
        return ModelOutput(self.head(self.pooling(self.backbone(images.flatten(1)))))

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


class ToyBatches:
    def __init__(self) -> None:
        self.step = 0

    def __next__(self) -> Batch:
        self.step += 1
        images = torch.randn(8, 1, 2, 2, generator=torch.Generator().manual_seed(self.step))
        return Batch(images, torch.arange(8) % 2, torch.arange(8))

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def _train(
    run_dir: Path, scores: Iterator[float] | None = None, *, batches: ToyBatches | None = None,
    stop: StopSignal | None = None, schedule: bool = False, lr: float = 0.1, **settings: Any,
) -> tuple[FitResult, ToyModel, Objective]:  # fmt: skip
    torch.manual_seed(0)
    model, objective = ToyModel(), Objective(SquaredNorm())
    optimizer = torch.optim.Adam([*model.parameters(), *objective.parameters()], lr=lr)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0) if schedule else None

    def validate() -> dict[str, float]:
        return {"map_at_r": -model.head.weight.abs().sum().item() if scores is None else next(scores)}

    values = {"max_steps": 20, "validate_every": 5, "log_every": 1} | settings
    result = fit(
        model, objective, batches or ToyBatches(), validate, optimizer, FitSettings(**values), run_dir,
        device=torch.device("cpu"), schedule=plateau, stop=stop,
    )  # fmt: skip
    return result, model, objective


def test_training_stops_after_patience_and_restores_the_best_weights(tmp_path) -> None:
    scores = iter([0.1, 0.5, 0.4, 0.5, 0.3, 0.9])
    result, model, _ = _train(tmp_path, scores, max_steps=100, patience=3)
    assert (result.stop_reason, result.step, result.best_step, result.best_score) == ("early_stopping", 25, 10, 0.5)
    best = torch.load(tmp_path / BEST, weights_only=True)
    assert best["step"] == 10
    assert all(torch.equal(value, best["model"][name]) for name, value in model.state_dict().items())


def test_improvement_below_the_minimum_does_not_count(tmp_path) -> None:
    result, _, _ = _train(tmp_path, iter([0.5, 0.505, 0.506]), max_steps=100, patience=2, min_improvement=0.01)
    assert (result.best_step, result.step) == (5, 15)


def test_last_step_is_validated_even_off_the_interval(tmp_path) -> None:
    result, _, _ = _train(tmp_path, iter([0.1, 0.2, 0.3]), max_steps=12)
    assert (result.stop_reason, result.best_step) == ("max_steps", 12)


def test_model_observes_every_step_once(tmp_path) -> None:
    _, model, _ = _train(tmp_path, max_steps=7)
    assert model.observed == list(range(1, 8))


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


@pytest.fixture
def _folders(tmp_path) -> tuple[Path, Path]:
    for name in ("whole", "resumed"):
        (tmp_path / name).mkdir()
    return tmp_path / "whole", tmp_path / "resumed"


@pytest.fixture(autouse=True)
def _make_folders(tmp_path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()


@pytest.mark.parametrize("schedule", [False, True])
@pytest.mark.parametrize("stop_at", [1, 4, 5, 13, 19])
def test_resumed_training_ends_in_the_same_bits(_folders, stop_at: int, schedule: bool) -> None:
    whole_dir, resumed_dir = _folders
    whole, model, objective = _train(whole_dir, schedule=schedule)

    class Killed(Exception):
        pass

    class Fragile(ToyBatches):
        def __next__(self) -> Batch:
            if self.step == stop_at:
                raise Killed
            return super().__next__()

    with pytest.raises(Killed):
        _train(resumed_dir, batches=Fragile(), checkpoint_every=1, schedule=schedule)
    resumed, model2, objective2 = _train(resumed_dir, checkpoint_every=1, schedule=schedule)
    assert (resumed.step, resumed.best_step, resumed.best_score) == (whole.step, whole.best_step, whole.best_score)
    for ours, theirs in ((model, model2), (objective, objective2)):
        assert all(torch.equal(value, theirs.state_dict()[name]) for name, value in ours.state_dict().items())
    assert read_history(whole_dir / "history.csv") == read_history(resumed_dir / "history.csv")


def test_best_weights_survive_a_kill_between_the_two_checkpoints(_folders, monkeypatch) -> None:
    whole_dir, resumed_dir = _folders
    whole, model, _ = _train(whole_dir, iter([0.1, 0.9, 0.2, 0.3]))
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
    class Terminating(ToyBatches):
        def __next__(self) -> Batch:
            if self.step == 6:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().__next__()

    stop = StopSignal().install()
    try:
        with pytest.raises(Preempted) as info:
            _train(tmp_path, batches=Terminating(), stop=stop)
    finally:
        stop.uninstall()
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
    _train(tmp_path, max_steps=5)
    state = torch.load(tmp_path / LAST, weights_only=True)
    del state["model"]["head.bias"]
    torch.save(state, tmp_path / LAST)
    with pytest.raises(RunError, match=r"does not fit this configuration[\s\S]*head\.bias"):
        _train(tmp_path, max_steps=10)


@pytest.mark.parametrize(
    "changes", [{"max_steps": -1}, {"validate_every": 0}, {"patience": 0}, {"clip_norm": 0.0}, {"warmup_steps": 20}]
)
def test_impossible_settings_are_refused_by_name(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        FitSettings(**({"max_steps": 20, "validate_every": 5} | changes))
