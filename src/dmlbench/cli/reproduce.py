"""``dmlbench reproduce``: run what is missing of a table, then print our results vs. the paper."""

import itertools
import logging
import math
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import fill
from typing import Any

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from dmlbench.apps import experiment_rows
from dmlbench.apps.experiment_rows import COORDINATES, NARROWING, Row, experiments, last_of_each, reproduce_of
from dmlbench.cli.arguments import CommandLine, in_train
from dmlbench.cli.errors import closest_key, groups
from dmlbench.cli.hydra_command import composed_command, run_command
from dmlbench.cli.progress import own_overrides
from dmlbench.config import compose, composing, config_folders, key_of, schema_of
from dmlbench.papers import tables
from dmlbench.recipes import recipe_file, recipe_of
from dmlbench.types import ConfigError, check_at_least, closest

log = logging.getLogger(__name__)

_OWN = tuple(schema_of("reproduce").__dataclass_fields__)
_OF_RUNS = ("hydra", *schema_of("train").__dataclass_fields__)
_LINE = 120
"""Characters of a line of the other experiments of ``--list``."""


def main(line: CommandLine) -> None:
    if line.is_sweep:
        raise ConfigError("-m: reproduce runs all missing runs of a table. Leave -m out.")
    own, given, launching = parts_of(line, _OWN)
    if line.help or line.cfg:
        run_command("reproduce", lambda cfg: None, own)
        return
    with composed_command("reproduce", own) as args:
        folders = config_folders(line.config_dir)
        if args.list:
            _print_list(folders)
        elif args.measured:
            from dmlbench.results.table import summarize_tables  # pandas comes with it

            print(summarize_tables(Path(args.measured)), end="")
        else:
            _reproduce(args, folders, given, launching, line.config_dir)


def parts_of(line: CommandLine, keys: Sequence[str]) -> tuple[CommandLine, list[str], list[str]]:
    """The command's own part of a command line, the overrides of its runs, and those of Hydra's launchers."""
    known = list(dict.fromkeys([*keys, *_OF_RUNS]))
    added = [path.name for path in line.config_dir.iterdir()] if line.config_dir else []
    grouped = [(re.split("[./@]", key_of(override).strip())[0], override) for override in line.overrides]
    if unknown := [group for group, _ in grouped if group not in (*known, *groups(), *added)]:
        raise ConfigError(f"there is no key '{unknown[0]}': {closest_key(unknown[0], known, compose('train', []))}")
    own = tuple(override for group, override in grouped if group in keys)
    given = [override for group, override in grouped if group == "paths" or group not in (*keys, "hydra")]
    launching = [override for group, override in grouped if group in ("hydra", "paths")]
    return replace(line, overrides=own), given, launching


def _reproduce(
    args: Any, folders: Sequence[Path], given: Sequence[str], launching: Sequence[str], config_dir: Path | None
) -> None:
    name, shard = known_name(args.table, folders), shard_of(args.shard)
    log.info("planning %s", name)
    reproduce = reproduce_of(experiments(folders)[name])
    if reproduce.get("commands") and not reproduce.get("rows"):
        from dmlbench.cli.run_table import run_commands

        if launcher := next((override for override in launching if override.startswith("hydra")), None):
            raise ConfigError(f"{launcher}: {name} is made by commands, which have no launcher. Leave it out.")
        run_commands(name, reproduce, args, given, config_dir)
        return
    table = select_table(args, name, folders, given)
    from dmlbench.cli.run_table import run_table  # torch comes with it, which a misspelt name need not wait for

    if args.tune:
        from dmlbench.cli.tune import tune_rows

        if (tuned := tune_rows(table, args, shard, config_dir)) is None:
            return
        with composing(tuned):  # now with the recipe
            run_table(args, table, shard, given, launching, tuned)
    else:
        _check_tuned(table, folders, Path(args.paths.output_dir))
        run_table(args, table, shard, given, launching, config_dir)


def _check_tuned(table: "Table", folders: Sequence[Path], output_dir: Path) -> None:
    """Rows by the recipe that tune=true writes need their entries in that recipe."""
    name = table.reproduce.get("search")
    rows = [row for row in table.rows if f"recipe={name}" in row.overrides]
    if name is None or not rows:
        return
    if recipe_file(folders, name):
        from dmlbench.cli.tune import has_entry  # torch comes with it

        recipe = recipe_of(folders, name)
        left = dict.fromkeys(row.label for row in rows if not has_entry(recipe, row))
        tuned = dict.fromkeys(row.label for row in rows if row.label not in left)
        if left:
            for dataset in dict.fromkeys(each for row in rows for each in row.overrides if key_of(each) == "dataset"):
                hydra.compose("train", [dataset])  # raises if it is unknown
            others = f", or choose other rows: 'rows={','.join(tuned)}'" if tuned else ""
            raise ConfigError(f"not tuned yet: {', '.join(left)}. Add tune=true to tune them first{others}.")
        return
    if tuned_here := recipe_file([output_dir / "tuning" / name], name):
        raise ConfigError(
            f"recipe={name} is not in the config folders, but {tuned_here} exists. Add tune=true to use it."
        )
    raise ConfigError(f"recipe={name} does not exist: {table.name} is not tuned yet. Add tune=true to tune it first.")


def _print_list(folders: Sequence[Path]) -> None:
    """Every table and figure of the papers with its state and title, a line each, then the other experiments.

    A terminal gets lines of its width.
    """
    known = experiments(folders)
    parts = {name: reproduce_of(known.get(name)) for name in experiment_rows.paper_tables(folders)}
    states = {name: experiment_rows.state_of(name, part, name in known) for name, part in parts.items()}
    of_name, of_state = max(map(len, states)), max(map(len, states.values()))
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else math.inf
    for name, state in states.items():
        title = experiment_rows.title_of(known[name]) if name in known else ""
        needs = f" Needs {parts[name]['needs']}." if state == "cannot be run" else ""
        line = f"{name:<{of_name}}  {state:<{of_state}}  {title}{needs}"
        print(f"{line[: int(width) - 1]}…" if len(line) > width else line.rstrip())
    others = ", ".join(name for name in known if name not in states)
    print(f"\n{fill(f'other experiments: {others}', _LINE)}")


@dataclass(frozen=True)
class Table:
    """The selected part of an experiment's table (see ``apps.experiment_rows``)."""

    name: str
    file: Path
    reproduce: Mapping[str, Any]
    rows: tuple[Row, ...]  # with the command line's overrides
    coordinates: Mapping[str, Sequence[int]]  # the requested folds and repeats, where they are narrowed
    part: tuple[str, ...]  # which part of the whole table this is, as in "dataset=cub200"; empty for the whole

    @property
    def has_scores(self) -> bool:
        """Whether a paper prints scores of it."""
        return any(row.score is not None for row in self.rows)

    @property
    def wanted(self) -> list[tuple[str, ...]]:
        """The overrides of all configs."""
        return list(dict.fromkeys(row.overrides for row in self.rows if not row.blocker))

    @property
    def labels(self) -> dict[tuple[str, ...], str]:
        """The name of the first row of each config; empty in a grid."""
        return {row.overrides: row.label and row.name for row in reversed(self.rows)}

    @property
    def names(self) -> dict[tuple[str, ...], str]:
        """The label of each config with its setting; in a grid, its own overrides."""
        if any(row.label for row in self.rows):
            return {row.overrides: row.name for row in reversed(self.rows)}
        return dict(zip(self.wanted, own_overrides(self.wanted), strict=True))


def known_name(name: str | None, folders: Sequence[Path]) -> str:
    known = experiments(folders)
    listed = list(dict.fromkeys([*experiment_rows.paper_tables(folders), *known]))
    if name is None:
        raise ConfigError(
            "table is missing: expected a name, such as dmlbench reproduce gsp/table2. List all with "
            "dmlbench reproduce --list."
        )
    if name in known:
        return name
    if name in tables():
        raise ConfigError(f"{name}: the table has no experiment yet, so its rows cannot be run.")
    raise ConfigError(f"no table or experiment is called '{name}': {closest(name, listed, most=len(listed))}")


def shard_of(shard: str | None) -> tuple[int, int]:
    if shard is None:
        return 1, 1
    match = re.fullmatch(r"([1-9]\d{0,5})/([1-9]\d{0,5})", str(shard))
    if match is None or int(match[1]) > int(match[2]):
        raise ConfigError(f"shard: got {shard}, expected i/n with i from 1 to n, such as 2/4.")
    return int(match[1]), int(match[2])


def select_table(args: Any, name: str, folders: Sequence[Path], given: Sequence[str]) -> Table:
    """The rows that a command line asks for; those of ``given`` in ``NARROWING`` choose among the paper's scores."""
    from dmlbench.apps.paper_comparison import moving  # torch comes with it, which a mistake need not wait for

    file = experiments(folders)[name]
    reproduce = reproduce_of(file)
    if (told := experiment_rows.instead_of_rows(reproduce)) and not reproduce.get("rows"):
        raise ConfigError(f"{name} cannot be run: it {told}.")
    labels = None if args.rows is None else list(args.rows)
    coordinates = {key: list(found) for key in ("fold", "repeat") if (found := getattr(args, key))}
    check_at_least(0, repeat=min(coordinates.get("repeat", [0])))
    choices, params = _composed(name)
    part = [] if labels is None else [f"row={','.join(sorted(set(labels)))}"]
    if reproduce.get("rows") and name in tables():
        everything = experiment_rows.rows_of_paper(name, reproduce, choices)
        groups = {key: options for key in NARROWING if (options := _options_of(given, key))}
        rows = experiment_rows.narrowed(everything, labels, groups)
        part = _part(rows, everything)
        rest = in_train([override for override in given if key_of(override) not in NARROWING])
    elif reproduce.get("rows"):
        rows = experiment_rows.own_rows(name, reproduce, labels, _options_of(given, "dataset"))
        rest = in_train([override for override in given if key_of(override) != "dataset"])
        part += sorted(moving(given, choosing=()))
    elif labels is None:
        configs, named = grid(params, in_train(given, is_grid=True))
        coordinates = {**named, **coordinates}
        also = [in_train([*experiment_rows.words(extra), *given], is_grid=True) for extra in reproduce.get("also", ())]
        rows = [Row("", last_of_each([f"experiment={name}", *config])) for config in [*also, *configs]]
        rest = []
        part = sorted(moving(given, choosing=()))
    else:
        raise ConfigError(
            f"rows: {name} is a grid without row names. Select configs by their values, as in pooling=gap (see "
            f"experiment={name})."
        )
    rows = [row if row.blocker else replace(row, overrides=last_of_each([*row.overrides, *rest])) for row in rows]
    if all(row.blocker for row in rows):
        why = "; ".join(dict.fromkeys(f"{row.label}: {row.blocker}" for row in rows))
        raise ConfigError(f"{name}: no requested row can be run ({why}).")
    return Table(name, file, reproduce, tuple(rows), coordinates, tuple(part))


def _part(kept: Sequence[Row], everything: Sequence[Row]) -> list[str]:
    """What the kept rows have in common, the same however they were selected."""
    found = []
    for key in (*NARROWING, "row"):
        own, known = ({str(getattr(row.score, key)) for row in rows} for rows in (kept, everything))
        if own != known:
            found.append(f"{key}={','.join(sorted(own))}")
    return found


def _composed(name: str) -> tuple[dict[str, str], dict[str, Any]]:
    """The options that an experiment composes, and its grid."""
    cfg = hydra.compose("train", [f"experiment={name}"], return_hydra_config=True)
    if cfg.reproduce:
        experiment_rows.check_reproduce(OmegaConf.to_container(cfg.reproduce, resolve=False), f"experiment={name}")
    params: Any = OmegaConf.to_container(cfg.hydra.sweeper.params, resolve=False) if cfg.hydra.sweeper.params else {}
    return {group: str(option) for group, option in cfg.hydra.runtime.choices.items()}, params


def _options_of(given: Sequence[str], key: str) -> list[str]:
    """The options that a command line names for a group, separated by commas."""
    values = [override.partition("=")[2] for override in given if override.partition("=")[0].strip() == key]
    return [option.strip() for value in values for option in value.strip("[]").split(",") if option.strip()]


def grid(params: Mapping[str, Any], given: Sequence[str]) -> tuple[list[tuple[str, ...]], dict[str, list[int]]]:
    """The configs of a grid as overrides, the first key varying slowest, and its folds and repeats.

    ``params`` are ``hydra.sweeper.params``; overrides that are ``given`` replace those of the same key.
    """
    texts = last_of_each([*(f"{key}={value}" for key, value in params.items()), *given])
    parsed = OverridesParser.create().parse_overrides(list(texts))
    axes, coordinates = [], {}
    for text, override in zip(texts, parsed, strict=True):
        values = [text]
        if override.is_sweep_override():
            values = [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
        if (key := override.key_or_group) in COORDINATES:
            numbers = [value.partition("=")[2] for value in values]
            if not all(number.isdecimal() for number in numbers):
                raise ConfigError(f"{text}: expected numbers from 0, such as {key}=0,1.")
            coordinates[key] = [int(number) for number in numbers]
        else:
            axes.append(values)
    return [tuple(config) for config in itertools.product(*axes)], coordinates
