"""Test scores of a complete run by any metric, computed once from its stored embeddings if the result lacks them."""

import dataclasses
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dmlbench.evaluation.embeddings.embed import load_embeddings
from dmlbench.evaluation.evaluate import evaluate
from dmlbench.evaluation.metrics.clustering import KmeansSettings, kmeans_of
from dmlbench.evaluation.metrics.table import Score, of_queries, score_named
from dmlbench.evaluation.spec import EvaluationSpec, shortlist_of
from dmlbench.results.store import EMBEDDINGS, require_own_files, require_tested
from dmlbench.runtime import read_json, write_json
from dmlbench.types import RunError

if TYPE_CHECKING:
    from pytorch_metric_learning.distances import BaseDistance

DistanceOf = Callable[[Path], "BaseDistance | None"]
"""The distance that compares a run's embeddings, by its directory; None is that of unit vectors."""

SCORES = "scores.json"
"""Scores computed after the run, next to its result, bound to the embeddings and the distance that they are of."""
_SCHEMA = 1

log = logging.getLogger(__name__)


def spec_of_run(spec: EvaluationSpec, result: Mapping[str, Any]) -> EvaluationSpec:
    """``spec`` with the run's own shortlist where it names none, and its own k-means where it has the defaults."""
    shortlist = shortlist_of(result["search"]) if spec.shortlist is None else spec.shortlist
    usual = KmeansSettings()
    own = kmeans_of(result["kmeans"]) if result.get("kmeans") else usual
    if spec.kmeans_settings != usual or dataclasses.replace(own, library=usual.library, seed=usual.seed) == usual:
        return spec.replaced(shortlist=shortlist)
    return spec.replaced(
        shortlist=shortlist, **{f"kmeans_{key}": value for key, value in dataclasses.asdict(own).items()}
    )


def scores_of_run(
    run_dir: Path,
    result: Mapping[str, Any],
    spec: EvaluationSpec,
    *,
    distance_of: DistanceOf,
    progress: bool = False,
) -> dict[str, float]:
    """The requested test scores, and those of the result by the same search and k-means.

    Scores that neither the result nor an earlier call has are computed from the embeddings and kept.

    Raises:
        RunError: a score is missing, and the run was never tested or its embeddings are gone.
        ConfigError: a metric that the run's distance does not allow.
    """
    spec = spec_of_run(spec, result)
    ways = {result["search"], result.get("kmeans"), ""}
    tested = result["metrics"].get("test") or {}
    known = {name: value for name, value in tested.items() if _way(score_named(name), spec) in ways}
    missing = [score for score in spec.scores if score.name not in known]
    if missing:
        require_tested(run_dir, result)
        if not (run_dir / EMBEDDINGS).exists():
            raise RunError(f"{run_dir} has no {EMBEDDINGS}, so nothing more can be computed of it; run it again")
        bound = require_own_files(run_dir, result)
        kept = _kept(run_dir, bound)
        for score in missing:
            if score.name in (scores := kept.get(_way(score, spec), {})):
                known[score.name] = scores[score.name]
        missing = [score for score in missing if score.name not in known]
    if missing:
        names = [score.name for score in missing]
        log.info("%s: computing %s from the stored embeddings", run_dir, ", ".join(names))
        stored = load_embeddings(run_dir / EMBEDDINGS)
        found = evaluate(
            stored.queries, stored.gallery, spec.replaced(metrics=tuple(names)),
            distance=distance_of(run_dir), progress=progress,
        ).scores  # fmt: skip
        known |= found
        for score in missing:
            kept.setdefault(_way(score, spec), {})[score.name] = found[score.name]
        try:
            write_json(run_dir / SCORES, {"schema": _SCHEMA, **bound, "scores": kept})
        except OSError as error:
            log.warning("%s cannot be written (%s): the scores are not kept", run_dir / SCORES, error.strerror)
    return known


def _way(score: Score, spec: EvaluationSpec) -> str:
    """What a score depends on besides the embeddings: the search, or how clusters are found."""
    if of_queries([score]):
        return spec.search
    return spec.kmeans if score.metric.reads == "clusters" else ""


def _kept(run_dir: Path, bound: Mapping[str, str]) -> dict[str, dict[str, float]]:
    """Scores that earlier calls computed from the same files."""
    try:
        held = read_json(run_dir / SCORES)
        if held["schema"] == _SCHEMA and {key: held.get(key) for key in bound} == dict(bound):
            return {way: {name: float(v) for name, v in scores.items()} for way, scores in held["scores"].items()}
        log.info("%s is of other embeddings; computing again", run_dir / SCORES)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("%s is damaged (%s); computing again", run_dir / SCORES, error)
    return {}
