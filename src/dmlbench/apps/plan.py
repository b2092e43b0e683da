"""Plan the runs of a table: its configs, the state of each run, and which runs are left to do."""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dmlbench.components import component
from dmlbench.identity import Overrides, PlannedConfig, require_result_of, run_directory
from dmlbench.results.store import EMBEDDINGS, LOCK, last_error, read_result, run_state
from dmlbench.runtime import shows_progress
from dmlbench.types import ConfigError, DmlbenchError, RunError, check_fold

Compose = Callable[[Overrides], PlannedConfig]
"""The config of overrides of ``dmlbench train``."""


@dataclass(frozen=True)
class Run:
    """A run and its state."""

    config: PlannedConfig
    fold: int
    repeat: int
    path: Path
    is_requested: bool  # whether the command line asks for its fold and repeat
    state: str = "missing"  # done, running, failed, interrupted, missing, or unusable (damaged or of another run)
    problem: str = ""  # why it failed or is unusable; what files a done run has lost
    result: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def overrides(self) -> Overrides:
        return (*self.config.overrides, f"fold={self.fold}", f"repeat={self.repeat}")

    @property
    def is_to_do(self) -> bool:
        left = self.state == "done" and (self.path / LOCK).exists()  # killed before it removed what it need not keep
        return self.is_requested and (left or self.state not in ("done", "unusable"))


def compose_configs(wanted: Iterable[Overrides], compose: Compose) -> dict[Overrides, PlannedConfig | str]:
    """A config for each of the overrides, or why they cannot be composed. Each is composed once."""
    wanted = list(dict.fromkeys(wanted))
    found: dict[Overrides, PlannedConfig | str] = {}
    for overrides in tqdm(wanted, "composing", unit="config", disable=not shows_progress() or len(wanted) < 3):
        try:
            found[overrides] = compose(overrides)
        except DmlbenchError as error:
            found[overrides] = str(error)
    return found


@dataclass(frozen=True)
class Plan:
    """The runs of a table."""

    configs: tuple[PlannedConfig, ...]  # of its rows, in their order
    first: Mapping[Overrides, PlannedConfig]  # by a config's overrides, the config whose runs must come before
    runs: tuple[Run, ...]  # at all folds and repeats, the first repeat of all configs before the next
    preparing: tuple[Run, ...]  # of the configs of ``first``, in the same order

    @property
    def requested(self) -> list[Run]:
        return [run for run in (*self.preparing, *self.runs) if run.is_requested]

    def refreshed(self) -> "Plan":
        """The same runs with their present state."""
        return replace(self, runs=tuple(map(with_state, self.runs)), preparing=tuple(map(with_state, self.preparing)))

    def waves(self, shard: tuple[int, int] = (1, 1)) -> list[list[Run]]:
        """The runs left to do in part i of n (``shard``): those that others follow, then all else.

        A run is in the part of the run that it follows, whatever is done.
        """
        number, count = shard
        requested = [run for run in self.runs if run.is_requested]
        mine = [run for i, run in enumerate(requested) if i % count == number - 1 and run.is_to_do]
        needed = {
            (self.first[run.config.overrides].sha256, run.fold, run.repeat)
            for run in mine
            if run.config.overrides in self.first
        }
        before = [run for run in self.preparing if run.is_to_do and (run.config.sha256, run.fold, run.repeat) in needed]
        return [wave for wave in (before, mine) if wave]


def make_plan(
    configs: Sequence[PlannedConfig], compose: Compose, output_dir: str, coordinates: Mapping[str, Sequence[int]]
) -> Plan:
    """The runs of configs at all folds and repeats of their protocols; ``coordinates`` narrow what is requested."""
    for fold in coordinates.get("fold", ()) if configs else ():
        check_fold(fold, max(config.num_folds for config in configs))
    known: dict[Overrides, PlannedConfig | str] = {config.overrides: config for config in configs}
    needed = dict.fromkeys(config.planned_by for config in configs if config.planned_by is not None)
    known |= compose_configs((overrides for overrides in needed if overrides not in known), compose)
    first: dict[Overrides, PlannedConfig] = {}
    for config in configs:
        if config.planned_by is not None:
            before = known[config.planned_by]
            if isinstance(before, str):
                raise RunError(before)
            first[config.overrides] = before
    hidden = {config.sha256: config for config in first.values()}  # a grid may name both stages; the first is no row
    rows = {config.sha256: config for config in configs if config.sha256 not in hidden}
    found = [_runs(list(part.values()), output_dir, coordinates) for part in (rows, hidden)]
    return Plan(tuple(rows.values()), first, *found)


def _runs(
    configs: Sequence[PlannedConfig], output_dir: str, coordinates: Mapping[str, Sequence[int]]
) -> tuple[Run, ...]:
    placed = []
    for i, config in enumerate(configs):
        folds, repeats = range(config.num_folds), range(config.num_repeats)
        asked_folds, asked_repeats = coordinates.get("fold", folds), coordinates.get("repeat", repeats)
        for fold in folds:
            for repeat in dict.fromkeys([*repeats, *asked_repeats]):  # more repeats than the protocol's are welcome
                path = run_directory(output_dir, config.dataset, config.protocol, config.name, fold, repeat)
                run = Run(config, fold, repeat, path, fold in asked_folds and repeat in asked_repeats)
                placed.append((repeat, fold, i, with_state(run)))
    return tuple(run for *_, run in sorted(placed, key=lambda entry: entry[:3]))


def with_state(run: Run) -> Run:
    """A run with its present state."""
    run = replace(run, state="missing", problem="", result={})
    if not run.path.is_dir():
        return run
    try:
        state = run_state(run.path)
        if state != "done":
            return replace(run, state=state, problem=last_error(run.path) if state == "failed" else "")
        result = read_result(run.path)
        require_result_of(run.path, result, run.config.sha256, run.config.base_seed)
    except RunError as error:
        return replace(run, state="unusable", problem=str(error))
    lost = "embeddings_sha256" in result and not (run.path / EMBEDDINGS).exists()
    problem = f"{run.path} has lost its {EMBEDDINGS}: its scores are kept, others need a new run" if lost else ""
    return replace(run, state="done", problem=problem, result=result)


@dataclass(frozen=True)
class Inputs:
    """The data sets and weights of configs, by ``sha256``."""

    missing: Mapping[str, DmlbenchError]  # why runs cannot start
    kinds: Mapping[str, str]  # what is missing: "data", "weights" or both
    notes: Mapping[str, tuple[str, ...]]  # how a data set differs from the published one


def one_error(errors: Iterable[DmlbenchError]) -> DmlbenchError:
    """Several errors as one that has each message once."""
    distinct = list({str(error): error for error in errors}.values())
    return distinct[0] if len(distinct) == 1 else type(distinct[0])(" ".join(map(str, distinct)))


def load_inputs(configs: Iterable[PlannedConfig]) -> Inputs:
    """Load each data set and each pretrained backbone of configs once."""
    configs = list(configs)
    errors: dict[str, DmlbenchError] = {}
    notes: dict[str, tuple[str, ...]] = {}
    for node in dict.fromkeys(node for config in configs for node in config.inputs):
        try:
            notes[node] = tuple(getattr(component(json.loads(node)), "notes", ()))
        except DmlbenchError as error:
            errors[node] = error
        except Exception:  # the run reports it, with more context
            continue
    found = {c.sha256: [errors[node] for node in c.inputs if node in errors] for c in configs}
    missing = {sha256: one_error(own) for sha256, own in found.items() if own}
    kinds = {
        c.sha256: " and ".join(
            kind for node, kind in zip(c.inputs, ("data", "weights"), strict=False) if node in errors
        )
        for c in configs
        if c.sha256 in missing
    }
    return Inputs(missing, kinds, {config.sha256: notes.get(config.inputs[0], ()) for config in configs})


def require_writable(folder: str) -> None:
    """Raise ConfigError unless runs can be written to a folder, which need not exist yet."""
    path = os.path.abspath(folder)
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    if not os.path.isdir(path) or not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"paths.output_dir: got {folder}, but {path} is not a writable folder. Choose another.")
