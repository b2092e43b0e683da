"""Settings that are not as the chosen options have them, against what Hydra composes."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf
from written_runs import write_run

from dmlbench.apps.compare_configs import BY_HAND, _distinct, changed_settings, find_configs
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.results.config_table import NAMING_GROUPS, config_labels
from dmlbench.types import flatten

RUNTIME = {
    "num_classes": 4, "num_channels": 64, "map_size": [7, 7], "embedding_size": 128, "image_size": [48, 48],
    "steps_per_epoch": 5, "num_features": 64,
}  # fmt: skip


@pytest.fixture
def stored(train_configs):
    """The configuration that ``dmlbench train`` would store."""

    def run(*arguments: str) -> dict:
        cfg, *_ = train_configs(*arguments)  # the first of a grid
        cfg.runtime.update(RUNTIME)
        return OmegaConf.to_container(cfg, resolve=True)

    return run


@pytest.mark.fast_sample(2)
@pytest.mark.parametrize(
    "choices",
    [
        ("pooling=gsp_small", "loss=arcface", "optim=sgd", "schedule=cosine"),
        ("pooling=gsp_zsr", "loss=xbm", "loss@loss.loss=triplet", "dataset=glyphs", "fit.warmup_steps=${epochs:2}"),
        ("head=avsl", "pooling=null", "backbone=resnet20_levels", "loss=layered_proxy_anchor"),
        ("backbone=timm", "backbone.name=resnet10t.c3_in1k", "miner=semihard"),
        ("pooling=gsp", "regularizer=zsr"),
        ("pooling=gsp", "regularizer=[zsr,xml]"),
    ],
    ids=["built_on_another", "wrapped", "levels", "timm", "regularizer", "two_regularizers"],
)
def test_an_option_as_it_is_has_its_own_values(stored, choices) -> None:
    assert changed_settings(stored(*choices), NAMING_GROUPS) == {}


@pytest.mark.slow
def test_several_regularizers_are_named_in_rows_and_compared_with_their_own_options(stored) -> None:
    given = "regularizer=[zsr,s2sd]", "regularizer.zsr.weight=0.2"
    configs = [stored("pooling=gsp"), stored("pooling=gsp", *given), stored("pooling=gsp", "regularizer=[s2sd,xml]")]
    assert changed_settings(configs[1], NAMING_GROUPS) == {"regularizer.zsr.weight": BY_HAND}
    configs[2]["regularizer"]["s2sd"]["feature_size"] = 2048  # as another backbone has it: no setting
    labels, notes = config_labels([(config["runtime"]["choices"], flatten(config)) for config in configs])
    assert not any("feature_size" in text for text in (*labels, *notes))
    assert [label.split()[:2] for label in labels] == [["gsp"], ["gsp", "s2sd+zsr"], ["gsp", "s2sd+xml"]]


@pytest.mark.slow
def test_what_is_given_by_hand_is_told_from_what_options_and_papers_say(stored, tmp_path: Path) -> None:
    given = "optim.lr_multipliers.loss=3", "pooling.num_prototypes=7", "+pooling.x=1", "optim.lr=0.25"
    by_hand = stored("recipe=small", "pooling=gsp", "loss=arcface", *given)
    assert changed_settings(by_hand, NAMING_GROUPS) == {
        "optim.lr": BY_HAND,
        "pooling.num_prototypes": BY_HAND,
        "pooling.x": BY_HAND,
        "pooling.smoothing": "set by recipe=small",  # which is no paper's
        "optim.lr_multipliers.loss": BY_HAND,
    }
    demo = stored("experiment=demo")
    assert changed_settings(demo, NAMING_GROUPS)["optim.lr"] == "set by experiment=demo"
    of_paper = "recipe=gsp", "loss=triplet", "dataset=cars196", "backbone=resnet50"
    assert changed_settings(stored(*of_paper), NAMING_GROUPS) == {}
    margin = changed_settings(stored(*of_paper, "loss.margin=0.3"), NAMING_GROUPS)
    assert margin == {"loss.margin": BY_HAND}
    circle = stored("loss._target_=pytorch_metric_learning.losses.CircleLoss", "loss.m=0.3")
    assert changed_settings(circle, NAMING_GROUPS) == {"loss.m": BY_HAND}
    weighed = stored("pooling=gsp", "regularizer=zsr", "regularizer.zsr.weight=0.7")
    assert changed_settings(weighed, NAMING_GROUPS) == {"regularizer.zsr.weight": BY_HAND}
    (tmp_path / "my_conf" / "pooling").mkdir(parents=True)
    (tmp_path / "my_conf/pooling/mine.yaml").write_text("_target_: dmlbench.models.pooling.k_max.KMax\nk: 3\n")
    own = ("--config-dir=my_conf", "pooling=mine")
    assert changed_settings(stored(*own), NAMING_GROUPS) == {}
    assert changed_settings(stored(*own, "pooling.k=4"), NAMING_GROUPS) == {"pooling.k": BY_HAND}


def test_labels_that_are_equal_get_the_hashes_of_their_configs() -> None:
    configs = [Path("a/r-gap-l-11111111"), Path("a/r-gap-l-22222222"), Path("a/r-gsp-l-33333333")]
    assert _distinct(["gap", "gap", "gsp"], configs) == ["gap [11111111]", "gap [22222222]", "gsp"]


def test_a_pattern_of_runs_summarizes_these_whatever_was_summarized_before(tmp_path: Path) -> None:
    for repeat in range(3):
        changes = {
            "aggregation": "mean_of_test",
            "num_folds": 1,
            "metrics": {"test": {"p_at_1": 0.1 * repeat}, "val": {}},
        }
        write_run(tmp_path / f"glyphs/mlrc/config/fold0_rep{repeat}", **changes)
    spec = EvaluationSpec(metrics=("p_at_1",))
    for pattern, runs in (("**", 3), ("glyphs/mlrc/config/fold0_rep2", 1), ("**", 3)):
        ((_, (config,)),) = find_configs(str(tmp_path), pattern, spec, allow_partial=True).items()
        assert config.summary["n_runs"] == runs
