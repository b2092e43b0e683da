"""Compare two configs run by run: means, difference and its confidence interval."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dmlbench.apps.loaded import distance_of_run
from dmlbench.apps.tables import asked_columns, labels_of_runs
from dmlbench.evaluation.metrics.table import score_named
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.results.cautions import IMPORTED, by_row, cautions
from dmlbench.results.collections import PairedDifference, paired_difference
from dmlbench.results.rules import rule_named
from dmlbench.results.run_scores import scores_of_run, spec_of_run
from dmlbench.results.store import (
    Coordinates,
    RunInfo,
    find_runs,
    read_result,
    require_own_place,
    run_name,
    runs_by_config,
    runs_in,
)
from dmlbench.types import ConfigError, RunError, closest

_SAME = ("dataset_fingerprint", "protocol", "base_seed", "n_query", "n_gallery")


@dataclass(frozen=True)
class PairedConfigs:
    """Two configs, by their folders, and their differences by metric."""

    first: Path
    second: Path
    differences: dict[str, PairedDifference]
    left_out: tuple[str, ...]  # runs that only one of them has
    differing: tuple[str, ...]  # settings in which they differ beyond their labels
    cautions: tuple[str, ...]  # of their scores (``results.cautions``)

    def to_text(self) -> str:
        """Percent (distances as they are), one line per metric."""
        lines = [f"A  {self.first}", f"B  {self.second}", ""]
        lines.append(f"{'':<22}{'A':>9}{'B':>9}{'B - A':>9}  95 % interval of B - A")
        for metric, found in self.differences.items():
            scale = score_named(metric).scale
            low_high = "none: a fold has a single pair and others more, or there is one"
            if found.interval is not None:
                low_high = f"[{scale * found.interval[0]:+.2f}, {scale * found.interval[1]:+.2f}]"
            numbers = f"{scale * found.first:9.2f}{scale * found.second:9.2f}{scale * found.difference:+9.2f}"
            lines.append(f"{score_named(metric).label:<22}{numbers}  {low_high}")
        one = next(iter(self.differences.values()))
        shared = "fold and repeat" if any(IMPORTED in note for note in self.cautions) else "fold, repeat and seed"
        lines.append(f"  percent; {one.n_pairs} pairs of runs with the same {shared}; t interval over {one.over}")
        lines += [f"  {note}" for note in self.cautions]
        lines += [f"  DIFFERENT SETTINGS: {note}" for note in self.differing]
        if self.left_out:
            lines.append(f"  PARTIAL: without {', '.join(self.left_out)}")
        return "\n".join(lines)


def compare_configs(
    output_dir: str, patterns: Sequence[str], spec: EvaluationSpec, *, allow_partial: bool = False
) -> PairedConfigs:
    """Compare the configs that two patterns name, on complete runs; scores that a run lacks are computed and kept."""
    found = [_runs_of_config(output_dir, pattern) for pattern in patterns]
    configs = [runs[0].path.parent for runs in found]
    if len(set(configs)) != 2:
        raise ConfigError(f"compare: got {', '.join(map(str, configs))}, expected two configs.")
    runs = [_results(of_config) for of_config in found]
    common = sorted(set(runs[0]) & set(runs[1]))
    lonely = sorted(set(runs[0]) ^ set(runs[1]))
    left_out = tuple(f"{run_name(key)} ({configs[key in runs[1]].name})" for key in lonely)
    if not common or (left_out and not allow_partial):
        remedy = "set allow_partial=true to compare the others" if common else "they have no run in common"
        raise RunError(f"configs are compared run by run, but only one has {', '.join(left_out)}; {remedy}")
    for key in common:
        if differing := [name for name in _SAME if runs[0][key][name] != runs[1][key][name]]:
            raise RunError(f"{run_name(key)}: the configs differ in {', '.join(differing)}, so they are no pair.")
    scores = [
        {key: _scores(path / run_name(key), results[key], spec) for key in common}
        for path, results in zip(configs, runs, strict=True)
    ]
    metrics = asked_columns(spec)
    known = sorted(set.intersection(*(set(run) for side in scores for run in side.values())))
    for metric in metrics:  # validation scores cannot be computed again
        if metric not in known:
            raise ConfigError(f"metric '{metric}' is not in all of these results: {closest(metric, known)}")
    differences = {
        metric: paired_difference(*({key: run[metric] for key, run in side.items()} for side in scores))
        for metric in metrics
    }
    _, settings = labels_of_runs(
        [(path / run_name(common[0]), of[common[0]]["choices"]) for path, of in zip(configs, runs, strict=True)]
    )
    warned = by_row([_cautions(results, common, spec) for results in runs], ("A", "B"))
    return PairedConfigs(configs[0], configs[1], differences, left_out, tuple(settings), tuple(warned))


def _runs_of_config(output_dir: str, pattern: str) -> list[RunInfo]:
    configs = list(runs_by_config(find_runs(output_dir, pattern)))
    if len(configs) != 1:
        found = ", ".join(str(path.relative_to(output_dir)) for path in configs) or "none"
        raise RunError(f"'{pattern}' must match one config under {output_dir}; it matches {found}")
    return runs_in(configs[0])  # also those beyond a pattern of runs


def _results(runs: Sequence[RunInfo]) -> dict[Coordinates, dict[str, Any]]:
    results = {}
    for run in runs:
        if run.state == "done":
            results[run.fold, run.repeat] = read_result(run.path)
            require_own_place(run.path, results[run.fold, run.repeat])
    return results


def _scores(run_dir: Path, result: dict[str, Any], spec: EvaluationSpec) -> dict[str, float]:
    if rule_named(result["aggregation"]).scored_on == "val":
        return result["metrics"]["val"]
    return scores_of_run(run_dir, result, spec, distance_of=distance_of_run)


def _cautions(
    results: Mapping[Coordinates, Mapping[str, Any]], common: Sequence[Coordinates], spec: EvaluationSpec
) -> list[str]:
    is_validated = rule_named(results[common[0]]["aggregation"]).scored_on == "val"
    scored_on = {"scored_on": "validation"} if is_validated else {}
    found = [
        cautions({**results[key], "search": spec_of_run(spec, results[key]).search, **scored_on}) for key in common
    ]
    return list(dict.fromkeys(note for notes in found for note in notes))
