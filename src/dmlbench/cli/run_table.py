"""Run what is missing of a table's rows or grid, or the commands that make it, then print and write it."""

import csv
import dataclasses
import hashlib
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from hydra.core.utils import JobReturn

from dmlbench.apps import paper_comparison
from dmlbench.apps.compare_configs import ConfigSummary, build_tables
from dmlbench.apps.experiment_rows import hours_per_run
from dmlbench.apps.pictures import save_figure
from dmlbench.apps.plan import Plan, Run, compose_configs, make_plan, missing_inputs
from dmlbench.cli import train
from dmlbench.cli.arguments import in_train
from dmlbench.cli.hydra_command import Job, launch, quiet, raise_failures
from dmlbench.cli.reproduce import Table
from dmlbench.config import config_folder, key_of, schema_of
from dmlbench.evaluation.metrics.registry import score_named
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.identity import PlannedConfig, planned_config
from dmlbench.papers import PaperScore, describe_table, load_table, tables
from dmlbench.results.verdicts import NOT_COMPARABLE, NOT_RUN, Comparison, side_by_side, verdict_on
from dmlbench.runtime import read_json
from dmlbench.types import ConfigError, DmlbenchError, RunError

_ON_OTHER_MACHINES = "launcher=submitit_slurm"
"""Which may have the data where this one has none."""
_MOST_LISTED = 5
_LONGEST = 40
"""Characters of a file's name that describe the part of a table; a hash identifies it."""
MINUS, BEST_PUBLISHED = " minus ", "the state of the art"
"""How rows of ProxyNCA++'s figure 1 name a difference, and the best of the methods that its tables quote."""


def run_table(
    args: Any, table: Table, shard: tuple[int, int], given: Sequence[str], launching: Sequence[str],
    config_dir: Path | None,
) -> None:  # fmt: skip
    """Plan, run part i of n (``shard``), compare. Overrides: ``given`` of runs, ``launching`` of Hydra's launchers."""
    with quiet("dmlbench.recipes"):  # each run logs what its recipe set
        configs = compose_configs(table.wanted, _planned)
        known = [config for config in configs.values() if not isinstance(config, str)]
        failures = [config for config in configs.values() if isinstance(config, str)]
        if failures and not known:
            raise ConfigError(failures[0])
        plan = make_plan(known, _planned, args.paths.output_dir, table.coordinates)
    waves = plan.waves(shard)
    _print_plan(plan, table, waves, failures)
    mixed = paper_comparison.mixtures((*plan.runs, *plan.preparing), to_do=any(waves) and args.run_missing)
    if args.dry_run:
        print("".join(f"{note}\n" for note in mixed), end="")
        return
    if mixed and not args.allow_mixed:
        raise ConfigError(f"{table.name}: {'; '.join(mixed)}; allow_mixed=true puts them side by side and says so")
    done: list[JobReturn] = []
    blocked: dict[str, DmlbenchError] = {}
    count = sum(map(len, waves))
    if waves and args.run_missing:
        if not any(_ON_OTHER_MACHINES in override for override in launching):
            blocked = missing_inputs({run.config.sha256: run.config for wave in waves for run in wave}.values())
            waves = [kept for wave in waves if (kept := [run for run in wave if run.config.sha256 not in blocked])]
            if blocked and not waves and not any(run.state == "done" for run in plan.runs):
                raise _one_error(blocked)
        for wave in waves:
            jobs = [run.overrides for run in wave]
            done += launch(Job("train", train.task, config_dir), jobs, in_train(launching), len(done))
        plan = plan.refreshed()
        mixed = paper_comparison.mixtures((*plan.runs, *plan.preparing), to_do=False)
    moved = paper_comparison.moving(given) if table.has_scores else []
    if table.has_scores and not table.file.is_relative_to(config_folder()):
        mixed = [*mixed, f"rows of one's own: {table.file}"]
    _print_table(args, table, plan, configs, moved, mixed, blocked)
    for run in plan.requested:
        if run.problem:
            what = {"failed": "failed", "unusable": "cannot be used"}.get(run.state, "note")
            print(f"{what}: {run.problem if str(run.path) in run.problem else f'{run.path}: {run.problem}'}")
    raise_failures(done)
    if blocked:
        raise RunError(f"{count - sum(map(len, waves))} of {count} runs were not begun: {_one_error(blocked)}")


def _planned(overrides: Sequence[str]) -> PlannedConfig:
    return planned_config(tuple(overrides), train.composed_run(overrides))


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
        if chosen.get("fit") != "untrained":  # the hours are of a training
            stated[config.sha256] = hours_per_run(table.reproduce, config.dataset, backbone)
    for failure in dict.fromkeys(failures):
        print(f"not planned: {failure}")
    to_do = [run for wave in waves for run in wave]
    total = _counted(Counter(run.state for run in plan.requested))
    print(f"{len(shown)} configs, {len(plan.requested)} runs: {total}")
    takes = paper_comparison.seconds_per_run(plan, stated)
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
    args: Any, table: Table, plan: Plan, configs: Mapping[tuple[str, ...], PlannedConfig | str],
    moved: Sequence[str], mixed: Sequence[str], blocked: Mapping[str, DmlbenchError],
) -> None:  # fmt: skip
    """Summarize, print and write the table. A part of it, or one with other values, has its own file name.

    Args:
        configs, blocked: as of ``compare_rows``.
        moved: overrides of the command line that make other configs than the paper's.
        mixed: other reasons why no row is comparable with the paper.
    """
    reasons = [*paper_comparison.given_by_hand(moved), *mixed]
    base = Path(args.paths.output_dir) / "tables" / f"{table.name}{_suffix(table.part, moved)}"
    notes = [f"a part of the table: {'; '.join(table.part)}"] if table.part else []
    if in_use := [str(run.path) for run in plan.runs if run.state == "running"]:
        listed = ", ".join(in_use[:_MOST_LISTED]) + (" and others" if len(in_use) > _MOST_LISTED else "")
        notes.append(f"left to the processes that have them: {len(in_use)} runs ({listed})")
    if table.has_scores:
        comparisons, deviations = paper_comparison.compare_rows(table.rows, plan, configs, blocked, reasons)
        write_comparison(table.name, comparisons, [*notes, *deviations], base)
        return
    spec = EvaluationSpec(metrics=tuple(args.metrics), recall_at=tuple(args.recall_at))
    summaries = paper_comparison.summarize(plan, {config.sha256: spec for config in plan.configs})
    for config in plan.configs:
        if problem := summaries[config.sha256].problem:
            print(f"{config.name} cannot be summarized: {problem}")
    if not any(summary.found for summary in summaries.values()):
        print(f"{table.name}: no config has a complete run yet")
        return
    labels = {config.sha256: table.labels.get(config.overrides, "") for config in plan.configs}
    grouped = paper_comparison.configs_of_grid(summaries, labels)
    for (dataset, protocol), one in build_tables(grouped, spec).items():
        noted = replace(one, notes=(*one.notes, *notes, *reasons))
        noted.publish(base if len(grouped) == 1 else base.with_name(f"{base.name}-{dataset}-{protocol}"))
    if references := table.reproduce.get("references"):
        _print_references(args, grouped, references, base)


def _print_references(
    args: Any, grouped: Mapping[tuple[str, str], Sequence[ConfigSummary]], references: Sequence[str], base: Path
) -> None:
    """Print and write the differences of complete rows from complete reference rows."""
    from dmlbench.apps import reference_comparison as compared

    complete = {dataset: compared.complete_rows(configs) for (dataset, _), configs in grouped.items()}
    whole = {
        dataset: configs for dataset, configs in complete.items()
        if len(configs) > 2 and set(references) <= {config.label for config in configs}
    }  # fmt: skip
    for dataset in complete.keys() - whole.keys():
        print(f"{dataset}: differences need all runs of {', '.join(references)}, and of one more row")
    if not whole:
        return
    sentences = []
    for dataset, configs in whole.items():
        for metric, found in compared.differences_of(configs, references, args.metrics).items():
            title = f"{dataset}, {score_named(metric).label}: differences"
            made = compared.reference_table(title, configs, found, metric)
            made.publish(base.with_name(f"{base.name}-{dataset}-{metric}-differences"))
            sentences += [f"{dataset}, {sentence}" for sentence in compared.conclusions(found, metric)]
    print("\n".join(sentences))
    metric = args.metrics[-1]
    save_figure(compared.score_figure(whole, references, metric), base.with_suffix(".png"))
    save_figure(compared.rank_figure(whole, metric), base.with_name(f"{base.name}-ranks.png"))
    print(f"written: {base.with_suffix('.png')}, {base.with_name(f'{base.name}-ranks.png')}")


def write_comparison(name: str, comparisons: Sequence[Comparison], notes: Sequence[str], base: Path) -> None:
    """Print and write our scores vs. those of the paper's table ``name``."""
    described = describe_table(name)
    of_paper = [f"the paper's numbers: {described.numbers}", *([described.note] if described.note else [])]
    about = f"{described.about} ({described.place})"
    side_by_side(name, about, comparisons, [*of_paper, *notes]).publish(base)


def _suffix(part: Sequence[str], moved: Sequence[str]) -> str:
    """The end of a table's file name; empty for the paper's whole table."""
    if not part and not moved:
        return ""
    values = "-".join(word.partition("=")[2] or word for word in part)
    readable = re.sub(r"[^\w+.,-]+", "_", values[:_LONGEST])
    words = [*([readable] if part else []), *(["own"] if moved else [])]
    digest = hashlib.sha256("\n".join([*part, "", *sorted(moved)]).encode()).hexdigest()
    return f"-{'-'.join([*words, digest[:8]])}"


@dataclass(frozen=True)
class Command:
    """A command of ``dmlbench`` that makes a table, and the file that it writes its numbers to, if any."""

    arguments: tuple[str, ...]
    output: Path | None

    def __str__(self) -> str:
        return shlex.join(["dmlbench", *self.arguments])

    @property
    def is_done(self) -> bool:
        return self.output is not None and self.output.exists()


def run_commands(
    name: str, reproduce: Mapping[str, Any], args: Any, given: Sequence[str], config_dir: Path | None
) -> None:
    """Run the commands of an experiment that are not done, then print and write what the paper has numbers for.

    ``dmlbench train`` skips its complete runs; other commands are skipped where their output exists.
    """
    if unknown := [key for key in ("rows", "fold", "repeat", "shard") if getattr(args, key) is not None]:
        raise ConfigError(f"{name} is made by commands: {unknown[0]} chooses nothing of it")
    folder = Path(args.paths.output_dir) / "tables" / name
    commands = list(_commands(name, reproduce["commands"], given, config_dir, folder))
    if not commands:
        raise ConfigError(f"{name} has no command for {' '.join(given)}")
    if needs := reproduce.get("needs"):
        print(f"needs {needs}")
    for i, command in enumerate(commands, start=1):
        by_hand = "<" in str(command)
        state = "done" if command.is_done else "to be completed by hand" if by_hand else "to run"
        print(f"[{i}/{len(commands)}] {state}: {command}", flush=True)
        if args.dry_run or not args.run_missing or by_hand or command.is_done:
            continue
        if command.output is not None:
            command.output.parent.mkdir(parents=True, exist_ok=True)
        code = subprocess.run([sys.executable, "-m", "dmlbench", *command.arguments], check=False).returncode
        if code:
            raise RunError(f"{command} ended with exit code {code}; start the same command again to resume")
    if not args.dry_run and _has_numbers(name):
        _print_comparison(name, commands, given, folder)


def _has_numbers(name: str) -> bool:
    return name in tables() and any(score.mean is not None for score in load_table(name))


def _commands(
    name: str, lines: Sequence[str], given: Sequence[str], config_dir: Path | None, folder: Path
) -> Iterator[Command]:
    """The commands with the overrides that they know, and with a file for their numbers where the paper has some."""
    chosen = [override.partition("=")[2] for override in given if override.startswith("dataset=")]
    datasets = {dataset for options in chosen for dataset in options.strip("[]").split(",")}
    for line in lines:
        words = shlex.split(line)[1:]
        if datasets:
            own = next((word for word in words if word.startswith("dataset=")), "dataset=")
            if not (kept := [dataset for dataset in own.removeprefix("dataset=").split(",") if dataset in datasets]):
                continue
            words[words.index(own)] = f"dataset={','.join(kept)}"
        schema = schema_of("_".join(words[:2]) if words[0] in ("oodml", "study") else words[0])
        keys = [field.name for field in dataclasses.fields(schema)]
        rest = [override for override in given if not override.startswith("dataset=")]
        known = [o for o in rest if words[0] == "reproduce" or key_of(o).partition(".")[0] in keys]
        words += [*known, *(["--config-dir", str(config_dir)] if config_dir else [])]
        output = None
        if "output" in keys and _has_numbers(name):
            digest = hashlib.sha256("\n".join(words).encode()).hexdigest()
            output = folder.with_name(f"{folder.name}-{digest[:8]}.json")
            words.append(f"output={output}")
        yield Command(tuple(words), output)


def _print_comparison(name: str, commands: Sequence[Command], given: Sequence[str], folder: Path) -> None:
    measured = [read_json(command.output) for command in commands if command.output is not None and command.is_done]
    notes = dict.fromkeys(note for one in measured for note in one["notes"])
    of_numbers = [note for note in notes if note.startswith("halves of")]  # what the distances are of, as in the paper
    reasons = [*paper_comparison.given_by_hand(given), *(note for note in notes if note not in of_numbers)]
    averages, texts, of_bars = _averaged_bars(name, commands, folder.parents[1])
    if texts:
        measured.append(averages)
        of_numbers.append(f"R@1 averaged over {len(commands)} tables: {'; '.join(texts)}")
        reasons += dict.fromkeys(of_bars)
    comparisons = []
    for score in load_table(name):
        found = next((number for one in measured if (number := _number(score, one)) is not None), None)
        if found is None:
            comparisons.append(Comparison(score, NOT_RUN))
        elif reasons:
            comparisons.append(Comparison(score, NOT_COMPARABLE, *found, note="; ".join(reasons)))
        else:
            comparisons.append(verdict_on(score, *found))
    write_comparison(name, comparisons, of_numbers, folder)


def _averaged_bars(
    name: str, commands: Sequence[Command], folder: Path
) -> tuple[dict[str, float], list[str], list[str]]:
    """R@1 of the methods of rows "A minus B", averaged over the tables that commands reproduce.

    Returns:
        Our averages by method, of methods that all tables have; lines of text; why ours are not comparable.
    """
    tables = [command.arguments[1] for command in commands if command.arguments[0] == "reproduce"]
    measured: dict[str, float] = {}
    texts, reasons = list[str](), list[str]()
    for method in dict.fromkeys(part for score in load_table(name) for part in score.row.split(MINUS) if tables):
        scores = [_best_score(table, method) for table in tables]
        lines = [_line_of(folder / f"{table}.csv", best) for table, best in zip(tables, scores, strict=True)]
        ours = [float(line["ours"]) for line in lines if line.get("ours")]
        reasons += [line["note"] for line in lines if line.get("verdict") == NOT_COMPARABLE]
        here = "not run"
        if len(ours) == len(tables):
            measured[method] = float(np.mean(ours))
            here = f"{measured[method]:.1f} here"
        texts.append(f"{method} {np.mean([float(score.mean or 0) for score in scores]):.1f} in the paper, {here}")
    return measured, texts, reasons


def _best_score(table: str, method: str) -> PaperScore:
    """The best R@1 of a method in a paper's table; of published methods the best counts."""
    found = [
        score for score in load_table(table)
        if score.metric == "R@1" and (score.row == method or (method == BEST_PUBLISHED and score.origin == "quoted"))
    ]  # fmt: skip
    return max(found, key=lambda score: score.mean or 0)


def _line_of(path: Path, score: PaperScore) -> dict[str, Any]:
    """The line of a score in a written table, empty where there is none."""
    if score.origin == "quoted":
        return {"ours": score.mean}
    if not path.exists():
        return {}
    with path.open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    wanted = (score.row, str(score.embedding_size), score.metric)
    return next((line for line in lines if (line["row"], line["embedding_size"], line["metric"]) == wanted), {})


def _number(score: PaperScore, measured: Mapping[str, Any]) -> tuple[float, float | None] | None:
    """Mean and standard deviation of what commands measured for a score, if they did."""
    if MINUS in score.row:
        first, second = score.row.split(MINUS)
        return (measured[first] - measured[second], None) if {first, second} <= measured.keys() else None
    if score.dataset != measured.get("dataset", measured.get("test")):
        return None
    if "train" in measured:  # distances between data sets
        return (measured["distance"], None) if score.setting == f"train {measured['train']}" else None
    if "alike" in measured:  # splits
        if score.row.startswith("Default"):
            return next(((step["distance"], None) for step in measured["way"] if step["kind"] == "default"), None)
        return (float(np.mean(measured["alike"])), float(np.std(measured["alike"]))) if measured["alike"] else None
    distances = {f"split {one['split']}": one["here"] for one in measured["distances"]}
    return (distances[score.setting], None) if score.setting in distances else None
