from functools import partial

import pytest
import torch
from torch import nn

from dmlbench.training.optim import OptimizerSettings, clip_gradients, frozen, make_optimizer, parameter_groups
from dmlbench.types import ConfigError


def _groups() -> tuple[nn.Module, dict[str, list[tuple[str, nn.Parameter]]]]:
    model = nn.ModuleDict({"backbone": nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), "head": nn.Linear(4, 2)})
    groups = {name: list(model[name].named_parameters()) for name in ("backbone", "head")}
    return model, groups


def _settings(**changes: object) -> OptimizerSettings:
    values = {"optimizer": partial(torch.optim.Adam, eps=1e-8), "lr": 1e-3, "weight_decay": 0.1} | changes
    return OptimizerSettings(**values)


def test_every_trainable_parameter_is_in_exactly_one_group() -> None:
    model, groups = _groups()
    objective = nn.Linear(2, 2)
    optimizer = make_optimizer(parameter_groups(groups, objective), _settings())
    optimized = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert len(optimized) == len(set(optimized))
    assert set(optimized) == {id(p) for p in [*model.parameters(), *objective.parameters()]}


def test_batch_norm_and_biases_do_not_decay_unless_asked_to() -> None:
    _, groups = _groups()
    optimizer = make_optimizer(groups, _settings())
    decay = {p.ndim > 1: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decay == {True: 0.1, False: 0.0}
    everywhere = make_optimizer(groups, _settings(decay_batch_norm=True))
    assert {group["weight_decay"] for group in everywhere.param_groups} == {0.1}


def test_rate_multipliers_apply_to_their_group_only() -> None:
    _, groups = _groups()
    optimizer = make_optimizer(parameter_groups(groups, nn.Linear(2, 2)), _settings(lr_multipliers={"loss": 100.0}))
    rates = {group["name"].split(",")[0]: group["lr"] for group in optimizer.param_groups}
    assert rates == pytest.approx({"backbone": 1e-3, "head": 1e-3, "loss": 0.1})


def test_unknown_group_in_the_multipliers_is_refused_with_the_nearest_name() -> None:
    _, groups = _groups()
    with pytest.raises(ConfigError, match=r"'proxy'.*known: backbone, head, loss, pooling"):
        make_optimizer(groups, _settings(lr_multipliers={"proxy": 1.0}))


def test_parameter_in_two_groups_is_a_defect() -> None:
    _, groups = _groups()
    with pytest.raises(ValueError, match="also in group 'backbone'"):
        make_optimizer({**groups, "head": groups["backbone"]}, _settings())


@pytest.mark.parametrize("changes", [{"lr": 0.0}, {"lr": -1.0}, {"weight_decay": -1.0}])
def test_impossible_rates_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        _settings(**changes)


def test_frozen_module_keeps_weights_and_statistics_and_thaws_as_it_was() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    module[0].bias.requires_grad_(False)  # frozen by someone else: must stay so
    before = module[1].running_mean.clone()
    with frozen(module):
        assert not any(p.requires_grad for p in module.parameters())
        module(torch.randn(2, 3, 4, 4))
    assert torch.equal(module[1].running_mean, before)
    assert [p.requires_grad for p in module.parameters()] == [True, False, True, True]
    assert module.training


def test_clipping_limits_values_first_and_then_the_norm() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    parameter.grad = torch.tensor([30.0, -30.0, 3.0, 0.0])
    norm = clip_gradients([parameter], norm=10.0, value=10.0)
    clipped_by_value = torch.tensor([10.0, -10.0, 3.0, 0.0])
    assert norm == pytest.approx(float(clipped_by_value.norm()))
    torch.testing.assert_close(parameter.grad, clipped_by_value * 10 / clipped_by_value.norm())
