"""``dmlbench reproduce``: run what is missing of a table, then print our results vs. the paper."""

import contextlib
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from hydra.core.utils import JobReturn
from omegaconf import DictConfig

from dmlbench.apps.table_rows import (
    experiments,
    hours_per_run,
    paper_tables,
    reproduce_of,
    states,
)
from dmlbench.cli import train
from dmlbench.cli.arguments import CommandLine, in_train
from dmlbench.cli.command import Job, composed_command, run_command
from dmlbench.cli.errors import groups
from dmlbench.cli.sweeps import launch, raise_failures
from dmlbench.cli.table_output import print_table
from dmlbench.cli.table_selection import Table, known_name, select_table, shard_of
from dmlbench.cli.target_overrides import key_of
from dmlbench.config import config_folder, config_folders, schema_of
from dmlbench.types import ConfigError, DmlbenchError, RunError, closest

if TYPE_CHECKING:
    from dmlbench.apps.plan import Plan, Run

log = logging.getLogger(__name__)

_OWN = tuple(schema_of("reproduce").__dataclass_fields__)
_ON_OTHER_MACHINES = "launcher=submitit_slurm"
"""Which may have the data where this one has none."""
_OF_RUNS = ("hydra", *schema_of("train").__dataclass_fields__)
_LINE = 120
"""Characters of a line of ``--list``."""


def main(line: CommandLine) -> None:
    """Plan, run, compare."""
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
            from dmlbench.apps.published_tables import summarize_tables  # pandas comes with it

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
    from dmlbench.apps.plan import compose_configs, make_plan, missing_inputs
    from dmlbench.apps.table_comparison import mixtures, moving

    name = known_name(cfg.table, folders)
    shard = shard_of(cfg.shard)
    log.info("planning %s", name)
    if (reproduce := reproduce_of(experiments(folders)[name])).get("commands") and not reproduce.get("rows"):
        from dmlbench.cli.table_commands import run_commands

        run_commands(name, reproduce, cfg, given, config_dir)
        return
    table = select_table(cfg, name, folders, given)
    with quiet("dmlbench.recipes"):  # each run logs what its recipe set
        configs = compose_configs(table.wanted, train.composed_run)
        known = [config for config in configs.values() if not isinstance(config, str)]
        failures = [config for config in configs.values() if isinstance(config, str)]
        if failures and not known:
            raise ConfigError(failures[0])
        plan = make_plan(known, train.composed_run, cfg.paths.output_dir, table.coordinates)
    waves = plan.waves(shard)
    _print_plan(plan, table, waves, failures)
    mixed = mixtures((*plan.runs, *plan.preparing), to_do=any(waves) and cfg.run_missing)
    if cfg.dry_run:
        for note in mixed:
            print(note)
        return
    if mixed and not cfg.allow_mixed:
        raise ConfigError(f"{name}: {'; '.join(mixed)}; allow_mixed=true puts them side by side and says so")
    done: list[JobReturn] = []
    blocked: dict[str, DmlbenchError] = {}
    count = sum(map(len, waves))
    if waves and cfg.run_missing:
        if not any(_ON_OTHER_MACHINES in override for override in launching):
            blocked = missing_inputs({run.config.sha256: run.config for wave in waves for run in wave}.values())
            waves = [kept for wave in waves if (kept := [run for run in wave if run.config.sha256 not in blocked])]
            if blocked and not waves and not any(run.state == "done" for run in plan.runs):
                raise _one_error(blocked)
        for wave in waves:
            jobs = [run.overrides for run in wave]
            done += launch(Job("train", train.task, config_dir), jobs, in_train(launching), len(done))
        plan = plan.refreshed()
        mixed = mixtures((*plan.runs, *plan.preparing), to_do=False)
    moved = moving(given) if table.has_scores else []
    file = experiments(folders)[name]
    if table.has_scores and not file.is_relative_to(config_folder()):
        mixed = [*mixed, f"rows of one's own: {file}"]
    print_table(cfg, table, plan, configs, moved, mixed, blocked)
    _print_problems(plan)
    raise_failures(done)
    if blocked:
        raise RunError(f"{count - sum(map(len, waves))} of {count} runs were not begun: {_one_error(blocked)}")


def _one_error(blocked: Mapping[str, DmlbenchError]) -> DmlbenchError:
    """The errors of several configs as one that has each message once."""
    errors = list({str(error): error for error in blocked.values()}.values())
    return errors[0] if len(errors) == 1 else type(errors[0])("; ".join(map(str, errors)))


@contextlib.contextmanager
def quiet(name: str) -> Iterator[None]:
    """Only warnings of a logger."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)


def _print_plan(plan: "Plan", table: Table, waves: Sequence[Sequence["Run"]], failures: Sequence[str]) -> None:
    """Print the state of every config's requested runs, how many are to be run, and what these cost."""
    from dmlbench.apps.table_comparison import seconds_per_run

    shown = [*{config.sha256: config for config in plan.first.values()}.values(), *plan.configs]
    labels = {config.sha256: table.labels.get(config.overrides, "") for config in shown}
    of_label, width = max(map(len, labels.values())), max(len(config.place) for config in shown)
    for config in shown:
        of_config = Counter(run.state for run in plan.requested if run.config.sha256 == config.sha256)
        row = f"{labels[config.sha256]:<{of_label}}  " if of_label else ""
        print(f"{row}{config.place:<{width}}  {_counted(of_config) or 'no run requested'}")
    for failure in dict.fromkeys(failures):
        print(f"not planned: {failure}")
    stated = {}
    for config in shown:
        chosen = dict(override.partition("=")[::2] for override in config.overrides)
        backbone = chosen.get("backbone", table.backbone)
        stated[config.sha256] = hours_per_run(table.reproduce, config.dataset, backbone)
    to_do = [run for wave in waves for run in wave]
    total = _counted(Counter(run.state for run in plan.requested))
    print(f"{len(shown)} configs, {len(plan.requested)} runs: {total}")
    print(f"to run here: {len(to_do)}{_cost(to_do, seconds_per_run(plan, stated), table.reproduce)}\n")


def _counted(states: Counter[str]) -> str:
    return ", ".join(f"{count} {state}" for state, count in states.items())


def _cost(to_do: Sequence["Run"], takes: Mapping[str, tuple[float, str]], reproduce: Mapping[str, Any]) -> str:
    if not to_do:
        return ""
    known = [takes[run.config.sha256] for run in to_do if run.config.sha256 in takes]
    unknown = len(to_do) - len(known)
    stated = reproduce.get("hours_per_run") or {}
    parts = []
    for how in dict.fromkeys(how for _, how in known):
        hours = sum(seconds for seconds, by in known if by == how) / 3600
        device = "" if how == "measured here" else f" on {stated.get('device', 'an unnamed device')}"
        bound = "at most " if stated.get("upper_bound") and how != "measured here" else "about "
        parts.append(f"{bound}{hours:,.2f} hours {how}{device}")
    if unknown:
        parts.append(f"{unknown} runs of unknown cost" if known else "of unknown cost: no run of it is complete")
    return ", " + ", ".join(parts)


def _print_problems(plan: "Plan") -> None:
    """One line for each run that failed, is unusable or has lost files."""
    for run in plan.requested:
        if run.problem:
            what = {"failed": "failed", "unusable": "cannot be used"}.get(run.state, "note")
            print(f"{what}: {run.problem if str(run.path) in run.problem else f'{run.path}: {run.problem}'}")


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
