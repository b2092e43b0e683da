"""float16 with a gradient scaler: gradients by float32, clipping after the scale is removed, steps that are skipped."""

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import CountedBatches, SmallModel
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from dmlbench.losses.objective import Objective
from dmlbench.models.pooling.global_pooling import Gap
from dmlbench.training.deferred_metrics import MAX_SKIPPED, BatchValues, DeferredMetrics
from dmlbench.training.fit import HISTORY, LAST, FitResult, FitSettings, fit
from dmlbench.training.log import read_history
from dmlbench.types import Batch, Diverged

INFINITE = 1e9  # beyond float16 with any scale above 2^-14


class Size(nn.Module):
    """The mean of squares, times the factor of a step."""

    def __init__(self, factor: Callable[[int], float]) -> None:
        super().__init__()
        self.factor, self.calls = factor, 0

    def forward(self, embeddings: Tensor, labels: Tensor, indices_tuple: Any = None) -> Tensor:
        self.calls += 1
        return self.factor(self.calls) * embeddings.square().mean()


class Batches(CountedBatches):
    def __init__(self, ends: int | None) -> None:
        self.ends = ends

    def __next__(self) -> Batch:
        if self.step == self.ends:
            raise StopIteration
        self.step += 1
        images = torch.rand(8, 3, 6, 6, generator=torch.Generator().manual_seed(self.step))
        return Batch(images, torch.arange(8) // 2, torch.arange(8))


def trained(
    run_dir: Path, factor: Callable[[int], float] = lambda step: 1.0, *, precision: str = "fp16",
    ends: int | None = None, **settings: Any,
) -> tuple[FitResult, list[Tensor]]:  # fmt: skip
    """Progress, and the gradients that every step of the optimizer has seen, as one vector each."""
    torch.manual_seed(0)
    run_dir.mkdir(exist_ok=True)
    model, seen = SmallModel(Gap()), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer.register_step_pre_hook(lambda *_: seen.append(torch.cat([p.grad.flatten() for p in model.parameters()])))
    values = {"max_steps": 4, "validate_every": 4, "log_every": 1} | settings
    result = fit(
        model, Objective(Size(factor)), Batches(ends), None, optimizer, FitSettings(precision=precision, **values),
        run_dir, device=torch.device("cpu"), schedule=StepLR(optimizer, 100),
    )  # fmt: skip
    return result, seen


@pytest.mark.parametrize("changes", [{}, {"accumulate": 2, "forward_batch": 3}])
def test_unscaled_gradients_are_those_of_float32(tmp_path, changes: dict[str, Any]) -> None:
    _, exact = trained(tmp_path / "float32", precision="float32", **changes)
    for precision, tolerance in (("fp16", 0.003), ("bf16", 0.02)):
        _, found = trained(tmp_path / precision, precision=precision, **changes)
        for ours, theirs in zip(found, exact, strict=True):
            assert (ours - theirs).norm() < tolerance * theirs.norm()
    saved = torch.load(tmp_path / "fp16" / LAST, weights_only=True)
    assert saved["gradient_scaler"]["scale"] == 2**16 and saved["gradient_scaler"]["_growth_tracker"] == 4
    assert "gradient_scaler" not in torch.load(tmp_path / "bf16" / LAST, weights_only=True)


def test_gradients_below_float16_survive_by_the_scale(tmp_path) -> None:
    _, exact = trained(tmp_path / "float32", lambda step: 1e-6, precision="float32")
    _, found = trained(tmp_path / "fp16", lambda step: 1e-6)
    for ours, theirs in zip(found, exact, strict=True):
        assert 0 < theirs.abs().max() < 1e-6
        assert (ours - theirs).norm() < 0.01 * theirs.norm()


@pytest.mark.parametrize("clip", [{"clip_norm": 1e-3}, {"clip_value": 1e-4}])
def test_gradients_are_clipped_after_the_scale_is_removed(tmp_path, clip: dict[str, float]) -> None:
    _, exact = trained(tmp_path / "float32", precision="float32", **clip)
    _, found = trained(tmp_path / "fp16", **clip)
    for ours, theirs in zip(found, exact, strict=True):
        assert (ours - theirs).norm() < 0.02 * theirs.norm()  # clipping by value magnifies small entries
        if "clip_norm" in clip:
            assert ours.norm().item() == pytest.approx(1e-3, rel=1e-4)


@pytest.mark.parametrize("clip", [{}, {"clip_norm": 1.0}, {"clip_value": 1.0}])
def test_steps_without_finite_gradients_are_skipped_and_counted(tmp_path, caplog, recwarn, clip) -> None:
    caplog.set_level(logging.INFO)
    result, seen = trained(tmp_path, lambda step: INFINITE if step in (1, 3) else 1.0, **clip)
    assert (result.step, result.skipped_steps, len(seen)) == (4, 2, 2)
    assert "fp16: 2 of 4 steps skipped" in caplog.text
    counts = [value for _, name, value in read_history(tmp_path / HISTORY) if name == "train/skipped_steps"]
    assert counts == [1, 1, 2, 2]
    saved = torch.load(tmp_path / LAST, weights_only=True)
    assert saved["gradient_scaler"]["scale"] == 2**14
    assert (saved["progress"]["skipped_steps"], saved["schedule"]["last_epoch"]) == (2, 4)
    assert not [w for w in recwarn if "lr_scheduler" in str(w.message)]


def test_a_killed_training_with_skipped_steps_resumes_to_the_same_bits(tmp_path) -> None:
    whole, _ = trained(tmp_path / "whole", lambda step: INFINITE if step in (1, 3) else 1.0, checkpoint_every=1)
    with pytest.raises(StopIteration):
        trained(tmp_path / "parts", lambda step: INFINITE if step == 1 else 1.0, ends=2, checkpoint_every=1)
    resumed, _ = trained(tmp_path / "parts", lambda step: INFINITE if step == 1 else 1.0, checkpoint_every=1)
    assert resumed.skipped_steps == whole.skipped_steps == 2
    expected, found = (torch.load(tmp_path / name / LAST, weights_only=True) for name in ("whole", "parts"))
    for part in ("model", "gradient_scaler", "schedule"):
        torch.testing.assert_close(found[part], expected[part], rtol=0, atol=0)
    assert read_history(tmp_path / "parts" / HISTORY) == read_history(tmp_path / "whole" / HISTORY)


def test_steps_that_are_all_skipped_end_the_training() -> None:
    metrics = DeferredMetrics()
    loss, skipped = [BatchValues({"loss": torch.tensor(1.0)}, {})], torch.tensor(True)
    for step in range(1, MAX_SKIPPED):
        metrics.add(step, loss, torch.tensor(math.inf), skipped)
    metrics.read()
    assert metrics.last == {"loss": 1.0, "skipped_steps": MAX_SKIPPED - 1}
    metrics.add(MAX_SKIPPED, loss, torch.tensor(1.0), skipped)  # clipped by value
    with pytest.raises(
        Diverged, match=r"fit\.precision: got fp16, but the gradients of all 50 steps up to step 50.*bf16"
    ):
        metrics.read()
    metrics = DeferredMetrics()
    metrics.add(1, [BatchValues({"loss": torch.tensor(math.nan)}, {})], torch.tensor(math.nan), skipped)
    with pytest.raises(Diverged, match="step 1: loss = nan"):
        metrics.read()
