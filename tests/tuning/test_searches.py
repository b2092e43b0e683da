"""The searches of ``conf/search``: they compose, their bounds are values of runs, and their names are their files'."""

import hydra
import pytest
from omegaconf import OmegaConf

from dmlbench.apps.experiment_rows import reproduce_of
from dmlbench.cli.train import composed_run
from dmlbench.cli.tune import make_search
from dmlbench.components import component
from dmlbench.config import arguments_of, composing, config_folder
from dmlbench.external_files import load_yaml
from dmlbench.runner import ComposedRun
from dmlbench.tuning.best_trial import COVERED
from dmlbench.tuning.search import checked
from dmlbench.types import ConfigError

LOSSES = {
    "contrastive": ["pos_margin", "neg_margin"], "triplet": ["margin"], "margin": ["margin", "beta"],
    "multi_similarity": ["alpha", "beta", "base"], "proxy_nca": ["softmax_scale"], "norm_softmax": ["temperature"],
    "arcface": ["margin", "scale"], "soft_triple": ["margin", "la", "gamma"],
}  # fmt: skip


def searched(name: str, *given: str, own: tuple[str, ...] = ()):
    args = arguments_of(hydra.compose("tune", [f"search={name}", *own]))

    def choices(overrides):
        return dict(hydra.compose("train", overrides, return_hydra_config=True).hydra.runtime.choices)

    return make_search(args, given, choices)


def composed(overrides) -> ComposedRun:
    return ComposedRun(composed_run(overrides))


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_mlrc_musgrave_searches_each_loss_by_fifty_trials_of_four_folds(loss) -> None:
    with composing():
        search = searched("mlrc_musgrave", "dataset=cars196", f"loss={loss}")
        checked(search, composed)
        parts = [composed_run(search.of_run({}, i)).protocol.held_out_part for i in range(4)]
    assert {d.key for d in search.space} == {f"loss.{key}" for key in LOSSES[loss]}
    assert (search.trials, search.pruner, parts) == (50, None, [0, 1, 2, 3])


@pytest.mark.slow
def test_the_reality_check_searches_the_learning_rates_of_every_loss_and_its_recipe_is_in_the_space() -> None:
    reproduce = reproduce_of(config_folder() / "experiment" / "reality_check.yaml")
    recipe = load_yaml(config_folder() / "recipe" / "reality_check.yaml")
    found = {tuple(entry["when"].items()): entry["set"] for entry in recipe["settings"]}
    with composing():
        for label, row in reproduce["rows"].items():
            if "recipe=reality_check" not in row:
                continue
            overrides = [
                "dataset=cub200",
                *row.replace("recipe=reality_check", "").split(),
            ]
            search = searched("reality_check", *overrides)
            checked(search, composed)
            trial, run = composed_run(search.of_run({}, 0)), composed_run(["experiment=reality_check", *overrides])
            assert (trial.fit.max_steps, run.fit.max_steps) == ((1500, 5000) if "loss=" in row else (0, 0))
            keys = {dimension.key for dimension in search.space}
            if "loss=" in row:
                cfg = composed_run(search.of_run({}, 0))
                OmegaConf.update(cfg, "runtime.num_classes", 3)
                OmegaConf.update(cfg, "runtime.embedding_size", 128)
                trains = any(True for _ in component(cfg.loss).parameters())
                assert {"optim.lr"} | ({"optim.lr_multipliers.loss"} if trains else set()) < keys, label
            options = dict(each.split("=") for each in overrides if each.split("=")[0] in COVERED)
            values = found[tuple(options.items())]
            assert values.keys() == keys, label
            for dimension in search.space:
                value, low, high = values[dimension.key], dimension.low, dimension.high
                allowed = value in dimension.choices if low is None else low <= value <= high
                assert allowed, (label, dimension.key)


@pytest.mark.slow
def test_searches_have_the_names_of_their_files_and_see_no_test_set() -> None:
    names = [path.stem for path in (config_folder() / "search").glob("*.yaml")]
    with composing():
        assert [searched(name).name for name in names] == names
        checked(searched("demo"), composed)
        with pytest.raises(ConfigError, match=r"protocol: got mlrc, expected hpo, .* Leave protocol out"):
            checked(searched("demo", "protocol=mlrc"), composed)
        with pytest.raises(ConfigError, match=r"protocol: got mlrc, expected hpo"):  # also of a trial's second run
            checked(searched("demo", own=("runs=[['repeat=0'],['protocol=mlrc']]",)), composed)
        for given, own in ((["optim.lr=0.1"], ()), ([], ("runs=[['repeat=0','optim.lr=0.1']]",))):
            with pytest.raises(ConfigError, match=r"optim.lr=0.1: optim.lr is in the search space. Leave optim.lr out"):
                searched("demo", *given, own=own)
        with pytest.raises(ConfigError, match=r"repeat=1: the runs of a trial have repeat=0. Change runs instead"):
            searched("demo", "repeat=1")
        with pytest.raises(ConfigError, match="train: got 'pooling', expected overrides"):
            searched("demo", own=("train=[pooling]",))
        with pytest.raises(ConfigError, match="name: got 'a/b', expected a file name"):
            searched("demo", own=("name=a/b",))
