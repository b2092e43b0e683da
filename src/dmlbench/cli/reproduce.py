"""``dmlbench reproduce``: what is missing of a table is run, then ours is printed beside the paper's."""

import contextlib
import csv
import logging
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.utils import configure_log
from hydra.errors import HydraException
from omegaconf import DictConfig, open_dict
from omegaconf.errors import OmegaConfBaseException

from dmlbench.apps.experiment_tables import (
    QUOTED,
    experiments,
    hours_per_run,
    paper_tables,
    reproduce_of,
    states,
)
from dmlbench.apps.measured import measured
from dmlbench.cli import train
from dmlbench.cli.arguments import CommandLine, for_hydra, key_of
from dmlbench.cli.asked_table import Table, asked_table, in_train, known_name, shard_of
from dmlbench.cli.front import Prepared, explain, groups, prepare_process, require_output_dir, run_hydra
from dmlbench.cli.sweeps import SweepFailed, launcher_for
from dmlbench.cli.written_table import print_table
from dmlbench.config import composing, config_folder, settle
from dmlbench.schemas import ReproduceConfig, TrainConfig
from dmlbench.types import ConfigError, DmlbenchError, RunError, closest

if TYPE_CHECKING:
    from dmlbench.apps.plan import Plan, Run

log = logging.getLogger(__name__)

_OWN = tuple(ReproduceConfig.__dataclass_fields__)
_ON_OTHER_MACHINES = "launcher=submitit_slurm"
"""Which may have the data where this one has none."""
_OF_RUNS = ("hydra", *TrainConfig.__dataclass_fields__)


def main(line: CommandLine) -> None:
    """Plan, run, compare.

    Raises:
        ConfigError: the table, its rows or values of one's own are wrong; runs are of different code or data.
        SweepFailed: runs have failed; the others are done, and the table is written.
    """
    if line.is_sweep:
        raise ConfigError("-m: reproduce runs all that is missing of a table by itself; leave -m out")
    own, given, launching = parts_of(line, _OWN)
    if line.options:
        run_hydra("reproduce", lambda cfg: None, own)
        return
    prepare_process(line.config_dir)
    with composing(line.config_dir):
        cfg = hydra.compose("reproduce", for_hydra("reproduce", own), return_hydra_config=True)
        configure_log(cfg.hydra.job_logging)
        require_output_dir(cfg)
        folders = [*([line.config_dir] if line.config_dir else []), config_folder()]
        if cfg.list:
            _print_list(folders, Path(cfg.paths.output_dir) / "tables")
            return
        if cfg.measured:
            print(measured(Path(cfg.measured)), end="")
            return
        _reproduce(cfg, folders, given, launching, line.config_dir)


def parts_of(line: CommandLine, keys: Sequence[str]) -> tuple[CommandLine, list[str], list[str]]:
    """The command's own part of a command line, what is for the runs, and what is for Hydra's launchers.

    Raises:
        ConfigError: a key is of none of them.
    """
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
    return CommandLine(line.options, line.config_dir, line.words, tuple(own)), given, launching


def _reproduce(
    cfg: DictConfig, folders: Sequence[Path], given: Sequence[str], launching: Sequence[str], folder: Path | None
) -> None:
    from dmlbench.apps.ingredients import what_is_missing
    from dmlbench.apps.plan import CellCache, make_plan
    from dmlbench.apps.reproduce import mixtures, moving

    if cfg.max_hours is not None and not 0 <= cfg.max_hours < float("inf"):
        raise ConfigError(f"max_hours ({cfg.max_hours}) must be a number of hours from 0, or null for no limit")
    name = known_name(cfg.table, folders)
    shard = shard_of(cfg.shard)
    searching = [f"hydra.searchpath=['file://{folder.resolve()}']"] if folder else []

    def compose(overrides: Sequence[str]) -> DictConfig:
        return composed_run([*overrides, *searching])

    log.info("planning %s", name)
    table = asked_table(cfg, name, folders, given, searching)
    cache = CellCache(Path(cfg.paths.cache_dir) / "plans", name, folders, compose)
    with quiet("dmlbench.recipes"):  # each run says what its recipe did, when it is run
        cells = cache.cells(table.wanted)
        known = [cell for cell in cells.values() if not isinstance(cell, str)]
        failures = [cell for cell in cells.values() if isinstance(cell, str)]
        if failures and not known:
            raise ConfigError(failures[0])
        plan = make_plan(known, cache, cfg.paths.output_dir, table.coordinates)
    waves = plan.waves(shard)
    seconds = _print_plan(plan, table, waves, failures)
    # what is asked for is summed up with the rest
    everything = plan if plan.has_all() else make_plan(known, cache, cfg.paths.output_dir, {})
    mixed = mixtures(everything.all_runs(plan), to_do=any(waves) and cfg.max_hours != 0)
    if mixed and not cfg.allow_mixed and not cfg.dry_run:
        raise ConfigError(f"{name}: {'; '.join(mixed)}; allow_mixed=true puts them side by side and says so")
    if cfg.dry_run:
        for note in mixed:
            print(note)
        return
    failed: Sequence[tuple[str, Exception]] = ()
    blocked: dict[str, DmlbenchError] = {}
    count = sum(map(len, waves))
    if waves and cfg.max_hours != 0 and not any(_ON_OTHER_MACHINES in override for override in launching):
        blocked = what_is_missing({run.cell.sha256: run.cell for wave in waves for run in wave}.values(), compose)
        waves = [kept for wave in waves if (kept := [run for run in wave if run.cell.sha256 not in blocked])]
        if blocked and not waves and not any(run.state == "done" for run in everything.runs):
            raise _one_error(blocked)
    if waves:
        jobs = [[(run.overrides, seconds.get(run.cell.sha256)) for run in wave] for wave in waves]
        failed = _launch(jobs, cfg.max_hours, [*launching, *searching], folder)
        before, plan = plan, plan.refreshed()
        everything = plan if everything is before else everything.refreshed()
        mixed = mixtures(everything.all_runs(plan), to_do=False)
    moved = moving(given) if table.lines else []
    file = experiments(folders)[name]
    if table.lines and not file.is_relative_to(config_folder()):
        mixed = [*mixed, f"rows of one's own: {file}"]
    whole = replace(everything, runs=everything.all_runs(plan, preparing=False))
    print_table(cfg, table, whole, cells, moved, mixed, blocked)
    _print_problems(plan, but="failed" if failed else "")
    if failed:
        raise SweepFailed(failed, count)
    if blocked:
        raise RunError(f"{count - sum(map(len, waves))} of {count} runs were not begun: {_one_error(blocked)}")


def _one_error(blocked: Mapping[str, DmlbenchError]) -> DmlbenchError:
    """The errors of several cells as one that says each of them once."""
    errors = list({str(error): error for error in blocked.values()}.values())
    return errors[0] if len(errors) == 1 else type(errors[0])("; ".join(map(str, errors)))


@contextlib.contextmanager
def quiet(name: str) -> Iterator[None]:
    """A logger says no more than warnings."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)


def composed_run(overrides: Sequence[str]) -> DictConfig:
    """A run's configuration as ``dmlbench train`` would have it.

    Raises:
        ConfigError: it cannot be composed.
    """
    try:
        cfg = hydra.compose("train", list(overrides), return_hydra_config=True)
        settle(cfg)
        train.settle_choices(cfg, cfg.hydra)
    except (HydraException, OmegaConfBaseException) as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise ConfigError(str(cause) if isinstance(cause, DmlbenchError) else explain(error)) from error
    with open_dict(cfg):
        del cfg["hydra"]
    return cfg


def _print_plan(
    plan: "Plan", table: Table, waves: Sequence[Sequence["Run"]], failures: Sequence[str]
) -> dict[str, float]:
    """Print what there is and what is to be done; returns what runs of cells take in seconds, where that is known."""
    from dmlbench.apps.reproduce import seconds_per_run

    everything = [*plan.preparing, *plan.runs]
    states_of: dict[str, Counter[str]] = {}
    for run in everything:
        states_of.setdefault(run.cell.sha256, Counter())[run.state] += 1
    shown = [*{cell.sha256: cell for cell in plan.first.values()}.values(), *plan.cells]
    labels = {cell.sha256: table.rows.get(cell.overrides, "") for cell in shown}
    of_label = max(map(len, labels.values()))
    width = max(len(f"{cell.dataset}/{cell.protocol}/{cell.name}") for cell in shown)
    for cell in shown:
        counted = ", ".join(f"{count} {state}" for state, count in states_of.get(cell.sha256, Counter()).items())
        row = f"{labels[cell.sha256]:<{of_label}}  " if of_label else ""
        print(f"{row}{f'{cell.dataset}/{cell.protocol}/{cell.name}':<{width}}  {counted or 'no run asked for'}")
    for failure in dict.fromkeys(failures):
        print(f"not planned: {failure}")
    stated = {}
    for cell in shown:
        chosen = dict(override.partition("=")[::2] for override in cell.overrides)
        stated[cell.sha256] = hours_per_run(table.reproduce, cell.dataset, chosen.get("backbone", table.backbone))
    takes = seconds_per_run(plan, stated)
    total = Counter(run.state for run in everything)
    to_do = [run for wave in waves for run in wave]
    print(
        f"{len(shown)} cells, {len(everything)} runs: "
        + ", ".join(f"{count} {state}" for state, count in total.items())
    )
    print(f"to run here: {len(to_do)}{_cost(to_do, takes, table.reproduce)}\n")
    return {sha256: seconds for sha256, (seconds, _) in takes.items()}


def _cost(to_do: Sequence["Run"], takes: Mapping[str, tuple[float, str]], reproduce: Mapping[str, Any]) -> str:
    """What runs take, as far as is known, and how that is known."""
    if not to_do:
        return ""
    known = [takes[run.cell.sha256] for run in to_do if run.cell.sha256 in takes]
    unknown = len(to_do) - len(known)
    parts = []
    for how in dict.fromkeys(how for _, how in known):
        hours = sum(seconds for seconds, by in known if by == how) / 3600
        stated = reproduce.get("hours_per_run") or {}
        device = "" if how == "measured here" else f" on {stated.get('device', 'an unnamed device')}"
        bound = "at most " if stated.get("upper_bound") and how != "measured here" else "about "
        parts.append(f"{bound}{hours:,.2f} hours {how}{device}")
    if unknown:
        parts.append(f"{unknown} runs of unknown cost" if known else "of unknown cost: no run of it is complete")
    return ", " + ", ".join(parts)


def _launch(
    waves: Sequence[Sequence[tuple[tuple[str, ...], float | None]]], max_hours: float | None,
    overrides: Sequence[str], folder: Path | None,
) -> list[tuple[str, Exception]]:  # fmt: skip
    """Run jobs, given with the seconds that they take, wave by wave; returns those that failed."""
    launcher = launcher_for(Prepared("train", train.task, folder), in_train(overrides))
    is_basic = launcher.is_in_this_process
    started, number, planned, is_used_up = time.monotonic(), 0, 0.0, False
    limit = float("inf") if max_hours is None else 3600 * max_hours
    takes = {tuple(job): seconds or 0.0 for wave in waves for job, seconds in wave}

    def has_time(job: Sequence[str]) -> bool:
        return time.monotonic() - started + takes[tuple(job)] <= limit

    for wave in waves:
        jobs: list[tuple[str, ...]] = []
        for job, seconds in wave:
            if max_hours is not None and max_hours > 0 and seconds is None and not is_basic:
                raise ConfigError("max_hours needs to know what a run takes: run one of them first, without a launcher")
            if limit <= 0 or not has_time(job) or (not is_basic and planned + takes[tuple(job)] > limit):
                log.info("max_hours=%s is used up; start the same command again for the rest", max_hours)
                is_used_up = True
                break
            planned += takes[tuple(job)]
            if is_basic and max_hours is not None:
                launcher.launch([job], number)
                number += 1
            else:
                jobs.append(job)
        if jobs:
            launcher.launch(jobs, number)
            number += len(jobs)
        if max_hours is None:
            launcher.wait()
        if is_used_up:  # what follows needs what was not begun
            break
    launcher.wait(has_time)  # for what others have, as long as there is time to run it
    return launcher.failures


def _print_problems(plan: "Plan", *, but: str) -> None:
    """Runs that failed, cannot be used, or have lost something, one line each, without those of the state ``but``."""
    for run in (*plan.preparing, *plan.runs):
        if run.problem and run.state != but:
            what = {"failed": "failed", "unusable": "cannot be used"}.get(run.state, "note")
            print(f"{what}: {run.problem if str(run.path) in run.problem else f'{run.path}: {run.problem}'}")


def _print_list(folders: Sequence[Path], written: Path) -> None:
    """Every table and figure of the papers with its state, a line each, then the other experiments."""
    known = experiments(folders)
    names = paper_tables(folders)
    width = max(map(len, names))
    for name in names:
        parts = list(states(name, reproduce_of(known.get(name)), name in known))
        if last := _last_verdicts(written / f"{name}.csv"):
            parts.append(f"last table: {last}")
        print(f"{name:<{width}}  {'; '.join(parts)}")
    others = [name for name in known if name not in names]
    print(f"\nother experiments, which are tables of their own rows or grids: {', '.join(others)}")


def _last_verdicts(path: Path) -> str:
    """How many scores of a table that was written had which verdict."""
    from dmlbench.results.verdicts import NEEDS, count_of_verdicts

    with contextlib.suppress(OSError, UnicodeError, csv.Error), path.open(encoding="utf-8", newline="") as file:
        verdicts: Iterator[str] = (line.get("verdict") or "" for line in csv.DictReader(file))
        return count_of_verdicts(verdict for verdict in verdicts if verdict not in ("", QUOTED, NEEDS))
    return ""
