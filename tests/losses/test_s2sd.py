"""S2SD's objective and gradients are those of the ooDML study's code, and of a naive loop."""

import copy

import pytest
import torch
from pytorch_metric_learning.losses import ContrastiveLoss
from small_models import randn
from torch import Tensor

from dmlbench import build
from dmlbench.checks import check
from dmlbench.config import compose
from dmlbench.losses.margin_oodml import MarginOodml
from dmlbench.losses.objective import Objective
from dmlbench.losses.proxy_anchor import ProxyAnchor
from dmlbench.losses.s2sd import SimilaritySelfDistillation, similarity_distillation
from dmlbench.models.net import features_of
from dmlbench.types import ModelOutput

LABELS = torch.tensor([0, 0, 1, 1, 2, 2])


@pytest.mark.usefixtures("_float64_objective")
@pytest.mark.parametrize("case", ["s0", "s1", "s2"])
def test_objective_and_gradients_equal_public_code(golden_tensors, golden_meta, case: str) -> None:
    recorded, meta = golden_tensors("s2sd"), golden_meta("s2sd")
    settings = meta[case]
    s2sd = SimilaritySelfDistillation(
        0.5, 512, lambda size: Objective(MarginOodml(3, beta=1.2)), sizes=meta["sizes"], temperature=settings["T"],
        distillation_weight=settings["w"], feature_weight=settings["feat_w"], feature_delay=settings["delay"],
        max_pooling=settings["aggr"],
    )  # fmt: skip
    objective = Objective(MarginOodml(3, beta=1.2), regularizers={"s2sd": s2sd}, mixing="convex").double()
    public = {f"target_nets.{name}": p for name, p in s2sd.heads.named_parameters()}
    public |= {f"target_criteria.{i}.beta": one.loss.beta for i, one in enumerate(s2sd.objectives)}
    public["source_criterion.beta"] = objective.loss.beta
    for name, parameter in public.items():
        parameter.data.copy_(recorded[f"weight_{name}"])
    for iteration in (0, 1):
        maps, rows = recorded["maps"].double().requires_grad_(), recorded["embeddings"].clone().requires_grad_()
        value = objective(ModelOutput(rows, features_of(maps)), LABELS, step=iteration + 1)["loss"]
        found = torch.autograd.grad(value, [rows, maps, *public.values()])
        gradients = dict(zip(("embeddings", "maps", *public), found, strict=True))
        prefix = f"{case}_{iteration}_grad_"
        wanted = {k.removeprefix(prefix): v for k, v in recorded.items() if k.startswith(prefix)}
        assert wanted.keys() >= ({"embeddings"} if iteration == 0 else gradients.keys())
        torch.testing.assert_close(value, recorded[f"{case}_{iteration}_loss"], rtol=1e-6, atol=1e-8)
        for name, gradient in wanted.items():
            torch.testing.assert_close(gradients[name], gradient.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_distillation_equals_a_naive_loop_and_teaches_one_side_alone(temperature: float) -> None:
    rows, teacher = randn(5, 3).requires_grad_(), randn(5, 7, seed=1).requires_grad_()
    value = similarity_distillation(rows, teacher, temperature=temperature)
    total = torch.zeros((), dtype=torch.float64)
    for i in range(5):
        of = [torch.stack([x[i] @ x[j] / (x[i].norm() * x[j].norm()) for j in range(5)]) for x in (rows, teacher)]
        s, t = ((cosines / temperature).exp() for cosines in of)
        s, t = s / s.sum(), (t / t.sum()).detach()
        total = total + sum(t[j] * (t[j] / s[j]).log() for j in range(5))
    expected = temperature**2 * total / 5
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(*(torch.autograd.grad(x, rows, retain_graph=True)[0] for x in (value, expected)))
    assert torch.autograd.grad(value, teacher, allow_unused=True) == (None,)
    close_to_itself = similarity_distillation(rows, 3 * rows, temperature=temperature)
    torch.testing.assert_close(close_to_itself, torch.zeros((), dtype=torch.float64), atol=1e-14, rtol=0)


def made(**arguments) -> SimilaritySelfDistillation:
    torch.manual_seed(0)
    given = {"weight": 0.5, "feature_size": 8, "make_objective": lambda size: Objective(ContrastiveLoss())}
    return SimilaritySelfDistillation(**(given | {"sizes": (4, 6)} | arguments))


def value_of(s2sd: SimilaritySelfDistillation, step: int = 1) -> Tensor:
    s2sd.step = step
    maps = torch.rand(6, 8, 2, 2, generator=torch.Generator().manual_seed(1))
    rows = torch.randn(6, 3, generator=torch.Generator().manual_seed(2))
    return s2sd(ModelOutput(rows, features_of(maps)), LABELS, lambda *_: torch.zeros(()))


def test_features_teach_after_the_delay() -> None:
    without = value_of(made(feature_weight=0.0))
    s2sd = made(feature_delay=2)
    found = [value_of(s2sd, step) for step in (1, 2, 2, 3)]  # of accumulated batches, two have one step
    assert [bool(x == without) for x in found] == [True, True, True, False]
    assert value_of(made(feature_delay=0)) == found[3]


def test_distillation_counts_with_its_weight_alone_in_the_objective() -> None:
    features = torch.rand(6, 8, 2, 2, generator=torch.Generator().manual_seed(1)).double()
    rows = torch.randn(6, 3, generator=torch.Generator().manual_seed(2)).double()
    dml = value_of(made(distillation_weight=0.0, feature_weight=0.0))
    s2sd = made(weight=0.2, distillation_weight=3.0, feature_weight=0.0)
    side = features_of(features)
    of_heads = [head.double()(side["features"] + side["features_max"]) for head in copy.deepcopy(s2sd.heads)]
    taught = [similarity_distillation(rows, larger, temperature=1.0) for larger in of_heads]
    expected = 3.0 * (taught[0] + taught[1]) / 2
    torch.testing.assert_close(0.2 * (value_of(s2sd) - dml).double(), expected, rtol=1e-4, atol=1e-6)


def test_every_head_has_a_loss_of_its_own_size_and_own_parameters() -> None:
    cfg = compose("train", ["loss=proxy_anchor", "regularizer=s2sd", "regularizer.s2sd.sizes=[24,40]"])
    check(cfg)
    cfg.runtime.num_classes = 4
    objective = build.build_objective(cfg, build.build_model(cfg))
    heads = objective.regularizers["s2sd"].objectives
    sizes = [one.loss.proxies.shape for one in (objective, *heads)]
    assert sizes == [(4, cfg.runtime.embedding_size), (4, 24), (4, 40)]
    assert all(isinstance(one.loss, ProxyAnchor) for one in heads)
    assert len({id(p) for p in objective.parameters()}) == len(list(objective.parameters())) == 1 + 2 * (4 + 1)


def test_losses_of_heads_have_the_rate_of_the_loss_and_heads_that_of_regularizers() -> None:
    """criteria/s2sd.py takes each target criterion's own groups, criteria/proxynca.py's with its lrmulti."""
    cfg = compose("train", ["loss=proxy_anchor", "regularizer=s2sd", "regularizer.s2sd.sizes=[24]"])
    cfg.runtime.num_classes = 4
    cfg.optim.lr_multipliers.update({"loss": 100.0, "regularizer": 3.0})
    model = build.build_model(cfg)
    objective = build.build_objective(cfg, model)
    optimizer, _ = build.build_optimizer(cfg, model, objective)
    rates = {id(p): group["lr"] / cfg.optim.lr for group in optimizer.param_groups for p in group["params"]}
    s2sd = objective.regularizers["s2sd"]
    assert [rates[id(p)] for p in (objective.loss.proxies, s2sd.objectives[0].loss.proxies)] == pytest.approx(
        [100, 100]
    )
    assert {round(rates[id(p)], 9) for p in s2sd.heads.parameters()} == {3}


def test_a_memory_is_the_losses_alone_and_a_miner_every_heads() -> None:
    cfg = compose("train", ["loss=xbm", "miner=multi_similarity", "regularizer=s2sd", "regularizer.s2sd.sizes=[24]"])
    cfg.runtime.num_classes = 4
    objective = build.build_objective(cfg, build.build_model(cfg))
    (head,) = objective.regularizers["s2sd"].objectives
    assert type(head.loss) is type(objective.loss.loss)
    assert type(head.miner) is type(objective.miner)
