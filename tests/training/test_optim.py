import copy
from functools import partial

import numpy as np
import pytest
import torch
from timm.layers import RmsNorm
from timm.optim import param_groups_layer_decay
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from dmlbench.models.backbones import TimmBackbone
from dmlbench.models.resnet_cifar import ResNet20
from dmlbench.training.optim import (
    ClipForm,
    HarmonicPlateau,
    OptimizerSettings,
    WarmupCosine,
    clip_gradients,
    decay_added,
    frozen,
    make_optimizer,
    parameter_groups,
    step_schedule,
)
from dmlbench.types import ConfigError


def _groups(norm: nn.Module | None = None) -> tuple[nn.Module, dict[str, list[tuple[str, nn.Parameter]]]]:
    backbone = nn.Sequential(nn.Conv2d(3, 4, 3), norm or nn.BatchNorm2d(4))
    model = nn.ModuleDict({"backbone": backbone, "head": nn.Linear(4, 2)})
    groups = {name: list(model[name].named_parameters()) for name in ("backbone", "head")}
    return model, groups


def _settings(**changes: object) -> OptimizerSettings:
    values = {"optimizer": partial(torch.optim.Adam, eps=1e-8), "lr": 1e-3, "weight_decay": 0.1} | changes
    return OptimizerSettings(**values)


def test_every_trainable_parameter_is_in_exactly_one_group() -> None:
    model, groups = _groups()
    objective = nn.Linear(2, 2)
    optimizer = make_optimizer(parameter_groups(groups, objective), _settings(), modules=[model, objective])
    optimized = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert len(optimized) == len(set(optimized))
    assert set(optimized) == {id(p) for p in [*model.parameters(), *objective.parameters()]}


@pytest.mark.parametrize("decay_batch_norm", [False, True])
@pytest.mark.parametrize("decay_biases", [False, True])
@pytest.mark.parametrize(
    "norm",
    [nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.LayerNorm(4), nn.RMSNorm(4), RmsNorm(4)],
    ids=lambda x: type(x).__name__,
)
def test_normalization_and_other_vectors_decay_where_asked_to(
    norm: nn.Module, decay_batch_norm: bool, decay_biases: bool
) -> None:
    model, groups = _groups(norm)
    power = nn.Parameter(torch.ones(1, 1, 1))  # of GeM
    settings = _settings(decay_batch_norm=decay_batch_norm, decay_biases=decay_biases)
    optimizer = make_optimizer({**groups, "pooling": [("power", power)]}, settings, modules=[model])
    decays = {id(p) for group in optimizer.param_groups for p in group["params"] if group["weight_decay"]}
    names = {name for name, p in [*model.named_parameters(), ("power", power)] if id(p) in decays}
    weights = {"backbone.0.weight", "head.weight"}
    normalization = {f"backbone.1.{name}" for name, _ in norm.named_parameters()} if decay_batch_norm else set()
    assert names == weights | normalization | ({"backbone.0.bias", "head.bias", "power"} if decay_biases else set())


def test_a_module_has_a_learning_rate_of_its_own() -> None:
    objective = nn.ModuleDict({"loss": nn.ModuleDict({"network": nn.Linear(2, 2), "other": nn.Linear(2, 3)})})
    groups = parameter_groups({"head": nn.Linear(2, 2).named_parameters()}, objective)
    settings = _settings(lr_multipliers={"loss": 100.0, "network": 5.0}, without_decay=["loss"])
    optimizer = make_optimizer(groups, settings, modules=[objective])
    rates = {id(p): (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]}
    assert {rates[id(p)] for p in objective["loss"]["network"].parameters()} == {(5e-3, 0.0)}
    assert {rates[id(p)] for p in objective["loss"]["other"].parameters()} == {(0.1, 0.0)}
    with pytest.raises(ConfigError, match=r"got 'nothing', expected a group or a module of this loss: .*network"):
        make_optimizer(groups, _settings(lr_multipliers={"nothing": 1.0}), modules=[objective])


def test_nothing_of_a_group_without_decay_decays() -> None:
    model, groups = _groups()
    settings = _settings(decay_batch_norm=True, decay_biases=True, without_decay=["loss"])
    optimizer = make_optimizer(parameter_groups(groups, nn.Linear(2, 2)), settings, modules=[model])
    decays = {group["name"]: group["weight_decay"] for group in optimizer.param_groups}
    assert decays == {"backbone": 0.1, "head": 0.1, "loss, no decay": 0.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": 0.0}, r"optim\.lr: got 0\.0, expected a positive number"),
        ({"weight_decay": -1.0}, r"optim\.weight_decay: got -1\.0"),
        ({"layer_decay": 0.0}, r"optim\.layer_decay: got 0\.0, expected a number in \(0, 1\] or null"),
        ({"layer_decay": 1.5}, r"optim\.layer_decay: got 1\.5"),
        ({"layer_decay": 0.5}, r"optim\.layer_decay: got 0\.5 with a frozen backbone"),
        ({"without_decay": ["proxies"]}, r"optim\.without_decay: got the unknown group 'proxies'"),
        ({"lr_multipliers": {"proxy": 1.0}}, r"'proxy'.*choose one of backbone, distance, head, loss, pooling"),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_optimizer(_groups()[1], _settings(**changes), modules=[])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": 0.5}, r"optim\.optimizer\.lr: .* Set optim\.lr"),
        ({"weight_decay": 0.5}, r"optim\.optimizer\.weight_decay: .* Set optim\.weight_decay"),
        ({"nesterov": True}, r"optim\.optimizer: Nesterov momentum requires a momentum"),
        ({"momentums": 0.9}, r"optim\.optimizer: .*momentums"),
    ],
)
def test_arguments_of_the_optimizer_that_have_no_effect_or_do_not_work_are_refused(arguments, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OptimizerSettings(partial(torch.optim.SGD, **arguments), lr=0.1)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
        self.pooling = nn.BatchNorm2d(4)
        self.projection = nn.Linear(4, 2)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ((), set()),
        (("backbone", "pooling"), {"backbone", "pooling"}),
        (("head",), {"projection"}),
        (("loss",), {"loss"}),
    ],
)
def test_frozen_groups_keep_weights_and_statistics_and_thaw_as_they_were(groups, expected: set[str]) -> None:
    model, objective = _Model(), nn.Linear(2, 2)
    model.backbone[0].bias.requires_grad_(False)  # frozen by someone else: must stay so
    with frozen(groups, model, objective):
        both = [*model.named_parameters(), *objective.named_parameters(prefix="loss")]
        trained = {name.split(".")[0] for name, p in both if p.requires_grad}
        assert trained == {"backbone", "pooling", "projection", "loss"} - expected
        model.pooling(model.backbone(torch.randn(2, 3, 4, 4)))
        assert objective.training  # memories of the loss fill although its parameters rest
    for name, norm in (("backbone", model.backbone[1]), ("pooling", model.pooling)):
        assert int(norm.num_batches_tracked) == (name not in expected)
    assert [p.requires_grad for p in model.parameters()] == [True, False, *[True] * 6]
    assert all(p.requires_grad for p in objective.parameters())
    assert all(module.training for module in model.modules())


def _recursion(
    start: Tensor, gradients: list[Tensor], *, lr: float, decay: float, decoupled: bool, eps: float
) -> Tensor:
    """Adam as printed by Kingma & Ba (2015), algorithm 1, with L2 in the gradient or decay beside it."""
    beta1, beta2 = 0.9, 0.99
    x, m, v = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    for t, gradient in enumerate(gradients, start=1):
        g = gradient if decoupled else gradient + decay * x
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        update = (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + eps)
        x = x - lr * update - (lr * decay * x if decoupled else 0)
    return x


@pytest.mark.parametrize("eps", [1e-8, 1.0])  # 1.0: ProxyNCA++
@pytest.mark.parametrize(("optimizer", "decoupled"), [(torch.optim.Adam, False), (torch.optim.AdamW, True)])
def test_adam_decays_in_the_gradient_and_adamw_beside_it_by_group(optimizer, decoupled: bool, eps: float) -> None:
    torch.manual_seed(0)
    model, objective = _Model().double(), nn.Linear(2, 2).double()
    groups = {
        "backbone": list(model.backbone.named_parameters()),
        "pooling": list(model.pooling.named_parameters()),
        "head": list(model.projection.named_parameters()),
    }
    rates = {"backbone": 0.5, "pooling": 1.0, "head": 2.0, "loss": 100.0}
    settings = OptimizerSettings(
        partial(optimizer, betas=(0.9, 0.99), eps=eps), lr=1e-2, weight_decay=0.1, lr_multipliers=rates
    )
    made = make_optimizer(parameter_groups(groups, objective), settings, modules=[model, objective])
    owners = {p: name for name, members in groups.items() for _, p in members}
    owners |= dict.fromkeys(objective.parameters(), "loss")
    starts = {p: p.detach().clone() for p in owners}
    gradients = {p: [torch.randn_like(p) for _ in range(4)] for p in owners}
    for t in range(4):
        for p in owners:
            p.grad = gradients[p][t].clone()
        made.step()
    for p, owner in owners.items():
        decay = 0.1 if p.ndim > 1 else 0.0  # batch norm and biases do not decay
        expected = _recursion(
            starts[p], gradients[p], lr=1e-2 * rates[owner], decay=decay, decoupled=decoupled, eps=eps
        )
        torch.testing.assert_close(p.detach(), expected, rtol=1e-12, atol=1e-12)


def _rates(schedule: LRScheduler, optimizer: Optimizer, steps: int) -> list[list[float]]:
    rates = []
    for _ in range(steps):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    return rates


def _two_groups() -> Optimizer:
    return torch.optim.SGD([{"params": [nn.Parameter(torch.ones(1))], "lr": lr} for lr in (0.1, 10.0)], lr=1.0)


@pytest.mark.parametrize("warmup_steps", [1, 7])
def test_warm_up_and_cosine_are_those_of_torch_in_sequence(warmup_steps: int) -> None:
    ours, theirs = _two_groups(), _two_groups()
    schedule = lr_scheduler.LambdaLR(ours, WarmupCosine(warmup_steps, 30, 0.2, 0.0))
    parts = [
        lr_scheduler.LinearLR(theirs, start_factor=0.2, total_iters=warmup_steps),
        lr_scheduler.CosineAnnealingLR(theirs, T_max=30 - warmup_steps),
    ]
    sequence = lr_scheduler.SequentialLR(theirs, parts, milestones=[warmup_steps])
    np.testing.assert_allclose(_rates(schedule, ours, 30), _rates(sequence, theirs, 30), rtol=1e-9)


def test_warm_up_and_cosine_begin_and_end_at_their_factors_of_each_groups_rate() -> None:
    optimizer = _two_groups()
    schedule = lr_scheduler.LambdaLR(optimizer, WarmupCosine(4, 10, 0.5, 0.1))
    first, second = np.transpose(_rates(schedule, optimizer, 13))
    np.testing.assert_allclose(second, 100 * first)
    np.testing.assert_allclose(first[[0, 2, 4, 7, 10, 12]], [0.05, 0.075, 0.1, 0.055, 0.01, 0.01])


@pytest.mark.parametrize(
    "changes",
    [{"warmup_steps": 10}, {"warmup_steps": -1}, {"start_factor": 0.0}, {"start_factor": 2.0}, {"final_factor": -0.1}],
)
def test_impossible_warm_up_is_refused_by_name(changes: dict[str, float]) -> None:
    values = {"warmup_steps": 4, "total_steps": 10, "start_factor": 0.5, "final_factor": 0.0} | changes
    with pytest.raises(ConfigError, match=next(iter(changes))):
        WarmupCosine(**values)  # type: ignore[arg-type]


def test_clipping_limits_values_first_and_then_the_norm() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    parameter.grad = torch.tensor([30.0, -30.0, 3.0, 0.0])
    norm = clip_gradients(torch.optim.SGD([parameter], lr=1.0), norm=10.0, value=10.0)
    clipped_by_value = torch.tensor([10.0, -10.0, 3.0, 0.0])
    assert float(norm) == pytest.approx(float(clipped_by_value.norm()))
    torch.testing.assert_close(parameter.grad, clipped_by_value * 10 / clipped_by_value.norm())


def test_decayed_gradients_are_clipped_by_norm_and_then_by_value() -> None:
    starts = torch.tensor([7.0]), torch.tensor([100.0, 0.0, 1.0])
    free, decaying = parameters = [nn.Parameter(start.clone()) for start in starts]
    free.grad, decaying.grad = torch.tensor([5.0]), torch.tensor([30.0, -40.0, 0.0])
    groups = [{"params": [p], "weight_decay": decay} for p, decay in zip(parameters, (0.0, 0.5), strict=True)]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    decayed = torch.tensor([5.0, 80.0, -40.0, 0.5])
    expected = (decayed * 10 / decayed.norm()).clamp(-8, 8)
    with decay_added(optimizer, "decayed"):
        norm = clip_gradients(optimizer, norm=10.0, value=8.0, form="decayed")
        optimizer.step()
    assert float(norm) == pytest.approx(float(decayed.norm()))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.5]
    torch.testing.assert_close(torch.cat(parameters).detach(), torch.cat(starts) - 0.1 * expected)


@pytest.mark.parametrize("form", ["plain", "decayed"])
def test_norms_and_values_are_clipped_without_each_other(form: ClipForm) -> None:
    gradient = torch.tensor([30.0, -40.0, 3.0])
    for limits, expected in (
        ({"norm": 10.0, "value": None}, gradient * 10 / gradient.norm()),
        ({"norm": None, "value": 10.0}, torch.tensor([10.0, -10.0, 3.0])),
        ({"norm": None, "value": None}, gradient),
    ):
        parameter = nn.Parameter(torch.zeros(3))
        parameter.grad = gradient.clone()
        clip_gradients(torch.optim.SGD([parameter], lr=1.0), form=form, **limits)
        torch.testing.assert_close(parameter.grad, expected)


def test_decoupled_decay_is_not_clipped() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    with pytest.raises(ConfigError, match="AdamW, which does not add decay to the gradient"):
        decay_added(optimizer, "decayed").__enter__()


def test_a_plateau_steps_at_scores_and_every_other_schedule_at_steps() -> None:
    optimizers = [torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0) for _ in range(2)]
    plateau = lr_scheduler.ReduceLROnPlateau(optimizers[0], mode="max", factor=0.5, patience=0)
    halving = lr_scheduler.StepLR(optimizers[1], step_size=1, gamma=0.5)
    found = []
    for score in (None, None, 0.3, None, 0.2, None):  # None: a step; else a validation
        for optimizer, schedule in zip(optimizers, (plateau, halving), strict=True):
            optimizer.step()
            step_schedule(schedule, score=score)
        found.append([optimizer.param_groups[0]["lr"] for optimizer in optimizers])
    assert found == [[1, 1 / 2], [1, 1 / 4], [1, 1 / 4], [1, 1 / 8], [1 / 2, 1 / 8], [1 / 2, 1 / 16]]


def test_a_harmonic_plateau_waits_for_the_mean_of_the_score_and_one() -> None:
    def rates(kind: type[lr_scheduler.ReduceLROnPlateau], scores: list[float]) -> list[float]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        schedule = kind(optimizer, mode="max", factor=0.1, patience=0, threshold=0.01, threshold_mode="rel")
        found = []
        for score in scores:
            schedule.step(score)
            found.append(optimizer.param_groups[0]["lr"])
        return found

    scores = [0.5, 0.5075, 0.6]  # + 1.5 % of R is 0.99 % of 2R / (1 + R)
    assert rates(lr_scheduler.ReduceLROnPlateau, scores) == [1.0, 1.0, 1.0]
    assert rates(HarmonicPlateau, scores) == pytest.approx([1.0, 0.1, 0.1])


# --- layer-wise learning-rate decay


class _TimmModel(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.backbone = TimmBackbone(name, pretrained=False)
        self.head = nn.Linear(self.backbone.channels[-1], 4)

    def optimizer(self, **changes: object) -> Optimizer:
        groups = {name: list(getattr(self, name).named_parameters(name)) for name in ("backbone", "head")}
        groups = {name: [(key, p) for key, p in members if p.requires_grad] for name, members in groups.items()}
        layers = {f"backbone.{name}": layer for name, layer in self.backbone.layer_ids().items()}
        return make_optimizer(groups, _settings(**changes), modules=[self], layers=layers)

    def by_name(self, optimizer: Optimizer) -> dict[str, tuple[float, float]]:
        found = {id(p): (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
        return {name: found[id(p)] for name, p in self.named_parameters() if id(p) in found}


@pytest.mark.parametrize("name", ["test_vit", "test_vit2", "resnet10t", "test_convnext", "test_efficientnet"])
def test_layers_learn_at_the_rates_of_timm(name: str) -> None:
    model = _TimmModel(name)
    optimizer = model.optimizer(layer_decay=0.75)
    scales = {id(p): g["lr_scale"] for g in param_groups_layer_decay(model.backbone.model) for p in g["params"]}
    assert len(set(scales.values())) > 3
    rates = model.by_name(optimizer)
    for name, p in model.named_parameters():
        assert rates[name][0] == pytest.approx(1e-3 * scales.get(id(p), 1.0), rel=1e-12)
    assert optimizer.param_groups[0]["lr"] == 1e-3  # the rate that is logged


def test_rate_of_a_vits_layer_is_the_factor_to_the_number_of_layers_above() -> None:
    model = _TimmModel("test_vit")  # six blocks
    model.backbone.model.blocks[5].requires_grad_(False)  # frozen layers count
    model.backbone.model.norm.requires_grad_(False)  # timm: in the last block's layer
    rates = model.by_name(model.optimizer(layer_decay=0.5, lr_multipliers={"backbone": 0.1, "head": 2.0}))
    assert rates["backbone.model.cls_token"][0] == rates["backbone.model.patch_embed.proj.weight"][0]
    assert rates["backbone.model.cls_token"][0] == pytest.approx(1e-4 * 0.5**6)
    for block in range(5):
        assert rates[f"backbone.model.blocks.{block}.attn.qkv.weight"][0] == pytest.approx(1e-4 * 0.5 ** (5 - block))
    assert rates["head.weight"][0] == pytest.approx(2e-3)


@pytest.mark.parametrize(
    "changes", [{}, {"decay_batch_norm": True}, {"decay_biases": True}, {"without_decay": ["head"]}]
)
def test_layer_decay_leaves_weight_decay_and_schedules_alone(changes: dict[str, object]) -> None:
    model = _TimmModel("test_vit")
    plain, decayed = model.optimizer(**changes), model.optimizer(layer_decay=0.5, **changes)
    assert {n: wd for n, (_, wd) in model.by_name(plain).items()} == {
        n: wd for n, (_, wd) in model.by_name(decayed).items()
    }
    names = [group["name"] for group in decayed.param_groups]
    assert len(set(names)) == len(names) and names[0].startswith("backbone, layer 6")
    before = model.by_name(decayed)
    schedule = lr_scheduler.LambdaLR(decayed, WarmupCosine(4, 20, 0.1, 0.0))
    for step in range(8):
        factor = WarmupCosine(4, 20, 0.1, 0.0)(step)
        for name, (lr, _) in model.by_name(decayed).items():
            assert lr == pytest.approx(before[name][0] * factor, rel=1e-12)
        decayed.step()
        schedule.step()


def test_layer_decay_of_one_is_the_plain_optimizer_and_resumes_to_the_same_bits() -> None:
    torch.manual_seed(0)
    images = torch.randn(2, 3, 32, 32)

    def trained(model: _TimmModel, optimizer: Optimizer, steps: int) -> dict[str, Tensor]:
        for _ in range(steps):
            optimizer.zero_grad()
            model.head(model.backbone.native(images)).square().sum().backward()
            optimizer.step()
        return model.state_dict()

    start = _TimmModel("test_vit")
    first, second = copy.deepcopy(start), copy.deepcopy(start)
    plain = trained(first, first.optimizer(), 3)
    other = trained(second, second.optimizer(layer_decay=1.0), 3)
    assert all(torch.equal(value, other[name]) for name, value in plain.items())

    whole, half = copy.deepcopy(start), copy.deepcopy(start)
    expected = trained(whole, whole.optimizer(layer_decay=0.6), 4)
    optimizer = half.optimizer(layer_decay=0.6)
    state = copy.deepcopy((trained(half, optimizer, 2), optimizer.state_dict()))
    resumed = copy.deepcopy(start)
    resumed.load_state_dict(state[0])
    optimizer = resumed.optimizer(layer_decay=0.6)
    optimizer.load_state_dict(state[1])
    found = trained(resumed, optimizer, 2)
    assert all(torch.equal(value, found[name]) for name, value in expected.items())


def test_layer_decay_needs_layers_that_timm_groups() -> None:
    with pytest.raises(
        ConfigError, match=r"optim\.layer_decay: got a backbone of ResNet20, .* Set optim\.layer_decay=null"
    ):
        ResNet20().layer_ids()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adafactor])
def test_decay_is_not_moved_into_the_gradient_of_optimizers_that_decouple_it(kind: type[torch.optim.Optimizer]) -> None:
    optimizer = kind([torch.nn.Parameter(torch.ones(2))], lr=0.1, weight_decay=0.5)
    with (
        pytest.raises(ConfigError, match=f"clip_form: got decayed with {kind.__name__}"),
        decay_added(optimizer, "decayed"),
    ):
        pass
