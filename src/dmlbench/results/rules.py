"""Scores of complete runs by any metric, and aggregation rules: how the runs of a config become one summary.

A protocol names its rule in ``aggregation``: a key of ``RULES``, or the importable name of an ``AggregationRule``.
"""

import dataclasses
import hashlib
import importlib
import io
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from pytorch_metric_learning.distances import BaseDistance

from dmlbench.evaluation.embeddings.embed import load_embeddings
from dmlbench.evaluation.evaluate import evaluate
from dmlbench.evaluation.metrics.clustering import KmeansSettings, kmeans_of
from dmlbench.evaluation.metrics.registry import Score, in_table_order, of_queries, score_named, score_names
from dmlbench.evaluation.search.rerank import Reranker
from dmlbench.evaluation.spec import EvaluationSpec, shortlist_of
from dmlbench.results.collections import collections, confidence_interval, mean_and_std, summarize
from dmlbench.results.store import (
    EMBEDDINGS,
    Coordinates,
    kept_of,
    locked,
    require_own_files,
    require_tested,
    run_name,
)
from dmlbench.runtime import atomic_write, write_json
from dmlbench.types import IncompleteConfig, RunError, closest, missing_module

COLLECTIONS = "collections.csv"
_JOINED = "concatenated_"
DistanceOf = Callable[[Path], BaseDistance | None]
"""The distance that compares a run's embeddings, by its directory; None is that of unit vectors."""
SCORES = "scores.json"
"""Scores computed after the run, next to its result, bound to the embeddings and the distance that they are of."""
_SCHEMA = 1
log = logging.getLogger(__name__)


def spec_of_run(
    spec: EvaluationSpec, result: Mapping[str, Any], *, clustered_as: Mapping[str, Any] | None = None
) -> EvaluationSpec:
    """``spec`` with the run's own shortlist where it names none, and its own k-means where it has the defaults.

    With ``clustered_as``, the result of another run, k-means is that run's.

    A run whose k-means differs from the defaults in library and seed alone gets the defaults: its clusters are computed
    again, so that all rows of a table have those of one library and seed.
    """
    shortlist = shortlist_of(result["search"]) if spec.shortlist is None else spec.shortlist
    usual = KmeansSettings()
    kmeans = (clustered_as or result).get("kmeans")
    own = kmeans_of(kmeans) if kmeans else usual
    if spec.kmeans_settings != usual or dataclasses.replace(own, library=usual.library, seed=usual.seed) == usual:
        return spec.replaced(shortlist=shortlist)
    return spec.replaced(
        shortlist=shortlist, **{f"kmeans_{key}": value for key, value in dataclasses.asdict(own).items()}
    )


def scores_of_run(
    run_dir: Path, result: Mapping[str, Any], spec: EvaluationSpec, *, distance_of: DistanceOf, progress: bool = False
) -> dict[str, float]:
    """The requested test scores, and those of the result by the same search and k-means (see ``spec_of_run``).

    Scores that neither the result nor an earlier call has are computed from the embeddings and kept.

    Raises:
        RunError: a score is missing, and the run was never tested or its embeddings are gone.
        ConfigError: a metric that the run's distance does not allow.
    """
    ways = {result["search"], result.get("kmeans"), ""}
    tested = result["metrics"].get("test") or {}
    known = {name: value for name, value in tested.items() if _way(score_named(name), spec) in ways}
    missing = [score for score in spec.scores if score.name not in known]
    if missing:
        require_tested(run_dir, result)
        if not (run_dir / EMBEDDINGS).exists():
            raise RunError(f"{run_dir} has no {EMBEDDINGS}, so no further scores can be computed. Run it again.")
        bound = require_own_files(run_dir, result)
        kept = kept_of(run_dir / SCORES, bound, "scores", schema=_SCHEMA)
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
            log.warning("%s cannot be written (%s): the scores are not saved", run_dir / SCORES, error.strerror)
    return known


def _way(score: Score, spec: EvaluationSpec) -> str:
    """What a score depends on besides the embeddings: the search, or how clusters are found."""
    if of_queries([score]):
        return spec.search
    return spec.kmeans if score.metric.reads == "clusters" else ""


@dataclass(frozen=True)
class ConfigRuns:
    """The complete runs of a config."""

    path: Path
    runs: Mapping[Coordinates, Path]  # ascending
    results: Mapping[Coordinates, Mapping[str, Any]]  # ``result.json`` of each
    distance_of: DistanceOf
    known: Mapping[str, Any] | None = None  # the config's summary so far, of the same runs
    force: bool = False  # rank collections again, although their scores are known
    progress: bool = False

    @property
    def first(self) -> Mapping[str, Any]:
        return next(iter(self.results.values()))

    def tested(self, spec: EvaluationSpec) -> dict[Coordinates, dict[str, float]]:
        """Test scores of every run: the requested ones, and others of its result by the same search and k-means."""
        return {
            key: scores_of_run(run_dir, self.results[key], spec, distance_of=self.distance_of, progress=self.progress)
            for key, run_dir in self.runs.items()
        }


class AggregationRule(Protocol):
    """Interface of aggregation rules, which compute the scores of a config from its runs.

    If the folds of a protocol have different test sets, set ``one_test_set = False``. If it stays True, test sets of
    different sizes raise an error.
    """

    @property
    def scored_on(self) -> Literal["test", "val"]: ...

    @property
    def spread(self) -> str:
        """Text for tables: what the standard deviations are computed over, such as "repeats"."""
        ...

    def summarize(self, config: ConfigRuns, spec: EvaluationSpec) -> dict[str, Any]:
        """Summarize the runs of a config in a dictionary, which is saved in ``aggregate.json``.

        ``summary["scores"][kind][score]`` holds the ``mean`` and ``std`` of a score, where ``kind`` is, for example,
        "separated". ``summary["raw"][run][score]`` holds the score of a single run, where ``run`` is, for example,
        "fold0_rep0". A rule may add further keys.
        """
        ...


@dataclass(frozen=True)
class Collections:
    """Mean and population std over all collections of one run per fold, separated and concatenated.

    Concatenated embeddings rank the whole gallery even if the runs ranked a shortlist. Reranked runs are not
    concatenated: their values belong to the lists of one model.
    """

    scored_on: Literal["test", "val"] = "test"
    spread: str = "collections of fold models"

    def summarize(self, config: ConfigRuns, spec: EvaluationSpec) -> dict[str, Any]:
        with locked(config.path):  # what another process adds to the collections must not be lost
            tested = config.tested(spec)
            frame, dimension = self._frame(config, spec, tested)
            text = frame.to_csv(index=False).encode()
            atomic_write(config.path / COLLECTIONS, text)
        folds = sorted({fold for fold, _ in tested})
        joins = _can_be_joined(config)
        scores: dict[str, dict[str, Any]] = {"separated": {}, **({"concatenated": {}} if joins else {})}
        for column, value in summarize(frame).items():
            kind, _, score = column.partition("_")
            scores[kind][score] = value
        intervals: dict[str, list[float] | None] = {}
        for score in scores["separated"]:
            interval = confidence_interval(
                [[run[score] for (f, _), run in tested.items() if f == fold] for fold in folds]
            )
            intervals[score] = None if interval is None else list(interval)
        return {
            "scores": scores,
            "n_collections": len(frame),
            "collections_sha256": hashlib.sha256(text).hexdigest(),
            **({} if spec.search == "exact" else {"concatenated_search": "exact"}),
            "dimension": {"separated": dimension, **({"concatenated": dimension * len(folds)} if joins else {})},
            "interval_95": intervals,
            "raw": _by_name(tested),
        }

    def _frame(
        self, config: ConfigRuns, spec: EvaluationSpec, tested: Mapping[Coordinates, Mapping[str, float]]
    ) -> tuple[pd.DataFrame, int]:
        """The scores of all collections, earlier ones included, and the size of the embeddings."""
        keys = [[key for key in tested if key[0] == fold] for fold in sorted({fold for fold, _ in tested})]
        loaded = [[load_embeddings(config.runs[key] / EMBEDDINGS) for key in fold] for fold in keys]
        known = None if config.force or config.known is None else stored_collections(config.path, config.known)
        ranked = pd.DataFrame() if known is None else known.filter(regex=f"^{_JOINED}")
        asked = [s for s in of_queries(spec.scores) if _JOINED + s.name not in ranked and _can_be_joined(config)]
        distances = [[config.distance_of(config.runs[key]) for key in fold] for fold in keys]
        rows = loaded[0][0].queries.rows
        if isinstance(distances[0][0], Reranker):  # cells are no dimensions of the embedding
            rows = distances[0][0].center_rows(rows[:1])
        frame = collections(
            [[stored.queries for stored in fold] for fold in loaded],
            None
            if loaded[0][0].gallery is None
            else [[s.gallery for s in fold if s.gallery is not None] for fold in loaded],
            scores=[[tested[key] for key in fold] for fold in keys],
            metrics=score_names(asked),
            tile_bytes=spec.tile_bytes,
            device=spec.device,
            distances=distances,
            progress=config.progress,
        )
        for place, fold in enumerate(keys):  # of partial configs, places are no coordinates
            frame[f"repeat_fold{place}"] = [fold[run][1] for run in frame[f"repeat_fold{place}"]]
        frame = frame.rename(columns={f"repeat_fold{i}": f"repeat_fold{fold[0][0]}" for i, fold in enumerate(keys)})
        if len(ranked.columns):
            frame = frame.join(ranked)
            columns = [str(name) for name in frame]
            joined = in_table_order(name.removeprefix(_JOINED) for name in columns if name.startswith(_JOINED))
            apart = [name for name in columns if not name.startswith(_JOINED)]
            frame = frame[[*apart, *(_JOINED + name for name in joined)]]
        return frame, int(rows.shape[1])


def _can_be_joined(config: ConfigRuns) -> bool:
    return "rerank" not in config.first


@dataclass(frozen=True)
class OverRepeats:
    """Mean and population std over the repeats; with ``best`` also the run with the best monitored score."""

    scored_on: Literal["test", "val"]
    best: bool = False
    spread: str = "repeats"

    def summarize(self, config: ConfigRuns, spec: EvaluationSpec) -> dict[str, Any]:
        if self.scored_on == "test":
            rows = config.tested(spec)
        else:  # embeddings of validation sets are not kept: what the runs computed is all there is
            rows = {key: dict(result["metrics"]["val"]) for key, result in config.results.items()}
        names = [name for name in next(iter(rows.values())) if all(name in row for row in rows.values())]
        columns = {name: np.array([row[name] for row in rows.values()]) for name in names}
        scores = {"mean": {name: mean_and_std(values) for name, values in columns.items()}}
        extras: dict[str, Any] = {}
        if self.best:
            # One run, chosen by the score that it was selected by, with all its scores.
            selected_by = [
                result["metrics"].get("val") or result["metrics"]["test"] for result in config.results.values()
            ]
            at = int(np.argmax([scores_of[config.first["monitor"]] for scores_of in selected_by]))
            scores["best"] = {name: {"mean": float(values[at]), "std": None} for name, values in columns.items()}
            extras["best_run"] = run_name(list(rows)[at])
        return {"scores": scores, "n_collections": None, "raw": _by_name(rows), **extras}


@dataclass(frozen=True)
class OverSplits:
    """Scores over the distance between the halves of the splits, and the area under them: AGS.

    AGS, the Aggregated Generalization Score, is the area under a score over the splits' distances, scaled to [0, 1], of
    each repeat; then mean and population std. "mean" is the mean over the splits instead.

    Source: T. Milbich et al., NeurIPS 2021, section 4.2.
    """

    scored_on: Literal["test", "val"] = "test"
    spread: str = "repeats"
    one_test_set: bool = False

    def summarize(self, config: ConfigRuns, spec: EvaluationSpec) -> dict[str, Any]:
        rows = config.tested(spec)
        facts = {key[0]: result["facts"] for key, result in config.results.items()}
        folds = sorted(facts, key=lambda fold: (facts[fold]["distance"], fold))
        distances = [facts[fold]["distance"] for fold in folds]
        if len(set(distances)) < 2:
            raise IncompleteConfig(
                f"{config.path}: got splits of {len(set(distances))} distance, expected at least two distances. Run "
                "other folds."
            )
        repeats = sorted({r for _, r in rows if all((fold, r) in rows for fold in folds)})
        if not repeats:
            raise IncompleteConfig(
                f"{config.path}: no repeat has all of the {len(folds)} splits. Run the missing ones."
            )
        rows = {key: row for key, row in rows.items() if key[1] in repeats}  # curves and areas are of the same runs
        names = [name for name in next(iter(rows.values())) if all(name in row for row in rows.values())]
        scores: dict[str, Any] = {"AGS": {}, "mean": {}}
        for name in names:
            curves = np.array([[rows[fold, repeat][name] for fold in folds] for repeat in repeats])
            areas = area_under(curves, distances)
            for kind, values in (("AGS", areas), ("mean", curves.mean(axis=1))):
                scores[kind][name] = mean_and_std(values)
        by_split = []
        for fold in folds:
            own = [row for (f, _), row in rows.items() if f == fold]
            means = {name: mean_and_std([row[name] for row in own]) for name in names}
            by_split.append({"fold": fold, **facts[fold], "scores": means})
        tested = {fold: next(r for (f, _), r in config.results.items() if f == fold) for fold in folds}
        counts = {key: sum(r[key] for r in tested.values()) for key in ("n_query", "n_gallery", "n_skipped_queries")}
        return {"scores": scores, "n_collections": None, "raw": _by_name(rows), "by_split": by_split, **counts}


def area_under(curves: ArrayLike, distances: ArrayLike) -> NDArray[np.float64]:
    """Areas [...] by trapezoids under scores [..., S] over ascending distances [S], scaled to [0, 1]."""
    at = np.asarray(distances, dtype=np.float64)
    return np.asarray(np.trapezoid(np.asarray(curves, dtype=np.float64), (at - at[0]) / (at[-1] - at[0]), axis=-1))


RULES: dict[str, AggregationRule] = {
    "collections": Collections(),
    "best_and_mean": OverRepeats("test", best=True),
    "mean_of_test": OverRepeats("test"),
    "mean": OverRepeats("val"),
    "over_splits": OverSplits(),
}


def rule_named(name: str) -> AggregationRule:
    """A rule of ``RULES``, or of another package by its importable name."""
    if name in RULES:
        return RULES[name]
    module, _, attribute = name.rpartition(".")
    try:
        rule: AggregationRule = getattr(importlib.import_module(module), attribute)
        return rule
    except (ImportError, AttributeError, ValueError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == (top := module.partition(".")[0]):
            raise RunError(missing_module(top, "aggregation")) from error
        raise RunError(f"aggregation '{name}' is unknown ({error}): {closest(name, list(RULES))}") from error


def stored_collections(config_dir: Path, summary: Mapping[str, Any]) -> pd.DataFrame | None:
    """The scores of all collections that a config's summary is of; None if their file is missing or another."""
    if not (config_dir / COLLECTIONS).is_file():
        return None
    try:
        text = (config_dir / COLLECTIONS).read_bytes()
        frame = pd.read_csv(io.BytesIO(text), dtype=str).astype(float)
    except (OSError, ValueError):
        return None
    if summary.get("collections_sha256", found := hashlib.sha256(text).hexdigest()) != found:  # earlier ones have none
        return None
    return frame if len(frame) == summary["n_collections"] and not frame.isna().any(axis=None) else None


def _by_name(rows: Mapping[Coordinates, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    return {run_name(key): dict(scores) for key, scores in rows.items()}
