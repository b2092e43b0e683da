"""The copy that follows a network: its weights by a loop, its embeddings in evaluation mode, and nothing else moved."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import CountedBatches, SmallModel
from torch import Tensor, nn

from dmlbench.losses.objective import Objective
from dmlbench.losses.regularizer import DmlLoss, Regularizer
from dmlbench.models.pooling.gsp import Gsp
from dmlbench.training.fit import BEST, LAST, FitSettings, fit
from dmlbench.training.large_batch import accumulate_gradients
from dmlbench.training.momentum_encoder import MomentumEncoder
from dmlbench.types import Batch, ModelOutput


def fresh_model() -> SmallModel:
    """With what trains otherwise than it tests: batch norm, dropout, prototypes that start."""
    return SmallModel(Gsp(4, 3, transport_ratio=0.4, memory_rows=6), nn.BatchNorm2d(6), nn.Dropout(0.3))


class Nearness(Regularizer):
    """Keeps embeddings near their keys, which it also keeps."""

    requires = ("keys",)
    key_momentum = 0.75

    def forward(self, output: ModelOutput, labels: Tensor, dml_loss: DmlLoss) -> Tensor:
        self.seen = output.side["keys"]
        assert not self.seen.requires_grad
        return (output.embedding - self.seen).square().mean()


class Size(nn.Module):
    def forward(self, embeddings: Tensor, labels: Tensor, indices_tuple: Any = None) -> Tensor:
        return embeddings.square().sum()


def images_of(seed: int) -> Tensor:
    return torch.rand(8, 3, 6, 6, generator=torch.Generator().manual_seed(seed))


class Batches(CountedBatches):
    def __init__(self, *, ends: int | None = None) -> None:
        self.ends = ends

    def __next__(self) -> Batch:
        if self.step == self.ends:
            raise StopIteration
        self.step += 1
        labels = torch.arange(8) // 2
        return Batch(images_of(self.step), labels, torch.arange(8), images_of(1000 + self.step))


def trained(run_dir: Path, batches: Batches | None = None, **settings: Any) -> tuple[SmallModel, Objective]:
    torch.manual_seed(0)
    model, objective = fresh_model(), Objective(Size(), regularizers={"near": Nearness(0.2)})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    run_dir.mkdir(exist_ok=True)
    values = {"max_steps": 4, "validate_every": 10, "log_every": 1, "checkpoint_every": 1} | settings
    fit(model, objective, batches or Batches(), None, optimizer, FitSettings(**values), run_dir,
        device=torch.device("cpu"))  # fmt: skip
    return model, objective


def test_weights_follow_and_all_else_is_the_models() -> None:
    torch.manual_seed(0)
    model = fresh_model()
    model.observe(model(images_of(0)), step=1)
    follower = MomentumEncoder(model, 0.75)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += torch.randn(parameter.shape)
        model(images_of(1))  # moves the running statistics
        follower.update()
        for name, parameter in model.named_parameters():
            expected[name] = 0.75 * expected[name] + 0.25 * parameter.detach()
    assert model.pooling.started
    other = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            parameter.copy_(expected[name])
    model.backbone[2].eval()  # a part that rests stays so
    modes = [module.training for module in model.modules()]
    before, draws = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    torch.testing.assert_close(follower(images_of(2)), other.eval()(images_of(2)).embedding.detach())
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), draws)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_prototypes_are_those_of_the_model_until_they_have_started() -> None:
    torch.manual_seed(0)
    model = SmallModel(Gsp(4, 3, memory_rows=16))
    follower = MomentumEncoder(model, 0.9)
    for step in (1, 2):
        model.observe(model(images_of(step)), step=step)
        follower.update()
        assert model.pooling.started == (step == 2)
        assert torch.equal(follower.state_dict()["pooling.prototypes"], model.pooling.prototypes)
    with torch.no_grad():
        model.pooling.prototypes += 1
    follower.update()
    assert not torch.equal(follower.state_dict()["pooling.prototypes"], model.pooling.prototypes)


@pytest.mark.parametrize("forward_batch", [None, 3])
def test_the_objective_gets_keys_of_the_second_views(forward_batch: int | None) -> None:
    torch.manual_seed(0)
    model, near = fresh_model(), Nearness(0.2)
    follower = MomentumEncoder(model, 0.75)
    accumulate_gradients(
        model, Objective(Size(), regularizers={"near": near}), Batches().__next__, step=1, forward=model,
        keys=follower, forward_batch=forward_batch,
    )  # fmt: skip
    torch.manual_seed(0)
    torch.testing.assert_close(near.seen, MomentumEncoder(fresh_model(), 0.75)(images_of(1001)), rtol=1e-3, atol=1e-4)


def test_an_objective_without_keys_embeds_no_second_view(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(Nearness, "key_momentum", None)
    monkeypatch.setattr(MomentumEncoder, "__init__", None)
    _, objective = trained(tmp_path / "run")
    assert not hasattr(objective.regularizers["near"], "seen")
    assert "momentum_encoder" not in torch.load(tmp_path / "run" / LAST, weights_only=True)


@pytest.mark.parametrize("changes", [{}, {"accumulate": 2, "forward_batch": 3}])
def test_a_killed_training_goes_on_to_the_same_bits(tmp_path: Path, changes: dict[str, Any]) -> None:
    whole = trained(tmp_path / "whole", **changes)
    with pytest.raises(StopIteration):
        trained(tmp_path / "parts", Batches(ends=5 if changes else 2), **changes)
    resumed = trained(tmp_path / "parts", **changes)
    for ours, theirs in zip(whole, resumed, strict=True):
        assert all(torch.equal(value, theirs.state_dict()[name]) for name, value in ours.state_dict().items())
    assert torch.equal(whole[1].regularizers["near"].seen, resumed[1].regularizers["near"].seen)
    saved, again = (torch.load(tmp_path / name / LAST, weights_only=True) for name in ("whole", "parts"))
    copied = saved["momentum_encoder"]
    assert copied.keys() == dict(whole[0].named_parameters()).keys()
    assert all(torch.equal(value, again["momentum_encoder"][name]) for name, value in copied.items())
    assert any(not torch.equal(value, saved["model"][name]) for name, value in copied.items())
    assert "momentum_encoder" not in torch.load(tmp_path / "whole" / BEST, weights_only=True)


@pytest.mark.parametrize("momentum", [0.0, 1.0])
def test_momentum_0_copies_and_1_stays(momentum: float) -> None:
    torch.manual_seed(0)
    model = fresh_model()
    model.observe(model(images_of(0)), step=1)  # the prototypes start
    follower, before = MomentumEncoder(model, momentum), copy.deepcopy(dict(model.named_parameters()))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1
    follower.update()
    wanted = before if momentum else dict(model.named_parameters())
    assert all(torch.equal(follower.state_dict()[name], value) for name, value in wanted.items())
