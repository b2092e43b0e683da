"""Aggregation rules: how the runs of a config become one summary.

A protocol names its rule in ``aggregation``: a key of ``RULES``, or the importable name of an ``AggregationRule``.
"""

import hashlib
import importlib
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from dmlbench.evaluation.embeddings.embed import load_embeddings
from dmlbench.evaluation.metrics.table import in_table_order, of_queries, score_names
from dmlbench.evaluation.search.rerank import Reranker
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.results.collections import collections, confidence_interval, mean_and_std, summarize
from dmlbench.results.run_scores import DistanceOf, scores_of_run
from dmlbench.results.store import EMBEDDINGS, Coordinates, locked, run_name
from dmlbench.runtime import atomic_write
from dmlbench.types import RunError, closest

COLLECTIONS = "collections.csv"

_JOINED = "concatenated_"


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
    """What makes a summary of runs; a rule whose folds have test sets of their own sets ``one_test_set`` to False."""

    @property
    def scored_on(self) -> Literal["test", "val"]: ...

    @property
    def spread(self) -> str:
        """What its standard deviations are over, in words."""
        ...

    def summarize(self, config: ConfigRuns, spec: EvaluationSpec) -> dict[str, Any]:
        """``{"scores": {kind: {score: {"mean", "std"}}}, "raw": scores of the runs by coordinates, ...}``."""
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
            at = int(columns[config.first["monitor"]].argmax())
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
            raise RunError(
                f"{config.path}: scores over distance need two splits or more of different distance, these runs have "
                f"{len(set(distances))}; run other folds"
            )
        repeats = [
            repeat for repeat in sorted({key[1] for key in rows}) if all((fold, repeat) in rows for fold in folds)
        ]
        if not repeats:
            raise RunError(
                f"{config.path}: no repeat has all of the {len(folds)} splits that were run; run the missing ones"
            )
        rows = {key: row for key, row in rows.items() if key[1] in repeats}  # curves and areas are of the same runs
        names = [name for name in next(iter(rows.values())) if all(name in row for row in rows.values())]
        scores: dict[str, Any] = {"AGS": {}, "mean": {}}
        for name in names:
            curves = np.array([[rows[fold, repeat][name] for fold in folds] for repeat in repeats])
            areas = area_under(curves, distances)
            for kind, values in (("AGS", areas), ("mean", curves.mean(axis=1))):
                scores[kind][name] = mean_and_std(values)
        by_split = [
            {
                "fold": fold,
                **facts[fold],
                "scores": {
                    name: mean_and_std([row[name] for (f, _), row in rows.items() if f == fold]) for name in names
                },
            }
            for fold in folds
        ]
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
        raise RunError(f"aggregation '{name}' is unknown ({error}); {closest(name, list(RULES))}") from error


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
