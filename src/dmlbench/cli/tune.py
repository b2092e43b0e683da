"""``dmlbench tune``: search hyperparameters under ``protocol=hpo``, and write the best as a recipe."""

import logging
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from filelock import FileLock

from dmlbench.cli.arguments import CommandLine, in_train
from dmlbench.cli.hydra_command import composed_command, prepare_process, quiet, run_command
from dmlbench.cli.reproduce import parts_of
from dmlbench.cli.train import composed_run, explained
from dmlbench.config import arguments_of, composing, config_folders, key_of, schema_of, without_hydra
from dmlbench.recipes import Recipe, applies, recipe_of
from dmlbench.runtime import atomic_write
from dmlbench.types import ConfigError, RunError, check_file_name, counted

if TYPE_CHECKING:
    from dmlbench.apps.experiment_rows import Row
    from dmlbench.cli.reproduce import Table
    from dmlbench.results.table import Table as TrialsTable
    from dmlbench.runner import ComposedRun
    from dmlbench.tuning.search import Outcome, Search

log = logging.getLogger(__name__)

_WAIT_S = 5.0
_OWN = (*schema_of("tune").__dataclass_fields__, "search")


def main(line: CommandLine) -> None:
    """Run the missing trials, print the table, write the recipe; ``--dry-run`` prints the search and checks one run."""
    if line.is_sweep:
        raise ConfigError("-m: tune chooses the values. Leave -m out, and name the searched keys in space.")
    own, given = _parts(line)
    if line.help or line.cfg:
        run_command("tune", lambda cfg: None, own)
        return
    with composed_command("tune", own) as args:
        search = make_search(args, given, _choices)
        if not line.dry_run:
            _print(*_conduct(search, line.config_dir))
            return
        _describe(search)
    prepare_process(line.config_dir, "train")
    with composing(line.config_dir, "train"):
        _check({"example trial": search})


def _check(searches: "Mapping[str, Search]") -> None:
    """Check a trial of each search, and estimate its time."""
    from dmlbench.cli.preflight import check_trials
    from dmlbench.tuning.space import corners

    check_trials({name: in_train(search.of_run(corners(search.space)[0], 0)) for name, search in searches.items()})


def _describe(search: "Search") -> None:
    """Print the trials and the search space."""
    from dmlbench.tuning.search import STORAGE, checked, reporting, require_same_settings

    done = 0
    if not (search.folder / STORAGE).is_file():
        checked(search, _compose)
    else:
        require_same_settings(search, _compose)
        with reporting(search) as found:
            done = sum(outcome.state != "running" for outcome in found)
    runs = counted(len(search.runs), "run")
    print(f"{search.name}: {counted(search.trials, 'trial')} ({search.method}) of {runs} each, {done} done")
    for dimension in search.space:
        print(f"  {dimension.key}: {dimension.described}")


def _print(table: "TrialsTable", lines: Sequence[str]) -> None:
    print("\n".join([table.to_markdown(), *lines]))


def _parts(line: CommandLine) -> tuple[CommandLine, list[str]]:
    """The search's own part of a command line, and the overrides of its runs."""
    own, given, launching = parts_of(line, _OWN)
    other = next((override for override in launching if override.startswith("hydra")), None)
    if other and not (line.help or line.cfg):
        raise ConfigError(f"{other}: tune has no launcher. Start the same command in several shells.")
    return own, given


def trials_of(line: CommandLine) -> "TrialsTable":
    """Run the missing trials of a search, write the recipe, and return the table of trials."""
    own, given = _parts(line)
    with explained(), composed_command("tune", own, logs=False) as args:
        return _conduct(make_search(args, given, _choices), line.config_dir)[0]


def _conduct(search: "Search", config_dir: Path | None) -> tuple["TrialsTable", list[str]]:
    """Run the missing trials; return their table and the lines below it."""
    from dmlbench.tuning.search import conduct, reporting

    conduct(search, _compose)
    with reporting(search) as found:
        return _report(search, found, config_dir)


def _compose(overrides: Sequence[str]) -> "ComposedRun":
    from dmlbench.runner import ComposedRun

    with quiet("dmlbench.recipes"):  # said once, by the recipe's own file
        return ComposedRun(composed_run(in_train(overrides)))


def _choices(overrides: Sequence[str]) -> Mapping[str, str | None]:
    composed = hydra.compose("train", in_train(overrides), return_hydra_config=True)
    return dict(composed.hydra.runtime.choices)


def tune_rows(table: "Table", args: Any, shard: tuple[int, int], config_dir: Path | None) -> Path | None:
    """Conduct the searches of a table's rows that have the recipe of its ``search``; write that recipe at the end.

    Rows that share the options of ``COVERED`` share their values: the first one is searched. Entries of an existing
    recipe for other options are kept. Waits for the searches of other shards.

    Args:
        args: of ``dmlbench reproduce``.
        shard: i/n; this process conducts every n-th search.

    Returns:
        The config folder that has the recipe, or None with ``dry_run``.
    """
    from dmlbench.cli.run_table import part_suffix
    from dmlbench.tuning.best_trial import WRITTEN, Tuned, joint_recipe, ranked, spread_table
    from dmlbench.tuning.search import ended, require_same_settings

    name = table.reproduce.get("search")
    if name is None:
        raise ConfigError(f"tune: got true, but {table.name} defines no search. Use `dmlbench tune` instead.")
    results = Path(args.paths.output_dir) / "tuning" / name
    folder = config_dir or results
    path = folder / "recipe" / f"{name}.yaml"
    if path.is_file() and WRITTEN not in path.read_text(encoding="utf-8"):
        raise ConfigError(f"{path}: tune=true would overwrite this recipe written by hand. Rename the file.")
    searches: dict[str, Search] = {}
    covered: dict[str, dict[str, str]] = {}
    protocols: dict[str, str] = {}
    for row in (row for row in table.rows if f"recipe={name}" in row.overrides):
        overrides = [each for each in row.overrides if key_of(each) not in ("recipe", "experiment")]
        when = _options_by_group(row)
        if (key := "-".join(when.values())) not in searches:
            command = hydra.compose("tune", [f"search={name}", f"name={key}"], return_hydra_config=True)
            of_search = replace(arguments_of(without_hydra(command)), paths=args.paths)
            searches[key], covered[key] = make_search(of_search, overrides, _choices), when
            chosen = _choices(overrides)
            protocols[key] = str(chosen["protocol"])
            if group := next((each.key for each in searches[key].space if each.key in chosen), None):
                raise ConfigError(f"space.{group}: got a group, expected keys, because tune=true writes one recipe.")
            require_same_settings(searches[key], _compose)
    number, count = shard
    own = dict(list(searches.items())[number - 1 :: count])
    if args.dry_run:
        left = {key: search for key, search in own.items() if ended(search) is None}
        print(f"searches left: {len(left)} of {len(own)}")
        if left:
            print(f"{max(search.trials for search in left.values())} trials of each; the first ones:")
            _check(left)
        return None
    if not args.run_missing and (waiting := [key for key, search in searches.items() if ended(search) is None]):
        raise RunError(f"run_missing: got false, but searches are left: {', '.join(waiting)}. Set run_missing=true.")
    for i, (key, search) in enumerate(own.items()):
        if ended(search) is None:
            log.info("search %d of %d: %s", i + 1, len(own), key)
            _print(*_conduct(search, None))
    outcomes = {key: _end_of(key, search) for key, search in searches.items()}
    best = {key: ranked(found)[0] for key, found in outcomes.items()}
    if failed := [key for key, trial in best.items() if trial.state != "complete"]:
        raise RunError(f"{', '.join(failed)}: no trial is complete.")
    of_runs = {key: search.of_run(best[key].values, 0) for key, search in searches.items()}
    parts = [
        Tuned(covered[key], {**_choices(of_runs[key]), "protocol": protocols[key]}, best[key], len(outcomes[key]))
        for key in searches
    ]
    spread_table(name, outcomes, _compose(next(iter(of_runs.values()))).monitor).publish(
        results / f"trials{part_suffix(table.part, ())}"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(results / "recipe.lock"):  # of other data sets, other processes may add entries
        atomic_write(path, joint_recipe(name, parts, recipe_of(config_folders(folder), name)).encode())
    print(f"written: {path}")
    return folder


def has_entry(recipe: Recipe, row: "Row") -> bool:
    """Whether a recipe of ``tune_rows`` has an entry for a table's row, which may restate options that others share."""
    from dmlbench.tuning.best_trial import COVERED

    options = _options_by_group(row)
    needed = options.keys() - set(COVERED)
    return any(
        needed <= entry.when.keys() <= options.keys() and applies(entry.when, options) for entry in recipe.settings
    )


def _options_by_group(row: "Row") -> dict[str, str]:
    """The options that tell the search of a table's row, and its entry in the recipe, from other rows."""
    from dmlbench.tuning.best_trial import ROWS

    return {key_of(each): each.partition("=")[2] for each in row.overrides if key_of(each) in ROWS}


def _end_of(key: str, search: "Search") -> "list[Outcome]":
    """The outcomes of a search, once the process that conducts it has ended it."""
    from dmlbench.tuning.search import ended

    if (found := ended(search)) is None:
        log.info("waiting for search %s of another shard. Start that shard if it is not running.", key)
    while found is None:
        time.sleep(_WAIT_S)
        found = ended(search)
    return found


def _report(search: "Search", found: "Sequence[Outcome]", config_dir: Path | None) -> tuple["TrialsTable", list[str]]:
    from dmlbench.tuning.best_trial import notes, ranked, trials_table

    best = ranked(found)[0]
    table = trials_table(search, found, _compose(search.of_run(best.values, 0)).monitor)
    written = table.write(search.folder / "trials", ["csv", "md"])
    if best.state != "complete":
        if any(outcome.state == "running" for outcome in found):
            return table, []  # whoever has them writes the recipe
        raise RunError(f"{search.folder}: no trial is complete ({'; '.join(notes(search, found)[:-1])}).")
    path, use = _write_recipe(replace(search, trials=len(found)), best, config_dir)
    use += _searching(config_dir)
    command = f"dmlbench train --config-dir {shlex.quote(str(search.folder))} recipe={search.name} {shlex.join(use)}"
    return table, [*(f"written: {each}" for each in [*written, path]), "", f"to train with it: {command}"]


def make_search(args: Any, given: Sequence[str], choices: Any) -> "Search":
    """Make the search of a configuration."""
    from dmlbench.tuning.search import Search
    from dmlbench.tuning.space import grid, make_space

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
            raise ConfigError(
                f"{override}: {key} is in the search space. Leave {key} out here, or remove it from space."
            )
    of_runs = {key_of(each): run for run in runs for each in run}
    if override := next((each for each in given if key_of(each) in of_runs), None):
        raise ConfigError(
            f"{override}: the runs of a trial have {' '.join(of_runs[key_of(override)])}. Change runs instead, such as "
            f"\"runs=[['{override}']]\"."
        )
    trials = min(args.trials, len(grid(space))) if args.method == "grid" else args.trials
    return Search(
        name=args.name, folder=output_dir / "tuning" / args.name, output_dir=output_dir,
        space=space, overrides=overrides, runs=tuple(map(tuple, runs)), trials=trials, seed=args.seed,
        startup_trials=args.startup_trials, pruner=args.pruner, method=args.method,
    )  # fmt: skip


def _searching(config_dir: Path | None) -> list[str]:
    """What makes Hydra find the options of ``--config-dir``, too."""
    return [f"hydra.searchpath=['file://{config_dir.resolve()}']"] if config_dir else []


def _write_recipe(search: "Search", best: "Outcome", config_dir: Path | None) -> tuple[Path, list[str]]:
    """Write the recipe and check that it makes the winner's settings; return its file and the overrides beside it."""
    from dmlbench.runner import ComposedRun
    from dmlbench.tuning.best_trial import make_recipe, settings

    content, asked = make_recipe(search, best, _compose, _choices)
    winner = settings(_compose(search.of_run(best.values, 0)))
    path = search.folder / "recipe" / f"{search.name}.yaml"
    path.parent.mkdir(exist_ok=True)
    atomic_write(path, content.encode())
    with composing(search.folder), quiet("dmlbench.recipes"):
        given = in_train([*asked, f"recipe={search.name}"])
        made = settings(ComposedRun(composed_run([*given, *_searching(config_dir)])))
    if lost := [key for key in {**winner, **made} if winner.get(key, "absent") != made.get(key, "absent")]:
        raise RunError(
            f"{path} cannot store all settings of the best trial: {', '.join(lost)}. Set these on the command line in "
            "addition to the recipe."
        )
    return path, [each for each in asked if not each.startswith("protocol")]
