"""Recipes: papers' settings as printed or as in their code, between an option's own values and those that are given."""

import functools
import itertools
import re
from typing import Any

import pytest
from composed import value
from omegaconf import DictConfig, OmegaConf

from dmlbench.checks import check
from dmlbench.config import compose, config_folder, read_config
from dmlbench.external_files import read
from dmlbench.identity import config_id
from dmlbench.recipes import GROUPS, SIDES, Recipe, applies
from dmlbench.results.store import CONFIG, read_result
from dmlbench.runner import run
from dmlbench.types import ConfigError

CONF = config_folder()
RECIPES = sorted(path.stem for path in (CONF / "recipe").glob("*.yaml") if path.stem != "none")
SMALL = [
    *("dataset=glyphs", "dataset.table.num_classes=8", "dataset.table.images_per_class=5", "fit.max_steps=1"),
    *("dataset.table.image_size=24", "transform.train.padding=2", "fit.validate_every=1", "fit.keep=none"),
    *("head.out_features=8", "sampler.classes_per_batch=2", "sampler.images_per_class=2", "device=cpu"),
]


@functools.cache
def combinations(recipe: str) -> list[dict[str, str | None]]:
    """What a recipe covers, group by group."""
    listed = [
        {group: o if isinstance(o, list) else [o] for group, o in block.items()} for block in of_file(recipe).covers
    ]
    return [
        dict(zip(block, options, strict=True)) for block in listed for options in itertools.product(*block.values())
    ]


def of_file(recipe: str) -> Recipe:
    return read(CONF / "recipe" / f"{recipe}.yaml", Recipe, ConfigError)


@pytest.mark.parametrize("recipe", [name for name in RECIPES if combinations(name) and name != "xml"])
def test_every_entry_of_a_recipe_holds_for_something_that_it_covers(recipe: str) -> None:
    extended = of_file(recipe).extends
    unused = [*of_file(recipe).settings, *(of_file(extended).settings if extended else [])]
    wanted = [entry.when.get("regularizer") for entry in unused]  # which compose with whatever is covered
    regularizers = {None, *(each for one in wanted for each in (one if isinstance(one, list) else [one]))}
    for chosen, side, regularizer in itertools.product(combinations(recipe), SIDES, regularizers):
        options = dict.fromkeys(GROUPS) | {"regularizer": regularizer} | chosen | {"side": side}
        if not chosen.get("sampler"):  # the recipe's own, or any that fits the loss
            unused = [e for e in unused if not applies(without_sampler(e.when), options)]
        unused = [e for e in unused if not applies(e.when, options)]
    assert unused == []


def without_sampler(when: dict[str, Any]) -> dict[str, Any]:
    return {group: wanted for group, wanted in when.items() if group != "sampler"}


@pytest.mark.fast_sample(3)
@pytest.mark.parametrize("every", [407, pytest.param(37, marks=pytest.mark.slow)])
@pytest.mark.parametrize("recipe", [name for name in RECIPES if combinations(name)])
def test_what_a_recipe_covers_composes_to_its_values(recipe: str, every: int) -> None:
    for i, chosen in list(enumerate(combinations(recipe)))[::every]:
        overrides = [f"{group}={option}" for group, option in chosen.items() if option]
        cfg = compose("train", [f"recipe={recipe}", f"recipe.side={SIDES[i % 2]}", *overrides, *levels(chosen)])
        check(cfg)
        assert not cfg.runtime.recipe.overridden


def levels(chosen: dict[str, str | None]) -> list[str]:
    return ["pooling=none"] if chosen.get("head") == "avsl" else []


# As printed: GSP supplement 1.6.7 (of CUB, Cars196, In-shop, SOP), ProxyNCA++ table 1.
DATASETS = ("cub200", "cars196", "inshop", "sop")
FAIR = {
    "contrastive": {
        "loss.pos_margin": (0.0, 0.2652, 0.2858, 0.2858),
        "loss.neg_margin": (0.3841, 0.5409, 0.5130, 0.5130),
    },
    "contrastive_c1": {"loss.neg_margin": (0.5,) * 4},
    "triplet": {
        "loss.margin": (0.0961, 0.1190, 0.0451, 0.0451),
        "pooling.smoothing": (5.0,) * 4,
        "batch": ((8, 4),) * 4,
    },
    "multi_similarity": {
        "loss.alpha": (2, 14.35, 8.49, 2),
        "loss.beta": (40, 75.83, 57.38, 40),
        "loss.base": (0.5, 0.66, 0.41, 0.5),
        "sampler.images_per_class": (4,) * 4,
    },
    "proxy_anchor": {
        "loss.margin": (0.1,) * 4,
        "loss.alpha": (32,) * 4,
        "optim.lr": (1e-5, 1e-5, 1e-5, 5e-6),
        "optim.lr_multipliers.loss": (100,) * 4,
        "sampler.classes_per_batch": (32,) * 4,
        "sampler.images_per_class": (1,) * 4,
        "pooling.num_prototypes": (64, 64, 128, 128),
        "pooling.smoothing": (0.5,) * 4,
        "fit.warmup_steps": (100, 100, 1000, 1000),
        "fit.patience": (15, 15, 10, 10),
    },
    "proxy_nca_gsp": {"loss.temperature": (0.11,) * 4, "optim.lr_multipliers.loss": (100,) * 4},
    "xbm_contrastive": {
        "loss.memory_size": (25 * 32, 25 * 32, 400 * 32, 1400 * 32),
        "loss.start_step": (1000,) * 4,
        "regularizer.zsr.weight": (0.1,) * 4,
        "regularizer.zsr.softmax_scale": (1.0,) * 4,  # equation 4.4
    },
}


@pytest.mark.fast_sample(3)
@pytest.mark.parametrize("dataset", DATASETS)
@pytest.mark.parametrize("loss", FAIR)
def test_the_fair_setting_has_the_printed_values(loss: str, dataset: str) -> None:
    given = ["experiment=gsp_fair", "recipe.side=paper", f"dataset={dataset}", f"loss={loss}", "pooling=gsp"]
    cfg = compose("train", given)
    for key, values in FAIR[loss].items():
        assert value(cfg, key) == pytest.approx(values[DATASETS.index(dataset)], rel=1e-12), key


def test_the_plateau_of_proxynca_pp_is_one_of_the_harmonic_mean_in_its_code_alone() -> None:
    targets = [
        compose("train", ["experiment=proxynca_pp/table3", f"recipe.side={side}"]).schedule._target_
        for side in ("code", "paper")
    ]
    assert targets == ["dmlbench.training.optim.HarmonicPlateau", "torch.optim.lr_scheduler.ReduceLROnPlateau"]


@pytest.mark.fast_sample(2)
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["dataset=cub200"], {"optim.lr": 1e-5, "loss.memory_size": 25 * 112, "loss.start_step": 1000}),
        # supplement 1.1: global max pooling as well as global average pooling, whose place GSP takes
        (["dataset=cars196"], {"optim.lr": 1e-4, "optim.weight_decay": 4e-4, "pooling.combine": "gmp"}),
        (["dataset=cars196", "backbone=bn_inception"], {"loss.memory_size": 25 * 128, "batch": (32, 4)}),
        # 1.6.4: patience 4 of Keras, which is 3 of PyTorch
        (["dataset=inshop"], {"loss.memory_size": 400 * 112, "schedule.patience": 3, "loss.start_step": 1000}),
    ],
)  # fmt: skip
def test_the_conventional_setting_of_gsp_has_the_printed_values(given, expected) -> None:
    base = ["experiment=gsp_conventional", "loss=xbm_contrastive", "pooling=gsp", "recipe.side=paper"]
    cfg = compose("train", [*base, *given])
    assert {key: value(cfg, key) for key in expected} == expected
    assert (cfg.head.out_features, cfg.fit.monitor, cfg.regularizer.zsr.weight) == (512, "recall_at_1", 0.1)


@pytest.mark.slow
def test_every_row_with_gsp_has_the_zero_shot_loss_unless_it_is_left_out() -> None:
    def composed(*given: str) -> DictConfig:
        return compose("train", ["experiment=gsp_fair", *given])

    assert composed("pooling=gap").regularizer is None
    assert composed("pooling=gsp").regularizer.zsr.weight == 0.1
    assert composed("pooling=gsp", "regularizer.zsr.weight=0.3").regularizer.zsr.weight == 0.3
    assert composed("pooling=gsp", "regularizer=none").regularizer is None
    assert composed("pooling=gsp", "~regularizer").regularizer is None
    both = composed("pooling=gsp", "regularizer=[zsr,xml]", "regularizer.zsr.weight=0.2").regularizer
    assert (both.zsr.weight, set(both)) == (0.2, {"mixing", "zsr", "xml"})
    assert composed("pooling=gsp").regularizer == composed("pooling=gsp_zsr").regularizer


def test_a_schedule_that_somebody_chose_or_left_out_stays_so() -> None:
    for given in ("schedule=none", "~schedule"):
        assert compose("train", ["experiment=gsp_conventional", "dataset=sop", given]).schedule is None
    assert compose("train", ["experiment=gsp_conventional", "schedule=cosine"]).schedule.eta_min == 0.0


@pytest.mark.slow
def test_margins_of_oodml_start_where_its_miner_wants_them() -> None:
    base = ["recipe=oodml", "loss=margin_oodml", "backbone=resnet50"]
    for dataset, beta, rho in (("cub200", 0.6, 0.4), ("cars196", 0.6, 0.35), ("sop", 0.9, 0.15)):
        cfg = compose("train", [*base, f"dataset={dataset}"])
        assert (cfg.loss.beta, cfg.miner._target_.rpartition(".")[2]) == (1.2, "DistanceWeighted")
        cfg = compose("train", [*base, f"dataset={dataset}", "miner=rho_distance_weighted"])
        assert (cfg.loss.beta, cfg.miner.switch_probability, cfg.miner.variant) == (beta, rho, "official")
        assert (value(cfg, "batch"), cfg.head.out_features) == ((56, 2), 512)
        assert (cfg.head.bias, cfg.backbone.batch_norm) == (True, "stats")


@pytest.mark.slow
def test_uniform_prior_and_s2sd_of_oodml_are_those_of_its_script() -> None:
    base = ["recipe=oodml", "loss=margin_oodml", "backbone=resnet50"]
    for dataset, weight, hidden, interval in (("cars196", 0.2, 100, 10), ("sop", 0.02, 50, 200)):
        cfg = compose("train", [*base, f"dataset={dataset}", "regularizer=uniform_prior"])
        prior = cfg.regularizer.uniform_prior
        found = (prior.weight, prior.hidden_size, prior.discriminator_interval, prior.chunk_size)
        assert found == (weight, hidden, interval, 128)
        assert (cfg.regularizer.mixing, cfg.loss.beta, cfg.optim.lr_multipliers.loss) == ("add", 1.2, 50.0)
    for dataset, miner, rho, beta, weight, delay, classes in (
        ("cub200", "rho_distance_weighted", 0.4, 0.6, 50, 0, 56),
        ("cars196", "rho_distance_weighted", 0.3, 0.6, 50, 0, 56),
        ("sop", "distance_weighted_oodml", None, 0.9, 5, 1000, 52),
    ):
        cfg = compose("train", [*base, f"dataset={dataset}", f"miner={miner}", "regularizer=s2sd"])
        s2sd = cfg.regularizer.s2sd
        assert (cfg.miner.get("switch_probability"), cfg.loss.beta) == (rho, beta)
        assert (s2sd.distillation_weight, s2sd.feature_weight, s2sd.feature_delay) == (weight, weight, delay)
        assert (s2sd.sizes, s2sd.max_pooling, s2sd.weight) == ([1024, 1536, 2048], dataset != "sop", 0.5)
        assert (cfg.sampler.classes_per_batch, cfg.optim.lr_multipliers.loss) == (classes, 1.0)
        assert cfg.backbone.name == ("resnet101.tv_in1k" if dataset == "sop" else "resnet50.tv_in1k")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dataset", "alpha", "rho", "queue", "weights"),
    [
        ("cub200", 0.3, 1500, 30 * 108, [0.75, 1.25, 1.25, 1.25]),
        ("cars196", 0.15, 100, 30 * 108, [0.5, 1.5, 1.5, 1.5]),
        ("sop", 0.2, 150, 70 * 108, [1, 1, 1, 1]),
    ],
)
def test_diva_of_oodml_is_that_of_its_script(dataset: str, alpha: float, rho: float, queue: int, weights) -> None:
    base = ["recipe=oodml", "backbone=resnet50", f"dataset={dataset}", "loss=diva", "head=unit_parts"]
    cfg = compose("train", base)
    similarity, decorrelation = cfg.regularizer.self_similarity, cfg.regularizer.decorrelation
    assert cfg.miner is None
    assert cfg.loss.shared_weight == cfg.loss.intra_weight == similarity.weight == alpha
    assert (cfg.loss.shared, cfg.loss.intra, similarity.shares) == ("permuted", "permuted", "of_batch")
    assert (cfg.loss.margin, cfg.loss.beta, cfg.loss.learn_beta) == (0.2, 1.2, True)
    assert (decorrelation.weight, decorrelation.hidden_size, cfg.regularizer.mixing) == (rho, 512, "add")
    found = (similarity.queue_size, similarity.key_momentum, similarity.temperature)
    assert found == (queue, 0.9, 0.01)
    assert (similarity.nearest, similarity.farthest) == (0.5, 1.4)
    assert (cfg.head.weights, cfg.head.out_features, value(cfg, "batch")) == (weights, 512, (54, 2))
    assert (cfg.head.bias, cfg.backbone.batch_norm) == (True, "stats")
    multipliers = cfg.optim.lr_multipliers
    assert (cfg.optim.lr * multipliers.loss, multipliers.get("regularizer")) == (pytest.approx(5e-4), 1)
    assert compose("train", [*base, "regularizer=none"]).regularizer is None


@pytest.mark.fast_sample(2)
@pytest.mark.parametrize(
    ("loss", "dataset", "values"),
    [
        ("multi_similarity", "cub200", {"alpha": 0.01, "beta": 50.60, "base": 0.56}),
        ("triplet", "sop", {"margin": 0.0451}),
        ("proxy_nca", "cars196", {"rate": 4.43e-3, "softmax_scale": 7.97}),
        ("margin", "sop", {"rate": 1.82e-3, "margin": 0.0915, "beta": 1.1072}),
        ("soft_triple", "cars196", {"rate": 1.4e-4, "la": 17.69, "gamma": 1 / 19.18, "tau": 0.0669, "margin": 0.3588}),
    ],
)
def test_the_first_reality_check_has_its_optimal_values(loss: str, dataset: str, values: dict[str, float]) -> None:
    """KevinMusgrave/powerful-benchmarker v0.9.33 (b8a58ad2), docs/papers/mlrc.md:37-50."""
    cfg = compose("train", ["experiment=mlrc_musgrave", f"loss={loss}", f"dataset={dataset}"])
    found = OmegaConf.to_container(cfg.loss, resolve=False) | {"rate": cfg.optim.lr * cfg.optim.lr_multipliers.loss}
    assert {key: found[key] for key in values} == pytest.approx(values, rel=1e-5)
    assert (cfg.optim.lr, cfg.optim.lr_multipliers.head, cfg.fit.validate_every) == (1e-6, 1.0, 200)


def test_xml_has_its_regularizer_over_the_settings_of_gsp() -> None:
    base = ["recipe=xml", "backbone=bn_inception", "loss=contrastive", "dataset=inshop"]
    cfg = compose("train", [*base, "pooling=gap_histogram"])
    assert (cfg.regularizer.xml.weight, cfg.regularizer.xml.ridge, cfg.pooling.num_prototypes) == (0.01, 0.05, 128)
    assert (cfg.pooling.variant, cfg.pooling.smoothing, cfg.loss.neg_margin) == ("official", 10.0, 0.5)
    paper = compose("train", [*base, "pooling=gap_histogram", "recipe.side=paper"])
    assert (paper.pooling.variant, paper.loss.neg_margin) == ("paper", 0.5130)
    assert compose("train", [*base, "pooling=gap"]).regularizer is None


@pytest.mark.fast_sample(2)
@pytest.mark.parametrize("loss", ["margin_oodml", "contrastive", "triplet", "proxy_anchor"])
def test_without_a_recipe_nothing_but_the_options_own_values_applies(loss: str) -> None:
    plain, chosen = (compose("train", [f"loss={loss}", f"dataset={dataset}"]) for dataset in ("glyphs", "cub200"))
    for key in ("head", "optim", "sampler", "loss"):
        assert plain[key] == chosen[key], key
    assert set(plain.optim.lr_multipliers.values()) == {1.0}
    assert plain.runtime.recipe == {}


def test_a_value_that_is_given_wins_and_is_named() -> None:
    given = ["recipe=gsp", "loss=triplet", "dataset=cars196", "backbone=resnet50"]
    assert compose("train", given).loss.margin == 0.05
    cfg = compose("train", [*given, "loss.margin=0.3"])
    assert cfg.loss.margin == 0.3
    assert cfg.runtime.recipe.overridden == {"loss.margin": 0.05}
    assert (cfg.runtime.recipe.name, cfg.runtime.recipe.side) == ("gsp", "code")
    assert cfg.runtime.recipe.places["loss.margin"] == "triplet_loss.py; code"
    experiment = compose("train", ["experiment=losses", "loss=proxy_anchor", "optim.lr_multipliers.loss=7"])
    assert experiment.runtime.recipe.overridden == {"optim.lr_multipliers.loss": 100.0}


def test_configs_are_told_apart_by_their_values_and_not_by_their_recipe() -> None:
    values = [f"loss.{key}" for key in ("alpha=2", "beta=40", "base=0.5")]
    given = ["loss=multi_similarity", "dataset=glyphs"]
    assert config_id(compose("train", ["recipe=small", *given])) == config_id(compose("train", [*given, *values]))


def test_a_recipe_refuses_what_it_has_nothing_for_and_says_what_it_has() -> None:
    with pytest.raises(
        ConfigError, match=r"recipe=gsp has no settings for loss=proxy_nca_pp\. .* settings for loss=contrastive\|"
    ):
        compose("train", ["experiment=gsp_fair", "loss=proxy_nca_pp"])
    with pytest.raises(ConfigError, match=r"no settings for protocol=mlrc\. .*protocol=two_stage"):
        compose("train", ["experiment=proxynca_pp/table3", "protocol=mlrc"])


@pytest.mark.slow
def test_each_job_of_a_sweep_has_the_values_of_its_choices(tmp_path, monkeypatch, command) -> None:
    jobs: list[DictConfig] = []
    monkeypatch.setattr("dmlbench.runner.run", jobs.append)
    monkeypatch.setenv("DMLBENCH_OUTPUT", str(tmp_path))
    arguments = ["recipe=gsp", "recipe.side=paper,code", "dataset=cars196,sop", "loss=triplet", "backbone=resnet50"]
    command("train", "-m", *arguments, "protocol=conventional", "schedule.patience=9")
    found = [(cfg.dataset.name, cfg.runtime.recipe.side, cfg.optim.lr, cfg.loss.margin) for cfg in jobs]
    assert found == [
        *(("cars196", "paper", 1e-4, 0.1190), ("sop", "paper", 1e-4, 0.0451)),
        *(("cars196", "code", 1e-5, 0.2), ("sop", "code", 1e-4, 0.2)),
    ]
    assert all(cfg.schedule.patience == 9 and "schedule.patience" in cfg.runtime.recipe.overridden for cfg in jobs)
    assert jobs[0].runtime.choices["schedule"] == "plateau"


def test_deviations_that_apply_go_with_the_run_and_into_why(tmp_path, command) -> None:
    (tmp_path / "recipe").mkdir()
    text = """
extends: gsp
deviations:
  - {when: {loss: triplet}, text: Applies., source: my notes}
  - {when: {loss: contrastive}, text: Does not apply., source: my notes}
"""
    (tmp_path / "recipe" / "mine.yaml").write_text(text)
    shown = command("train", "--config-dir", str(tmp_path), "recipe=mine", "loss=triplet", "--why")
    assert "deviates: Applies." in shown
    assert "Does not apply." not in shown


def test_a_folder_of_the_user_adds_recipes(tmp_path, command) -> None:
    (tmp_path / "recipe").mkdir()
    entry = "{when: {loss: triplet}, choose: {schedule: cosine}, set: {loss.margin: 0.77}, source: my notes}"
    text = f"extends: gsp\ndefaults:\n  - override /optim: sgd\nsettings:\n  - {entry}\n"
    (tmp_path / "recipe" / "mine.yaml").write_text(text)
    shown = OmegaConf.create(
        command("train", "--config-dir", str(tmp_path), "recipe=mine", "loss=triplet", "--cfg", "job")
    )
    assert (shown.loss.margin, shown.optim.optimizer._target_) == (0.77, "torch.optim.SGD")
    assert (shown.fit.clip_form, shown.schedule.eta_min) == ("decayed", 0.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rows: []", "rows is unknown: choose one of covers, defaults"),
        ("defaults: 5", "defaults: got 5, expected a valid array"),
        ("settings:\n  - {set: {loss.margin: 1}}", "settings.0.source is missing"),
        ("settings:\n  - {set: [loss.margin], source: x}", "settings.0.set: got ['loss.margin'], expected an object"),
        ("settings:\n  - {when: {los: triplet}, source: x}", "settings.0.when: got 'los', expected 'dataset'"),
        ("settings:\n  - {choose: {pooling: gsp}, source: x}", "settings.0.choose: got 'pooling', expected 'miner'"),
    ],
)
def test_a_file_that_does_not_fit_the_schema_is_one_message(tmp_path, text: str, message: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        read(tmp_path / "mine.yaml", Recipe, ConfigError)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("extends: mine", "recipe=mine extends itself: mine -> mine"),
        ("settings:\n  - {set: {fit: 3, fit.max_steps: 4}, source: x}", "sets both fit and fit.max_steps"),
        (
            "settings:\n  - {choose: {schedule: none_such}, source: x}",
            "uses schedule=none_such, but there is no schedule/none_such.yaml",
        ),
    ],
)
def test_a_table_that_cannot_be_read_is_one_message(tmp_path, command, text: str, message: str) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text(text)
    assert message in command("train", "--config-dir", str(tmp_path), "recipe=mine", code=2)


def test_why_names_the_place_of_every_value(command) -> None:
    given = ["experiment=gsp_conventional", "dataset=sop", "loss=triplet", "pooling=gsp", "fit.patience=2"]
    shown = command("train", *given, "--why")
    rows = {line.split()[0]: line for line in shown.splitlines() if line.strip()}
    for key, place in {
        "loss.margin": "recipe gsp: conventional_*_default.yaml; code",
        "loss.swap": "conf/loss/triplet.yaml",
        "schedule.mode": "recipe gsp: conf/schedule/plateau.yaml for 1.6.4",
        "fit.patience": "command line",
        "fold": "conf/train.yaml",
        "regularizer.zsr.weight": "recipe gsp: 1.6.7 GSP",
    }.items():
        assert rows[key].rstrip().endswith(place) or place in rows[key], rows[key]
    assert "unknown" not in shown
    assert "replaced: fit.patience, 10 in the recipe (1.6.4 and conventional_*_default.yaml, 10,000 epochs)" in shown
    assert "conf/experiment/demo.yaml" in command("train", "experiment=demo", "--why")
    circle = ("loss._target_=pytorch_metric_learning.losses.CircleLoss", "loss.m=0.3", "optim.lr_multipliers={loss: 7}")
    values = [line.split() for line in command("train", *circle, "--why").splitlines()]
    assert [words[0] for words in values if words[0].startswith("loss.")] == ["loss._target_", "loss.m"]
    assert ["optim.lr_multipliers.loss", "7", "command", "line"] in values


def test_a_result_names_its_recipe_and_what_was_given_instead(tmp_path) -> None:
    paths = [f"paths.output_dir={tmp_path / 'out'}", f"paths.cache_dir={tmp_path}", f"paths.data_dir={tmp_path}"]
    chosen = ["recipe=small", "loss=proxy_anchor", "pooling=gsp", "optim.lr_multipliers.loss=5"]
    plain = ["loss=proxy_anchor", "pooling=gsp", "optim.lr_multipliers.loss=5", "pooling.smoothing=0.5"]
    run_dir = run(compose("train", [*SMALL, *paths, *chosen]))
    recipe = {"name": "small", "side": "code", "overridden": {"optim.lr_multipliers.loss": 100.0}, "deviations": []}
    assert read_result(run_dir)["recipe"] == recipe
    places = read_config(run_dir / CONFIG)["runtime"]["recipe"]["places"]
    assert places["pooling.smoothing"] == "GSP 1.6.7, losses with proxies"
    assert run(compose("train", [*SMALL, *paths, *plain])) == run_dir  # the same values are the same config
