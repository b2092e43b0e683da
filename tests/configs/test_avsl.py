"""AVSL's settings as its paper prints and its public code sets them, and its tables as configurations."""

import pytest
from omegaconf import OmegaConf

from dmlbench.checks import check
from dmlbench.config import compose

# zbr17/AVSL fd2686e4, examples/samples_avsl.sh: --lr_trunk, --lr_embedder, --lr_collector, --loss0_weight and so on,
# --pa_neg_margin, --step (epochs), --gamma, and whether batch norm is frozen.
RELEASED = {
    "cub200": (1e-5, 5.5e-4, 1.1e-4, [0.5, 1, 0.5], 2.2, 10, 0.5, "all"),
    "cars196": (
        *(0.00025230934618157737, 0.00016294139202611374, 0.09918213648327627),
        *([1, 4, 4], 2.2, 5, 0.5, "all"),
    ),
    "sop": (6e-4, 6e-4, 0.06, [1, 4, 4], 2.4, 15, 0.25, "none"),
}


def with_epochs_of_ten_steps(*overrides: str):
    cfg = compose("train", list(overrides))
    check(cfg)
    OmegaConf.update(cfg, "runtime.steps_per_epoch", 10)
    return cfg


@pytest.mark.parametrize("dataset", RELEASED)
def test_the_released_recipe_has_the_values_of_the_public_code(dataset: str) -> None:
    cfg = with_epochs_of_ten_steps("experiment=avsl/table1", f"dataset={dataset}")
    backbone, head, collector, weights, neg_margin, step, gamma, batch_norm = RELEASED[dataset]
    factors = cfg.optim.lr_multipliers
    rates = [cfg.optim.lr * factors[group] for group in ("backbone", "head", "distance", "loss")]
    assert rates == pytest.approx([backbone, head, collector, collector], rel=1e-12)
    assert (list(cfg.loss.level_weights), cfg.loss.pos_margin, cfg.loss.neg_margin) == (weights, 1.8, neg_margin)
    assert (cfg.loss.alpha, cfg.loss.final_pos_margin, cfg.loss.final_neg_margin) == (16, 1.8, 2.2)
    assert (cfg.schedule.step_size, cfg.schedule.gamma) == (10 * step, gamma)
    assert cfg.backbone.batch_norm == batch_norm
    assert (cfg.fit.warmup_steps, list(cfg.fit.warmup_frozen), cfg.fit.max_steps) == (50, ["backbone"], 610)
    assert cfg.fit.patience * cfg.fit.validate_every == 150
    assert (cfg.sampler.batch_size, cfg.optim.weight_decay) == (180, 1e-4)


@pytest.mark.parametrize("dataset", RELEASED)
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


@pytest.mark.parametrize(
    "row",
    [["loss=layered"], ["backbone=resnet50", "pooling=gap_gmp", "head=linear", "loss=margin"]],
    ids=["Margin-AVSL", "Margin"],
)
def test_the_public_code_has_one_triplet_an_image_for_the_margin_loss(row: list[str]) -> None:
    cfg = with_epochs_of_ten_steps("experiment=avsl/table1", "dataset=cub200", "sampler=avsl_balanced", *row)
    factors = cfg.optim.lr_multipliers
    rates = [cfg.optim.lr * factors[group] for group in ("backbone", "head", "distance", "loss")]
    assert rates == pytest.approx([1e-5, 1e-4, 1e-4, 1e-2], rel=1e-12)
    assert (cfg.sampler.classes_per_batch, cfg.sampler.images_per_class) == (45, 4)
    loss, miner = (cfg.loss, cfg.miner) if cfg.miner else (cfg.loss.loss, cfg.loss.miner)
    assert (miner.cutoff, loss.beta, loss.margin) == (0.5, 1.2, 0.2)
    assert (cfg.schedule.step_size, cfg.fit.warmup_steps) == (100, 0)


def test_the_baseline_trains_proxies_as_the_public_code_does() -> None:
    cfg = with_epochs_of_ten_steps(
        "experiment=avsl/table1",
        "dataset=cars196",
        "backbone=resnet50",
        "pooling=gap_gmp",
        "head=linear",
        "loss=proxy_anchor",
    )
    assert cfg.optim.lr * cfg.optim.lr_multipliers.loss == pytest.approx(1e-2)
    assert (cfg.optim.lr, cfg.loss.alpha, cfg.loss.margin, cfg.head.out_features) == (1e-4, 32, 0.1, 512)
    assert (cfg.schedule.step_size, cfg.fit.warmup_steps) == (100, 50)


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
