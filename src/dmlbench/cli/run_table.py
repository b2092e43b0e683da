"""Run what is missing of a table's rows or grid, or the commands that make it, then print and write it."""

import csv
import dataclasses
import hashlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from hydra.core.utils import JobReturn

from dmlbench.apps import paper_comparison
from dmlbench.apps.compare_configs import ConfigSummary, asked_columns, build_tables
from dmlbench.apps.pictures import save_figure
from dmlbench.apps.plan import Plan, Run, compose_configs, load_inputs, make_plan, one_error
from dmlbench.apps.time_estimate import measured_times
from dmlbench.cli import train
from dmlbench.cli.arguments import in_train
from dmlbench.cli.hydra_command import Job, launch, quiet, raise_failures
from dmlbench.cli.preflight import Settings, check_runs, composer, print_plan, print_time
from dmlbench.cli.progress import Progress
from dmlbench.cli.reproduce import Table
from dmlbench.config import config_folder, key_of, schema_of
from dmlbench.data.preparation.catalog import title_of
from dmlbench.evaluation.metrics.registry import score_named
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.identity import PlannedConfig
from dmlbench.papers import PaperScore, describe_table, load_table, tables
from dmlbench.results.verdicts import NOT_COMPARABLE, NOT_RUN, Comparison, side_by_side, verdict_on
from dmlbench.runtime import read_json
from dmlbench.types import ConfigError, DmlbenchError, RunError, counted

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
    spec = EvaluationSpec(metrics=tuple(args.metrics), recall_at=tuple(args.recall_at))
    settings: Settings = {}
    compose = composer(settings, is_checked=args.dry_run)
    with quiet("dmlbench.recipes"):  # each run logs what its recipe set
        configs = compose_configs(table.wanted, compose)
        known = [config for config in configs.values() if not isinstance(config, str)]
        failures = [config for config in configs.values() if isinstance(config, str)]
        if failures and not known:
            raise ConfigError(failures[0])
        plan = make_plan(known, compose, args.paths.output_dir, table.coordinates)
    waves = plan.waves(shard)
    to_do = [run for wave in waves for run in wave]
    is_elsewhere = any(_ON_OTHER_MACHINES in override for override in launching)
    moved = paper_comparison.moving(given) if table.has_scores else []
    is_own = table.has_scores and not table.file.is_relative_to(config_folder())
    of_file = [f"rows of your own experiment: {table.file}"] if is_own else []
    mixed = paper_comparison.mixtures((*plan.runs, *plan.preparing), to_do=bool(to_do) and args.run_missing)
    print_plan(plan, table.names, failures)
    if args.dry_run:
        print("".join(f"{note}\n" for note in mixed), end="")
        check_runs(
            plan, to_do, table.names, failures, args.paths.output_dir, table=table, settings=settings,
            reasons=[*paper_comparison.given_by_hand(moved), *of_file], is_elsewhere=is_elsewhere,
        )  # fmt: skip
        return
    if args.run_missing:
        print_time(to_do, measured_times(plan))
    print()
    if mixed and not args.allow_mixed:
        raise ConfigError(f"{table.name}: {'; '.join(mixed)}. Set allow_mixed=true to allow it.")
    done: list[JobReturn] = []
    blocked: Mapping[str, DmlbenchError] = {}
    names: list[str] = []
    if waves and args.run_missing:
        if not is_elsewhere:
            blocked = load_inputs({run.config.sha256: run.config for run in to_do}.values()).missing
            waves = [kept for wave in waves if (kept := [run for run in wave if run.config.sha256 not in blocked])]
            if blocked and not waves and not any(run.state == "done" for run in plan.runs):
                raise one_error(blocked.values())
        names = [_name(run, table) for wave in waves for run in wave]
        job = Job("train", train.task, config_dir, Progress(names))
        for wave in waves:
            done += launch(job, [run.overrides for run in wave], in_train(launching), len(done))
        plan = plan.refreshed()
        mixed = paper_comparison.mixtures((*plan.runs, *plan.preparing), to_do=False)
    _print_table(args, table, plan, configs, moved, [*mixed, *of_file], blocked, spec)
    for run in plan.requested:
        if run.problem:
            what = {"failed": "failed", "unusable": "cannot be used"}.get(run.state, "note")
            print(f"{what}: {run.problem if str(run.path) in run.problem else f'{run.path}: {run.problem}'}")
    raise_failures(done, names)
    if failures:
        raise ConfigError(f"{counted(len(failures), 'config')} cannot be composed: {failures[0]}")
    if blocked:
        count = len(to_do)
        raise RunError(f"{count - len(names)} of {count} runs did not start: {one_error(blocked.values())}")


def _name(run: Run, table: Table) -> str:
    """What log lines call a run."""
    name = table.names.get(run.config.overrides) or run.config.name  # the first stage of a row is no row
    return f"{name} on {run.config.dataset}, fold {run.fold}, repeat {run.repeat}"


def _print_table(
    args: Any, table: Table, plan: Plan, configs: Mapping[tuple[str, ...], PlannedConfig | str],
    moved: Sequence[str], mixed: Sequence[str], blocked: Mapping[str, DmlbenchError], spec: EvaluationSpec,
) -> None:  # fmt: skip
    """Summarize, print and write the table. A part of it, or one with other values, has its own file name.

    Args:
        configs, blocked: as of ``compare_rows``.
        moved: overrides of the command line that make other configs than the paper's.
        mixed: other reasons why no row is comparable with the paper.
        spec: scores of a table without a paper's.
    """
    reasons = [*paper_comparison.given_by_hand(moved), *mixed]
    base = Path(args.paths.output_dir) / "tables" / f"{table.name}{part_suffix(table.part, moved)}"
    notes = [f"a part of the table: {'; '.join(table.part)}"] if table.part else []
    if in_use := [str(run.path) for run in plan.runs if run.state == "running"]:
        listed = ", ".join(in_use[:_MOST_LISTED]) + (" and others" if len(in_use) > _MOST_LISTED else "")
        notes.append(f"running in other processes: {counted(len(in_use), 'run')} ({listed})")
    if table.has_scores:
        comparisons, deviations = paper_comparison.compare_rows(table.rows, plan, configs, blocked, reasons)
        write_comparison(table.name, comparisons, [*notes, *deviations], base)
        return
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
        noted = replace(one, notes=tuple(dict.fromkeys((*one.notes, *notes, *reasons))))
        noted.publish(base if len(grouped) == 1 else base.with_name(f"{base.name}-{dataset}-{protocol}"))
    if references := table.reproduce.get("references"):
        _print_references(asked_columns(spec), grouped, references, base)


def _print_references(
    asked: Sequence[str], grouped: Mapping[tuple[str, str], Sequence[ConfigSummary]], references: Sequence[str],
    base: Path,
) -> None:  # fmt: skip
    """Print and write the differences of complete rows from complete reference rows in the scores ``asked`` for."""
    from dmlbench.apps import reference_comparison as compared

    protocols = len({protocol for _, protocol in grouped})
    complete = {
        f"{dataset}-{protocol}" if protocols > 1 else dataset: compared.complete_rows(configs)
        for (dataset, protocol), configs in grouped.items()
    }
    whole = {
        dataset: configs for dataset, configs in complete.items()
        if set(references) < {config.label for config in configs}
    }  # fmt: skip
    for dataset in complete.keys() - whole.keys():
        print(f"{title_of(dataset)}: differences need all runs of {', '.join(references)}, and of one more row")
    if not whole:
        return
    metrics = compared.compared_metrics([config for configs in whole.values() for config in configs], asked)
    if absent := [metric for metric in asked if metric not in metrics]:
        print(f"no differences in {', '.join(absent)}: the runs have no scores of single queries by it")
    if not metrics:
        return
    sentences = []
    for dataset, configs in whole.items():
        for metric, found in compared.differences_of(configs, references, metrics).items():
            title = f"{title_of(dataset)}, {score_named(metric).label}: differences"
            made = compared.reference_table(title, configs, found, metric)
            made.publish(base.with_name(f"{base.name}-{dataset}-{metric}-differences"))
            sentences += [f"{title_of(dataset)}, {sentence}" for sentence in compared.conclusions(found, metric)]
    print("\n".join(sentences))
    metric = metrics[-1]
    pictures = [base.with_name(f"{base.name}{suffix}.png") for suffix in ("", "-ranks")]
    save_figure(compared.score_figure(whole, references, metric), pictures[0])
    save_figure(compared.rank_figure(whole, metric), pictures[1])
    print(f"written: {pictures[0]}, {pictures[1]}")


def write_comparison(name: str, comparisons: Sequence[Comparison], notes: Sequence[str], base: Path) -> None:
    """Print and write our scores vs. those of the paper's table ``name``."""
    described = describe_table(name)
    of_paper = [f"the paper's numbers: {described.numbers}", *([described.note] if described.note else [])]
    about = f"{described.about} ({described.place})"
    side_by_side(name, about, comparisons, [*of_paper, *notes]).publish(base)


def part_suffix(part: Sequence[str], moved: Sequence[str]) -> str:
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
        raise ConfigError(f"{unknown[0]}: {name} is made by commands without this key. Leave it out.")
    if args.tune:
        raise ConfigError(f"tune: got true, but {name} is made by commands, which search nothing. Leave it out.")
    folder = Path(args.paths.output_dir) / "tables" / name
    commands = list(_commands(name, reproduce["commands"], given, config_dir, folder))
    if not commands:
        raise ConfigError(f"{name} has no command for {' '.join(given)}")
    taken = {argument for command in commands for argument in command.arguments}
    if lost := [override for override in given if override not in taken and key_of(override) != "dataset"]:
        raise ConfigError(f"{lost[0]}: got an override that no command of {name} takes. Leave it out.")
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
        if code := _exit_code([sys.executable, "-m", "dmlbench", *command.arguments]):
            raise RunError(f"{command} ended with exit code {code}. Start the same command again to resume.")
    if not args.dry_run and _has_numbers(name):
        _print_comparison(name, commands, given, folder)


def _exit_code(command: Sequence[str]) -> int:
    """Run a command; when this process is stopped, the command may first save its checkpoint."""
    with subprocess.Popen(command) as process:
        try:
            return process.wait()
        except BaseException as stopped:
            if not isinstance(stopped, KeyboardInterrupt):  # which a terminal sends to both
                process.terminate()
            process.wait()
            raise


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


def _output_of(path: Path) -> Any:
    try:
        return read_json(path)
    except ValueError as error:
        raise RunError(f"{path} is damaged ({error}). Remove it, and start the same command again.") from None


def _print_comparison(name: str, commands: Sequence[Command], given: Sequence[str], folder: Path) -> None:
    measured = [_output_of(command.output) for command in commands if command.output is not None and command.is_done]
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
