"""Run the commands that make a table which is no grid of runs, and compare their numbers with the paper's."""

import dataclasses
import hashlib
import logging
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
from dmlbench.apps.table_rows import about
from dmlbench.cli.arguments import key_of
from dmlbench.cli.table_output import write_table
from dmlbench.config import schema_of
from dmlbench.papers import PaperScore, describe_table, load_table, tables
from dmlbench.results import side_by_side
from dmlbench.results.verdicts import NOT_COMPARABLE, NOT_RUN, Comparison, verdict_on
from dmlbench.runtime import read_json
from dmlbench.types import ConfigError, RunError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Command:
    """A command of a table.

    Attributes:
        arguments: of ``dmlbench``.
        output: the file with its numbers, if it writes one for the table.
    """

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

    ``dmlbench train`` skips its complete runs, other commands are skipped where their output exists.

    Args:
        name: of the experiment.
        reproduce: of the experiment, with ``commands``.
        cfg: of ``dmlbench reproduce``.
        given: overrides for the commands; ``dataset`` chooses among them.
        config_dir: folder of the user's own configuration files.

    Raises:
        ConfigError: the command line asks for rows, folds, repeats or a shard, or chooses no command.
        RunError: a command failed.
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
    comparisons = []
    for score in load_table(name):
        found = next((number for one in measured if (number := _number(score, one)) is not None), None)
        if found is None:
            comparisons.append(Comparison(score, NOT_RUN))
        elif reasons:
            comparisons.append(Comparison(score, NOT_COMPARABLE, *found, note="; ".join(reasons)))
        else:
            comparisons.append(verdict_on(score, *found))
    described = describe_table(name)
    paper = [f"the paper's numbers: {described.numbers}", *([described.note] if described.note else [])]
    write_table(side_by_side.SideBySide(name, about(name), tuple(comparisons), (*paper, *of_numbers)), folder)


def _number(score: PaperScore, measured: Mapping[str, Any]) -> tuple[float, float | None] | None:
    """Mean and standard deviation of what a command of ``dmlbench oodml`` measured for a score, if it did."""
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
