"""Levels side by side: the embedding by hand, and a run from training to evaluation."""

import json
from pathlib import Path

import pytest
import torch

from dmlbench.apps.reevaluate import evaluate_from
from dmlbench.cli.main import main
from dmlbench.config import compose
from dmlbench.models.concatenated_levels import ConcatenatedLevels
from dmlbench.models.pooling.global_pooling import Gap
from dmlbench.models.resnet_cifar import ResNet20
from dmlbench.types import ConfigError

SMALL = (
    "dataset.table.num_classes=16", "dataset.table.images_per_class=4", "dataset.table.image_size=32", "device=cpu",
    "fit.max_steps=2", "fit.validate_every=2", "sampler.classes_per_batch=4", "num_workers=0",
)  # fmt: skip


def test_embedding_is_that_of_the_two_highest_levels_each_of_unit_length() -> None:
    backbone = ResNet20(out_levels=(0, 1, 2)).eval()
    head = ConcatenatedLevels(backbone.channels, 5)
    model = head.model(backbone, Gap())
    images = torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8)
    maps = backbone(backbone.preprocess(images))[1:]
    rows = [x.mean((2, 3)) @ project.weight.T for x, project in zip(maps, head.projections, strict=True)]
    expected = torch.cat([row / row.norm(dim=1, keepdim=True) for row in rows], 1)
    assert torch.allclose(model(images).embedding, expected, atol=1e-5) and model.embedding_size == 10
    with pytest.raises(ConfigError, match=r"num_levels \(4\)"):
        ConcatenatedLevels(backbone.channels, 5, num_levels=4)


def test_a_run_is_trained_tested_and_evaluated_from_its_checkpoint(tmp_path: Path) -> None:
    head = ["head=concatenated_levels", "pooling=gap", "backbone=resnet20_levels"]
    with pytest.raises(SystemExit) as info:
        main(["train", *head, *SMALL, f"paths.output_dir={tmp_path}", f"paths.cache_dir={tmp_path / 'cache'}"])
    (path,) = tmp_path.rglob("result.json")
    assert info.value.code == 0 and json.loads(path.read_text())["steps"] == 2
    again = evaluate_from(compose("evaluate", [f"run={path.parent}", "from_checkpoint=true", "device=cpu"]))
    assert again.evaluation.scores == again.stored and again.queries.rows.shape[1] == 128
