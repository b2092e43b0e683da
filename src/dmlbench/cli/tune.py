"""``dmlbench tune``: search hyper-parameters under ``protocol=hpo``, and write the best as a recipe."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import hydra

from dmlbench.cli.arguments import CommandLine, in_train
from dmlbench.cli.hydra_command import composed_command, quiet, run_command
from dmlbench.cli.reproduce import parts_of
from dmlbench.cli.train import composed_run
from dmlbench.config import composing, key_of, schema_of
from dmlbench.types import ConfigError, RunError, check_file_name

if TYPE_CHECKING:
    from dmlbench.tuning.search import Outcome, Search

_OWN = (*schema_of("tune").__dataclass_fields__, "search")


def main(line: CommandLine) -> None:
    """Run the missing trials, print the table, write the recipe."""
    if line.is_sweep:
        raise ConfigError("-m: tune chooses the values. Leave -m out, and name the searched keys in space.")
    own, given, launching = parts_of(line, _OWN)
    if line.help or line.cfg:
        run_command("tune", lambda cfg: None, own)
        return
    if other := next((override for override in launching if override.startswith("hydra")), None):
        raise ConfigError(f"{other}: tune has no launcher. Start the same command in several shells.")
    with composed_command("tune", own) as args:
        _tune(args, given, line.config_dir)


def _tune(args: Any, given: Sequence[str], config_dir: Path | None) -> None:
    from dmlbench.runner import ComposedRun
    from dmlbench.tuning.search import conduct, reporting

    def compose(overrides: Sequence[str]) -> ComposedRun:
        with quiet("dmlbench.recipes"):  # said once, by the recipe's own file
            return ComposedRun(composed_run(in_train(overrides)))

    def choices(overrides: Sequence[str]) -> Mapping[str, str | None]:
        composed = hydra.compose("train", in_train(overrides), return_hydra_config=True)
        return dict(composed.hydra.runtime.choices)

    search = make_search(args, given, choices)
    conduct(search, compose)
    with reporting(search) as found:
        _report(search, found, compose, choices, config_dir)


def _report(search: "Search", found: "Sequence[Outcome]", compose: Any, choices: Any, config_dir: Path | None) -> None:
    from dmlbench.tuning.best_trial import notes, ranked, trials_table

    monitor = compose(search.of_run(found[0].values, 0)).monitor
    table = trials_table(search, found, monitor)
    written = table.write(search.folder / "trials", ["csv", "md"])
    print(table.to_markdown())
    best = ranked(found)[0]
    if best.state != "complete":
        if any(outcome.state == "running" for outcome in found):
            return  # whoever has them writes the recipe
        raise RunError(f"{search.folder}: no trial is complete ({'; '.join(notes(search, found)[:-1])})")
    path, use = _write_recipe(search, best, compose, choices, config_dir)
    print("\n".join(f"written: {each}" for each in [*written, path]))
    folder = quote(str(search.folder))
    print(f"\nto train by it: dmlbench train --config-dir {folder} recipe={search.name} {' '.join(use)}")


def make_search(args: Any, given: Sequence[str], choices: Any) -> "Search":
    """Make the search of a configuration."""
    from dmlbench.tuning.search import Search
    from dmlbench.tuning.space import make_space

    check_file_name(args.name)
    if not isinstance(args.runs, list) or not all(isinstance(run, str | list) for run in args.runs):
        raise ConfigError(f"runs: got {args.runs}, expected overrides of each run, such as runs=[['repeat=0']].")
    runs = [[run] if isinstance(run, str) else run for run in args.runs]
    for key, listed in (("train", args.train), *(("runs", run) for run in runs)):
        if wrong := [each for each in listed if not (isinstance(each, str) and ("=" in each or each[:1] == "~"))]:
            raise ConfigError(f"{key}: got {wrong[0]!r}, expected overrides such as fit.max_steps=100.")
    overrides = (*args.train, *given)
    output_dir = Path(args.paths.output_dir)
    space = make_space(args.space, choices(["protocol=hpo", *overrides]))
    searched = {dimension.key for dimension in space}
    for override in (*given, *(each for run in runs for each in run)):
        if (key := key_of(override).strip()) in searched:
            raise ConfigError(f"{override}: {key} is searched. Leave this out, or take {key} out of space.")
    return Search(
        name=args.name, folder=output_dir / "tuning" / args.name, output_dir=output_dir,
        space=space, overrides=overrides, runs=tuple(map(tuple, runs)), trials=args.trials, seed=args.seed,
        startup_trials=args.startup_trials, pruner=args.pruner,
    )  # fmt: skip


def _write_recipe(
    search: "Search", best: "Outcome", compose: Any, choices: Any, config_dir: Path | None
) -> tuple[Path, list[str]]:
    """Write the recipe and check that it makes the winner's settings; return its file and the overrides beside it."""
    from dmlbench.runner import ComposedRun
    from dmlbench.runtime import atomic_write
    from dmlbench.tuning.best_trial import make_recipe, settings

    content, asked = make_recipe(search, best, compose, choices)
    winner = settings(compose(search.of_run(best.values, 0)))
    path = search.folder / "recipe" / f"{search.name}.yaml"
    path.parent.mkdir(exist_ok=True)
    atomic_write(path, content.encode())
    searching = [f"hydra.searchpath=['file://{config_dir.resolve()}']"] if config_dir else []
    with composing(search.folder), quiet("dmlbench.recipes"):
        made = settings(ComposedRun(composed_run([*in_train([*asked, f"recipe={search.name}"]), *searching])))
    if lost := [key for key in {**winner, **made} if winner.get(key, "absent") != made.get(key, "absent")]:
        raise RunError(
            f"{path} cannot hold all settings of the best trial ({', '.join(lost)}). Give these on the command line "
            "beside the recipe."
        )
    return path, [each for each in asked if not each.startswith("protocol")]
