"""Every YAML composes, passes the checks and can be instantiated; mistakes end in messages with a remedy."""

import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from commands_of_tables import Command, own_commands
from composed import composed, option, with_values
from omegaconf import DictConfig, OmegaConf, open_dict

from dmlbench import build
from dmlbench.checks import check
from dmlbench.cli.errors import guarded
from dmlbench.components import component, imported, parameters_of
from dmlbench.config import compose, config_folder
from dmlbench.data.split_file import FORMAT
from dmlbench.identity import config_id, config_settings, config_sha256, run_sha256
from dmlbench.runtime import write_json
from dmlbench.types import ConfigError, ModelOutput

CONF = config_folder()
WITHOUT_WEIGHTS = ("bn_inception", "resnet50", "timm", "vit_small", "dinov2_small", "clip_vit_b16")
WITHOUT_WEIGHTS += ("deit_small", "dino_vit_small")
WITHOUT_WEIGHTS += ("bn_inception_levels", "resnet50_levels", "googlenet")
WITHOUT_WEIGHTS += ("efficientnet_lite0", "efficientnet_lite1", "efficientnet_lite2")
# What is made for several levels goes together.
LEVELS = {"backbone": "resnet20_levels", "pooling": "none", "head": "avsl", "loss": "layered"}
OF_LEVELS = {("pooling", "none"), ("head", "avsl"), ("loss", "layered"), ("loss", "layered_proxy_anchor")}


# Composing a configuration takes most of a test's time, so options of groups that do not depend on each other are
# tested in one: each option is in one of these rows.
TOGETHER = (
    ("pooling", "loss", "fit", "optim", "schedule", "transform"),
    ("backbone", "dataset", "sampler", "protocol", "logger", "evaluation", "paths", "feature_cache"),
    ("miner", "regularizer", "rerank"),
    ("tuning",),
    ("head",),
)


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def rows_of_options() -> Iterator[dict[str, str]]:
    """Options by group, with what those of levels cannot do without."""
    for groups in TOGETHER:
        alone = [(group, option) for group in groups for option in options(group) if (group, option) in OF_LEVELS]
        yield from ({group: option} for group, option in alone)
        rest = ([(group, o) for o in options(group) if (group, o) not in OF_LEVELS] for group in groups)
        for row in itertools.zip_longest(*rest):
            yield dict(filter(None, row))


def needed_by(row: dict[str, str]) -> dict[str, str]:
    """Options of other groups that a row cannot do without."""
    needed = LEVELS if OF_LEVELS & set(row.items()) else {}
    if "head" in row:  # any of them finds there the maps that it asks for
        needed = {"backbone": LEVELS["backbone"], **needed}
    if row.get("miner") == "rho_distance_weighted":
        needed = {"loss": "margin_oodml"}
    if row.get("feature_cache") not in (None, "none"):
        needed = {**needed, "backbone.frozen_until": "all"}
    if row.get("tuning") not in (None, "none"):
        needed = {**needed, "backbone": "vit_small"}
    if row.get("regularizer") not in (None, "none"):
        needed = {**needed, "pooling": "gsp_small"}
    if row.get("regularizer") == "hier":
        needed["head"] = "hyperbolic"
    return {group: option for group, option in needed.items() if group not in row}


ROWS = list(rows_of_options())
EXPERIMENTS = sorted(  # of those of which nothing can be run tests/configs/test_experiments.py knows
    str(path.relative_to(CONF / "experiment").with_suffix(""))
    for path in (CONF / "experiment").rglob("*.yaml")
    if not re.search(r"\n  (needs|commands):", path.read_text(encoding="utf-8"))
)


def components(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        if str(node.get("_target_", "")).startswith("dmlbench."):
            yield node
        for value in node.values():
            yield from components(value)


DERIVED = {
    *("in_features", "in_channels", "map_sizes", "distance", "mean", "std", "out_levels", "out_indices"),
    "hub_config",
    *("run_dir", "run_id", "configuration"),
    *("num_channels", "labels", "seed", "optimizer", "make_objective", "vectors"),
}
MADE = ("backbone", "tuning", "pooling", "head", "loss", "miner", "optim", "schedule", "fit", "evaluation")


def test_every_option_is_in_one_row() -> None:
    groups = {folder.name for folder in CONF.iterdir() if folder.is_dir()}
    single = groups - {"experiment", "enhancement", "hydra", "recipe", "search"}
    rows = [choice for row in ROWS for choice in row.items()]
    assert sorted(rows) == sorted((group, option) for group in single for option in options(group))


@pytest.mark.parametrize("group", sorted({group for row in ROWS for group in row}))
def test_every_option_spells_out_the_arguments_of_its_target(group: str) -> None:
    for name in options(group):
        for node in components(option(group, name)):
            parameters, _ = parameters_of(imported(node["_target_"], group))
            assert set(parameters) - set(node) - DERIVED == set(), name


@pytest.mark.fast_sample(4)
@pytest.mark.parametrize("row", ROWS, ids=[" ".join(f"{g}={o}" for g, o in row.items()) for row in ROWS])
def test_every_option_fits_its_target_and_is_made(
    row: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dmlbench.checks.find_spec", bool)  # loggers of extras that are not installed
    choices = {**row, **needed_by(row)}
    overrides = [f"{group}={option}" for group, option in choices.items()]
    if row.get("protocol") == "oodml":
        halves = {"train": ["a"], "test": ["b"], "fitted": [], "validation": []}
        split = {"name": "1", "kind": "default", "distance": 1.0, **halves}
        document = {"format": FORMAT, "dataset": "", "measured_by": "nothing", "splits": [split]}
        write_json(tmp_path / "splits.json", document)
        overrides.append(f"protocol.splits={tmp_path / 'splits.json'}")
    cfg = compose("train", overrides)
    check(cfg)
    if row.keys() & set(MADE):
        if choices.get("backbone") in WITHOUT_WEIGHTS:
            cfg.backbone.pretrained = False
        # drawing the weights of large networks would take seconds
        with torch.device("cpu" if row.keys().isdisjoint(("backbone", "tuning")) else "meta"):
            make(cfg, with_images=not row.keys().isdisjoint(("pooling", "loss", "miner")))


def make(cfg: DictConfig, *, with_images: bool) -> None:
    """Everything that a run makes of its configuration."""
    OmegaConf.update(cfg, "runtime.num_classes", 6)
    OmegaConf.update(cfg, "runtime.steps_per_epoch", 10)
    OmegaConf.update(cfg, "runtime.image_size", [32, 32])
    model = build.build_model(cfg)
    objective = build.build_objective(cfg, model)
    build.build_optimizer(cfg, model, objective)
    build.build_fit_settings(cfg)
    component(cfg.evaluation)
    if with_images:
        model.eval()
        output = model(torch.randint(0, 256, (12, 3, 32, 32), dtype=torch.uint8))
        assert output.embedding.shape == (12, model.embedding_size)
        model.observe(output, step=1)
        value = objective(ModelOutput(output.embedding), torch.arange(12) % 6, step=1)["loss"]
        assert torch.isfinite(value)


def grid_of(option: str) -> dict[str, list[str]]:
    """Overrides of an experiment's sweep by key; every option of a group has tests of its own, so two stand for all."""
    cfg = compose("train", [f"experiment={option}"], with_hydra=True)
    grid = OmegaConf.to_container(cfg.hydra.sweeper.params or OmegaConf.create())
    assert isinstance(grid, dict)
    values_of = {
        k: options(k)[:2] if str(values).startswith("glob(*") else _split(str(values)) for k, values in grid.items()
    }
    return {key: [f"{key}={value}" for value in values] for key, values in values_of.items()}


@pytest.mark.fast_sample(3)
@pytest.mark.parametrize("option", EXPERIMENTS)
def test_every_experiment_composes(option: str) -> None:
    check(compose("train", [f"experiment={option}"]))  # a slow test has all configs of its grid


@pytest.mark.slow
@pytest.mark.parametrize("command", own_commands(), ids=str)
def test_every_row_of_our_own_tables_composes(command: Command) -> None:
    check(compose("train", [f"experiment={command.table}", *command.overrides]))


@pytest.mark.slow
@pytest.mark.parametrize("option", EXPERIMENTS)
def test_every_experiment_composes_in_every_config_of_its_grid(option: str) -> None:
    grid = {key: overrides for key, overrides in grid_of(option).items() if key not in ("fold", "repeat")}
    for config in itertools.product(*grid.values()):
        check(compose("train", [f"experiment={option}", *config]))


def _split(values: str) -> list[str]:
    """Values of a sweep; commas in brackets belong to a value."""
    return re.split(r",(?![^\[]*\])", values)


def test_epochs_count_optimizer_steps_of_the_run(tmp_path) -> None:
    def steps(*overrides: str) -> list[int]:
        small = ("dataset.table.num_classes=16", "dataset.table.images_per_class=8", "dataset.table.image_size=32")
        cfg = compose("train", ["dataset=glyphs", *small, f"paths.cache_dir={tmp_path}", *overrides])
        build.build_data(cfg)
        return [cfg.fit.max_steps, cfg.fit.validate_every]

    balanced = ("sampler.classes_per_batch=4", "sampler.images_per_class=2")
    epochs = ("fit.max_steps=${epochs:3}", "fit.validate_every=${epochs:0.5}")
    assert steps(*balanced, *epochs) == [18, 3]  # 6 classes x 8 images in batches of 8
    assert steps(*balanced, *epochs, "fit.accumulate=2") == [9, 2]
    assert steps(*balanced, "fit.max_steps=${epochs:0}") == [0, 100]


def test_enhancements_add_up_in_any_combination() -> None:
    def config(*names: str) -> Any:
        return compose("train", ["experiment=proxynca_pp/table8", f"enhancement=[{','.join(names)}]"])

    none, every = config("none"), config("scale", "norm", "cbs", "max", "fast", "prob")
    whole = compose("train", ["experiment=proxynca_pp/table3"])
    for key in ("sampler", "pooling", "head", "optim", "fit", "schedule", "protocol", "transform"):
        assert every[key] == whole[key], key
        assert none[key] == whole[key] or key in ("sampler", "pooling", "head", "optim"), key
    assert OmegaConf.to_container(every.loss, resolve=False) == OmegaConf.to_container(whole.loss, resolve=False)
    two = config("cbs", "max")
    assert (two.sampler, two.pooling) == (every.sampler, every.pooling)
    assert (two.head, two.optim) == (none.head, none.optim)


def test_a_data_set_brings_its_transform_and_the_command_line_decides() -> None:
    assert compose("train", ["dataset=glyphs"]).transform.train.padding == 4
    assert compose("train", ["dataset=glyphs", "transform=avsl"]).transform.train.crop == 224
    assert compose("train", ["dataset=cars196"]).transform.train.crop == 227
    assert compose("train", ["dataset=cars196", "transform=avsl"]).transform.train.crop == 224
    assert compose("train", ["experiment=demo"]).transform.train.padding == 3


def test_config_ignores_coordinates_and_machine_but_not_what_moves_numbers() -> None:
    default = config_id(composed())
    machine = ("device=cpu", "num_workers=4", "image_cache=false", "evaluation.tile_bytes=1048576")
    coordinates = ("fold=3", "repeat=2", "base_seed=5")
    files = ("paths.output_dir=x", "paths.data_dir=y", "paths.cache_dir=z", "fit.keep=both")
    others = ("fit.checkpoint_every=7", "evaluation.back_end=torch", "evaluation.device=cpu", "logger={wandb: {}}")
    for each in (*machine, *coordinates, *files, *others):
        assert config_id(with_values(each)) == default, each
    gmp = "pooling._target_=dmlbench.models.pooling.global_pooling.Gmp"
    for each in ("fit.precision=bf16", "optim.lr=1.0", "dataset.table.seed=1", "head.out_features=64", gmp):
        assert config_id(with_values(each)) != default, each


def test_keys_added_later_count_where_they_differ() -> None:
    plain, before, simix = (composed("loss=recall_at_k_surrogate") for _ in range(3))
    with open_dict(before):
        del before.loss["simix"]
    simix.loss.simix = True
    assert config_sha256(plain) == config_sha256(before) != config_sha256(simix)
    for pooling in ("netvlad", "otp"):
        sized, before, by_head = (composed(f"pooling={pooling}") for _ in range(3))
        with open_dict(before):
            del before.pooling["embedding_size"]
        by_head.pooling.feature_size = None
        assert config_sha256(sized) == config_sha256(before) != config_sha256(by_head)
    old, averaged = (OmegaConf.to_container(with_values(f"fit.ema={ema}")) for ema in ("null", 0.9))
    del old["fit"]["ema"]
    assert [config_settings(each)["fit.ema"] for each in (old, averaged)] == [None, 0.9]  # tables tell them apart


def test_run_hash_knows_coordinates_and_seed() -> None:
    hashes = {run_sha256(with_values(each)) for each in ("fold=0", "fold=1", "repeat=1", "base_seed=1", "device=cpu")}
    assert len(hashes) == 4


AVSL = ["head=avsl", "pooling=none", "backbone=resnet20_levels", "head.level_size=8", "head.top_k=4"]
MISTAKES = [
    (["poling=gap"], "did you mean 'pooling'"),
    (["pooling=gpa"], "did you mean 'gap'"),
    (["lr=1"], "no key 'lr': did you mean 'optim.lr'[?]"),
    (["loss=triplet", "miner=semihard", "miner.type_of_triplets=semi_hard"], "type_of_triplets.*'semihard'"),
    (["loss=cosface", "loss.scale=-64"], "loss.scale: got -64, expected a positive number"),
    (["eval_batch_size=0"], "eval_batch_size: got 0, expected at least 1"),
    (["early_stopping=1"], "did you mean 'fit.patience'"),
    (["seed=1"], "did you mean 'base_seed'"),
    (["amp=true"], "did you mean 'fit.precision'"),
    (["fit.early_stopping=1"], "did you mean 'fit.patience'"),
    (["schedule=warmup_cosine", "schedule.warmup_steps=1"], "did you mean 'schedule.lr_lambda.warmup_steps'"),
    (
        ["pooling.power=${runtime.num_chanels}", "pooling=gem"],
        "pooling.power: got .*did you mean 'runtime.num_channels'",
    ),
    (["logger=wandb", "logger.wandb.init.notes=x"], r"write \+logger.wandb.init.notes=<value>"),
    (["pooling=qqqq"], "Options of your own need --config-dir=<folder>"),
    (["fit.max_step=1"], "did you mean 'fit.max_steps'"),
    (["logger=csv"], "wandb. Every run writes history.csv."),
    (["loss.alpha={}"], "loss.alpha: got {}, expected a number or null."),
    (["optim.optimizer._partial_=maybe"], "optim.optimizer._partial_: got 'maybe', expected true or false"),
    (["optim.lr=abc"], "optim.lr: got 'abc', expected a number[.]"),
    (["optim.lr=1e300"], "optim.lr: got 1e.300, expected a positive number in the range of float32"),
    (["optim.lr_multipliers.pooling=abc"], "optim.lr_multipliers: got .*'abc'.*, expected {name: a number}."),
    (
        ["schedule=multi_step", "schedule.milestones=[1,inf]"],
        "schedule.milestones\\[1\\]: got inf, expected a finite number",
    ),
    (["fit.min_improvement=-1"], "min_improvement: got -1.*at least 0"),
    (["schedule=cosine", "schedule.T_max=0"], "schedule.T_max: got 0, expected at least 1 step"),
    (
        [
            *("schedule=cosine", "schedule._target_=torch.optim.lr_scheduler.ChainedScheduler"),
            *("~schedule.T_max", "~schedule.eta_min"),
            "+schedule.schedulers=[{_target_:torch.optim.lr_scheduler.StepLR,_partial_:true,step_size:0}]",
        ],
        "schedule.schedulers.0..step_size: got 0, expected at least 1 step",
    ),
    (["+extra=1"], "no key 'extra'"),
    (
        ["pooling=gsop", "transform=mlrc", "transform.eval.crop=64"],
        "transform.eval.crop: got 64, expected 227 as in transform.train.crop",
    ),
    (
        ["head=avsl", "pooling=none", "head.reliability=learned", "transform=mlrc", "transform.eval.crop=64"],
        "transform.eval.crop: got 64, expected 227 as in transform.train.crop",
    ),
    (["fit.keep=all"], "fit.keep: got 'all', expected one of 'best', 'last', 'both', 'none'"),
    (["pooling._target_=dmlbench.models.pooling.gsp.Gps"], "did you mean 'Gsp'"),
    (["pooling=gsp", "head.out_features=-7"], "out_features: got -7, expected at least 1"),
    (["loss=triplet", "sampler.images_per_class=1"], "images_per_class: got 1, expected at least 2"),
    (["fit.max_steps=${epochs:-1}"], "epochs:.*: got -1, expected a number of at least 0, such as"),
    (
        ["head.out_features=${oc.env:DIM}"],
        "head.out_features: got .*oc.env:DIM}, expected a value, because the same run",
    ),
    (
        [
            "protocol=two_stage",
            "schedule=cosine",
            "~schedule.T_max",
            "~schedule.eta_min",
            "schedule._target_=dmlbench.config.config_folder",
        ],
        "schedule: got dmlbench.config.config_folder, which needs the number of steps",
    ),
    (["protocol=two_stage", "schedule=cosine"], "which needs the number of steps.*schedule=plateau"),
    (
        ["experiment=gsp_fair", "loss=proxy_anchor", "fit.max_steps=3", "hydra.mode=RUN"],
        r"warmup_steps: got 100.*Values may come from recipe=gsp; recipe=none leaves it out",
    ),
    (["recipe=gsp"], "recipe=gsp has no settings for dataset=glyphs_collage. With .* settings for dataset=cub200"),
    (["fit.monitor=mapr"], "fit.monitor: got mapr.*did you mean 'map_at_r'"),
    (["transform=mlrc", "transform.eval.crop=300"], "crop: got 300, expected at most 256, the value of resize"),
    (
        ["experiment=gsp_fair", "loss=proxy_anchor", "sampler=random", "hydra.mode=RUN"],
        "classes_per_batch is not an argument.*Values may come from recipe=gsp",
    ),
    (["evaluation.metrics=[intra_class_distance]", "fit.monitor=intra_class_distance"], "a score with a direction"),
    (["loss=margin", "loss.distance.power=-1"], "loss.distance.power: got -1, expected a positive number"),
    ([*AVSL, "loss=contrastive", "fit=untrained"], "head.inference: got rectified with fit=untrained"),
    ([*AVSL, "loss=arcface"], "loss: got .*ArcFace, which cannot use the head's distance.*loss=layered"),
    ([*AVSL, "loss=layered", "loss@loss.loss=proxy_anchor"], "loss.loss: got .*ProxyAnchor.*loss@loss.loss=triplet"),
    ([*AVSL, "loss=layered", "+miner@loss.miner=semihard"], "loss.miner: each level.*\\+loss.miner._partial_=true"),
    (
        [*AVSL, "loss=layered", "miner=distance_weighted"],
        "miner: got .*DistanceWeightedMiner, which uses its own distance instead of AvslDistance",
    ),
    ([*AVSL, "loss=layered_proxy_anchor", "head.num_levels=2"], "level_weights.*each of the 2 levels.*\\[1.0, 1.0\\]"),
    ([*AVSL, "loss=triplet", "evaluation.metrics=[map_at_r,nmi]"], "evaluation.metrics: got nmi, .*Leave them out"),
    ([*AVSL, "loss=triplet", "evaluation.back_end=faiss"], "Set evaluation.back_end=auto"),
]


@pytest.mark.fast_sample(6)
@pytest.mark.parametrize(("overrides", "message"), MISTAKES, ids=[" ".join(overrides) for overrides, _ in MISTAKES])
def test_mistakes_in_configurations_are_named_with_a_remedy(capsys, overrides: list[str], message: str) -> None:
    assert guarded(lambda: check(compose("train", overrides))) == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error


@pytest.mark.parametrize(
    ("words", "code", "large"),
    [(["--help"], 0, ["torch", "hydra", "omegaconf", "numpy"]), (["train", "optm.lr=1"], 2, ["torch"])],
)
def test_overview_and_misspelt_keys_wait_for_nothing_large(tmp_path, words, code, large) -> None:
    script = f"""
import sys
from dmlbench.cli.main import main
try:
    main({words})
finally:
    print([name for name in {large} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == code and done.stdout.splitlines()[-1] == "[]", done.stderr


def test_backbone_without_weights_says_how_to_place_the_file() -> None:
    with pytest.raises(ConfigError, match=r"bn_inception-52deb4733\.pth"):
        build.build_model(compose("train", ["backbone=bn_inception"]))
    with pytest.raises(ConfigError, match=r"nowhere\.pth.*weights_file"):
        build.build_model(compose("train", ["backbone=bn_inception", f"backbone.weights_file={Path('nowhere.pth')}"]))


def test_proxies_have_the_size_of_the_embedding() -> None:
    small = ["dataset=glyphs", "backbone=resnet20_small", "loss=proxy_anchor", "head.out_features=16"]
    cfg = compose("train", [*small, "loss.embedding_size=32"])
    build.build_data(cfg)
    with pytest.raises(ConfigError, match=r"loss\.embedding_size: got 32, expected 16"):
        build.build_objective(cfg, build.build_model(cfg))


def test_a_width_that_only_the_backbone_has_is_not_made_up() -> None:
    check(compose("train", ["pooling=attention_pool", "pooling.num_heads=6"]))


def test_what_is_evaluated_names_no_config_unless_it_selects_the_weights() -> None:
    def digest(*values: str) -> str:
        return run_sha256(with_values(*values))

    for others in ("metrics=[nmi]", "recall_at=[1,10]", "kmeans_seed=1", "back_end=torch", "tile_bytes=9999999"):
        assert digest(f"evaluation.{others}") == digest()
    assert digest("evaluation.shortlist=100") != digest()  # validation ranks the shortlist, too
    by_nmi = ("evaluation.metrics=[nmi]", "fit.monitor=nmi")
    assert len({digest(), digest(*by_nmi), digest(*by_nmi, "evaluation.kmeans_seed=1")}) == 3
    assert digest(*by_nmi, "evaluation.shortlist=100") == digest(*by_nmi)


@pytest.mark.parametrize("key", ["back_end", "kmeans_library"])
def test_faiss_that_is_not_installed_is_an_error_before_the_run(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    cfg = compose("train", [f"evaluation.{key}=faiss", "evaluation.metrics=[map_at_r,nmi]"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=f"evaluation.{key}: got faiss, expected the package faiss to be installed"):
        check(cfg)


def test_a_row_without_training_is_not_trained_by_an_experiments_length() -> None:
    for length, said in (("3", "3"), ("${epochs:3}", r"\$\{epochs:3\}")):
        cfg = compose("train", ["fit=untrained", f"fit.max_steps={length}"])
        OmegaConf.update(cfg, "runtime.choices.fit", "untrained", force_add=True)
        with pytest.raises(ConfigError, match=f"fit.max_steps: got {said}, expected 0 with fit=untrained"):
            check(cfg)


@pytest.mark.parametrize("pooling", ["gsp", "gsop", "transformer"])
def test_a_pooling_that_needs_the_size_of_the_embedding_says_so(pooling: str) -> None:
    cfg = composed(f"pooling={pooling}", "head=identity", "fit=untrained")
    with pytest.raises(ConfigError, match=r"pooling.embedding_size: got null, but .* needs the size of the embedding"):
        check(cfg)


def test_parts_that_start_after_the_last_step_are_said(caplog: pytest.LogCaptureFixture) -> None:
    check(composed("loss=xbm", "loss.start_step=10"))
    assert not caplog.records
    check(composed("loss=xbm", "regularizer=s2sd"))
    said = [record.getMessage() for record in caplog.records]
    assert (
        "loss.start_step: got 2000 with fit.max_steps=300, so this part never starts. Lower it, or train longer."
        in said
    )
    assert any(text.startswith("regularizer.s2sd.feature_delay: got 1000") for text in said)


def test_text_by_default_may_be_a_number() -> None:
    check(composed("loss=triplet", "loss.triplets_per_anchor=10"))


def test_a_head_in_closed_form_has_the_weights_of_its_name() -> None:
    cfg = compose("train", ["experiment=last_blocks", "head=learned_whitening", "fit=untrained", "hydra.mode=RUN"])
    OmegaConf.update(cfg, "runtime.choices.head", "learned_whitening", force_add=True)  # the experiment sets init=pca
    with pytest.raises(ConfigError, match=r"head.init: got pca, expected learned_whitening .*Add head.init=learned_wh"):
        check(cfg)
