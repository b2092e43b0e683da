"""``dmlbench tune``: hyper-parameters searched under ``protocol=hpo``, and the best ones written as a recipe."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.utils import configure_log
from omegaconf import DictConfig, OmegaConf, open_dict

from dmlbench.cli.arguments import CommandLine, for_hydra, key_of
from dmlbench.cli.command import prepare_process, require_output_dir, run_command
from dmlbench.cli.reproduce import parts_of, quiet
from dmlbench.cli.train import composed_run
from dmlbench.config import composing, schema_of
from dmlbench.types import ConfigError, RunError, is_file_name

if TYPE_CHECKING:
    from dmlbench.tuning.search import Outcome, Search

_OWN = (*schema_of("tune").__dataclass_fields__, "search")


def main(line: CommandLine) -> None:
    """Do the trials that are missing, print the table, write the recipe.

    Raises:
        ConfigError: the search or values of one's own are wrong.
        RunError: the folder or its runs are of something else, or no trial is complete.
    """
    if line.is_sweep:
        raise ConfigError("-m: tune chooses the values by itself; leave -m out, and name what is searched in space")
    own, given, launching = parts_of(line, _OWN)
    if line.help or line.cfg:
        run_command("tune", lambda cfg: None, own)
        return
    if other := next((override for override in launching if override.startswith("hydra")), None):
        raise ConfigError(f"{other}: tune has no launcher; start the same command in several shells instead")
    prepare_process(line.config_dir)
    with composing(line.config_dir):
        cfg = hydra.compose("tune", for_hydra("tune", own), return_hydra_config=True)
        configure_log(cfg.hydra.job_logging)
        with open_dict(cfg):
            del cfg["hydra"]
        require_output_dir(cfg)
        _tune(cfg, given, line.config_dir)


def _tune(cfg: DictConfig, given: Sequence[str], config_dir: Path | None) -> None:
    from dmlbench.tuning.search import conduct, reporting

    def compose(overrides: Sequence[str]) -> DictConfig:
        with quiet("dmlbench.recipes"):  # said once, by the recipe's own file
            return composed_run(_for_train(overrides))

    def choices(overrides: Sequence[str]) -> Mapping[str, str | None]:
        composed = hydra.compose("train", _for_train(overrides), return_hydra_config=True)
        return dict(composed.hydra.runtime.choices)

    search = make_search(cfg, given, choices)
    conduct(search, compose)
    with reporting(search) as found:
        _report(search, found, compose, choices, config_dir)


def _report(search: "Search", found: "Sequence[Outcome]", compose: Any, choices: Any, config_dir: Path | None) -> None:
    from dmlbench.tuning.findings import notes, ranked, to_markdown, write_table

    monitor = compose(search.of_run(found[0].values, 0)).fit.monitor
    written = write_table(search, found, monitor)
    print(to_markdown(search, found, monitor))
    best = ranked(found)[0]
    if best.state != "complete":
        if any(outcome.state == "running" for outcome in found):
            return  # whoever has them writes the recipe
        raise RunError(f"{search.folder}: no trial is complete ({'; '.join(notes(search, found)[:-1])})")
    path, use = _write_recipe(search, best, compose, choices, config_dir)
    print("\n".join(f"written: {each}" for each in [*written, path]))
    folder = quote(str(search.folder))
    print(f"\nto train by it: dmlbench train --config-dir {folder} recipe={search.name} {' '.join(use)}")


def make_search(cfg: DictConfig, given: Sequence[str], choices: Any) -> "Search":
    """The search that a configuration describes.

    Raises:
        ConfigError: a value of it is wrong.
    """
    from dmlbench.tuning.search import Search
    from dmlbench.tuning.space import make_space

    if not is_file_name(str(cfg.name)):
        raise ConfigError(f"name ({cfg.name!r}) names a folder and a recipe: use letters, digits, '.', '_' and '-'")
    plain: Any = OmegaConf.to_container(cfg, resolve=True)
    runs = [[run] if isinstance(run, str) else run for run in plain["runs"]]
    for key, listed in (("train", plain["train"]), *(("runs", run) for run in runs)):
        if wrong := [each for each in listed if not (isinstance(each, str) and ("=" in each or each[:1] == "~"))]:
            raise ConfigError(
                f"{key} has {wrong[0]!r}, which is no override of dmlbench train, such as fit.max_steps=100"
            )
    overrides = (*plain["train"], *given)
    output_dir = Path(plain["paths"]["output_dir"])
    space = make_space(plain["space"], choices(["protocol=hpo", *overrides]))
    searched = {dimension.key for dimension in space}
    for override in (*given, *(each for run in runs for each in run)):
        if (key := key_of(override).strip()) in searched:
            raise ConfigError(f"{override}: {key} is searched; leave this out, or take {key} out of space")
    return Search(
        name=plain["name"], folder=output_dir / "tuning" / plain["name"], output_dir=output_dir,
        space=space, overrides=overrides, runs=tuple(map(tuple, runs)), trials=plain["trials"], seed=plain["seed"],
        startup_trials=plain["startup_trials"], pruner=plain["pruner"],
    )  # fmt: skip


def _for_train(overrides: Sequence[str]) -> list[str]:
    return for_hydra("train", CommandLine(overrides=tuple(overrides)))


def _write_recipe(
    search: "Search", best: "Outcome", compose: Any, choices: Any, config_dir: Path | None
) -> tuple[Path, list[str]]:
    """The recipe's file and how it is used, once it has been seen to make the winner's settings.

    Raises:
        RunError: it does not.
    """
    from dmlbench.runtime import atomic_write
    from dmlbench.tuning.findings import make_recipe, settings

    content, asked = make_recipe(search, best, compose, choices)
    winner = settings(compose(search.of_run(best.values, 0)))
    path = search.folder / "recipe" / f"{search.name}.yaml"
    path.parent.mkdir(exist_ok=True)
    atomic_write(path, content.encode())
    searching = [f"hydra.searchpath=['file://{config_dir.resolve()}']"] if config_dir else []
    with composing(search.folder), quiet("dmlbench.recipes"):
        made = settings(composed_run([*_for_train([*asked, f"recipe={search.name}"]), *searching]))
    if lost := [key for key in {**winner, **made} if winner.get(key, "absent") != made.get(key, "absent")]:
        raise RunError(
            f"{path} cannot say all of the best trial's settings ({', '.join(lost)}); give these on the command line "
            "beside the recipe"
        )
    return path, [each for each in asked if not each.startswith("protocol")]
