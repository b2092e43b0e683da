"""From the runs of a config to one summary, by the rule that the protocol names."""

import hashlib
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dmlbench.evaluation.metrics.registry import in_table_order, of_queries, score_named
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.results import store
from dmlbench.results.caveats import MOST_RUNS, is_late
from dmlbench.results.rules import COLLECTIONS, ConfigRuns, DistanceOf, rule_named, spec_of_run, stored_collections
from dmlbench.results.store import RESULT, Coordinates, RunInfo, run_name
from dmlbench.runtime import read_json, remove_leftovers, write_json
from dmlbench.types import IncompleteConfig, RunError, shorten

log = logging.getLogger(__name__)

AGGREGATE = "aggregate.json"
AGGREGATE_SCHEMA = 1


_KEYS = {
    *("choices", "dataset_fingerprint", "missing", "n_collections", "n_gallery", "n_query", "n_runs"),
    *("n_runs_not_started", "n_skipped_queries", "raw", "runs_sha256", "scored_on", "scores", "search", "val_is_test"),
}
_IF_ANY = ("n_query_published", "rerank", "training", "weights_sha256")
"""Facts of a config's first run that other runs share and that some results lack."""


def aggregate_config(
    runs: Sequence[RunInfo],
    spec: EvaluationSpec | None = None,
    *,
    allow_partial: bool = False,
    distance_of: DistanceOf = lambda run_dir: None,
    force: bool = False,
    progress: bool = True,
) -> dict[str, Any]:
    """Summarize the runs of one config into ``aggregate.json`` in its folder, by its protocol's rule.

    A summary of the same runs keeps its scores; only further requested ones are computed.

    Args:
        runs: every run directory of the config, complete or not.
        spec: the scores to summarize, besides those that all runs have.
        force: summarize and rank collections again; scores of single runs stay.

    Raises:
        IncompleteConfig: runs are missing.
        RunError: runs are damaged, or of different data or seeds; another process summarizes the config.
        ConfigError: a metric that the runs' distance does not allow.
    """
    spec = spec or EvaluationSpec()
    config_dir = runs[0].path.parent
    done = {(run.fold, run.repeat): run.path for run in runs if run.state == "done"}
    results = {coordinates: store.read_result(path) for coordinates, path in sorted(done.items())}
    if not results:
        raise IncompleteConfig(f"{config_dir}: incomplete: no complete run{failed_runs(runs)}.")
    for folder in (config_dir, *done.values()):
        remove_leftovers(folder)
    for key, result in results.items():
        store.require_own_files(done[key], result)
    first = next(iter(results.values()))
    foreign = [done[fold, repeat].name for fold, repeat in results if fold >= first["num_folds"]]
    if foreign:
        stray = config_dir / foreign[0]
        raise RunError(f"{stray} is not a fold of its protocol, which has {first['num_folds']} folds. Remove it.")
    missing = missing_runs(results, first)
    num_expected = len(results) + len(missing)
    if missing and not allow_partial:
        lacking = f"without {shorten(missing, most=MOST_RUNS)}{failed_runs(runs)}"
        raise IncompleteConfig(
            f"{config_dir}: incomplete: {len(results)} of {num_expected} runs, {lacking}. Run the missing ones, or set "
            "allow_partial=true."
        )
    rule = rule_named(first["aggregation"])
    _require_same(config_dir, results, one_test_set=getattr(rule, "one_test_set", True))
    spec = spec_of_run(spec, first)
    source = _results_sha256(done[key] for key in results)
    known = None if force else read_aggregate(config_dir)
    if known and (known["runs_sha256"], known["search"]) != (source, spec.search):
        known = None
    if known and known["n_collections"] and stored_collections(config_dir, known) is None:
        log.warning("%s is missing or damaged; writing it again", config_dir / COLLECTIONS)
        known = None
    if known:  # what was asked for before stays
        joined = known["scores"].get("concatenated", {})
        before = [
            name
            for name in known["scores"].get("separated", {})
            if name in joined or not of_queries([score_named(name)])  # runs have more than was asked for
        ]
        spec = spec.replaced(metrics=tuple(in_table_order([*spec.score_names, *before])))
    if known and has_scores(known, spec):
        log.info("%s is up to date", config_dir / AGGREGATE)
        return known

    runs_of_config = ConfigRuns(
        config_dir, {key: done[key] for key in results}, results, distance_of, known, force=force, progress=progress
    )
    summarized = rule.summarize(runs_of_config, spec)
    if raw := summarized["raw"]:
        results = {key: result for key, result in results.items() if run_name(key) in raw}
        missing = missing_runs(results, first)  # with those that the rule left out
    shared = (
        *("config_id", "dataset", "dataset_fingerprint", "protocol", "aggregation", "choices", "base_seed"),
        *("val_is_test", "n_query", "n_gallery", "n_skipped_queries"),
    )
    facts = {run_name(key): result.get("facts") for key, result in results.items()}
    notes = list(dict.fromkeys(note for result in results.values() for note in result.get("data_notes", ())))
    deviations = list(dict.fromkeys(d for result in results.values() for d in variants_and_deviations(result)))
    degenerate = _degenerate(results)
    validated = [result["metrics"].get("val") or {} for result in results.values()]
    of_all = [name for name in validated[0] if all(isinstance(scores.get(name), float) for scores in validated)]
    summary = {
        "schema": AGGREGATE_SCHEMA,
        **{key: first[key] for key in shared},
        "search": spec.search,
        "scored_on": "validation" if rule.scored_on == "val" else "test",
        "spread": rule.spread,
        "n_runs": len(results),
        "n_runs_expected": num_expected,
        "missing": missing,
        "n_runs_not_started": sum(is_late(result) for result in results.values()),
        "runs_sha256": source,
        "kmeans": spec.kmeans,
        "code": Counter(store.code_of(result) for result in results.values()),
        **({"facts": facts} if any(facts.values()) else {}),
        **({"data_notes": notes} if notes else {}),
        **({"degenerate": degenerate} if degenerate else {}),
        **({"deviations": deviations} if deviations else {}),
        **{key: first[key] for key in _IF_ANY if key in first},
        **({"imported": told} if (told := _told(results)) else {}),
        "validation": {name: sum(scores[name] for scores in validated) / len(validated) for name in of_all},
        **summarized,
        "steps": [result["steps"] for result in results.values()],
        "wall_s": round(sum(result["wall_s"] for result in results.values()), 1),
    }
    write_json(config_dir / AGGREGATE, summary)
    return summary


def missing_runs(done: Collection[Coordinates], result: Mapping[str, Any]) -> list[str]:
    """Names of the runs that a config lacks besides those ``done``: all folds of all repeats must be there.

    Args:
        result: of one of its runs.
    """
    repeats = {*range(result["num_repeats"]), *(repeat for _, repeat in done)}
    expected = [(fold, repeat) for fold in range(result["num_folds"]) for repeat in sorted(repeats)]
    return [run_name(key) for key in expected if key not in done]


def failed_runs(runs: Sequence[RunInfo]) -> str:
    """The failed runs of a config, as the end of a message."""
    names = [run.path.name for run in runs if run.state == "failed"]
    return f"; failed: {shorten(names, most=MOST_RUNS)} (reasons: `dmlbench status`)" if names else ""


def _told(results: Mapping[Coordinates, Mapping[str, Any]]) -> dict[str, Any]:
    """What the user told of imported runs; their ids are "by order" if those of any run are."""
    told = [result["imported"] for result in results.values() if "imported" in result]
    by_order = [own for own in told if own["ids"] == "by order"]
    return dict((by_order or told or [{}])[0])


def _degenerate(results: Mapping[Coordinates, Mapping[str, Any]]) -> list[str]:
    """Signs of collapsed or copied embeddings, with the runs that they are of."""
    runs: dict[str, list[str]] = {}
    same: dict[str, list[str]] = {}
    for key, result in results.items():
        for sign in result.get("degenerate", ()):
            runs.setdefault(sign, []).append(run_name(key))
        if result["steps"] or "imported" in result:  # repeats without training are alike
            same.setdefault(str(result.get("embeddings_sha256", key)), []).append(run_name(key))
    copied = [f"the same embeddings in {', '.join(names)}" for names in same.values() if len(names) > 1]
    return [f"{sign} ({', '.join(names)})" for sign, names in runs.items()] + copied


def variants_and_deviations(result: Mapping[str, Any]) -> list[str]:
    """A line for each chosen variant, and for each deviation of the run's recipe from its paper or code."""
    recipe, variants = result.get("recipe", {}), result.get("variants", {})
    return [
        *(f"{key}: {value}" for key, value in variants.items() if key != "backbone.variant"),  # part of its name
        *(f"recipe={recipe['name']} deviates: {text}" for text in recipe.get("deviations", ())),
    ]


def has_scores(summary: Mapping[str, Any], spec: EvaluationSpec) -> bool:
    """Whether a summary has every requested score that its runs allow, by the search and k-means of ``spec``."""
    if summary["scored_on"] == "validation":
        return True  # embeddings of validation sets are not kept
    if summary["search"] != spec.search:
        return False
    clustered = any(score.metric.reads == "clusters" for score in spec.scores)
    if clustered and summary.get("kmeans") != spec.kmeans:
        return False
    return all(
        score.name in scores
        for kind, scores in summary["scores"].items()
        for score in (of_queries(spec.scores) if kind == "concatenated" else spec.scores)
    )


def read_aggregate(config_dir: Path) -> dict[str, Any] | None:
    """The summary in a config's folder; None if there is none of this schema or, with a warning, if it is damaged."""
    try:
        summary = read_json(config_dir / AGGREGATE)
        if summary.get("schema") != AGGREGATE_SCHEMA:
            return None
        if lacking := sorted(_KEYS - summary.keys()):
            raise ValueError(f"it lacks {lacking[0]}")
    except FileNotFoundError:
        return None
    except ValueError as error:
        log.warning("%s is damaged (%s)", config_dir / AGGREGATE, error)
        return None
    return summary


def is_current(config_dir: Path, summary: Mapping[str, Any], coordinates: Iterable[Coordinates]) -> bool:
    """Whether a summary was made from exactly the present results of these runs."""
    paths = [config_dir / run_name(key) for key in sorted(coordinates)]
    return all((path / RESULT).is_file() for path in paths) and summary["runs_sha256"] == _results_sha256(paths)


def _results_sha256(run_dirs: Iterable[Path]) -> str:
    return hashlib.sha256(b"".join((run_dir / RESULT).read_bytes() for run_dir in run_dirs)).hexdigest()


def _require_same(config_dir: Path, results: Mapping[Coordinates, Mapping[str, Any]], *, one_test_set: bool) -> None:
    for key, remedy in (
        ("dataset_fingerprint", "The data set changed between the runs. Remove the older ones and run them again."),
        ("base_seed", "Use one base_seed for all runs of a config."),
        ("weights_sha256", "The pretrained weights changed. Remove the older runs and run them again."),
        ("n_query", "The test set changed between the runs. Remove the older ones and run them again."),
        ("search", "Evaluate all of them with the same shortlist."),
        ("n_gallery", "The test set changed between the runs. Remove the older ones and run them again."),
    ):
        of_folds = key in ("n_query", "n_gallery") and not one_test_set
        values: dict[int | None, dict[Any, str]] = {}
        for coordinates, result in results.items():
            if key in result:
                of = values.setdefault(coordinates[0] if of_folds else None, {})
                of.setdefault(result[key], run_name(coordinates))
        for found in values.values():
            if len(found) > 1:
                listing = ", ".join(f"{value} in {run}" for value, run in found.items())
                raise RunError(f"{config_dir}: the runs differ in {key} ({listing}). {remedy}")
