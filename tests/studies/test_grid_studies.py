"""Studies of a pooling's values and of poolings without training, in miniature."""

from pathlib import Path

import pytest
import torch
from torch import nn

from dmlbench.config import compose
from dmlbench.models.pooling.gem import Gem
from dmlbench.models.pooling.global_pooling import Gap, Gmp
from dmlbench.results.store import find_runs, read_result
from dmlbench.runtime import read_json
from dmlbench.studies import gsp_m_eps, gsp_mu, untrained_poolings
from dmlbench.studies.record import conduct_study
from dmlbench.types import ConfigError

TINY = ["dataset.table.num_classes=16", "dataset.table.images_per_class=4", "dataset.table.image_size=24",
        "transform.train.padding=2", "fit.max_steps=2", "head.out_features=8", "pooling.memory_rows=32"]  # fmt: skip


def places(tmp_path: Path) -> list[str]:
    return [f"paths.output_dir={tmp_path}", f"paths.cache_dir={tmp_path}/cache", "device=cpu"]


def test_gsp_over_mu_in_miniature(tmp_path: Path) -> None:
    own = "training=[" + ",".join(f"'{override}'" for override in [*TINY, "pooling.num_prototypes=4"]) + "]"
    cfg = compose("study_gsp_mu", [own, "folds=[0]", "transport_ratios=[1.0,0.3]", *places(tmp_path)])
    findings, _ = conduct_study("gsp_mu", cfg, gsp_mu.conduct)
    assert [row[0] for row in findings.rows] == ["mu = 0.3", "mu = 1"]
    runs = find_runs(tmp_path)
    assert len(runs) == 2
    scores = {read_result(run.path)["metrics"]["test"]["map_at_r"] for run in runs}
    parts = read_json(tmp_path / "studies" / "gsp_mu.json")["parts"]
    assert {part["value"]["map_at_r"] for part in parts.values()} == scores
    cfg.name, cfg.transport_ratios = "other", [0.3, 1.5]
    with pytest.raises(ConfigError, match=r"in \(0, 1\]"):
        conduct_study("gsp_mu", cfg, gsp_mu.conduct)


def test_gsp_over_prototypes_and_smoothing_in_miniature(tmp_path: Path) -> None:
    own = "training=[" + ",".join(f"'{override}'" for override in TINY[:-1]) + "]"
    small = ["prototypes=[2,4]", "smoothings=[1.0,5.0]", "folds=[1]"]
    cfg = compose("study_gsp_m_eps", [own, *small, *places(tmp_path)])
    findings, written = conduct_study("gsp_m_eps", cfg, gsp_m_eps.conduct)
    assert [row[0] for row in findings.rows] == [
        "GAP", "m = 2, epsilon = 1", "m = 2, epsilon = 5", "m = 4, epsilon = 1", "m = 4, epsilon = 5"
    ]  # fmt: skip
    assert written[-1].exists()


def test_maps_are_pooled_without_a_projection() -> None:
    maps = torch.rand(3, 5, 2, 4)
    poolings: dict[str, nn.Module] = {"gap": Gap(), "gmp": Gmp(), "gem": Gem(power=2.0)}
    rows = untrained_poolings.pooled_by(poolings, maps)
    flat = maps.flatten(2)
    expected = torch.cat([flat.mean(dim=2), flat.amax(dim=2), flat.square().mean(dim=2).sqrt()], dim=1)
    assert torch.allclose(rows, expected, atol=1e-6)


def test_untrained_poolings_in_miniature(tmp_path: Path) -> None:
    data = ["dataset=glyphs", "dataset.table.num_classes=8", "dataset.table.images_per_class=4",
            "dataset.table.image_size=24", "backbone=resnet20_small", "num_workers=0"]  # fmt: skip
    cfg = compose("study_untrained_poolings", [*data, *places(tmp_path)])
    findings, _ = conduct_study("untrained_poolings", cfg, untrained_poolings.conduct)
    assert [row[0] for row in findings.rows] == ["gap", "gmp", "gap_gmp", "gem", "k_max"]
    assert "R@1 45.0 with GAP, 53.1 with GMP" in findings.claims[0].paper
    cfg.name, cfg.poolings = "other", ["gap", "cbam"]
    with pytest.raises(ConfigError, match="cbam is none of gap, gmp"):
        conduct_study("untrained_poolings", cfg, untrained_poolings.conduct)
