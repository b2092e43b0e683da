"""Heads that cut or concatenate embeddings: unit parts (DiVA) and concatenated levels."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from composed import arguments
from torch import Tensor

from dmlbench.apps.embeddings import evaluate_from
from dmlbench.models.concatenated_levels import ConcatenatedLevels
from dmlbench.models.net import PooledModel
from dmlbench.models.pooling.base import Pooling
from dmlbench.models.pooling.global_pooling import Gap
from dmlbench.models.pooling.gsp import Gsp
from dmlbench.models.resnet_cifar import ResNet20
from dmlbench.models.unit_parts import UnitParts
from dmlbench.types import ConfigError

WEIGHTS = (0.5, 1.5, 1.0, 2.0)


def embedding_of(pooling: Pooling, images: Tensor, weights: tuple[float, ...] = WEIGHTS) -> tuple[Tensor, Tensor]:
    """As the model gives it, and as its pooling does."""
    torch.manual_seed(0)
    backbone = ResNet20().eval()
    head = UnitParts(backbone.channels[-1], 12, weights=weights)
    model = PooledModel(backbone, pooling, head).eval()
    maps = backbone(backbone.preprocess(images))[-1]
    assert "weights" not in dict(model.state_dict())
    return model(images).embedding, pooling(maps, head).embedding


@pytest.mark.parametrize("pooling", [Gap(), Gsp(12, 4, transport_ratio=0.4, memory_rows=8)], ids=["gap", "gsp"])
def test_each_part_is_a_unit_vector_times_its_weight(pooling: Pooling) -> None:
    images = torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8)
    given, pooled = embedding_of(pooling, images)
    for row, raw in zip(given, pooled, strict=True):
        for i, weight in enumerate(WEIGHTS):
            part = raw[3 * i : 3 * i + 3]
            torch.testing.assert_close(row[3 * i : 3 * i + 3], weight * part / part.square().sum().sqrt())


def test_the_cosine_is_the_mean_of_the_parts_weighted_by_squares() -> None:
    images = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    given, _ = embedding_of(Gap(), images)
    alike, _ = embedding_of(Gap(), images, (1.0, 1.0, 1.0, 1.0))
    of_parts = alike.unflatten(1, (4, 3)).prod(0).sum(1)
    squares = torch.tensor(WEIGHTS).square()
    cosine = torch.cosine_similarity(given[0], given[1], dim=0)
    torch.testing.assert_close(cosine, (squares * of_parts).sum() / squares.sum())


@torch.no_grad()
def test_cells_to_be_matched_are_cut_into_parts_as_the_embedding_is() -> None:
    model = PooledModel(ResNet20(stem_stride=2), Gap(), UnitParts(64, 8, weights=[2.0, 1.0])).eval()
    images = torch.randint(256, (3, 3, 32, 32), dtype=torch.uint8)
    center, *cells = model.rows_with_cells(images, 2).unflatten(1, (5, 8)).unbind(1)
    torch.testing.assert_close(center, model(images).embedding)
    for cell in cells:
        torch.testing.assert_close(cell.unflatten(1, (2, 4)).norm(dim=2), torch.tensor([2.0, 1.0]).expand(3, 2))


def test_embedding_is_that_of_the_two_highest_levels_each_of_unit_length() -> None:
    backbone = ResNet20(out_levels=(0, 1, 2)).eval()
    head = ConcatenatedLevels(backbone.channels, 5)
    model = head.model(backbone, Gap())
    images = torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8)
    maps = backbone(backbone.preprocess(images))[1:]
    rows = [x.mean((2, 3)) @ project.weight.T for x, project in zip(maps, head.projections, strict=True)]
    expected = torch.cat([row / row.norm(dim=1, keepdim=True) for row in rows], 1)
    assert torch.allclose(model(images).embedding, expected, atol=1e-5) and model.embedding_size == 10


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(ConfigError, match="num_levels: got 4"):
        ConcatenatedLevels((16, 32, 64), 5, num_levels=4)
    with pytest.raises(ConfigError, match=r"head\.out_features: got embeddings of 10 dimensions"):
        PooledModel(ResNet20(), Gap(), UnitParts(64, 10))
    for weights in ((), (1.0, 0.0)):
        with pytest.raises(ConfigError, match=r"head\.weights: got"):
            UnitParts(8, 8, weights=weights)


@pytest.mark.fast_sample(1)
@pytest.mark.parametrize(
    "head",
    [
        ["head=unit_parts", "loss=diva", "regularizer=diva", "sampler.images_per_class=2"],
        ["head=concatenated_levels", "pooling=gap", "backbone=resnet20_levels"],
    ],
)
def test_a_run_is_trained_tested_and_evaluated_from_its_checkpoint(
    command: Callable[..., str], tmp_path: Path, head: list[str]
) -> None:
    small = ["dataset.table.num_classes=16", "dataset.table.images_per_class=4", "dataset.table.image_size=32",
             "device=cpu", "fit.max_steps=2", "fit.validate_every=2", "sampler.classes_per_batch=4", "num_workers=0",
             f"paths.output_dir={tmp_path}", f"paths.cache_dir={tmp_path / 'cache'}"]  # fmt: skip
    command("train", *head, *small)
    (path,) = tmp_path.rglob("result.json")
    assert json.loads(path.read_text())["steps"] == 2
    again = evaluate_from(arguments("evaluate", f"run={path.parent}", "from_checkpoint=true", "device=cpu"))
    assert again.evaluation.scores == again.stored and again.queries.rows.shape[1] == 128
    parts = again.queries.rows.unflatten(1, (4, 32) if "head=unit_parts" in head else (2, 64))
    torch.testing.assert_close(parts.norm(dim=2), torch.ones(parts.shape[:2]))
