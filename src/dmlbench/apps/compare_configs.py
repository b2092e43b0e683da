"""Aggregated configs with labels and changed settings, tables of them, and two configs compared run by run."""

import functools
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from dmlbench.apps.loading import distance_of_run
from dmlbench.config import config_folder, read_config
from dmlbench.evaluation.metrics.registry import in_table_order, score_named, scores_of
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.external_files import load_yaml
from dmlbench.identity import config_settings
from dmlbench.results import store
from dmlbench.results.aggregate import aggregate_config, has_scores, is_current, read_aggregate
from dmlbench.results.caveats import IMPORTED, by_fact, by_row, caveats
from dmlbench.results.collections import PairedDifference, holm, paired_difference
from dmlbench.results.config_table import NAMING_GROUPS, check_metrics, config_labels, make_table
from dmlbench.results.rules import rule_named, scores_of_run, spec_of_run
from dmlbench.results.store import RunInfo
from dmlbench.results.table import Table
from dmlbench.types import ConfigError, RunError, flatten

log = logging.getLogger(__name__)

Found = tuple[Path, list[RunInfo], dict[str, Any]]
"""A config's folder, its runs and its summary."""
BY_HAND = "given by hand"
_SAME = ("dataset_fingerprint", "protocol", "base_seed", "n_query", "n_gallery")


@dataclass(frozen=True)
class ConfigSummary:
    """An aggregated config."""

    path: Path
    runs: tuple[RunInfo, ...]
    summary: dict[str, Any]  # of ``aggregate_config``
    label: str
    differing: tuple[str, ...] = ()  # notes on settings in which the configs of its table differ beyond their labels

    @property
    def complete(self) -> list[Path]:
        """Directories of the complete runs."""
        return [run.path for run in self.runs if run.state == "done"]


def asked_columns(spec: EvaluationSpec) -> list[str]:
    """Names of the requested scores, in the order of ``spec``."""
    columns = (score.name for metric in spec.metrics for score in scores_of([metric], spec.recall_at))
    return list(dict.fromkeys(columns))


def find_configs(
    output_dir: str, pattern: str, spec: EvaluationSpec, *, allow_partial: bool = False
) -> dict[tuple[str, str], list[ConfigSummary]]:
    """Aggregated configs by (data set, protocol), trained ones first.

    Requested scores that a summary lacks are computed and kept.
    """
    configs = store.runs_by_config(store.find_runs(output_dir, pattern))
    if not configs:
        raise RunError(f"no run under {output_dir} matches '{pattern}'; `dmlbench status` lists what there is")
    grouped: dict[tuple[str, str], list[Found]] = {}
    for path, runs in configs.items():
        if allow_partial and not any(run.state == "done" for run in runs):
            log.warning("%s has no complete run and is left out", path)
            continue
        summary = read_aggregate(path)
        if summary is None or not is_current(path, summary):
            how = "not aggregated" if summary is None else "aggregated from other runs than lie there now"
            raise RunError(f"{path} is {how}; run `dmlbench aggregate 'configs={path.relative_to(output_dir)}'`")
        if summary["missing"] and not allow_partial:
            raise RunError(f"{path} lacks {', '.join(summary['missing'])}. Run them or set allow_partial=true.")
        if not has_scores(summary, spec):
            summary = aggregate_config(
                runs, spec, distance_of=distance_of_run, allow_partial=allow_partial, progress=sys.stderr.isatty()
            )
        grouped.setdefault((runs[0].dataset, runs[0].protocol), []).append((path, runs, summary))
    if not grouped:
        raise RunError(f"no config that matches '{pattern}' has a complete run; `dmlbench status` tells what happened")
    return named_configs(grouped)


def named_configs(
    grouped: Mapping[tuple[str, str], list[Found]], rows: Mapping[Path, str] | None = None
) -> dict[tuple[str, str], list[ConfigSummary]]:
    """Label configs by (data set, protocol), trained ones first.

    Args:
        rows: labels by a config's folder, which are kept, as is the order. Differing settings that the rows' own
            overrides or recipe set are not noted.
    """
    result = {}
    for key, everything in grouped.items():
        found = [ConfigSummary(path, tuple(runs), summary, "") for path, runs, summary in everything]
        labels, differing = labels_of_runs([(config.complete[0], config.summary["choices"]) for config in found])
        labels = _distinct(labels, [config.path for config in found])
        if rows is not None:
            labels = [rows[config.path] for config in found]
            known = {setting for config in found for setting in _set_by_row(config.complete[0])}
            differing = [note for note in differing if note.partition(":")[0] not in known]
        named = [replace(c, label=label, differing=tuple(differing)) for c, label in zip(found, labels, strict=True)]
        result[key] = named if rows is not None else sorted(named, key=_place_in_table)
    return result


def _place_in_table(config: ConfigSummary) -> tuple[bool, str]:
    return "(untrained)" not in config.label, config.label


def _set_by_row(run_dir: Path) -> list[str]:
    """Settings that the command line or a recipe set."""
    runtime = read_config(run_dir / store.CONFIG).get("runtime") or {}
    return [*(runtime.get("given") or ()), *((runtime.get("recipe") or {}).get("places") or ())]


def build_tables(
    grouped: Mapping[tuple[str, str], Sequence[ConfigSummary]], spec: EvaluationSpec, *, facts: Sequence[str] = ()
) -> dict[tuple[str, str], Table]:
    """One table per (data set, protocol); ``facts`` of the splits are columns, too."""
    tables, metrics = {}, asked_columns(spec)
    for (dataset, protocol), configs in grouped.items():
        summaries, labels = [config.summary for config in configs], [config.label for config in configs]
        title = f"{dataset} under {protocol}"
        tables[dataset, protocol] = make_table(title, summaries, labels, metrics, facts, configs[0].differing)
    return tables


def runs_frame(grouped: Mapping[tuple[str, str], Sequence[ConfigSummary]]) -> pd.DataFrame:
    """A row for each run of the configs, with its scores as fractions."""
    rows = [
        {"dataset": dataset, "protocol": protocol, "row": config.label, "config": config.path.name, "run": run,
         "scored_on": config.summary["scored_on"], "notes": "; ".join(caveats(config.summary)), **scores}
        for (dataset, protocol), configs in grouped.items() for config in configs
        for run, scores in config.summary["raw"].items()
    ]  # fmt: skip
    places = ["dataset", "protocol", "row", "config", "run", "scored_on", "notes"]
    frame = pd.DataFrame(rows)
    return frame[[*places, *in_table_order(str(name) for name in frame if name not in places)]]


def labels_of_runs(runs: Sequence[tuple[Path, Mapping[str, str]]]) -> tuple[list[str], list[str]]:
    """Labels of the configs of runs, given with their choices, and notes on settings in which these differ."""
    stored = [read_config(run_dir / store.CONFIG) for run_dir, _ in runs]
    settings = [(choices, config_settings(dict(config))) for (_, choices), config in zip(runs, stored, strict=True)]
    return config_labels(settings, [changed_settings(config, NAMING_GROUPS) for config in stored])


def _distinct(labels: Sequence[str], configs: Sequence[Path]) -> list[str]:
    """Labels, with the config's hash where several configs have the same."""
    return [
        f"{label} [{config.name.rpartition('-')[2]}]" if labels.count(label) > 1 else label
        for label, config in zip(labels, configs, strict=True)
    ]


def changed_settings(container: Mapping[str, Any], groups: Sequence[str]) -> dict[str, str]:
    """Settings of a run's resolved configuration that are not by their option or a paper's recipe, with what set each.

    Of a user's own experiments and recipes, only overrides of the command line are known.
    """
    runtime = container.get("runtime") or {}
    experiment = (runtime.get("choices") or {}).get("experiment")
    recipe = runtime.get("recipe") or {}
    setters = dict.fromkeys(_set_by(f"experiment/{experiment}"), f"set by experiment={experiment}")
    if "paper" not in (_file(f"recipe/{recipe.get('name')}") or {"paper": "of the user"}):
        setters |= dict.fromkeys(recipe.get("places", ()), f"set by recipe={recipe['name']}")
    setters |= dict.fromkeys(runtime.get("given") or (), BY_HAND)
    names = ("backbone.name", *(f"{group}._target_" for group in groups))  # which labels say
    return {
        key: how
        for key in flatten({group: container.get(group) for group in groups})
        for setter, how in setters.items()
        if key not in names and setter not in groups and f"{key}.".startswith(f"{setter}.")
    }


def _set_by(name: str) -> list[str]:
    """Keys of an experiment, with those of the experiments that it is made of."""
    content = dict(_file(name) or {})
    bases = [entry for entry in content.pop("defaults", ()) if isinstance(entry, str) and entry != "_self_"]
    return [*flatten(content), *(key for base in bases for key in _set_by(base.lstrip("/")))]


@functools.cache
def _file(name: str) -> Any:
    """Unresolved content of a configuration file of the project; None if there is none."""
    path = config_folder() / f"{name}.yaml"
    return load_yaml(path) if path.is_file() else None


@dataclass(frozen=True)
class PairedConfigs:
    """Two configs, by their folders, and their differences by metric."""

    first: Path
    second: Path
    differences: dict[str, PairedDifference]
    left_out: tuple[str, ...]  # runs that only one of them has
    differing: tuple[str, ...]  # settings in which they differ beyond their labels
    caveats: tuple[str, ...]  # of their scores (``results.caveats``)

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
        shared = "fold and repeat" if any(IMPORTED in note for note in self.caveats) else "fold, repeat and seed"
        lines.append(f"  percent; {one.n_pairs} pairs of runs with the same {shared}; t interval over {one.over}")
        lines += [f"  {note}" for note in self.caveats]
        lines += [f"  DIFFERENT SETTINGS: {note}" for note in self.differing]
        if self.left_out:
            lines.append(f"  PARTIAL: without {', '.join(self.left_out)}")
        return "\n".join(lines)


def differences_text(found: Sequence[PairedConfigs]) -> str:
    """Several configs beside one: per metric the differences with their intervals, and p-values after Holm."""
    width = max(len(one.second.name) for one in found)
    lines = [f"A  {found[0].first}"]
    for metric in found[0].differences:
        pairs = [one.differences[metric] for one in found]
        lines += ["", f"{score_named(metric).label:<{width}}{'B':>9}{'B - A':>9}  {'95 % interval':<18}{'p (Holm)':>8}"]
        corrected = holm([pair.p_value for pair in pairs if pair.p_value is not None])
        known = iter(corrected)
        scale = score_named(metric).scale
        for one, pair in zip(found, pairs, strict=True):
            low_high, p_value = "none", "-"
            if pair.interval is not None:
                low_high = f"[{scale * pair.interval[0]:+.2f}, {scale * pair.interval[1]:+.2f}]"
                p_value = f"{next(known):.2g}"
            numbers = f"{scale * pair.second:9.2f}{scale * pair.difference:+9.2f}"
            lines.append(f"{one.second.name:<{width}}{numbers}  {low_high:<18}{p_value:>8}")
        lines.append(f"  p corrected over {len(corrected)} configs")
    over = {one.second.name: next(iter(one.differences.values())) for one in found}
    spans = by_fact([[f"{pair.n_pairs} pairs of runs, t over {pair.over}"] for pair in over.values()], list(over))
    lines += ["", *(f"  percent; {span}" for span in spans)]
    lines += dict.fromkeys(f"  {note}" for one in found for note in one.caveats)
    lines += dict.fromkeys(f"  DIFFERENT SETTINGS: {note}" for one in found for note in one.differing)
    lines += [f"  PARTIAL: without {', '.join(one.left_out)}" for one in found if one.left_out]
    return "\n".join(lines)


def compare_configs(
    output_dir: str, patterns: Sequence[str], spec: EvaluationSpec, *, allow_partial: bool = False
) -> PairedConfigs:
    """Compare the configs that two patterns name, on complete runs; scores that a run lacks are computed and kept."""
    found = [_runs_of_config(output_dir, pattern) for pattern in patterns]
    configs = [runs[0].path.parent for runs in found]
    if len(set(configs)) != 2:
        raise ConfigError(f"compare: got {', '.join(map(str, configs))}, expected two configs.")
    done = [{(run.fold, run.repeat): run.path for run in of_config if run.state == "done"} for of_config in found]
    runs = [{key: store.read_result(path) for key, path in paths.items()} for paths in done]
    for paths, results in zip(done, runs, strict=True):
        for key, path in paths.items():
            store.require_own_place(path, results[key])
    common = sorted(set(runs[0]) & set(runs[1]))
    lonely = sorted(set(runs[0]) ^ set(runs[1]))
    left_out = tuple(f"{store.run_name(key)} ({configs[key in runs[1]].name})" for key in lonely)
    if not common or (left_out and not allow_partial):
        remedy = "set allow_partial=true to compare the others" if common else "they have no run in common"
        raise RunError(f"configs are compared run by run, but only one has {', '.join(left_out)}; {remedy}")
    for key in common:
        if differing := [name for name in _SAME if runs[0][key][name] != runs[1][key][name]]:
            raise RunError(f"{store.run_name(key)}: the configs differ in {', '.join(differing)}, so they are no pair.")
    scores = [
        {key: _scores(paths[key], results[key], spec) for key in common}
        for paths, results in zip(done, runs, strict=True)
    ]
    metrics = asked_columns(spec)
    # validation scores cannot be computed again
    check_metrics(metrics, set.intersection(*(set(run) for side in scores for run in side.values())))
    differences = {
        metric: paired_difference(*({key: run[metric] for key, run in side.items()} for side in scores))
        for metric in metrics
    }
    at = common[0]
    _, settings = labels_of_runs([(paths[at], of[at]["choices"]) for paths, of in zip(done, runs, strict=True)])
    told = [dict.fromkeys(note for key in common for note in _cautions(of[key], spec)) for of in runs]
    warned = by_row([list(notes) for notes in told], [folder.name for folder in configs])
    return PairedConfigs(configs[0], configs[1], differences, left_out, tuple(settings), tuple(warned))


def _runs_of_config(output_dir: str, pattern: str) -> list[RunInfo]:
    configs = list(store.runs_by_config(store.find_runs(output_dir, pattern)))
    if len(configs) != 1:
        found = ", ".join(str(path.relative_to(output_dir)) for path in configs) or "none"
        raise RunError(f"'{pattern}' must match one config under {output_dir}; it matches {found}")
    return store.runs_in(configs[0])  # also those beyond a pattern of runs


def _is_validated(result: Mapping[str, Any]) -> bool:
    return rule_named(result["aggregation"]).scored_on == "val"


def _scores(run_dir: Path, result: dict[str, Any], spec: EvaluationSpec) -> dict[str, float]:
    if _is_validated(result):
        return result["metrics"]["val"]
    return scores_of_run(run_dir, result, spec, distance_of=distance_of_run)


def _cautions(result: Mapping[str, Any], spec: EvaluationSpec) -> list[str]:
    scored_on = {"scored_on": "validation"} if _is_validated(result) else {}
    return caveats({**result, "search": spec_of_run(spec, result).search, **scored_on})
