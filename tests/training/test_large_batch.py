"""Batches in parts against whole ones, in float64; accumulated ones against all their rows at once."""

import copy
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from pytorch_metric_learning.losses import ContrastiveLoss
from small_models import SmallModel
from torch import Tensor, nn

from dmlbench.losses.objective import Objective
from dmlbench.losses.prototype_reconstruction import ReconstructionRegularizer
from dmlbench.losses.proxy_anchor import ProxyAnchor
from dmlbench.losses.proxy_nca import ProxyNca
from dmlbench.losses.xbm import CrossBatchMemory
from dmlbench.losses.xml import CrossBatchRegularizer
from dmlbench.losses.zero_shot import ZeroShotRegularizer
from dmlbench.models.pooling.base import Pooled, Pooling
from dmlbench.models.pooling.global_pooling import Gap
from dmlbench.models.pooling.gsp import Gsp
from dmlbench.models.projection import Projection
from dmlbench.runtime import autocast
from dmlbench.training.large_batch import accumulate_gradients
from dmlbench.types import Batch, ConfigError, ModelOutput

CPU = torch.device("cpu")


def _batches(count: int, size: int = 8) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(size) // 2
    images = torch.rand(count, size, 3, 6, 6, dtype=torch.float64, generator=generator)
    return [Batch(part, labels, torch.arange(size)) for part in images]


def _gsp() -> Gsp:
    return Gsp(4, 3, transport_ratio=0.4, memory_rows=6)


def _full_objective() -> Objective:
    regularizers = {
        "zero_shot": ZeroShotRegularizer(0.1, 4, 5),
        "cross_batch": CrossBatchRegularizer(0.1),
        "reconstruction": ReconstructionRegularizer(0.1),
    }
    return Objective(CrossBatchMemory(ContrastiveLoss(), 4, 20, start_step=0), None, regularizers)


def _gradients(
    model: nn.Module, objective: nn.Module, batches: Sequence[Batch], *, first_step: int = 1,
    forward: Callable[[Tensor], ModelOutput] | None = None, **settings: int | None,
) -> list[dict[str, Tensor]]:  # fmt: skip
    """Of every parameter that has one, after each of the steps."""
    found: list[dict[str, Tensor]] = []
    supply = iter(batches)
    for step in range(first_step, first_step + len(batches) // (settings.get("accumulate") or 1)):
        model.zero_grad()
        objective.zero_grad()
        accumulate_gradients(model, objective, lambda: next(supply), step=step, forward=forward or model, **settings)
        both = [*model.named_parameters(), *objective.named_parameters(prefix="objective")]
        found.append({name: p.grad.clone() for name, p in both if p.grad is not None})
    return found


def _assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor], *, rtol: float = 1e-10) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        scale = float(value.double().abs().max())
        torch.testing.assert_close(actual[name], value, rtol=rtol, atol=rtol * scale, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("forward_batch", [3, 5])
def test_parts_have_the_gradients_and_leave_the_state_of_the_whole_batch(_float64_objective, forward_batch) -> None:
    torch.manual_seed(0)
    model, objective = SmallModel(_gsp()).double(), _full_objective().double()
    model2, objective2 = copy.deepcopy((model, objective))
    batches = _batches(3)  # the prototypes start in the first step, the memory of 20 rows wraps around in the third
    whole = _gradients(model, objective, batches)
    parts = _gradients(model2, objective2, batches, forward_batch=forward_batch)
    assert "pooling.prototypes" not in whole[0]  # pooled as GAP although the prototypes have started meanwhile
    assert whole[1]["pooling.prototypes"].abs().max() > 0
    assert objective.loss.is_active
    assert "objective.regularizers.zero_shot.label_embeddings" in whole[1]
    for actual, expected in zip(parts, whole, strict=True):
        _assert_equal(actual, expected)
    for actual_state, expected_state in (
        (model2.state_dict(), model.state_dict()),
        (objective2.state_dict(), objective.state_dict()),
    ):
        _assert_equal(actual_state, expected_state)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_dropout_batch_norm_and_bf16_repeat_the_first_pass_of_every_part(precision: str) -> None:
    torch.manual_seed(0)
    layers = (nn.BatchNorm2d(6), nn.Dropout(0.3))
    model, objective = SmallModel(Gap(), *layers), Objective(ProxyAnchor(4, 4))
    model2, objective2 = copy.deepcopy((model, objective))
    batch = Batch(_batches(1)[0].images.float(), torch.arange(8) // 2, torch.arange(8))

    def forward(module: nn.Module, images: Tensor) -> ModelOutput:
        with autocast(CPU, precision):
            return module(images)

    torch.manual_seed(5)
    embeddings = [forward(model, images).embedding for images in batch.images.split([3, 3, 2])]
    objective(ModelOutput(torch.cat(embeddings)), batch.labels, step=1)["loss"].backward()
    next_draw = torch.rand(())
    torch.manual_seed(5)
    (parts,) = _gradients(model2, objective2, [batch], forward=partial(forward, model2), forward_batch=3)
    assert torch.equal(torch.rand(()), next_draw)
    both = [*model.named_parameters(), *objective.named_parameters(prefix="objective")]
    _assert_equal(parts, {name: p.grad for name, p in both}, rtol=1e-5)
    norms = [module.backbone[2] for module in (model, model2)]
    assert norms[1].num_batches_tracked == 3  # once per part, not again in the second pass
    assert torch.equal(norms[0].running_mean, norms[1].running_mean)
    assert torch.equal(norms[0].running_var, norms[1].running_var)
    assert norms[1].track_running_stats


def test_batch_norm_notes_statistics_again_after_a_failed_pass() -> None:
    model, calls = SmallModel(Gap(), nn.BatchNorm2d(6)), []

    def forward(images: Tensor) -> ModelOutput:
        calls.append(images)
        if len(calls) > 3:  # after the first pass over three parts
            raise MemoryError
        return model(images)

    batch = Batch(_batches(1)[0].images.float(), torch.arange(8) // 2, torch.arange(8))
    with pytest.raises(MemoryError):
        _gradients(model, Objective(ProxyAnchor(4, 4)), [batch], forward=forward, forward_batch=3)
    assert model.backbone[2].track_running_stats


class _MeanOfMap(Pooling):
    provides = ("mean",)

    def forward(self, x: Tensor, project: Projection) -> Pooled:
        return Pooled(project(x.mean(dim=(2, 3))), {"mean": x.mean(dim=0)})


def test_side_output_without_a_row_per_image_is_refused_by_name() -> None:
    model = SmallModel(_MeanOfMap()).double()
    with pytest.raises(ConfigError, match=r"'mean': got the shape \(6, 4, 4\).*3 images.*forward_batch=null"):
        _gradients(model, Objective(ProxyNca(4, 4)), _batches(1), forward_batch=3)
    assert _gradients(model, Objective(ProxyNca(4, 4)), _batches(1))


@pytest.mark.parametrize("forward_batch", [None, 3])
def test_accumulated_batches_equal_all_rows_at_once_for_a_mean_over_rows(_float64_objective, forward_batch) -> None:
    torch.manual_seed(0)
    model, objective = SmallModel(Gap()).double(), Objective(ProxyNca(4, 4)).double()
    first, second, third = _batches(3)
    rows = Batch(*(torch.cat([getattr(b, n) for b in (first, second, third)]) for n in ("images", "labels", "ids")))
    (whole,) = _gradients(model, objective, [rows])
    (accumulated,) = _gradients(model, objective, [first, second, third], accumulate=3, forward_batch=forward_batch)
    _assert_equal(accumulated, whole)
