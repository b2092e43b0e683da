"""Aggregated configs with labels and changed settings, tables of them, and two configs compared run by run."""

import functools
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from dmlbench.apps.loading import distance_of_run
from dmlbench.config import config_folder, read_config
from dmlbench.data.preparation.catalog import title_of
from dmlbench.evaluation.metrics.registry import in_table_order, score_named, scores_of
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.external_files import load_yaml
from dmlbench.identity import config_settings
from dmlbench.results import store
from dmlbench.results.aggregate import (
    aggregate_config,
    failed_runs,
    has_scores,
    is_current,
    missing_runs,
    read_aggregate,
)
from dmlbench.results.caveats import IMPORTED, by_fact, by_row, caveats, mixed_code
from dmlbench.results.collections import PairedDifference, holm, p_value_text, paired_difference
from dmlbench.results.config_table import IMPORTED as LABEL_OF_IMPORTED
from dmlbench.results.config_table import (
    NAMING_GROUPS,
    NO_TRAINING,
    check_metrics,
    config_labels,
    differing_settings,
    make_table,
)
from dmlbench.results.rules import rule_named, scores_of_run, spec_of_run
from dmlbench.results.shared_settings import shared_settings
from dmlbench.results.store import RunInfo
from dmlbench.results.table import Table
from dmlbench.runtime import shows_progress
from dmlbench.training.fit import HISTORY
from dmlbench.types import (
    ConfigError,
    DmlbenchError,
    IncompleteConfig,
    RunError,
    RunInUse,
    counted,
    flatten,
    is_within,
    shorten,
)

log = logging.getLogger(__name__)

Found = tuple[Path, list[RunInfo], dict[str, Any]]
"""A config's folder, its runs and its summary."""
BY_HAND = "given by hand"
_PAUSE_S = 0.5
_SAME = ("dataset_fingerprint", "protocol", "base_seed", "n_query", "n_gallery")


@dataclass(frozen=True)
class ConfigSummary:
    """An aggregated config."""

    path: Path
    runs: tuple[RunInfo, ...]
    summary: dict[str, Any]  # of ``aggregate_config``
    label: str
    settings: Mapping[str, str] = field(default_factory=dict)  # that differ in its table and that no label says
    shared: str = ""  # settings that its whole table shares, in words

    @property
    def complete(self) -> list[Path]:
        """Directories of the complete runs."""
        return [run.path for run in self.runs if run.state == "done"]


def asked_columns(spec: EvaluationSpec) -> list[str]:
    """Names of the requested scores, in the order of ``spec``."""
    columns = (score.name for metric in spec.metrics for score in scores_of([metric], spec.recall_at))
    return list(dict.fromkeys(columns))


def find_configs(
    output_dir: str, pattern: str, spec: EvaluationSpec, *, allow_partial: bool = False,
    left_out: list[str] | None = None,
) -> dict[tuple[str, str], list[ConfigSummary]]:  # fmt: skip
    """Aggregated configs by (data set, protocol), trained ones first.

    Runs are summarized, and requested scores computed and kept, where that was not done yet. Configs that lack runs are
    left out with a warning, unless ``allow_partial`` takes them, and trials of searches as ``without_trials`` does.

    Args:
        left_out: gets every config that is left out, with the reason; also those that cannot be read; these raise the
            error if this is None.

    Raises:
        RunError: no config is complete.
    """
    configs = store.without_trials(store.runs_by_config(store.find_runs(output_dir, pattern)), pattern)
    if not configs:
        raise RunError(f"no run under {output_dir} matches '{pattern}'. List the runs with `dmlbench status`.")
    grouped: dict[tuple[str, str], list[Found]] = {}
    incomplete: list[str] = []
    for path, runs in configs.items():
        try:
            reason = _incomplete(path, runs, allow_partial=allow_partial)
            if not reason:
                if left_out is not None:
                    _require_readable([run.path for run in runs if run.state == "done"])
                summary = summary_of(path, runs, spec, allow_partial=allow_partial)
        except IncompleteConfig as error:
            reason = str(error)
        except DmlbenchError as error:
            if left_out is None:
                raise
            reason = f"{path}: {error}"
        if reason:
            incomplete.append(reason)
            log.warning("left out: %s", reason)
            if left_out is not None:
                left_out.append(reason)
            continue
        grouped.setdefault((runs[0].dataset, runs[0].protocol), []).append((path, runs, summary))
    if not grouped:
        raise RunError(
            f"no config that matches '{pattern}' is complete and readable. First of {len(incomplete)}: {incomplete[0]} "
            "Set allow_partial=true to show configs with missing runs. List the runs with `dmlbench status`."
        )
    return named_configs(grouped)


def summary_of(path: Path, runs: list[RunInfo], spec: EvaluationSpec, *, allow_partial: bool) -> dict[str, Any]:
    """The summary of the complete ones of these runs of a config, with the scores of ``spec``.

    Waits while another process summarizes them.
    """
    done = [(run.fold, run.repeat) for run in runs if run.state == "done"]
    waits = False
    while True:
        summary = read_aggregate(path)
        if summary is not None and is_current(path, summary, done):
            result = store.read_result(next(run.path for run in runs if run.state == "done"))
            if has_scores(summary, spec_of_run(spec, result)):
                return summary
        try:
            return aggregate_config(
                runs, spec, distance_of=distance_of_run, allow_partial=allow_partial, progress=shows_progress()
            )
        except RunInUse as error:
            if not waits:
                log.info("waiting: %s", error)
            waits = True
            time.sleep(_PAUSE_S)


def _require_readable(run_dirs: Sequence[Path]) -> None:
    """Raise DmlbenchError unless what a report reads of complete runs is sound, and their modules are found."""
    for run_dir in run_dirs:
        read_config(run_dir / store.CONFIG)
        store.require_own_files(run_dir, store.read_result(run_dir), (HISTORY, store.PER_QUERY))
    store.require_own_files(run_dirs[0], store.read_result(run_dirs[0]))
    distance_of_run(run_dirs[0])


def _incomplete(path: Path, runs: Sequence[RunInfo], *, allow_partial: bool) -> str:
    """How many runs a config has, if it must be left out; else empty."""
    done = [run for run in runs if run.state == "done"]
    if not done:
        return f"{path}: incomplete: no complete run{failed_runs(runs)}."
    if allow_partial:
        return ""
    count = len(missing_runs([(run.fold, run.repeat) for run in done], store.read_result(done[0].path)))
    return f"{path}: incomplete: {len(done)} of {len(done) + count} runs{failed_runs(runs)}." if count else ""


def named_configs(
    grouped: Mapping[tuple[str, str], list[Found]], rows: Mapping[Path, str] | None = None
) -> dict[tuple[str, str], list[ConfigSummary]]:
    """Label configs by (data set, protocol), those without training first.

    Args:
        rows: labels by a config's folder, which are kept, as is the order.
    """
    result = {}
    for key, everything in grouped.items():
        found = [ConfigSummary(path, tuple(runs), summary, "") for path, runs, summary in everything]
        examples = [(config.complete[0], config.summary["choices"]) for config in found]
        labels, settings, shared = labels_of_runs(examples)
        if rows is not None:
            labels = [rows[config.path] for config in found]
        named = [
            replace(config, label=label, settings=own, shared=shared)
            for config, label, own in zip(found, labels, settings, strict=True)
        ]
        result[key] = named if rows is not None else sorted(named, key=_place_in_table)
    return result


def _place_in_table(config: ConfigSummary) -> tuple[bool, str]:
    return NO_TRAINING not in config.label, config.label


def table_title(dataset: str, protocol: str) -> str:
    return f"{title_of(dataset)} under {protocol}"


def build_tables(
    grouped: Mapping[tuple[str, str], Sequence[ConfigSummary]], spec: EvaluationSpec, *, facts: Sequence[str] = ()
) -> dict[tuple[str, str], Table]:
    """One table per (data set, protocol); ``facts`` of the splits are columns, too."""
    tables, metrics = {}, asked_columns(spec)
    for (dataset, protocol), configs in grouped.items():
        summaries, labels = [config.summary for config in configs], [config.label for config in configs]
        settings = [config.settings for config in configs]
        title = table_title(dataset, protocol)
        tables[dataset, protocol] = make_table(title, summaries, labels, metrics, facts, settings, configs[0].shared)
    return tables


def runs_frame(grouped: Mapping[tuple[str, str], Sequence[ConfigSummary]]) -> pd.DataFrame:
    """A row for each run of the configs, with its scores as fractions."""
    rows = [
        {"dataset": dataset, "protocol": protocol, "row": config.label, "config": config.path.name, "run": run,
         "fold": fold, "repeat": repeat, "scored_on": config.summary["scored_on"],
         "notes": "; ".join(caveats(config.summary)), **scores}
        for (dataset, protocol), configs in grouped.items() for config in configs
        for run, scores in config.summary["raw"].items() for fold, repeat in [store.coordinates_of(run) or (None, None)]
    ]  # fmt: skip
    places = ["dataset", "protocol", "row", "config", "run", "fold", "repeat", "scored_on", "notes"]
    frame = pd.DataFrame(rows)
    return frame[[*places, *in_table_order(str(name) for name in frame if name not in places)]]


def labels_of_runs(
    runs: Sequence[tuple[Path, Mapping[str, str]]],
) -> tuple[list[str], list[dict[str, str]], str]:
    """Of the configs of runs, given with their choices: labels, settings in which they differ, and what they share."""
    stored = [read_config(run_dir / store.CONFIG) for run_dir, _ in runs]
    changed = [changed_settings(config, NAMING_GROUPS) for config in stored]
    made_here = [i for i, (_, choices) in enumerate(runs) if LABEL_OF_IMPORTED not in choices]
    here = [stored[i] for i in made_here], [changed[i] for i in made_here]
    shared = shared_settings(*here, whole=len(made_here) == len(runs))
    settings = [(choices, config_settings(dict(config))) for (_, choices), config in zip(runs, stored, strict=True)]
    labels, unsaid = config_labels(settings, changed)
    return _distinct(labels, [run_dir.parent for run_dir, _ in runs]), unsaid, shared


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
        if key not in names and setter not in groups and is_within(key, [setter])
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
    runs: tuple[Path, Path]  # the first that both have
    differences: dict[str, PairedDifference]
    left_out: tuple[str, ...]  # runs that only one of them has
    caveats: tuple[list[str], list[str]]  # of each config's scores (``results.caveats``)


def comparison_table(found: Sequence[PairedConfigs]) -> Table:
    """Differences of configs from one, by metric, with t intervals and p-values, which Holm's method corrects."""
    folders = [found[0].first, *(one.second for one in found)]
    runs = [found[0].runs[0], *(one.runs[1] for one in found)]
    labels, settings, shared = labels_of_runs([(run, store.read_result(run)["choices"]) for run in runs])
    first, *others = labels
    blocks, index, rows, lines = [], [], [], []
    for metric in found[0].differences:
        score, pairs = score_named(metric), [one.differences[metric] for one in found]
        corrected = holm([pair.p_value for pair in pairs])
        for label, one, pair, p_value, own in zip(others, found, pairs, corrected, settings[1:], strict=True):
            low, high = (score.scale * bound for bound in pair.interval) if pair.interval else (None, None)
            numbers = [f"{score.scale * pair.first:.2f}", f"{score.scale * pair.second:.2f}"]
            bounds = [f"{score.scale * bound:+z.2f}" for bound in pair.interval or ()]
            interval = f"[{', '.join(bounds)}]" if bounds else None
            difference = f"{score.scale * pair.difference:+z.2f}"
            blocks.append(score.label)
            index.append(label)
            rows.append([*numbers, difference, interval, None if p_value is None else p_value_text(p_value)])
            lines.append({
                "A": first, "B": label, "config": one.second.name, "metric": metric,
                "A mean": score.scale * pair.first, "B mean": score.scale * pair.second,
                "difference": score.scale * pair.difference, "low": low, "high": high,
                "p_value": pair.p_value, "p_holm": p_value, "pairs": pair.n_pairs, "over": pair.over,
                "settings": "; ".join(f"{key}={value}" for key, value in own.items()),
            })  # fmt: skip
    return Table(
        f"Differences from {first}",
        pd.DataFrame(rows, pd.Index(index, name="config B"), ["A", "B", "B - A", "95 % interval", "p"], dtype=object),
        (
            *_notes_of_pairs(found, labels, settings),
            *(f"{label}: {path}" for label, path in zip(labels, folders, strict=True)),
        ),
        shared,
        blocks=tuple(blocks),
        data=pd.DataFrame(lines),
    )


def _notes_of_pairs(
    found: Sequence[PairedConfigs], labels: Sequence[str], settings: Sequence[Mapping[str, str]]
) -> list[str]:
    first, *others = labels
    pairs = [next(iter(one.differences.values())) for one in found]
    imported = any(note.startswith(IMPORTED) for one in found for own in one.caveats for note in own)
    same = "fold and repeat" if imported else "fold, repeat and seed"
    spans = [[f"{counted(pair.n_pairs, 'pair')} of runs with the same {same}, t over {pair.over}"] for pair in pairs]
    count = sum(pair.p_value is not None for pair in pairs)
    corrected = f", corrected over {count} configs (Holm)" if count > 1 else ""
    caveats_of_first = dict.fromkeys(note for one in found for note in one.caveats[0])
    notes = [
        f"A: {first}; percent, class distances unscaled; p of a two-sided paired t test{corrected}",
        *by_fact(spans, others),
        *by_row([list(caveats_of_first), *(one.caveats[1] for one in found)], labels),
        *(f"PARTIAL: without {', '.join(one.left_out)}" for one in found if one.left_out),
    ]
    if len(found) > 1:
        return notes + [f"{text} (values: column settings of the CSV)" for text in differing_settings(settings)]
    values = {key: [f"{own[key]} ({label})" for own, label in zip(settings, labels, strict=True) if key in own]
              for own in settings for key in own}  # fmt: skip
    return notes + [f"different {key}: {', '.join(texts)}" for key, texts in sorted(values.items())]


def compare_with_first(
    output_dir: str, patterns: Sequence[str], spec: EvaluationSpec, *, among: str = "**", allow_partial: bool = False
) -> list[PairedConfigs]:
    """``compare_configs`` of the first pattern and each other one."""
    if len(patterns) < 2:
        raise ConfigError(f"compare: got {counted(len(patterns), 'config')}, expected two or more.")
    first, *others = patterns
    options: Any = {"among": among, "allow_partial": allow_partial}
    found = [compare_configs(output_dir, [first, other], spec, **options) for other in others]
    names = [pair.second.name for pair in found]  # a config twice would count twice in Holm's correction
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"compare: got {twice[0]} twice, expected each config once.")
    return found


def compare_configs(
    output_dir: str, patterns: Sequence[str], spec: EvaluationSpec, *, among: str = "**", allow_partial: bool = False
) -> PairedConfigs:
    """Compare the configs that two patterns name, on complete runs; scores that a run lacks are computed and kept.

    A pattern may be the label of a table's row. ``among`` is a third pattern, which both configs must match.
    """
    found = [_runs_of_config(output_dir, pattern, among, allow_partial) for pattern in patterns]
    configs = [runs[0].path.parent for runs in found]
    if len(set(configs)) != 2:
        raise ConfigError(f"compare: got {', '.join(map(str, configs))}, expected two different configs.")
    done = [{(run.fold, run.repeat): run.path for run in of_config if run.state == "done"} for of_config in found]
    runs = [{key: store.read_result(path) for key, path in paths.items()} for paths in done]
    for paths, results in zip(done, runs, strict=True):
        for key, path in paths.items():
            store.require_own_place(path, results[key])
    common = sorted(set(runs[0]) & set(runs[1]))
    lonely = sorted(set(runs[0]) ^ set(runs[1]))
    left_out = tuple(f"{store.run_name(key)} ({configs[key in runs[1]].name})" for key in lonely)
    if not common or (left_out and not allow_partial):
        remedy = "Set allow_partial=true to compare the others" if common else "They have no run in common"
        raise RunError(f"compare: only one config has {', '.join(left_out)}, expected the same runs in both. {remedy}.")
    for key in common:
        if differing := [name for name in _SAME if runs[0][key][name] != runs[1][key][name]]:
            raise RunError(
                f"compare: {store.run_name(key)} has different values of {', '.join(differing)} in the two configs, "
                "expected the same."
            )
    first_run = runs[0][common[0]]  # all clusters are found as its own
    scores = [
        {
            key: _scores(paths[key], results[key], spec_of_run(spec, results[key], clustered_as=first_run))
            for key in common
        }
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
    first, second = [list(dict.fromkeys(note for key in common for note in _caveats(of[key], spec))) for of in runs]
    examples = (done[0][at], done[1][at])
    mixed = mixed_code(Counter(store.code_of(of[key]) for of in runs for key in common))
    return PairedConfigs(configs[0], configs[1], examples, differences, left_out, (first + mixed, second + mixed))


def _runs_of_config(output_dir: str, pattern: str, among: str, allow_partial: bool) -> list[RunInfo]:
    requested = store.runs_by_config(store.find_runs(output_dir, among))
    configs = [path for path in store.runs_by_config(store.find_runs(output_dir, pattern)) if path in requested]
    rows = {} if configs else _rows(store.without_trials(requested, among, warn=False), allow_partial)
    configs = configs or rows.get(pattern, [])
    if len(configs) != 1:
        found = ", ".join(str(path.relative_to(output_dir)) for path in configs) or "none"
        remedy = "Use a longer pattern, or restrict the search with configs="
        if not configs:
            remedy = f"Known rows: {shorten(list(rows))}" if rows else "List the configs with `dmlbench status`"
        raise RunError(f"compare: '{pattern}' matches {found} under {output_dir}, expected one config. {remedy}.")
    return store.runs_in(configs[0])  # also those beyond a pattern of runs


def _rows(configs: Mapping[Path, list[RunInfo]], allow_partial: bool) -> dict[str, list[Path]]:
    """Configs by their rows' labels in the tables that ``find_configs`` makes of them."""
    tables: dict[tuple[str, str], list[Path]] = {}  # the first complete run of each config
    for path, runs in configs.items():
        if not _incomplete(path, runs, allow_partial=allow_partial):
            done = next(run for run in runs if run.state == "done")
            tables.setdefault((done.dataset, done.protocol), []).append(done.path)
    rows: dict[str, list[Path]] = {}
    for members in tables.values():
        labels, *_ = labels_of_runs([(run, store.read_result(run)["choices"]) for run in members])
        for label, run in zip(labels, members, strict=True):
            rows.setdefault(label, []).append(run.parent)
    return rows


def _is_validated(result: Mapping[str, Any]) -> bool:
    return rule_named(result["aggregation"]).scored_on == "val"


def _scores(run_dir: Path, result: dict[str, Any], spec: EvaluationSpec) -> dict[str, float]:
    if _is_validated(result):
        return result["metrics"]["val"]
    return scores_of_run(run_dir, result, spec, distance_of=distance_of_run)


def _caveats(result: Mapping[str, Any], spec: EvaluationSpec) -> list[str]:
    scored_on = {"scored_on": "validation"} if _is_validated(result) else {}
    return caveats({**result, "search": spec_of_run(spec, result).search, **scored_on})
