"""``dmlbench reproduce``: run what is missing of a table, then print our results vs. the paper."""

import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import shorten

from omegaconf import DictConfig

from dmlbench.apps.table_rows import experiments, paper_tables, reproduce_of, states
from dmlbench.cli.arguments import CommandLine
from dmlbench.cli.command import composed_command, run_command
from dmlbench.cli.errors import groups
from dmlbench.cli.table_selection import known_name, select_table, shard_of
from dmlbench.cli.target_overrides import key_of
from dmlbench.config import config_folders, schema_of
from dmlbench.types import ConfigError, closest

log = logging.getLogger(__name__)

_OWN = tuple(schema_of("reproduce").__dataclass_fields__)
_OF_RUNS = ("hydra", *schema_of("train").__dataclass_fields__)
_LINE = 120
"""Characters of a line of ``--list``."""


def main(line: CommandLine) -> None:
    if line.is_sweep:
        raise ConfigError("-m: reproduce runs all that is missing of a table; leave -m out")
    own, given, launching = parts_of(line, _OWN)
    if line.help or line.cfg:
        run_command("reproduce", lambda cfg: None, own)
        return
    with composed_command("reproduce", own) as cfg:
        folders = config_folders(line.config_dir)
        if cfg.list:
            _print_list(folders)
        elif cfg.measured:
            from dmlbench.results.table import summarize_tables  # pandas comes with it

            print(summarize_tables(Path(cfg.measured)), end="")
        else:
            _reproduce(cfg, folders, given, launching, line.config_dir)


def parts_of(line: CommandLine, keys: Sequence[str]) -> tuple[CommandLine, list[str], list[str]]:
    """The command's own part of a command line, the overrides of its runs, and those of Hydra's launchers."""
    own: list[str] = []
    given: list[str] = []
    launching: list[str] = []
    added = [path.name for path in line.config_dir.iterdir()] if line.config_dir else []
    for override in line.overrides:
        group = re.split("[./@]", key_of(override).strip())[0]
        if group not in (*keys, *_OF_RUNS, *groups(), *added):
            raise ConfigError(f"there is no key '{group}': {closest(group, [*keys, *_OF_RUNS])}")
        if group in ("hydra", "paths"):
            launching.append(override)
        if group in keys:
            own.append(override)
        if (group not in keys and group != "hydra") or group == "paths":
            given.append(override)
    return replace(line, overrides=tuple(own)), given, launching


def _reproduce(
    cfg: DictConfig, folders: Sequence[Path], given: Sequence[str], launching: Sequence[str], config_dir: Path | None
) -> None:
    name, shard = known_name(cfg.table, folders), shard_of(cfg.shard)
    log.info("planning %s", name)
    reproduce = reproduce_of(experiments(folders)[name])
    if reproduce.get("commands") and not reproduce.get("rows"):
        from dmlbench.cli.table_commands import run_commands

        run_commands(name, reproduce, cfg, given, config_dir)
        return
    from dmlbench.cli.table_runs import run_table  # torch comes with it, which a misspelt name need not wait for

    run_table(cfg, select_table(cfg, name, folders, given), shard, given, launching, config_dir)


def _print_list(folders: Sequence[Path]) -> None:
    """Every table and figure of the papers with its state, a line each, then the other experiments."""
    known = experiments(folders)
    names = paper_tables(folders)
    width = max(map(len, names))
    for name in names:
        told = "; ".join(states(name, reproduce_of(known.get(name)), name in known))
        print(f"{name:<{width}}  {shorten(told, _LINE - width - 2, placeholder='…')}")
    others = [name for name in known if name not in names]
    print(f"\nother experiments, which are tables of their own rows or grids: {', '.join(others)}")
