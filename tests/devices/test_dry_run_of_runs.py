"""Batches and whole trainings on CUDA without a GPU: they wait where they must, and images are the CPU's."""

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from devices.pretended_cuda import CUDA, PretendedCuda, moved, pretended_cuda
from torch import Tensor, nn

from dmlbench.data.batches.loaders import TrainBatches
from dmlbench.data.batches.samplers import ClassBalancedBatchSampler
from dmlbench.data.batches.transforms import Transform, random_resized_crop, random_shift
from dmlbench.data.image_table import Listing, table_of
from dmlbench.data.images.sources import DecodedImages, pixel_tensor
from dmlbench.data.protocols import class_index
from dmlbench.losses.contrastive_c1 import ContrastiveC1
from dmlbench.losses.diva import Diva
from dmlbench.losses.diva_regularizers import PartDecorrelation, SelfSimilarity
from dmlbench.losses.layered import LayeredProxyAnchor
from dmlbench.losses.objective import Objective
from dmlbench.losses.xbm import CrossBatchMemory
from dmlbench.losses.xml import CrossBatchRegularizer
from dmlbench.models.avsl import AvslHead
from dmlbench.models.avsl_distance import AvslDistance
from dmlbench.models.backbones import Backbone
from dmlbench.models.net import MetricModel, PooledModel
from dmlbench.models.pooling.gsp import Gsp
from dmlbench.models.projection import Projection
from dmlbench.models.unit_parts import UnitParts
from dmlbench.training import fit as fit_module
from dmlbench.training.fit import FitSettings, fit
from dmlbench.training.optim import OptimizerSettings, make_optimizer, parameter_groups

READ = {"deferred_metrics.py read: _to_copy to the host": 2}  # losses and gradient norms of log_every steps, together
# Where a checkpoint is loaded, its counters are read once.
LOADED = ("base.py _read_counts: _local_scalar_dense", "gsp.py _load_from_state_dict: _local_scalar_dense")


class TinyBackbone(Backbone):
    """Three maps of few channels."""

    def __init__(self) -> None:
        super().__init__([4, 4, 8], mean=(0.5, 0.5, 0.5), std=(0.2, 0.2, 0.2))
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, stride=2, padding=1), nn.BatchNorm2d(b))
            for a, b in ((3, 4), (4, 4), (4, 8))
        )

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        maps = [images]
        for stage in self.stages:
            maps.append(stage(maps[-1]))
        return tuple(maps[1:])


def batches(transform: Transform, *, second_views: bool = False) -> TrainBatches:
    random = np.random.default_rng(0)
    labels = np.repeat(np.arange(6), 5)
    paths, pixels = [f"{i}.png" for i in range(30)], random.integers(0, 256, (30, 16, 16, 3), dtype=np.uint8)
    table = table_of(Listing("", paths, labels, "abcdef", np.full(30, "train"), pixels=pixels, digest="none"))
    rows = np.arange(30)
    source = DecodedImages(table, short_side=None)
    images = pixel_tensor(table, source, CUDA) if transform.works_on == "batch" else source
    return TrainBatches(
        table, rows, images=images, class_index=class_index(table, rows), transform=transform, seed=0, device=CUDA,
        sampler=ClassBalancedBatchSampler(labels, classes_per_batch=4, images_per_class=2, seed=0),
        second_views=second_views,
    )  # fmt: skip


SHIFTED = random_shift(padding=2, padding_mode="constant", flip=0.5)


@pytest.mark.parametrize("transform", [SHIFTED, random_resized_crop(crop=8, resize=12, scale=(0.5, 1.0))])
def test_batches_are_those_of_the_cpu_and_nothing_waits_for_them(transform: Transform) -> None:
    with pretended_cuda() as device:
        on_gpu = batches(transform, second_views=True)
        device.waits.clear()
        found = list(islice(on_gpu, 2))
        assert not device.waits
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(batches.__globals__, "CUDA", torch.device("cpu"))
            expected = list(islice(batches(transform, second_views=True), 2))
    for one, other in zip(found, expected, strict=True):
        for name in ("images", "second_views"):
            assert getattr(one, name).device == CUDA
            assert torch.equal(getattr(one, name).twin, getattr(other, name))
        assert torch.equal(one.labels, other.labels) and torch.equal(one.ids, other.ids)


def trained(
    device: PretendedCuda, run_dir: Path, source: TrainBatches, saved: list[int],
    projection: type[Projection] = Projection, objective: Objective | None = None, **settings: Any,
) -> None:  # fmt: skip
    """``fit`` with gradients of ones, as nothing is differentiated; ``saved`` gets the steps of its checkpoints."""
    torch.manual_seed(0)
    model = PooledModel(TinyBackbone(), Gsp(16, 4, memory_rows=16), projection(8, 16))
    objective = objective or Objective(
        CrossBatchMemory(ContrastiveC1(), 16, 32, start_step=1), regularizers={"xml": CrossBatchRegularizer(0.1)}
    )
    moved(nn.ModuleList([model, objective]))
    device.waits.clear()
    groups = parameter_groups(model.parameter_groups(), objective)
    optimizer = make_optimizer(groups, OptimizerSettings(torch.optim.SGD, 1e-3), modules=(model, objective))

    def backward(loss: Tensor) -> None:
        assert loss.device == CUDA
        for p in [*model.parameters(), *objective.parameters()]:
            p.grad = torch.ones_like(p)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "backward", backward)
        patch.setattr(fit_module, "_save", lambda run_dir, state, *args, **kwargs: saved.append(state.step))
        best = {"model": model.state_dict(), "objective": objective.state_dict()}
        patch.setattr(fit_module, "load_checkpoint", lambda path: best)
        values = {"max_steps": 4, "validate_every": 100, "log_every": 2, "clip_norm": 1.0} | settings
        fit(model, objective, source, None, optimizer, FitSettings(**values), run_dir, device=CUDA)


def test_a_training_waits_every_log_every_steps_alone(tmp_path: Path) -> None:
    saved: list[int] = []
    with pretended_cuda() as device:
        trained(device, tmp_path, batches(SHIFTED), saved)
    assert {name: count for name, count in device.waits.items() if name not in LOADED} == READ
    assert saved == [4]


def test_a_training_with_keys_of_second_views_waits_no_more(tmp_path: Path) -> None:
    others = {"decorrelation": PartDecorrelation(1.0, 16), "self_similarity": SelfSimilarity(0.3, 16, queue_size=20)}
    objective = Objective(Diva(6, 16), regularizers=others, mixing="add")
    with pretended_cuda() as device:
        trained(device, tmp_path, batches(SHIFTED, second_views=True), [], UnitParts, objective)
    assert {x.device for x in objective.buffers()} == {CUDA}
    assert {name: count for name, count in device.waits.items() if name not in LOADED} == READ


def levels(variant: str) -> tuple[MetricModel, AvslDistance]:
    torch.manual_seed(0)
    head = AvslHead([4, 4, 8], level_size=8, top_k=4, variant=variant)  # type: ignore[arg-type]
    model = head.model(TinyBackbone(), None)
    assert isinstance(model.distance, AvslDistance)
    return model, model.distance


@pytest.mark.parametrize(("variant", "max_classes"), [("official", 1000), ("paper", 3)])
def test_avsl_waits_for_nothing_in_its_own_loss(variant: str, max_classes: int) -> None:
    model, distance = levels(variant)
    objective = Objective(LayeredProxyAnchor(6, distance, max_classes=max_classes))
    with pretended_cuda() as device:
        moved(nn.ModuleList([model, objective]))
        images = torch.randint(0, 256, (12, 3, 16, 16), dtype=torch.uint8, device=CUDA)
        labels = torch.arange(12) % 4
        device.waits.clear()
        for step in (1, 2):
            output = model(images)
            assert model.observe(output, step=step)
            assert objective(output, labels, step=step)["loss"].device == CUDA
    assert not device.waits
