"""Run the commands that make a table which is no grid of runs, and compare their numbers with the paper's."""

import csv
import dataclasses
import hashlib
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig

from dmlbench.apps.table_comparison import given_by_hand, moving
from dmlbench.cli.table_runs import write_comparison
from dmlbench.cli.target_overrides import key_of
from dmlbench.config import schema_of
from dmlbench.papers import PaperScore, load_table, tables
from dmlbench.results.verdicts import NOT_COMPARABLE, NOT_RUN, Comparison, verdict_on
from dmlbench.runtime import read_json
from dmlbench.types import ConfigError, RunError

MINUS, BEST_PUBLISHED = " minus ", "the state of the art"
"""How rows of ProxyNCA++'s figure 1 name a difference, and the best of the methods that its tables quote."""


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
    name: str, reproduce: Mapping[str, Any], cfg: DictConfig, given: Sequence[str], config_dir: Path | None
) -> None:
    """Run the commands of an experiment that are not done, then print and write what the paper has numbers for.

    ``dmlbench train`` skips its complete runs; other commands are skipped where their output exists.
    """
    if unknown := [key for key in ("rows", "fold", "repeat", "shard") if cfg[key] is not None]:
        raise ConfigError(f"{name} is made by commands: {unknown[0]} chooses nothing of it")
    folder = Path(cfg.paths.output_dir) / "tables" / name
    commands = list(_commands(name, reproduce["commands"], given, config_dir, folder))
    if not commands:
        raise ConfigError(f"{name} has no command for {' '.join(given)}")
    if needs := reproduce.get("needs"):
        print(f"needs {needs}")
    for i, command in enumerate(commands, start=1):
        by_hand = "<" in str(command)
        state = "done" if command.is_done else "to be completed by hand" if by_hand else "to run"
        print(f"[{i}/{len(commands)}] {state}: {command}", flush=True)
        if cfg.dry_run or not cfg.run_missing or by_hand or command.is_done:
            continue
        if command.output is not None:
            command.output.parent.mkdir(parents=True, exist_ok=True)
        code = subprocess.run([sys.executable, "-m", "dmlbench", *command.arguments], check=False).returncode
        if code:
            raise RunError(f"{command} ended with exit code {code}; start the same command again to resume")
    if not cfg.dry_run and _has_numbers(name):
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
        if datasets and not datasets & {word.removeprefix("dataset=") for word in words}:
            continue
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
    reasons = [*given_by_hand(moving(given)), *(note for note in notes if note not in of_numbers)]
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
