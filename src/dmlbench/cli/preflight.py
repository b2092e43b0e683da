"""Show the runs of a sweep or table, and check them before hours are spent: inputs, comparability and time."""

import logging
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import hydra
from hydra.core.utils import configure_log
from omegaconf import OmegaConf

from dmlbench.apps.experiment_rows import COORDINATES
from dmlbench.apps.paper_comparison import expected_differences
from dmlbench.apps.plan import Compose, Plan, Run, compose_configs, load_inputs, make_plan, require_writable
from dmlbench.apps.time_estimate import CachingTime, RunTime, kind_of, measured_times, timed, total_time
from dmlbench.build import make_experiment
from dmlbench.checks import check
from dmlbench.cli.arguments import CommandLine, for_hydra
from dmlbench.cli.hydra_command import is_sweep, prepare_process, quiet, sweep_jobs
from dmlbench.cli.progress import by_reason, own_overrides
from dmlbench.cli.reproduce import Table
from dmlbench.cli.train import composed_run
from dmlbench.config import composing, key_of
from dmlbench.identity import Overrides, PlannedConfig, planned_config
from dmlbench.results.caveats import by_fact
from dmlbench.runtime import select_device, set_strict_float32
from dmlbench.types import ConfigError, DmlbenchError, RunError, check_fold, counted, shorten

log = logging.getLogger(__name__)

_MOST_TIMED = 6
"""Configs that a dry run times."""

Settings = dict[str, dict[str, Any]]
"""What ``expected_differences`` reads of composed configurations, by ``sha256``."""


def check_sweep(line: CommandLine) -> None:
    """``dmlbench train --dry-run``: list the runs with their state, check their inputs, and estimate their time."""
    if line.help or line.cfg:
        raise ConfigError("--dry-run cannot be combined with --help or --cfg. Leave these out.")
    prepare_process(line.config_dir, "train")
    overrides = for_hydra("train", line)
    with composing(line.config_dir, "train"):
        jobs = [[override for override in overrides if not key_of(override).startswith("hydra")]]
        if (line.is_sweep or is_sweep(overrides)) and not (jobs := sweep_jobs(overrides)):
            raise ConfigError(
                "--dry-run: got a sweeper that chooses jobs during the sweep, expected Hydra's basic one."
            )
        wanted = [_without_coordinates(job) for job in jobs]
        _check_jobs(jobs, dict(zip(wanted, own_overrides(wanted), strict=True)))


def check_trials(trials: Mapping[str, Sequence[str]]) -> None:
    """Check one run of each search, as ``check_sweep`` does; ``trials`` are overrides by the name that messages use.

    Inside of ``composing()``.
    """
    _check_jobs(list(trials.values()), {_without_coordinates(trial): name for name, trial in trials.items()})


def _without_coordinates(overrides: Sequence[str]) -> Overrides:
    return tuple(each for each in overrides if key_of(each) not in COORDINATES)


def _check_jobs(jobs: Sequence[Sequence[str]], names: Mapping[Overrides, str]) -> None:
    """Print the plan of runs and check them. Inside of ``composing()``."""
    configure_log(hydra.compose("train", return_hydra_config=True).hydra.job_logging)
    settings: Settings = {}
    with quiet("dmlbench.recipes"):
        composed = compose_configs(names, composer(settings, is_checked=True))
        configs = [config for config in composed.values() if not isinstance(config, str)]
        failures = [config for config in composed.values() if isinstance(config, str)]
        if not configs:
            raise ConfigError(failures[0])
        first = settings[configs[0].sha256]
        coordinates = {key: _numbers(key, jobs) or [first[key]] for key in COORDINATES}
        num_folds = max(config.num_folds for config in configs)
        for fold in tuple(coordinates["fold"]):
            try:
                check_fold(fold, num_folds)
            except ConfigError as error:
                failures.append(str(error))
                coordinates["fold"].remove(fold)
        failing = _failing_jobs(jobs, [composed[_without_coordinates(job)] for job in jobs])
        _print_failing([(name, reason) for name, reason in failing if reason not in failures])
        output_dir = first["paths"]["output_dir"]
        plan = make_plan(configs, composer({}, is_checked=False), output_dir, coordinates)
    requested = {config.sha256 for config in configs}
    before = [run for run in plan.preparing if run.is_to_do and run.config.sha256 not in requested]
    failures += [f"run stage 1 first: {run.path}." for run in before]
    to_do = [run for wave in plan.waves() for run in wave if run.config.sha256 in requested]
    print_plan(plan, names, failures)
    check_runs(plan, to_do, names, failures, output_dir)


def warn_of_jobs(jobs: Sequence[Sequence[str]]) -> None:
    """Print which jobs of a sweep cannot start, before hours are spent on the others. Inside of ``composing()``.

    Raises:
        ConfigError: no job can start, or one has a misspelt option, which Hydra composes before it starts any.
    """
    wanted = [tuple(o for o in job if re.split("[./]", key_of(o))[0] not in (*COORDINATES, "hydra")) for job in jobs]
    with quiet("dmlbench.recipes"):
        composed = compose_configs(wanted, composer({}, is_checked=True))
        for overrides in (each for each, config in composed.items() if isinstance(config, str)):
            composed_run(overrides)  # an option that Hydra cannot compose ends the whole sweep: its error is enough
    found = _failing_jobs(jobs, [composed[overrides] for overrides in wanted])
    if len(found) == len(jobs):
        reasons = dict.fromkeys(reason for _, reason in found)
        raise ConfigError(f"all {len(jobs)} runs would fail: {' '.join(reasons)}")
    _print_failing(found)


def _failing_jobs(jobs: Sequence[Sequence[str]], configs: Sequence[PlannedConfig | str]) -> list[tuple[str, str]]:
    """Name and reason of each job whose config cannot be composed, or has no such fold."""
    found: list[tuple[str, str]] = []
    for job, name, config in zip(jobs, own_overrides(jobs), configs, strict=True):
        if isinstance(config, str):
            found.append((name, config))
            continue
        folds = (o.partition("=")[2] for o in job if key_of(o) == "fold")
        try:
            for fold in filter(str.isdecimal, folds):
                check_fold(int(fold), config.num_folds)
        except ConfigError as error:
            found.append((name, str(error)))
    return found


def _print_failing(found: Sequence[tuple[str, str]]) -> None:
    for reason, names in by_reason(found).items():
        print(f"dmlbench: {names} will fail: {reason}", file=sys.stderr)


def _numbers(key: str, jobs: Sequence[Sequence[str]]) -> list[int]:
    """The folds or repeats of jobs."""
    given = ([each.partition("=")[2] for each in job if key_of(each) == key] for job in jobs)
    texts = dict.fromkeys(values[-1] for values in given if values)  # Hydra takes the last
    if wrong := [text for text in texts if not text.isdecimal()]:
        raise ConfigError(f"{key}: got {wrong[0]}, expected a number from 0.")
    return [int(text) for text in texts]


def composer(settings: Settings, *, is_checked: bool) -> Compose:
    """Compose configs, and keep their settings; with ``is_checked`` also check them as a run does."""

    def planned(overrides: Sequence[str]) -> PlannedConfig:
        cfg = composed_run(overrides)
        if is_checked:
            check(cfg)
        config = planned_config(tuple(overrides), cfg)
        parts: Any = OmegaConf.to_container(cfg, resolve=False)
        settings[config.sha256] = {
            **{key: parts[key] for key in ("head", "evaluation", "runtime", *COORDINATES)},
            **{key: OmegaConf.to_container(cfg[key], resolve=True) for key in ("backbone", "paths")},
        }
        return config

    return planned


def print_plan(plan: Plan, names: Mapping[Overrides, str], failures: Sequence[str]) -> None:
    """Print the states of every config's requested runs."""
    shown = [*{config.sha256: config for config in plan.first.values()}.values(), *plan.configs]
    of_config = {config.sha256: names.get(config.overrides, "") for config in shown}
    of_name, of_place = max(map(len, of_config.values())), max(len(config.place) for config in shown)
    for config in shown:
        states = Counter(run.state for run in plan.requested if run.config.sha256 == config.sha256)
        name = f"{of_config[config.sha256]:<{of_name}}  " if of_name else ""
        print(f"{name}{config.place:<{of_place}}  {_in_words(states) or 'no run requested'}")
    for failure in dict.fromkeys(failures):
        print(f"not planned: {failure}")
    total = _in_words(Counter(run.state for run in plan.requested))
    print(f"{counted(len(shown), 'config')}, {counted(len(plan.requested), 'run')}: {total}")


def _in_words(states: Counter[str]) -> str:
    return ", ".join(f"{count} {state}" for state, count in states.items())


def print_time(
    to_do: Sequence[Run], times: Mapping[str, RunTime], names: Mapping[Overrides, str] | None = None
) -> None:
    """Print the number of runs to do and their time; with ``names`` of configs, also how the times are known."""
    total = total_time(to_do, times)
    print(f"to run here: {len(to_do)}{f', {total}' if total else ''}")
    if names is None:
        return
    of_kind: dict[tuple[str, ...], dict[RunTime, list[str]]] = {}  # names of runs
    for run in (run for run in to_do if run.config.sha256 in times):
        *place, _ = kind_of(run.config)
        of_time = of_kind.setdefault(tuple(place), {})
        of_time.setdefault(times[run.config.sha256], []).append(names.get(run.config.overrides) or run.config.name)
    for kind, of_time in of_kind.items():
        for each, own in of_time.items():
            which = f" ({shorten(list(dict.fromkeys(own)), most=3)})" if len(of_time) > 1 else ""
            print(f"  {'/'.join(kind)}{which}: {counted(len(own), 'run')}, {each}")


def check_runs(
    plan: Plan, to_do: Sequence[Run], names: Mapping[Overrides, str], failures: Sequence[str], output_dir: str,
    *, table: Table | None = None, settings: Settings | None = None, reasons: Sequence[str] = (),
    is_elsewhere: bool = False,
) -> None:  # fmt: skip
    """Check the inputs and the output folder of runs, print their time and which rows will not be comparable.

    Args:
        failures: why configs cannot be composed.
        table: of a paper, with the ``settings`` of its configs and the ``reasons`` why no row is comparable.
        is_elsewhere: another machine runs them: inputs and time are left out.

    Raises:
        RunError: something is missing.
    """
    configs = {run.config.sha256: run.config for run in to_do}
    inputs = load_inputs([] if is_elsewhere else configs.values())
    if table is not None and table.has_scores:
        _print_comparability(table, configs, settings or {}, inputs.notes, reasons)
    times, errors = measured_times(plan), dict(inputs.missing)
    if not is_elsewhere:
        errors |= _add_estimates(times, to_do, names, inputs.kinds)
    print_time(to_do, times, names)
    if is_elsewhere:
        print("data, weights and time were not checked: the launcher uses other machines")
    problems = {failure: list[str]() for failure in failures}
    for sha256, error in errors.items():
        problems.setdefault(str(error), []).append(names.get(configs[sha256].overrides) or configs[sha256].name)
    count = sum(run.config.sha256 in errors for run in to_do)
    try:
        require_writable(output_dir)
    except ConfigError as error:
        problems[str(error)], count = [], len(to_do)
    if problems:
        listed = " ".join(f"{what} Affects {', '.join(rows)}." if rows else what for what, rows in problems.items())
        what = (
            f"{count} of {len(to_do)} runs cannot start"
            if count
            else f"{counted(len(failures), 'config')} cannot be run"
        )
        raise RunError(f"{what}: {listed}")


def _print_comparability(
    table: Table, configs: Mapping[str, PlannedConfig], settings: Settings, notes: Mapping[str, Sequence[str]],
    reasons: Sequence[str],
) -> None:  # fmt: skip
    by_overrides = {config.overrides: config for config in configs.values()}
    facts: dict[str, dict[str, None]] = {}
    for row in table.rows:
        if (config := by_overrides.get(row.overrides)) is not None and row.score is not None:
            differences = expected_differences(row, config, settings[config.sha256], notes.get(config.sha256, ()))
            facts.setdefault(row.name, {}).update(dict.fromkeys([*reasons, *differences]))
    lines = by_fact([list(own) for own in facts.values()], list(facts)) if facts else []
    print("".join(f"will not be comparable with the paper: {line}\n" for line in lines), end="")


def _add_estimates(
    times: dict[str, RunTime], to_do: Sequence[Run], names: Mapping[Overrides, str], missing: Mapping[str, str]
) -> dict[str, DmlbenchError]:
    """Add to ``times``: time one config of each kind. Returns the errors of configs that cannot start."""
    of_kind: dict[tuple[str, ...], RunTime] = {}
    errors: dict[str, DmlbenchError] = {}
    for run in to_do:
        config, kind = run.config, kind_of(run.config)
        if config.sha256 in times:
            continue
        if config.sha256 in missing:
            times[config.sha256] = RunTime(None, f"{missing[config.sha256]} missing")
            continue
        if kind not in of_kind and len(of_kind) + len(errors) == _MOST_TIMED:
            times[config.sha256] = RunTime(None, f"a dry run times at most {_MOST_TIMED} configs")
            continue
        if kind not in of_kind:
            estimate = _timed(run, names.get(config.overrides) or config.name)
            if isinstance(estimate, DmlbenchError):
                errors[config.sha256], times[config.sha256] = estimate, RunTime(None, "it cannot start")
                continue
            of_kind[kind] = estimate
        times[config.sha256] = of_kind[kind]
    return errors


def _timed(run: Run, name: str) -> RunTime | DmlbenchError:
    """The time of a run, by a few of its steps, or why it cannot start.

    Images are decoded in this process, and nothing is cached.
    """
    cfg = composed_run(run.overrides)
    cfg.image_cache, cfg.num_workers, cfg.logger = False, 0, None

    log.info("timing %s", name)
    set_strict_float32()
    caching = CachingTime()
    try:
        device = select_device(cfg.device)
    except DmlbenchError as error:  # it may be there when the runs start
        return RunTime(None, str(error))
    try:
        experiment = make_experiment(cfg, run.path, device, complete=caching)
    except DmlbenchError as error:
        return error
    try:
        return timed(experiment, name, caching)
    except ConfigError as error:  # of the first step
        return error
    except DmlbenchError as error:
        return RunTime(None, str(error))
