"""Scores of the collections of fold models: one model per fold, every choice of a repeat per fold.

Four folds with three repeats each give 3^4 = 81 collections. A collection is scored in two ways:

- separated: the mean of its members' own scores;
- concatenated: one score of the joined embedding. Ranking by the sum of the members' squared distances of unit rows is
  ranking by the distance of the concatenated unit vectors, so one tile per member serves every collection.

Source: Musgrave et al., A Metric Learning Reality Check, ECCV 2020, section 3.2.
"""

import itertools
from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
import pandas as pd
import torch
from scipy.special import stdtrit

from dmlbench.evaluation.collections.concatenated import concatenated_scores
from dmlbench.evaluation.embeddings.sets import ModelDistances, ModelEmbeddings
from dmlbench.evaluation.evaluate import Evaluation
from dmlbench.evaluation.metrics.table import (
    DEFAULT_METRICS,
    DEFAULT_RECALL_AT,
    asked_scores,
    in_table_order,
    of_queries,
    score_names,
)
from dmlbench.evaluation.search.unit_vectors import TILE_BYTES
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.types import ConfigError, RunError

MAX_COLLECTIONS = 2**14


def collections(
    members: ModelEmbeddings,
    galleries: ModelEmbeddings | None = None,
    *,
    scores: Sequence[Sequence[Mapping[str, float]]] | None = None,
    metrics: Sequence[str] = DEFAULT_METRICS,
    recall_at: Sequence[int] = DEFAULT_RECALL_AT,
    tile_bytes: int = TILE_BYTES,
    device: str | None = None,
    distances: ModelDistances | None = None,
    progress: bool = False,
) -> pd.DataFrame:
    """Score every collection of one repeat per fold.

    The concatenated ranking is that of the sum over folds, in their order, of the members' exact similarities
    (see ``dmlbench.evaluation.search.unit_rows``), ties by gallery index; tiles and threads cannot change it.

    Args:
        members: query rows [Q, D] of every run, ``[fold][repeat]``; D may differ, ids and labels may not. Folds may
            have different numbers of repeats.
        galleries: gallery rows of the same runs, or None: the queries are searched among themselves.
        scores: the members' own scores as fractions, ``[fold][repeat][name]``, where they are known; computed
            otherwise.
        metrics: what joined embeddings are scored by, metrics of rankings; none at all is allowed with ``scores``.
        recall_at: values of K for metrics that take one.
        tile_bytes: bound of the memory taken beyond the members and the scores of single queries.
        device: as in ``EvaluationSpec``.
        distances: the runs' own distances, ``[fold][repeat]``; None, as a whole or of a run, is the Euclidean distance
            of unit vectors. The concatenated ranking is then by the sum of the members' distances.
        progress: whether to show a bar.

    Returns:
        One row per collection, the last fold's repeat changing fastest, with columns ``repeat_fold0`` ..,
        ``separated_<score>`` (of every metric that all given scores have) and ``concatenated_<score>`` (of rankings),
        as fractions.

    Raises:
        RunError: a fold without members, members of different test sets (naming the first difference), given scores
            that are incomplete, or sets that cannot be evaluated.
        ConfigError: more than ``MAX_COLLECTIONS``; ``recall_at`` or ``tile_bytes`` is out of range.
    """
    _check_members(members, galleries)
    if distances is not None and [len(fold) for fold in distances] != [len(fold) for fold in members]:
        raise RunError("distances must be given for every run, [fold][repeat], or not at all")
    names = score_names(of_queries(asked_scores(metrics, recall_at))) if metrics or scores is None else ()
    if not names and scores is None:
        raise ConfigError(
            f"metrics ({', '.join(metrics)}) has none of a ranking, by which joined embeddings are scored"
        )
    if scores is not None:
        _check_scores(scores, members, names)
    joined: dict[tuple[int, ...], Evaluation] = {}
    own: list[list[Evaluation]] = []
    if names:
        joined, own = concatenated_scores(
            members, galleries,
            spec=EvaluationSpec(tuple(recall_at), tile_bytes=tile_bytes, metrics=names, device=device),
            distances=distances, own=scores is None, progress=progress,
        )  # fmt: skip
    scores = scores or [[evaluation.scores for evaluation in fold] for fold in own]
    # Every score that all members have has a mean over members; those of a whole set, such as nmi, no joined ranking.
    separated = in_table_order(name for name in scores[0][0] if all(name in s for f in scores for s in f))
    rows = []
    for choice in itertools.product(*(range(len(fold)) for fold in members)):
        row: dict[str, float] = {f"repeat_fold{f}": r for f, r in enumerate(choice)}
        for name in separated:
            row[f"separated_{name}"] = float(np.mean([scores[f][r][name] for f, r in enumerate(choice)]))
        rows.append(row | {f"concatenated_{name}": joined[choice].scores[name] for name in names})
    return pd.DataFrame(rows)


def summarize(frame: pd.DataFrame) -> dict[str, dict[str, float | None]]:
    """Of each score column of ``collections``: {"mean": .., "std": population standard deviation over the rows}.

    Columns that start with ``repeat_fold`` are coordinates and are left out. One row has no spread: its std is None.

    Raises:
        ConfigError: the frame has no row.
    """
    if frame.empty:
        raise ConfigError("there is no collection to summarize; give at least one row")
    summary: dict[str, dict[str, float | None]] = {}
    for name in frame.columns:
        if not str(name).startswith("repeat_fold"):
            values = frame[name].to_numpy(dtype=np.float64)
            spread = float(values.std()) if len(values) > 1 else None
            summary[str(name)] = {"mean": float(values.mean()), "std": spread}
    return summary


def confidence_interval(scores: Sequence[Sequence[float]], level: float = 0.95) -> tuple[float, float] | None:
    """Two-sided interval of a config's mean score from its runs' own scores.

    With F folds of n_f repeats, mean m_f and sample variance s_f^2: the mean of the m_f, plus and minus the t quantile
    with sum_f (n_f - 1) degrees of freedom times sqrt(sum_f s_f^2 / n_f) / F. For n repeats in every fold that is
    F (n - 1) degrees of freedom and sqrt(sum_f s_f^2) / (F sqrt(n)). It speaks of other seeds, not of other folds.

    Args:
        scores: ``[fold][repeat]``.
        level: coverage in (0, 1).

    Returns:
        (low, high), or None where a fold has fewer than two repeats.

    Raises:
        ConfigError: ``level`` is not in (0, 1) or there is no fold.
    """
    if not 0 < level < 1:
        raise ConfigError(f"level ({level}) must lie between 0 and 1; 0.95 is usual")
    if not scores:
        raise ConfigError("there is no fold to take an interval of")
    if any(len(fold) < 2 for fold in scores):
        return None
    mean = float(np.mean([np.mean(fold) for fold in scores]))
    error = float(np.sqrt(sum(np.var(fold, ddof=1) / len(fold) for fold in scores))) / len(scores)
    t_quantile = float(stdtrit(sum(len(fold) - 1 for fold in scores), (1 + level) / 2))
    half = t_quantile * error
    return mean - half, mean + half


def _check_members(members: ModelEmbeddings, galleries: ModelEmbeddings | None) -> None:
    """Every fold has members, all of one test set, and there are not too many collections."""
    if not members or not all(len(fold) for fold in members):
        empty = [f for f, fold in enumerate(members) if not len(fold)]
        raise RunError(f"fold {empty[0]} has no run" if empty else "there is no fold to make collections of")
    count = prod(len(fold) for fold in members)
    if count > MAX_COLLECTIONS:
        raise ConfigError(
            f"{'x'.join(str(len(fold)) for fold in members)} repeats make {count} collections, more than "
            f"{MAX_COLLECTIONS}; aggregate fewer folds or repeats"
        )
    _check_common(members, "query")
    if galleries is not None:
        if [len(fold) for fold in galleries] != [len(fold) for fold in members]:
            raise RunError("members and galleries must come from the same runs, [fold][repeat]")
        _check_common(galleries, "gallery")


def _check_common(members: ModelEmbeddings, name: str) -> None:
    """Ids and labels of every member are those of fold 0, repeat 0, in the same order."""
    first = members[0][0]
    for f, fold in enumerate(members):
        for r, member in enumerate(fold):
            for what in ("ids", "labels"):
                ours, theirs = getattr(first, what), getattr(member, what)
                place = f"the {name} {what} of fold {f}, repeat {r}"
                remedy = "aggregate only runs on one version of one data set"
                if ours.shape != theirs.shape:
                    raise RunError(f"{place} count {len(theirs)} and those of fold 0, repeat 0 {len(ours)}; {remedy}")
                differs = torch.nonzero(ours.cpu() != theirs.cpu())
                if len(differs):
                    n = int(differs[0, 0])
                    raise RunError(
                        f"{place} differ from those of fold 0, repeat 0 first at position {n} "
                        f"({int(theirs[n])} instead of {int(ours[n])}); {remedy}"
                    )


def _check_scores(
    scores: Sequence[Sequence[Mapping[str, float]]], members: ModelEmbeddings, names: Sequence[str]
) -> None:
    if [len(fold) for fold in scores] != [len(fold) for fold in members]:
        raise RunError("scores must be given for every run, [fold][repeat], or not at all")
    for f, fold in enumerate(scores):
        for r, run in enumerate(fold):
            missing = [name for name in names if name not in run]
            if missing:
                raise RunError(
                    f"the scores of fold {f}, repeat {r} lack '{missing[0]}'; "
                    "evaluate the run again with these recall_at, or leave the scores out"
                )
