"""Batches and training steps on CUDA without a GPU: no tensor is left on the CPU."""

from collections.abc import Mapping
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from composed import composed, option
from devices.pretended_cuda import CUDA, moved, pretended_cuda
from omegaconf import DictConfig
from timm.models import VisionTransformer
from torch import Tensor, nn

from dmlbench import build
from dmlbench.components import component
from dmlbench.config import config_folder
from dmlbench.data.batches.loaders import TrainBatches
from dmlbench.data.batches.samplers import ClassBalancedBatchSampler
from dmlbench.data.batches.transforms import Transform, random_resized_crop, random_shift
from dmlbench.data.image_table import Listing, table_of
from dmlbench.data.images.sources import DecodedImages, pixel_tensor
from dmlbench.data.protocols import class_index
from dmlbench.losses.hier import HierarchicalRegularizer
from dmlbench.losses.layered import LayeredProxyAnchor
from dmlbench.losses.objective import Objective
from dmlbench.losses.pairwise_cross_entropy import PairwiseCrossEntropy
from dmlbench.models.avsl import AvslHead
from dmlbench.models.avsl_distance import AvslDistance, BorrowedDistance
from dmlbench.models.backbones import Backbone
from dmlbench.models.hyperbolic_head import HyperbolicHead
from dmlbench.models.net import MetricModel, features_of
from dmlbench.models.parameter_efficient import BitFit, Lora, Prompts, Tuning
from dmlbench.models.projection import Projection
from dmlbench.training.averaged_weights import AveragedWeights
from dmlbench.types import ModelOutput

CLASSES, SIZE, STEPS = 6, 16, 2
SMALL: Mapping[str, Mapping[str, Any]] = {
    "pooling": {"num_prototypes": 4, "memory_rows": 12, "num_centers": 4, "feature_size": 4, "num_slices": 4,
                "num_heads": 2, "attention_dim": 8, "num_filters": 8, "num_layers": 1, "start_step": 0},
    "loss": {"memory_size": 24, "start_step": 0},
    "head": {"level_size": 8, "top_k": 4},
    "regularizer": {"num_prototypes": 4, "embedding_size": SIZE, "chunk_size": 4, "sizes": [24, 32]},
}  # fmt: skip


def names(group: str) -> list[str]:
    return sorted(path.stem for path in (config_folder() / group).glob("*.yaml") if path.stem != "none")


def configuration(**options: str | dict[str, Any] | None) -> DictConfig:
    """Options by group, in small; of the rest the usual ones."""
    cfg = composed()
    cfg.runtime.update({"num_classes": CLASSES, "image_size": [32, 32], "num_channels": 8, "num_features": 8,
                        "map_size": [4, 5], "embedding_size": SIZE})  # fmt: skip
    cfg.head.out_features = SIZE
    for group, chosen in options.items():
        node = option(group, chosen) if isinstance(chosen, str) else chosen
        cfg[group] = None if node is None else _small(node, SMALL.get(group, {}))
    return cfg


def _small(node: dict[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _small(v, sizes) if isinstance(v, dict) else sizes.get(k, v) for k, v in node.items()}


def batch_labels() -> Tensor:
    return torch.arange(12) % CLASSES


def objective_of(cfg: DictConfig) -> Objective:
    regularizers, mixing = build.build_regularizers(cfg)
    return Objective(component(cfg.loss), component(cfg.miner), regularizers, mixing=mixing)


def check_steps_of_loss(**options: str | dict[str, Any]) -> None:
    """All that training steps of an objective compute lies on the device."""
    objective = objective_of(configuration(**options)).train()
    torch.manual_seed(0)
    with pretended_cuda():
        moved(objective)
        for step in range(1, STEPS + 1):
            embeddings = torch.randn(12, SIZE, device=CUDA, requires_grad=True)
            output = ModelOutput(embeddings, {"keys": torch.randn(12, SIZE, device=CUDA)})
            parts = objective(output, batch_labels(), step=step)
            assert parts.keys() == {"loss", "dml", *objective.regularizers}
            assert {x.device for x in parts.values()} == {CUDA}
            assert torch.isfinite(parts["loss"].detach().twin)


LOSSES = [name for name in names("loss") if "layered" not in name]
OF_PAIRS = ("contrastive", "contrastive_c1", "margin", "margin_gsp", "margin_oodml", "multi_similarity", "supcon",
            "triplet")  # fmt: skip


@pytest.mark.fast_sample(8)
@pytest.mark.parametrize("loss", LOSSES)
def test_loss(loss: str) -> None:
    check_steps_of_loss(loss=loss)


@pytest.mark.parametrize(
    ("shared", "intra", "shares"),
    [("permuted", "permuted", "of_batch"), ("across_classes", "within_class", "of_queue")],
)
def test_diva_with_keys(shared: str, intra: str, shares: str) -> None:
    others = option("regularizer", "diva")
    others["self_similarity"] |= {"queue_size": 20, "shares": shares}
    loss = option("loss", "diva") | {"shared": shared, "intra": intra}
    check_steps_of_loss(loss=loss, regularizer=others)


@pytest.mark.fast_sample(3)
@pytest.mark.parametrize("loss", OF_PAIRS)
def test_loss_with_a_memory(loss: str) -> None:
    check_steps_of_loss(loss=option("loss", "xbm") | {"loss": option("loss", loss)})


@pytest.mark.fast_sample(3)
@pytest.mark.parametrize("pairs", ["positive_negative", "anchor_negative"])
@pytest.mark.parametrize("loss", ["contrastive", "multi_similarity", "proxy_anchor"])
def test_loss_with_mixtures(loss: str, pairs: str) -> None:
    node = option("loss", "metrix") | {"loss": option("loss", loss), "pairs": [pairs], "num_hard_negatives": 3}
    check_steps_of_loss(loss=node)
    if loss != "proxy_anchor":
        check_steps_of_loss(loss=node, miner="multi_similarity")


@pytest.mark.parametrize(
    ("miner", "loss"),
    [
        *((name, "triplet") for name in names("miner")),
        ("multi_similarity", "contrastive_c1"),
        ("distance_weighted_oodml", "margin_oodml"),
        ("rho_distance_weighted", "margin_oodml"),
    ],
)
def test_miner(miner: str, loss: str) -> None:
    check_steps_of_loss(loss=loss, miner=miner)


def poolings() -> list[str]:
    """One of those that differ in numbers alone, which are small here."""
    return sorted({str(_small(option("pooling", name), SMALL["pooling"])): name for name in names("pooling")}.values())


@pytest.mark.fast_sample(6)
@pytest.mark.parametrize("pooling", poolings())
def test_pooling(pooling: str) -> None:
    cfg = configuration(pooling=pooling)
    module = component(cfg.pooling).train()
    channels = 8
    project = Projection(channels, module.input_width(SIZE))
    with pretended_cuda():
        moved(nn.ModuleList([module, project]))
        for step in range(1, STEPS + 1):
            shape = (12, channels, 1, 1) if module.needs == "native" else (12, channels, 4, 5)
            maps = torch.rand(shape, device=CUDA, requires_grad=True)
            pooled = module(maps, project)
            module.observe(pooled, step=step)
            assert {x.device for x in (pooled.embedding, *pooled.side.values())} == {CUDA}
            assert torch.isfinite(pooled.embedding.detach().twin).all()
        assert module.started if hasattr(module, "started") else True
        module.eval()
        for explained in (module.contributions(maps, project), module.nearest_prototypes(maps, project)):
            assert explained is None or explained.device == CUDA


@pytest.mark.fast_sample(5)
@pytest.mark.parametrize(
    ("regularizer", "pooling", "loss"),
    [
        *((name, pooling, "proxy_anchor") for name in names("regularizer") for pooling in ("gsp", "gap_histogram")),
        *(("xml", "gap_histogram", loss) for loss in ("margin_oodml", "recall_at_k_surrogate")),
    ],
)
def test_regularizer(regularizer: str, pooling: str, loss: str) -> None:
    cfg = configuration(regularizer=regularizer, pooling=pooling, loss=loss)
    module, objective = component(cfg.pooling).train(), objective_of(cfg).train()
    project = Projection(8, module.input_width(SIZE))
    with pretended_cuda():
        moved(nn.ModuleList([module, project, objective]))
        for step in range(1, STEPS + 1):
            maps = torch.rand(12, 8, 4, 5, device=CUDA)
            pooled = module(maps, project)
            module.observe(pooled, step=step)
            output = ModelOutput(pooled.embedding, pooled.side | features_of(maps))
            parts = objective(output, batch_labels(), step=step)
        assert len(parts) == 3
        assert parts["loss"].device == CUDA


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
def test_batches_are_those_of_the_cpu(transform: Transform) -> None:
    with pretended_cuda():
        found = list(islice(batches(transform, second_views=True), 2))
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(batches.__globals__, "CUDA", torch.device("cpu"))
            expected = list(islice(batches(transform, second_views=True), 2))
    for one, other in zip(found, expected, strict=True):
        for name in ("images", "second_views"):
            assert getattr(one, name).device == CUDA
            assert torch.equal(getattr(one, name).twin, getattr(other, name))
        assert torch.equal(one.labels, other.labels) and torch.equal(one.ids, other.ids)


def test_averaged_weights() -> None:
    model = nn.Module()
    model.weight, model.observer = nn.Parameter(torch.rand(3)), nn.Identity()
    with pretended_cuda():
        averaged = AveragedWeights(moved(model), 0.5)  # type: ignore[arg-type]
        for _ in range(STEPS):
            averaged.update()
        with averaged.in_model():
            assert model.weight.device == CUDA
        assert {x.device for x in averaged.state_dict().values()} == {CUDA}


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


def levels(variant: str) -> tuple[MetricModel, AvslDistance]:
    torch.manual_seed(0)
    head = AvslHead([4, 4, 8], level_size=8, top_k=4, variant=variant)  # type: ignore[arg-type]
    model = head.model(TinyBackbone(), None)
    assert isinstance(model.distance, AvslDistance)
    return model, model.distance


@pytest.mark.parametrize("riemannian", [False, True])
def test_hyperbolic_head_its_loss_and_hier(riemannian: bool) -> None:
    head = HyperbolicHead(8, SIZE, riemannian_gradient=riemannian)
    objective = Objective(
        PairwiseCrossEntropy(BorrowedDistance(head.make_distance())),
        regularizers={"hier": HierarchicalRegularizer(0.5, SIZE, num_proxies=6, num_neighbors=4)},
        mixing="add",
    )
    with pretended_cuda():
        moved(nn.ModuleList([head, objective]))
        points = head.finished(head(torch.randn(12, 8, device=CUDA)))
        parts = objective(ModelOutput(points), batch_labels(), step=1)
        assert {x.device for x in (points, *parts.values())} == {CUDA}
        assert torch.isfinite(parts["loss"].detach().twin)


@pytest.mark.parametrize("tuning", [Lora(rank=2), Prompts(2), BitFit()], ids=lambda tuning: tuning.name)
def test_tuned_vit(tuning: Tuning) -> None:
    model = VisionTransformer(img_size=8, patch_size=4, embed_dim=8, depth=2, num_heads=2, num_classes=0)
    tuning._tune(model.requires_grad_(False))
    with pretended_cuda():
        moved(model)
        tokens = model.forward_features(torch.randn(2, 3, 8, 8, device=CUDA))
        assert tokens.device == CUDA and torch.isfinite(tokens.detach().twin).all()


@pytest.mark.parametrize(("variant", "max_classes"), [("official", 1000), ("paper", 3)])
def test_avsl_and_its_loss(variant: str, max_classes: int) -> None:
    model, distance = levels(variant)
    objective = Objective(LayeredProxyAnchor(6, distance, max_classes=max_classes))
    with pretended_cuda():
        moved(nn.ModuleList([model, objective]))
        images = torch.randint(0, 256, (12, 3, 16, 16), dtype=torch.uint8, device=CUDA)
        labels = torch.arange(12) % 4
        for step in (1, 2):
            output = model(images)
            assert model.observe(output, step=step)
            assert objective(output, labels, step=step)["loss"].device == CUDA
