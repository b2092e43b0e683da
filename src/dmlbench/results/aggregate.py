"""From the runs of a config to one summary, by the rule that the protocol names."""

import hashlib
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dmlbench.evaluation.metrics.table import in_table_order, of_queries, score_named
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.results.rules import COLLECTIONS, ConfigRuns, Coordinates, rule_named, stored_collections
from dmlbench.results.run_scores import DistanceOf, spec_of_run
from dmlbench.results.store import RESULT, RunInfo, read_result, require_own_files
from dmlbench.runtime import read_json, remove_leftovers, write_json
from dmlbench.types import RunError, not_a_file

log = logging.getLogger(__name__)

AGGREGATE = "aggregate.json"
AGGREGATE_SCHEMA = 1
_KEYS = {
    *("choices", "dataset_fingerprint", "missing", "n_collections", "n_gallery", "n_query", "n_runs"),
    *("n_runs_not_started", "n_skipped_queries", "raw", "runs_sha256", "scored_on", "scores", "search", "val_is_test"),
}


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

    A summary of the very same runs keeps the scores that it has; only what is asked for beyond them is computed.

    Args:
        runs: every run directory of the config, complete or not.
        spec: the scores to sum up, besides those that all runs have; without ``rerank`` the runs' own search.
        allow_partial: summarize although runs are missing; the summary says how many it rests on.
        distance_of: the distance of a run, by its directory; None is that of unit vectors.
        force: sum up and rank collections again although they are known; scores of single runs stay.
        progress: show a progress bar for long work.

    Raises:
        RunError: runs are missing, or were not made from the same data and seed; another process summarizes the config.
        ConfigError: a metric that the runs' distance does not allow.
    """
    spec = spec or EvaluationSpec()
    config = runs[0].path.parent
    done = {(run.fold, run.repeat): run.path for run in runs if run.state == "done"}
    results = {coordinates: read_result(path) for coordinates, path in sorted(done.items())}
    if not results:
        raise RunError(f"{config} has no complete run; `dmlbench status` tells what happened to them")
    for folder in (config, *done.values()):
        remove_leftovers(folder)
    for key, result in results.items():
        require_own_files(done[key], result)
    first = next(iter(results.values()))
    foreign = [done[fold, repeat].name for fold, repeat in results if fold >= first["num_folds"]]
    if foreign:
        raise RunError(
            f"{config / foreign[0]} is of no fold of its protocol, which has {first['num_folds']}; remove it"
        )
    expected = [(fold, repeat) for fold in range(first["num_folds"]) for repeat in range(first["num_repeats"])]
    extra = sorted(set(results) - set(expected))
    if extra:
        expected = sorted(set(expected) | {(fold, repeat) for fold in range(first["num_folds"]) for _, repeat in extra})
    missing = [f"fold{fold}_rep{repeat}" for fold, repeat in expected if (fold, repeat) not in results]
    if missing and not allow_partial:
        raise RunError(
            f"{config}: {len(missing)} of {len(expected)} runs are missing ({', '.join(missing)}); run them, or "
            "summarize what is there with allow_partial=true"
        )
    rule = rule_named(first["aggregation"])
    _require_same(config, results, one_test_set=getattr(rule, "one_test_set", True))
    spec = spec_of_run(spec, first)
    source = hashlib.sha256(b"".join((done[key] / RESULT).read_bytes() for key in results)).hexdigest()
    known = None if force else read_aggregate(config)
    if known and (known["runs_sha256"], known["search"]) != (source, spec.search):
        known = None
    if known and known["n_collections"] and stored_collections(config, known) is None:
        log.warning("%s is missing or damaged; it is made again", config / COLLECTIONS)
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
        log.info("%s is up to date", config / AGGREGATE)
        return known

    runs_of_config = ConfigRuns(
        config, {key: done[key] for key in results}, results, distance_of, known, force=force, progress=progress
    )
    shared = (
        *("config_id", "dataset", "dataset_fingerprint", "protocol", "aggregation", "choices", "base_seed"),
        *("val_is_test", "n_query", "n_gallery", "n_skipped_queries"),
    )
    facts = {f"fold{fold}_rep{repeat}": result.get("facts") for (fold, repeat), result in results.items()}
    notes = list(dict.fromkeys(note for result in results.values() for note in result.get("data_notes", ())))
    deviations = list(dict.fromkeys(d for result in results.values() for d in deviations_of(result)))
    summary = {
        "schema": AGGREGATE_SCHEMA,
        **{key: first[key] for key in shared},
        "search": spec.search,
        "scored_on": "validation" if rule.scored_on == "val" else "test",
        "spread": rule.spread,
        "n_runs": len(results),
        "n_runs_expected": len(expected),
        "missing": missing,
        "n_runs_not_started": sum(
            not result.get("pooling_started", True) and result["steps"] > 0 for result in results.values()
        ),
        "runs_sha256": source,
        "kmeans": spec.kmeans,
        **({"facts": facts} if any(facts.values()) else {}),
        **({"data_notes": notes} if notes else {}),
        **({"deviations": deviations} if deviations else {}),
        **{key: first[key] for key in ("n_query_published", "imported", "rerank") if key in first},  # type: ignore[misc]
        **rule.summarize(runs_of_config, spec),
        "steps": [result["steps"] for result in results.values()],
        "wall_s": round(sum(result["wall_s"] for result in results.values()), 1),
    }
    write_json(config / AGGREGATE, summary)
    return summary


def deviations_of(result: Mapping[str, Any]) -> list[str]:
    """Chosen variants, and what differs from the paper or code that the run's recipe follows; one line each."""
    recipe, variants = result.get("recipe", {}), result.get("variants", {})
    return [
        *(f"{key}: {value}" for key, value in variants.items()),
        *(f"recipe={recipe['name']} deviates: {text}" for text in recipe.get("deviations", ())),
    ]


def has_scores(summary: Mapping[str, Any], spec: EvaluationSpec) -> bool:
    """Whether a summary has all that can be summed up of what ``spec`` asks for."""
    if summary["scored_on"] == "validation":
        return True  # there is no more than the runs have
    if spec.shortlist is not None and summary["search"] != spec.search:
        return False
    clustered = any(score.metric.reads == "clusters" for score in spec.scores)
    if clustered and summary.get("kmeans") != spec.kmeans:
        return False
    return all(
        score.name in scores
        for kind, scores in summary["scores"].items()
        for score in (of_queries(spec.scores) if kind == "concatenated" else spec.scores)
    )


def read_aggregate(config: Path) -> dict[str, Any] | None:
    """The summary in a config's folder; None where there is none of this schema, or a damaged one (the log says so)."""
    try:
        summary = read_json(config / AGGREGATE)
        if summary.get("schema") != AGGREGATE_SCHEMA:
            return None
        if lacking := sorted(_KEYS - summary.keys()):
            raise ValueError(f"it lacks {lacking[0]}")
        for key, kind in (("missing", list), ("raw", dict), ("scores", dict)):
            if not isinstance(summary[key], kind):
                raise TypeError(f"{key} is a {type(summary[key]).__name__}")
        for score in (score for scores in summary["scores"].values() for score in scores.values()):
            float(score["mean"]), float(score["std"] or 0)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("%s is damaged (%s)", config / AGGREGATE, error)
        return None
    return summary


def is_current(config: Path, summary: Mapping[str, Any]) -> bool:
    """Whether a summary was made from exactly the results that lie in the config's folder now."""
    found = (re.fullmatch(r"fold(\d+)_rep(\d+)", path.parent.name) for path in config.glob(f"fold*_rep*/{RESULT}"))
    return is_of_runs(config, summary, [(int(match[1]), int(match[2])) for match in found if match])


def is_of_runs(config: Path, summary: Mapping[str, Any], coordinates: Iterable[Coordinates]) -> bool:
    """Whether a summary was made from exactly the results of these runs of a config, as they are now."""
    results = [config / f"fold{fold}_rep{repeat}" / RESULT for fold, repeat in sorted(coordinates)]
    if any(not_a_file(path) for path in results):
        return False
    return summary["runs_sha256"] == hashlib.sha256(b"".join(path.read_bytes() for path in results)).hexdigest()


def _require_same(config: Path, results: Mapping[Coordinates, Mapping[str, Any]], *, one_test_set: bool) -> None:
    for key, remedy in (
        ("dataset_fingerprint", "the data set changed between the runs; remove the older ones and run them again"),
        ("base_seed", "use one base_seed for all runs of a config"),
        ("n_query", "the test set changed between the runs; remove the older ones and run them again"),
        ("search", "the runs were ranked by different shortlists; evaluate them alike"),
        ("n_gallery", "the test set changed between the runs; remove the older ones and run them again"),
    ):
        of_folds = key in ("n_query", "n_gallery") and not one_test_set
        values: dict[int | None, dict[Any, str]] = {}
        for (fold, repeat), result in results.items():
            values.setdefault(fold if of_folds else None, {}).setdefault(result[key], f"fold{fold}_rep{repeat}")
        for found in values.values():
            if len(found) > 1:
                listing = ", ".join(f"{value} in {run}" for value, run in found.items())
                raise RunError(f"{config}: the runs differ in {key} ({listing}); {remedy}")
