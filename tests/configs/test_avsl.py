"""AVSL's settings as its paper prints them, and its tables as configurations."""

import pytest
from omegaconf import OmegaConf

from dmlbench.checks import check
from dmlbench.config import compose

DATASETS = ("cub200", "cars196", "sop")


def with_epochs_of_ten_steps(*overrides: str):
    cfg = compose("train", list(overrides))
    check(cfg)
    OmegaConf.update(cfg, "runtime.steps_per_epoch", 10)
    return cfg


@pytest.mark.parametrize("dataset", DATASETS)
@pytest.mark.parametrize("row", [[], ["loss=layered", "sampler=proxy_anchor_balanced"]], ids=["ProxyAnchor", "margin"])
def test_the_paper_has_one_rate_and_levels_of_one_weight(dataset: str, row: list[str]) -> None:
    cfg = with_epochs_of_ten_steps("experiment=avsl/table1", f"dataset={dataset}", "recipe.side=paper", *row)
    assert (cfg.optim.lr, set(cfg.optim.lr_multipliers.values()), cfg.optim.weight_decay) == (1e-4, {1.0}, 1e-4)
    assert cfg.optim.optimizer._target_ == "torch.optim.AdamW"
    assert (cfg.schedule, cfg.fit.warmup_steps, cfg.backbone.batch_norm) == (None, 0, "all")
    assert list(cfg.loss.level_weights) == [1, 1, 1]
    assert (cfg.head.level_size, cfg.head.top_k, cfg.head.momentum) == (512, 128, 0.5)
    sampler = cfg.sampler
    assert sampler.get("batch_size", sampler.get("classes_per_batch", 0) * sampler.get("images_per_class", 0)) == 180
    if not row:
        assert (cfg.loss.alpha, cfg.loss.pos_margin, cfg.loss.neg_margin) == (16, 1.8, 2.2)
    else:  # section A.1; section 4.2 swaps the two
        assert (cfg.loss.loss.beta, cfg.loss.loss.margin) == (1.2, 0.2)


@pytest.mark.parametrize("name", ["glyphs", "omniglot"])
def test_rows_of_a_measured_table_differ_in_the_method_alone(name: str) -> None:
    levels = compose("train", [f"experiment=avsl/{name}"])
    baseline = compose("train", [f"experiment=avsl/{name}_baseline"])
    for key in ("dataset", "transform", "sampler", "protocol", "schedule", "fit", "evaluation"):
        assert levels[key] == baseline[key], key
    factors = [dict(cfg.optim.lr_multipliers) for cfg in (levels, baseline)]
    assert {key for key in factors[0] if factors[0][key] != factors[1][key]} == {"distance"}  # the baseline has none
    assert (levels.optim.lr, levels.head.level_size) == (baseline.optim.lr, baseline.head.out_features)
    assert {key for key in levels.backbone if levels.backbone[key] != baseline.backbone.get(key)} == {"out_levels"}
