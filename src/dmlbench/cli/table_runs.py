"""Run what is missing of a table's rows or grid, then print and write it."""

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn
from omegaconf import DictConfig

from dmlbench.apps import table_comparison
from dmlbench.apps.plan import Plan, PlannedConfig, Run, compose_configs, make_plan, missing_inputs
from dmlbench.apps.table_rows import hours_per_run
from dmlbench.cli import train
from dmlbench.cli.arguments import in_train
from dmlbench.cli.command import Job, launch, quiet, raise_failures
from dmlbench.cli.reproduce import Table
from dmlbench.config import config_folder
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.papers import describe_table
from dmlbench.results.table import Table as PrintedTable
from dmlbench.results.verdicts import Comparison, side_by_side
from dmlbench.runtime import remove_leftovers
from dmlbench.types import ConfigError, DmlbenchError, RunError

_ON_OTHER_MACHINES = "launcher=submitit_slurm"
"""Which may have the data where this one has none."""
_MOST_LISTED = 5
_LONGEST = 40
"""Characters of a file's name that describe the part of a table; a hash identifies it."""


def run_table(
    cfg: DictConfig, table: Table, shard: tuple[int, int], given: Sequence[str], launching: Sequence[str],
    config_dir: Path | None,
) -> None:  # fmt: skip
    """Plan, run part i of n (``shard``), compare. Overrides: ``given`` of runs, ``launching`` of Hydra's launchers."""
    with quiet("dmlbench.recipes"):  # each run logs what its recipe set
        configs = compose_configs(table.wanted, train.composed_run)
        known = [config for config in configs.values() if not isinstance(config, str)]
        failures = [config for config in configs.values() if isinstance(config, str)]
        if failures and not known:
            raise ConfigError(failures[0])
        plan = make_plan(known, train.composed_run, cfg.paths.output_dir, table.coordinates)
    waves = plan.waves(shard)
    _print_plan(plan, table, waves, failures)
    mixed = table_comparison.mixtures((*plan.runs, *plan.preparing), to_do=any(waves) and cfg.run_missing)
    if cfg.dry_run:
        print("".join(f"{note}\n" for note in mixed), end="")
        return
    if mixed and not cfg.allow_mixed:
        raise ConfigError(f"{table.name}: {'; '.join(mixed)}; allow_mixed=true puts them side by side and says so")
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
        mixed = table_comparison.mixtures((*plan.runs, *plan.preparing), to_do=False)
    moved = table_comparison.moving(given) if table.has_scores else []
    if table.has_scores and not table.file.is_relative_to(config_folder()):
        mixed = [*mixed, f"rows of one's own: {table.file}"]
    _print_table(cfg, table, plan, configs, moved, mixed, blocked)
    for run in plan.requested:
        if run.problem:
            what = {"failed": "failed", "unusable": "cannot be used"}.get(run.state, "note")
            print(f"{what}: {run.problem if str(run.path) in run.problem else f'{run.path}: {run.problem}'}")
    raise_failures(done)
    if blocked:
        raise RunError(f"{count - sum(map(len, waves))} of {count} runs were not begun: {_one_error(blocked)}")


def _one_error(blocked: Mapping[str, DmlbenchError]) -> DmlbenchError:
    """The errors of several configs as one that has each message once."""
    errors = list({str(error): error for error in blocked.values()}.values())
    return errors[0] if len(errors) == 1 else type(errors[0])("; ".join(map(str, errors)))


def _print_plan(plan: Plan, table: Table, waves: Sequence[Sequence[Run]], failures: Sequence[str]) -> None:
    """Print the state of every config's requested runs, how many are to be run, and what these cost."""
    shown = [*{config.sha256: config for config in plan.first.values()}.values(), *plan.configs]
    labels = {config.sha256: table.labels.get(config.overrides, "") for config in shown}
    of_label, width = max(map(len, labels.values())), max(len(config.place) for config in shown)
    stated = {}
    for config in shown:
        of_config = Counter(run.state for run in plan.requested if run.config.sha256 == config.sha256)
        row = f"{labels[config.sha256]:<{of_label}}  " if of_label else ""
        print(f"{row}{config.place:<{width}}  {_counted(of_config) or 'no run requested'}")
        chosen = dict(override.partition("=")[::2] for override in config.overrides)
        backbone = chosen.get("backbone", table.backbone)
        stated[config.sha256] = hours_per_run(table.reproduce, config.dataset, backbone)
    for failure in dict.fromkeys(failures):
        print(f"not planned: {failure}")
    to_do = [run for wave in waves for run in wave]
    total = _counted(Counter(run.state for run in plan.requested))
    print(f"{len(shown)} configs, {len(plan.requested)} runs: {total}")
    takes = table_comparison.seconds_per_run(plan, stated)
    print(f"to run here: {', '.join([str(len(to_do)), *_costs(to_do, takes, table.reproduce)])}\n")


def _counted(states: Counter[str]) -> str:
    return ", ".join(f"{count} {state}" for state, count in states.items())


def _costs(to_do: Sequence[Run], takes: Mapping[str, tuple[float, str]], reproduce: Mapping[str, Any]) -> list[str]:
    known = [takes[run.config.sha256] for run in to_do if run.config.sha256 in takes]
    stated = reproduce.get("hours_per_run") or {}
    parts = []
    for how in dict.fromkeys(how for _, how in known):
        hours = sum(seconds for seconds, by in known if by == how) / 3600
        device = "" if how == "measured here" else f" on {stated.get('device', 'an unnamed device')}"
        bound = "at most " if stated.get("upper_bound") and how != "measured here" else "about "
        parts.append(f"{bound}{hours:,.2f} hours {how}{device}")
    if unknown := len(to_do) - len(known):
        parts.append(f"{unknown} runs of unknown cost" if known else "of unknown cost: no run of it is complete")
    return parts


def _print_table(
    cfg: DictConfig, table: Table, plan: Plan, configs: Mapping[tuple[str, ...], PlannedConfig | str],
    moved: Sequence[str], mixed: Sequence[str], blocked: Mapping[str, DmlbenchError],
) -> None:  # fmt: skip
    """Summarize, print and write the table. A part of it, or one with other values, has its own file name.

    Args:
        configs, blocked: as of ``compare_rows``.
        moved: overrides of the command line that make other configs than the paper's.
        mixed: other reasons why no row is comparable with the paper.
    """
    reasons = [*table_comparison.given_by_hand(moved), *mixed]
    base = Path(cfg.paths.output_dir) / "tables" / f"{table.name}{_suffix(table.part, moved)}"
    notes = [f"a part of the table: {'; '.join(table.part)}"] if table.part else []
    if in_use := [str(run.path) for run in plan.runs if run.state == "running"]:
        listed = ", ".join(in_use[:_MOST_LISTED]) + (" and others" if len(in_use) > _MOST_LISTED else "")
        notes.append(f"left to the processes that have them: {len(in_use)} runs ({listed})")
    if table.has_scores:
        comparisons, deviations = table_comparison.compare_rows(table.rows, plan, configs, blocked, reasons)
        write_comparison(table.name, comparisons, [*notes, *deviations], base)
        return
    spec = EvaluationSpec(metrics=tuple(cfg.metrics), recall_at=tuple(cfg.recall_at))
    summaries = table_comparison.summarize(plan, {config.sha256: spec for config in plan.configs})
    for config in plan.configs:
        if problem := summaries[config.sha256].problem:
            print(f"{config.name} cannot be summarized: {problem}")
    if not any(summary.found for summary in summaries.values()):
        print(f"{table.name}: no config has a complete run yet")
        return
    for note in reasons:
        print(note)
    made = table_comparison.grid_tables(summaries, spec)
    for (dataset, protocol), one in made.items():
        noted = replace(one, notes=(*one.notes, *notes))
        _write_table(noted, base if len(made) == 1 else base.with_name(f"{base.name}-{dataset}-{protocol}"))


def write_comparison(name: str, comparisons: Sequence[Comparison], notes: Sequence[str], base: Path) -> None:
    """Print and write our scores vs. those of the paper's table ``name``."""
    described = describe_table(name)
    of_paper = [f"the paper's numbers: {described.numbers}", *([described.note] if described.note else [])]
    about = f"{described.about} ({described.place})"
    _write_table(side_by_side(name, about, comparisons, [*of_paper, *notes]), base)


def _write_table(table: PrintedTable, base: Path) -> None:
    print(table.to_text())
    remove_leftovers(base.parent)
    table.write(base)
    print(f"written: {base}.md, .csv, .tex\n")


def _suffix(part: Sequence[str], moved: Sequence[str]) -> str:
    """The end of a table's file name; empty for the paper's whole table."""
    if not part and not moved:
        return ""
    values = "-".join(word.partition("=")[2] or word for word in part)
    readable = re.sub(r"[^\w+.,-]+", "_", values[:_LONGEST])
    words = [*([readable] if part else []), *(["own"] if moved else [])]
    digest = hashlib.sha256("\n".join([*part, "", *sorted(moved)]).encode()).hexdigest()
    return f"-{'-'.join([*words, digest[:8]])}"
