"""Complete runs over train-test splits, each with the name of its method and what its split says of itself."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dmlbench.apps.tables import Found, named_configs
from dmlbench.config import load_config
from dmlbench.results.cautions import by_row, cautions_of_rows
from dmlbench.results.store import CONFIG, RunInfo, find_runs, read_result, require_own_place
from dmlbench.runtime import read_json
from dmlbench.types import ConfigError, RunError

Kept = TypeVar("Kept")

log = logging.getLogger(__name__)

Group = tuple[str, str]
"""Data set and protocol, within which runs stand side by side."""


@dataclass(frozen=True)
class SplitRun:
    """A complete run.

    Attributes:
        path: its directory.
        result: its ``result.json``.
        label: of its config, the shortest that tells the configs of its group apart.
        differing: settings in which the configs of its group differ beyond their labels.
    """

    path: Path
    result: Mapping[str, Any]
    label: str
    differing: tuple[str, ...] = ()

    @property
    def fold(self) -> int:
        return int(self.result["fold"])

    @property
    def repeat(self) -> int:
        return int(self.result["repeat"])

    @property
    def distance(self) -> float | None:
        """How far the split's test classes are from its training ones, if its facts say so."""
        value = self.result.get("facts", {}).get("distance")
        return None if value is None else float(value)

    @property
    def kind(self) -> str | None:
        """What kind of split it is, if its facts say so; ``default`` is the one that everybody uses."""
        value = self.result.get("facts", {}).get("kind")
        return None if value is None else str(value)

    @property
    def split(self) -> str:
        """The split as tables and pictures name it."""
        name = self.result.get("facts", {}).get("split", self.fold)
        return f"fold {self.fold}" if self.distance is None else f"{name} ({self.distance:.4g})"


def chosen_runs(runs: Sequence[str], configs: str | None, output_dir: str) -> list[Path]:
    """Directories of the runs that a command names, or of the complete ones of configs that match a pattern.

    Raises:
        ConfigError: it names both or neither.
        RunError: no complete run matches.
    """
    if bool(runs) == bool(configs):
        raise ConfigError("say which runs, by one of the two: run=<run directory> (or several), or configs=<pattern>")
    if configs is None:
        return [Path(run).absolute() for run in runs]
    found = [run.path.absolute() for run in find_runs(output_dir, configs) if run.state == "done"]
    if not found:
        raise RunError(f"no complete run under {output_dir} matches '{configs}'; `dmlbench status` lists what there is")
    return found


def named_runs(paths: Sequence[Path]) -> dict[Group, list[SplitRun]]:
    """Runs by data set and protocol, in the order of methods, folds and repeats.

    Runs over the splits of several files are groups of their own: fold 0 of one is another split than that of another.

    Of configs that are one but for what they were evaluated by, one is taken; the log says which.

    Raises:
        RunError: one is not complete, or was copied from another run.
    """
    results = {path: read_result(path) for path in dict.fromkeys(paths)}
    sequences = {config: _splits_of(next(path for path in results if path.parent == config)) for config in
                 dict.fromkeys(path.parent for path in results)}  # fmt: skip
    several = len(set(sequences.values())) > 1
    configs: dict[Group, dict[Path, Found]] = {}
    for path, result in results.items():
        require_own_place(path, result)
        of_run = (str(result["dataset"]), str(result["protocol"]))
        of_splits = f"-{sequences[path.parent]}" if several and sequences[path.parent] else ""
        group = (of_run[0], of_run[1] + of_splits)
        info = RunInfo(path, *of_run, path.parent.name, result["fold"], result["repeat"])
        found = configs.setdefault(group, {}).setdefault(path.parent, (path.parent, [], {"choices": result["choices"]}))
        found[1].append(info)
    named = named_configs({group: list(found.values()) for group, found in configs.items()})
    return {
        group: [
            SplitRun(run.path, results[run.path], config.label, config.differing)
            for config in members
            for run in sorted(config.runs, key=lambda run: (run.fold, run.repeat))
        ]
        for group, members in named.items()
    }


def _splits_of(run: Path) -> str:
    """Which file of splits a run is of; empty where its protocol reads none."""
    return str(load_config(run / CONFIG).protocol.get("splits_sha256") or "")[:8]


def notes_of(runs: Sequence[SplitRun]) -> list[str]:
    """What a reader must know of the runs' scores."""
    cautions = cautions_of_rows([run.result for run in runs])
    settings = dict.fromkeys(note for run in runs for note in run.differing)
    names = [f"{run.label}, {run.path.name}" for run in runs]
    return by_row(cautions, names) + [f"DIFFERENT SETTINGS: {note}" for note in settings]


def kept_of(
    path: Path, bound: Mapping[str, str], take: Callable[[dict[str, Any]], Kept], *, schema: int
) -> Kept | None:
    """What ``take`` finds in a file that an earlier call kept beside a run of these very weights.

    None where there is no such file, or one of other weights or damaged, as the log then says.
    """
    try:
        held = read_json(path)
        if held["schema"] == schema and {key: held.get(key) for key in bound} == dict(bound):
            return take(held)
        log.info("%s is of other weights; computing again", path)
    except FileNotFoundError:
        pass
    except (ValueError, KeyError, TypeError) as error:
        log.warning("%s is damaged (%s); computing again", path, error)
    return None
