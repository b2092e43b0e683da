"""From the runs of a cell to one summary, by the rule that the protocol names."""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dmlbench.evaluation.embeddings.embed import load_embeddings
from dmlbench.evaluation.evaluate import evaluate
from dmlbench.evaluation.search.unit_vectors import TILE_BYTES
from dmlbench.evaluation.task import EvaluationSpec, rerank_of
from dmlbench.results.collections import collections, confidence_interval, summarize
from dmlbench.results.store import EMBEDDINGS, RESULT, RunInfo, locked, read_result
from dmlbench.runtime import atomic_write
from dmlbench.types import RunError

if TYPE_CHECKING:
    from pytorch_metric_learning.distances import BaseDistance

log = logging.getLogger(__name__)

AGGREGATE, COLLECTIONS = "aggregate.json", "collections.csv"
PARTIAL = "collections.partial"
"""Folder of what an interrupted aggregation knows so far; a finished one removes it."""
AGGREGATE_SCHEMA = 1


def aggregate_cell(
    runs: Sequence[RunInfo],
    *,
    allow_partial: bool = False,
    recall_at: Sequence[int] = (1, 2, 4, 8),
    tile_bytes: int = TILE_BYTES,
    distances: Mapping[tuple[int, int], "BaseDistance"] | None = None,
    force: bool = False,
    progress: bool = True,
) -> dict[str, Any]:
    """Summarize the runs of one cell into ``aggregate.json`` (and ``collections.csv``) in the cell's folder.

    The rule is the protocol's: "collections" (mean and population std over all collections of fold models, embeddings
    apart and concatenated; the latter rank the whole gallery, even where the runs ranked a shortlist), "best_and_mean"
    (best repeat, and mean and std over repeats), "mean" (of the validation scores over repeats), "mean_of_test" (of the
    test scores over repeats).

    Args:
        runs: every run directory of the cell, complete or not.
        allow_partial: summarize although runs are missing; the summary says how many it rests on.
        recall_at: the K of R@K of the concatenated embeddings.
        tile_bytes: bound of the memory taken beyond the embeddings.
        distances: the runs' own distances by (fold, repeat); a run without one is compared by unit vectors. Only
            collections rank anew.
        force: compute again although an up-to-date summary exists.
        progress: show a progress bar for long work.

    Raises:
        RunError: runs are missing, or were not made from the same data and seed; another process summarizes the cell.
    """
    cell = runs[0].path.parent
    done = {(run.fold, run.repeat): run for run in runs if run.state == "done"}
    results = {coordinates: read_result(run.path) for coordinates, run in sorted(done.items())}
    if not results:
        raise RunError(f"{cell} has no complete run; `dmlbench status` tells what happened to them")
    first = next(iter(results.values()))
    expected = [(fold, repeat) for fold in range(first["num_folds"]) for repeat in range(first["num_repeats"])]
    extra = sorted(set(results) - set(expected))
    if extra:
        expected = sorted(set(expected) | {(fold, repeat) for fold in range(first["num_folds"]) for _, repeat in extra})
    missing = [f"fold{fold}_rep{repeat}" for fold, repeat in expected if (fold, repeat) not in results]
    if missing and not allow_partial:
        raise RunError(
            f"{cell}: {len(missing)} of {len(expected)} runs are missing ({', '.join(missing)}); run them, or "
            "summarize what is there with allow_partial=true"
        )
    _require_same(cell, results)

    source = hashlib.sha256(b"".join((done[key].path / RESULT).read_bytes() for key in results)).hexdigest()
    kind = first["aggregation"]
    # Only collections are ranked anew; other rules read the scores of the runs.
    settings = {"recall_at": list(recall_at) if kind == "collections" else None, "runs_sha256": source}
    existing = read_aggregate(cell)
    if existing and not force and all(existing[key] == value for key, value in settings.items()):
        log.info("%s is up to date", cell / AGGREGATE)
        return existing

    if kind == "collections":
        with locked(cell):  # two processes must not write into the same partial scores
            scores, extras = _collections(cell, done, results, recall_at, tile_bytes, distances or {}, progress)
    else:
        scores, extras = _over_repeats(results, kind)
    part = "val" if kind == "mean" else "test"
    shared = (
        *("cell_id", "dataset", "dataset_fingerprint", "protocol", "aggregation", "choices", "base_seed"),
        *("val_is_test", "search", "n_query", "n_gallery", "n_skipped_queries"),
    )
    summary = {
        "schema": AGGREGATE_SCHEMA,
        **{key: first[key] for key in shared},
        "scored_on": "validation" if part == "val" else "test",
        "n_runs": len(results),
        "n_runs_expected": len(expected),
        "missing": missing,
        "n_runs_not_started": sum(
            not result.get("pooling_started", True) and result["steps"] > 0 for result in results.values()
        ),
        **settings,
        "scores": scores,
        **extras,
        "raw": {f"fold{fold}_rep{repeat}": result["metrics"][part] for (fold, repeat), result in results.items()},
        "steps": [result["steps"] for result in results.values()],
        "wall_s": round(sum(result["wall_s"] for result in results.values()), 1),
    }
    atomic_write(cell / AGGREGATE, (json.dumps(summary, indent=1) + "\n").encode())
    return summary


def read_aggregate(cell: Path) -> dict[str, Any] | None:
    """The summary in a cell's folder, or None where there is none of this schema."""
    try:
        summary = json.loads((cell / AGGREGATE).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return summary if summary.get("schema") == AGGREGATE_SCHEMA else None


def is_current(cell: Path, summary: Mapping[str, Any]) -> bool:
    """Whether a summary was made from exactly the results that lie in the cell's folder now."""
    results = sorted(
        (tuple(map(int, path.parent.name.removeprefix("fold").split("_rep"))), path)
        for path in cell.glob(f"fold*_rep*/{RESULT}")
    )
    return summary["runs_sha256"] == hashlib.sha256(b"".join(path.read_bytes() for _, path in results)).hexdigest()


def _require_same(cell: Path, results: Mapping[tuple[int, int], Mapping[str, Any]]) -> None:
    for key, remedy in (
        ("dataset_fingerprint", "the data set changed between the runs; remove the older ones and run them again"),
        ("base_seed", "use one base_seed for all runs of a cell"),
        ("n_query", "the test set changed between the runs; remove the older ones and run them again"),
        ("search", "the runs were ranked by different shortlists; evaluate them alike"),
        ("n_gallery", "the test set changed between the runs; remove the older ones and run them again"),
    ):
        values: dict[Any, str] = {}
        for (fold, repeat), result in results.items():
            values.setdefault(result[key], f"fold{fold}_rep{repeat}")
        if len(values) > 1:
            listing = ", ".join(f"{value} in {run}" for value, run in values.items())
            raise RunError(f"{cell}: the runs differ in {key} ({listing}); {remedy}")


def _collections(
    cell: Path,
    done: Mapping[tuple[int, int], RunInfo],
    results: Mapping[tuple[int, int], Mapping[str, Any]],
    recall_at: Sequence[int],
    tile_bytes: int,
    distances: Mapping[tuple[int, int], "BaseDistance"],
    progress: bool,
) -> tuple[dict[str, Any], dict[str, Any]]:
    folds = sorted({fold for fold, _ in results})
    by_fold = [[key for key in results if key[0] == fold] for fold in folds]
    loaded = [[load_embeddings(done[key].path / EMBEDDINGS) for key in keys] for keys in by_fold]
    queries = [[stored.queries for stored in row] for row in loaded]
    galleries = None
    if loaded[0][0].gallery is not None:
        galleries = [[stored.gallery for stored in row if stored.gallery is not None] for row in loaded]
    own_distances = [[distances.get(key) for key in keys] for keys in by_fold]
    tested = [[results[key]["metrics"]["test"] for key in keys] for keys in by_fold]
    rerank = rerank_of(next(iter(results.values()))["search"])
    spec = EvaluationSpec(recall_at=tuple(recall_at), tile_bytes=tile_bytes, rerank=rerank)
    if any(name not in run for fold in tested for run in fold for name in spec.score_names):
        # The runs were scored by other metrics: those are kept, what collections need is added.
        tested = [
            [
                evaluate(stored.queries, stored.gallery, spec, distance=distance, progress=progress).scores | run
                for stored, distance, run in zip(*fold, strict=True)
            ]
            for fold in zip(loaded, own_distances, tested, strict=True)
        ]
    frame = collections(
        queries,
        galleries,
        scores=tested,
        recall_at=recall_at,
        tile_bytes=tile_bytes,
        distances=own_distances,
        partial=cell / PARTIAL,
        progress=progress,
    )
    atomic_write(cell / COLLECTIONS, frame.to_csv(index=False).encode())
    summary = summarize(frame)
    scores: dict[str, dict[str, Any]] = {"separated": {}, "concatenated": {}}
    for column, value in summary.items():
        kind, _, metric = column.partition("_")
        if kind in scores:
            scores[kind][metric] = value
    intervals: dict[str, list[float] | None] = {}
    for metric in scores["separated"]:
        interval = confidence_interval([[run[metric] for run in fold] for fold in tested])
        intervals[metric] = None if interval is None else list(interval)
    dimension = int(queries[0][0].rows.shape[1])
    return scores, {
        "n_collections": len(frame),
        # the sum of the folds' distances has no shortlist: whatever ranked the runs, it is over the whole gallery
        **({} if rerank is None else {"concatenated_search": "exact"}),
        "dimension": {"separated": dimension, "concatenated": dimension * len(folds)},
        "interval_95": intervals,
    }


def _over_repeats(
    results: Mapping[tuple[int, int], Mapping[str, Any]], kind: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    part = "val" if kind == "mean" else "test"
    rows = [result["metrics"][part] for result in results.values()]
    columns = {metric: np.array([row[metric] for row in rows]) for metric in rows[0]}
    mean = {
        metric: {"mean": float(values.mean()), "std": float(values.std()) if len(values) > 1 else None}
        for metric, values in columns.items()
    }
    scores: dict[str, Any] = {"mean": mean}
    if kind == "best_and_mean":
        # One run, chosen by the score that it was selected by, with all its scores.
        monitor = next(iter(results.values()))["monitor"]
        best = int(columns[monitor].argmax())
        scores["best"] = {metric: {"mean": float(values[best]), "std": None} for metric, values in columns.items()}
        fold, repeat = list(results)[best]
        return scores, {"n_collections": None, "best_run": f"fold{fold}_rep{repeat}"}
    return scores, {"n_collections": None}
