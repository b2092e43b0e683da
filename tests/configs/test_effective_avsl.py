"""Effective values of recipe=avsl against the public code: zbr17/AVSL fd2686e4 on gedml 0.2.2.

Recorded by running its collectors, samplers, selector and storage outside of the project.
"""

from typing import Any

import pytest
from effective import Effective, effective
from omegaconf import OmegaConf

from dmlbench.checks import check
from dmlbench.config import compose

pytestmark = pytest.mark.slow

BASELINE = ("backbone=resnet50", "pooling=gap_gmp", "head=linear")
ROWS = {
    "ProxyAnchor-AVSL": (),
    "ProxyAnchor [13]": (*BASELINE, "loss=proxy_anchor"),
    "Margin-AVSL": ("loss=layered", "sampler=avsl_balanced"),
    "Margin [41]": (*BASELINE, "loss=margin", "sampler=avsl_balanced"),
}
TRUNK = {"cub200": 1e-5, "cars196": 0.00025230934618157737, "sop": 6e-4}  # samples_avsl.sh, --lr_trunk
# DataLoader(drop_last=True) of batches of 180, and MPerClassFullSampler (m=4, batch_size=180) with class sizes as equal
# as the published numbers of images allow.
RANDOM_STEPS = {"cub200": 32, "cars196": 44, "sop": 330}
FULL_STEPS = {"cub200": 31, "cars196": 43, "sop": 251}
LAST_EPOCH = 61  # launcher/managers/base_manager.py:250, total_epochs=61
PATIENCE_EPOCHS = 15  # BaseManager.yaml; base_manager.py:358 adds the interval in epochs
DATASETS = ("cub200", "cars196", "sop")


def made(row: str, dataset: str) -> Effective:
    return effective("experiment=avsl/table1", f"dataset={dataset}", *ROWS[row])


@pytest.mark.fast_sample(3)
@pytest.mark.parametrize("dataset", TRUNK)
@pytest.mark.parametrize("row", ROWS)
def test_rows_of_table_1_train_as_the_public_code(row: str, dataset: str) -> None:
    run, by_margin = made(row, dataset), "Margin" in row
    assert run.steps_per_epoch == (FULL_STEPS if by_margin else RANDOM_STEPS)[dataset]
    assert run.settings.max_steps == LAST_EPOCH * run.steps_per_epoch
    assert run.settings.patience * run.settings.validate_every == PATIENCE_EPOCHS * run.steps_per_epoch
    assert run.settings.collapse_ratio == 0.6  # base_manager.py:36, early_stop_thres
    # --warm_up 5 of the scripts; 0 in args.csv, by which the margin loss runs. base_trainer.py:330: schedulers rest.
    assert run.settings.warmup_steps == (0 if by_margin else 5 * run.steps_per_epoch)
    assert (run.settings.warmup_schedule, run.settings.reset_after_warmup) == ("rests", False)
    assert all(not name.startswith("backbone") for name in run.trained_in_warmup)
    moves = dataset == "sop" and not by_margin  # --not_freeze_bn
    assert run.settings.warmup_batch_norm == ("updated" if moves else "frozen")
    # AdamW_*.yaml: one group of all parameters, with --wd 0.0001. Frozen batch norm trains nothing.
    assert set(run.decays.values()) == {1e-4}
    assert any(name.endswith("bias") or "biases" in name for name in run.decays)
    assert any(".bn" in name for name in run.decays) == moves


@pytest.mark.parametrize(("dataset", "norm"), [("cub200", 0.5765), ("cars196", 0.5779), ("sop", 0.5773)])
def test_proxies_of_the_baseline_start_as_those_of_its_collector(dataset: str, norm: float) -> None:
    """gedml 0.2.2, core/collectors/proxy_collector.py:104, kaiming_uniform_(a=sqrt(5)) of [classes, 512]."""
    run = made("ProxyAnchor [13]", dataset)
    assert run.mean_norms["objective.loss.proxies"] == pytest.approx(norm, rel=0.01)
    assert run.parameters["objective.loss.proxies"].abs().max() <= 512**-0.5
    # core/models/basic_models/mlp.py:11, kaiming_normal_(mode="fan_out") and no bias at the start
    assert run.parameters["projection.weight"].std().item() == pytest.approx(0.06251, rel=0.01)
    assert run.parameters["projection.bias"].abs().max() == 0


@pytest.mark.parametrize(("dataset", "norm"), [("cub200", 0.5777), ("cars196", 0.5791), ("sop", 0.5770)])
def test_proxies_of_each_level_start_as_those_of_the_code(dataset: str, norm: float) -> None:
    """src/avsl/collectors/avsl_collector.py:102, kaiming_normal_(a=sqrt(5)) of [classes, 512], one for each level."""
    proxies = made("ProxyAnchor-AVSL", dataset).class_vectors["objective.loss.proxies"]
    assert proxies.norm(dim=2).mean(0).tolist() == pytest.approx([norm] * 3, rel=0.01)


@pytest.mark.parametrize(("row", "count"), [("Margin-AVSL", 4), ("Margin [41]", 1)])
def test_boundaries_of_classes_start_at_the_codes_beta_with_its_rate(row: str, count: int) -> None:
    """gedml 0.2.2, margin_loss.py; args.csv, --margin_beta 1.2, --lr_loss 0.01; every term has its own boundaries."""
    run = made(row, "cub200")
    assert len(run.class_vectors) == count
    for name, beta in run.class_vectors.items():
        assert beta.tolist() == pytest.approx([1.2] * 100)
        assert run.rates[name] == pytest.approx(0.01)


def test_every_image_is_an_anchor_of_one_triplet_for_the_margin_loss() -> None:
    """HardSelector: as many triplets as images that have a positive; batches are 45 classes x 4 images."""
    baseline, levels = made("Margin [41]", "cub200"), made("Margin-AVSL", "cub200")
    assert baseline.anchors() == 180
    for miner in levels.objective.loss.miners:
        assert type(miner) is type(baseline.objective.miner)
        assert miner.cutoff == baseline.objective.miner.cutoff == 0.5  # args.csv, --hardneg_cutoff


def test_weights_of_levels_for_the_margin_loss_are_those_of_its_pipeline() -> None:
    """Recorded by running gedml's Storage and LossHandler on link_avsl_margin.yaml: it takes args.csv's loss0_weight of
    1 for the inferred distance, loss1_weight of 0.2 for the lowest level and loss2_weight of 1 for the middle one, and
    no weight for the top one."""
    loss = made("Margin-AVSL", "cub200").objective.loss
    assert ([*loss.level_weights], loss.final_weight) == ([0.2, 1.0, 1.0], 1.0)


@pytest.mark.parametrize(("side", "gain"), [("code", 10.0), ("paper", 1.0)])
def test_the_gain_of_certainties_is_the_codes_alone(side: str, gain: float) -> None:
    """avsl_collector.py:232, prob_gamma=10; the paper's eq. 6 has none."""
    run = effective("experiment=avsl/table1", "dataset=cub200", f"recipe.side={side}")
    distance: Any = run.model.distance
    assert distance.gain == gain


def with_epochs_of_ten_steps(*overrides: str):
    cfg = compose("train", list(overrides))
    check(cfg)
    OmegaConf.update(cfg, "runtime.steps_per_epoch", 10)
    return cfg


@pytest.mark.fast_sample(2)
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
