"""Complete runs over train-test splits, grouped by data set and protocol, and what is written of them."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from dmlbench.apps.compare_configs import Found, named_configs
from dmlbench.config import listed, read_config
from dmlbench.results.caveats import by_row, caveats_of_rows
from dmlbench.results.config_table import differing_settings
from dmlbench.results.store import (
    CONFIG,
    RunInfo,
    find_runs,
    read_result,
    require_own_place,
    runs_by_config,
    without_trials,
)
from dmlbench.runtime import set_strict_float32
from dmlbench.types import ConfigError, RunError, check_file_name

Group = tuple[str, str]
"""Data set and protocol."""


@dataclass(frozen=True)
class SplitRun:
    """A complete run, the shortest unique label of its config, and settings that differ beyond labels in its group."""

    path: Path
    result: Mapping[str, Any]
    label: str
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def fold(self) -> int:
        return int(self.result["fold"])

    @property
    def place(self) -> dict[str, Any]:
        """First columns of CSV files."""
        repeat = int(self.result["repeat"])
        return {"row": self.label, "config": self.path.parent.name, "fold": self.fold, "repeat": repeat}

    @property
    def distance(self) -> float | None:
        """Distance between the halves of the split, if the protocol measures one."""
        return self.result.get("facts", {}).get("distance")

    @property
    def kind(self) -> str | None:
        """Kind of the split, if known; ``default`` is the published one."""
        return self.result.get("facts", {}).get("kind")

    @property
    def split(self) -> str:
        """Name of the split in tables and figures."""
        name = self.result.get("facts", {}).get("split", self.fold)
        return f"fold {self.fold}" if self.distance is None else f"{name} ({self.distance:.4g})"


def grouped_runs(args: Any) -> Iterator[tuple[str, Path, list[SplitRun]]]:
    """Title, file stem and members of each group of the runs that a command names."""
    check_file_name(args.name)
    set_strict_float32()
    folder = Path(args.paths.output_dir) / "tables"
    paths = chosen_runs(listed(getattr(args, "run", None)), args.configs, args.paths.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for (dataset, protocol), runs in named_runs(paths).items():
        yield f"{dataset} under {protocol}", folder / f"{args.name}-{dataset}-{protocol}", runs


def chosen_runs(runs: Sequence[str], configs: str | None, output_dir: str) -> list[Path]:
    """Directories of the named runs, or of the complete runs that match a pattern."""
    if bool(runs) == bool(configs):
        raise ConfigError(
            f"got run={list(runs)} and configs={configs}, expected one of them. Set run=<run directory> (or several) "
            "or configs=<pattern>."
        )
    if configs is None:
        return [Path(run).absolute() for run in runs]
    matching = without_trials(runs_by_config(find_runs(output_dir, configs)), configs)
    found = [run.path.absolute() for runs in matching.values() for run in runs if run.state == "done"]
    if not found:
        raise RunError(f"no complete run under {output_dir} matches '{configs}'. `dmlbench status` lists all runs.")
    return found


def named_runs(paths: Sequence[Path]) -> dict[Group, list[SplitRun]]:
    """Group runs by data set and protocol, sorted by method, fold and repeat.

    Runs over different split files are in different groups.
    """
    results = {path: read_result(path) for path in dict.fromkeys(paths)}
    one_of = {path.parent: path for path in results}
    digests = {  # of the split files; empty for protocols that read none
        config: str(read_config(run / CONFIG)["protocol"].get("splits_sha256") or "")[:8]
        for config, run in one_of.items()
    }
    configs: dict[Group, dict[Path, Found]] = {}
    for path, result in results.items():
        require_own_place(path, result)
        dataset, protocol, digest = str(result["dataset"]), str(result["protocol"]), digests[path.parent]
        differs = digest and len(set(digests.values())) > 1
        info = RunInfo(path, dataset, protocol, path.parent.name, result["fold"], result["repeat"])
        found = configs.setdefault((dataset, f"{protocol}-{digest}" if differs else protocol), {})
        found.setdefault(path.parent, (path.parent, [], {"choices": result["choices"]}))[1].append(info)
    named = named_configs({group: list(found.values()) for group, found in configs.items()})
    return {
        group: [
            SplitRun(run.path, results[run.path], config.label, config.settings)
            for config in members
            for run in sorted(config.runs, key=lambda run: (run.fold, run.repeat))
        ]
        for group, members in named.items()
    }


def notes_of(runs: Sequence[SplitRun]) -> list[str]:
    """Caveats on the scores of runs."""
    caveats = caveats_of_rows([run.result for run in runs])
    names = [f"{run.label} ({run.path.name})" for run in runs]
    return by_row(caveats, names) + differing_settings([run.settings for run in runs])


def write_notes(figure: Figure, notes: Sequence[str], width: int, *, fontsize: int = 7) -> None:
    if notes:
        figure.supxlabel("\n".join(textwrap.fill(note, width) for note in notes), fontsize=fontsize)
