"""The average of the weights: its values by a loop and by PyTorch, what is scored and saved, and what is copied."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import CountedBatches, SmallModel
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from dmlbench.losses.objective import Objective
from dmlbench.models.pooling.global_pooling import Gap
from dmlbench.models.pooling.gsp import Gsp
from dmlbench.training.averaged_weights import AveragedWeights
from dmlbench.training.fit import BEST, LAST, FitSettings, fit
from dmlbench.types import Batch, ConfigError

DECAY = 0.8


class Size(nn.Module):
    def forward(self, embeddings: Tensor, labels: Tensor, indices_tuple: Any = None) -> Tensor:
        return embeddings.square().sum()


class Batches(CountedBatches):
    def __next__(self) -> Batch:
        self.step += 1
        images = torch.rand(8, 3, 6, 6, generator=torch.Generator().manual_seed(self.step))
        return Batch(images, torch.arange(8) // 2, torch.arange(8), images)


def fresh_model() -> SmallModel:
    torch.manual_seed(0)
    return SmallModel(Gap(), nn.BatchNorm2d(6))


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], **tolerance: float) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, **(tolerance or {"rtol": 0, "atol": 0}))


def trained(
    run_dir: Path, *, scores: list[float] | None = None, objective: Objective | None = None, **settings: Any
) -> tuple[SmallModel, list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """The model, the state that every validation has scored, and the trained weights after every step."""
    model, scored, steps = fresh_model(), [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer.register_step_post_hook(lambda *_: steps.append(weights_of(model)))
    left = iter(scores or [])

    def validate() -> dict[str, float]:
        scored.append({name: value.clone() for name, value in model.state_dict().items()})
        return {"map_at_r": next(left, 1.0)}

    values = FitSettings(**{"max_steps": 6, "validate_every": 2, "log_every": 1, "ema": DECAY} | settings)
    device = torch.device("cpu")
    fit(model, objective or Objective(Size()), Batches(), validate, optimizer, values, run_dir, device=device)
    return model, scored, steps


def test_average_equals_its_closed_form_and_pytorchs_and_buffers_are_the_models() -> None:
    model = fresh_model()
    averaged = AveragedWeights(model, DECAY)
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    drawn = []
    for _ in range(6):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += torch.randn(parameter.shape)
        model(next(Batches()).images)  # moves the running statistics
        averaged.update()
        theirs.update_parameters(model)
        drawn.append(weights_of(model))
    shares = [DECAY**5, *((1 - DECAY) * DECAY ** (5 - step) for step in range(1, 6))]
    assert math.isclose(sum(shares), 1)
    expected = {name: sum(a * w[name] for a, w in zip(shares, drawn, strict=True)) for name in drawn[0]}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with averaged.in_model():
        assert_equal(weights_of(model), expected, rtol=1e-5, atol=1e-6)
        assert_equal(model.state_dict(), theirs.module.state_dict())
    assert_equal(model.state_dict(), before)


def test_validations_and_the_best_checkpoint_have_averaged_weights_and_training_goes_on_from_its_own(tmp_path) -> None:
    model, scored, steps = trained(tmp_path, scores=[0.1, 0.9, 0.2])
    average, expected = steps[0], []
    for weights in steps:
        average = {name: DECAY * average[name] + (1 - DECAY) * value for name, value in weights.items()}
        expected.append(average)
    for found, step in zip(scored, (2, 4, 6), strict=True):
        assert_equal(found, expected[step - 1], rtol=1e-5, atol=1e-6)
    best, last = (torch.load(tmp_path / name, weights_only=True) for name in (BEST, LAST))
    assert best["step"] == 4
    for state in (best["model"], model.state_dict()):
        assert_equal(state, scored[1])
    assert_equal(last["model"], steps[5])
    assert_equal(last["averaged_weights"], expected[5], rtol=1e-5, atol=1e-6)
    (tmp_path / "plain").mkdir()
    plain, _, plain_steps = trained(tmp_path / "plain", ema=None)
    assert all(torch.equal(a[name], b[name]) for a, b in zip(steps, plain_steps, strict=True) for name in a)
    assert_equal(plain.state_dict(), plain_steps[1])
    assert "averaged_weights" not in torch.load(tmp_path / "plain" / LAST, weights_only=True)


def test_a_best_checkpoint_that_a_kill_prevented_is_written_with_averaged_weights(tmp_path) -> None:
    _, scored, _ = trained(tmp_path, max_steps=2)
    (tmp_path / BEST).unlink()
    trained(tmp_path, max_steps=2)
    assert_equal(torch.load(tmp_path / BEST, weights_only=True)["model"], scored[0])


def test_a_loss_that_shares_parameters_of_the_model_does_not_undo_the_average(tmp_path) -> None:
    class Shared(Size):
        distance: nn.Module

    model, objective = fresh_model(), Objective(Shared())
    objective.loss.distance = model.projection
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    settings = FitSettings(max_steps=3, validate_every=3, ema=DECAY)
    fit(model, objective, Batches(), None, optimizer, settings, tmp_path, device=torch.device("cpu"))
    assert_equal(weights_of(model), torch.load(tmp_path / LAST, weights_only=True)["averaged_weights"])


def test_prototypes_are_averaged_from_their_start() -> None:
    torch.manual_seed(0)
    model = SmallModel(Gsp(4, 3, memory_rows=16))
    averaged, batches = AveragedWeights(model, DECAY), Batches()
    expected: Tensor | None = None
    for step in range(1, 5):
        if step == 4:  # resumed
            resumed = AveragedWeights(model, DECAY)
            resumed.load_state_dict(averaged.state_dict())
            averaged = resumed
        model.observe(model(next(batches).images), step=step)
        assert model.pooling.started == (step >= 2)
        with torch.no_grad():
            model.pooling.prototypes += step
        own = model.pooling.prototypes.detach().clone()
        averaged.update()
        expected = own if step <= 2 or expected is None else DECAY * expected + (1 - DECAY) * own
        torch.testing.assert_close(averaged.state_dict()["pooling.prototypes"], expected)


def test_it_works_beside_a_momentum_encoder(tmp_path) -> None:
    objective = Objective(Size())
    objective.key_momentum = 0.5
    trained(tmp_path, objective=objective)
    last = torch.load(tmp_path / LAST, weights_only=True)
    assert last["momentum_encoder"].keys() == last["averaged_weights"].keys()
    assert not torch.equal(*(last[part]["projection.weight"] for part in ("momentum_encoder", "averaged_weights")))


@pytest.mark.parametrize("decay", [0.0, 1.0, -0.1, 999])
def test_decays_out_of_range_are_refused_with_limit_and_remedy(decay: float) -> None:
    with pytest.raises(ConfigError, match=rf"fit\.ema: got {decay}, expected a decay in \(0, 1\) or null\. Set one"):
        FitSettings(max_steps=2, validate_every=1, ema=decay)
