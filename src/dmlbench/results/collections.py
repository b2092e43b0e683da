"""Scores of collections of fold models, intervals of a config's mean score, and paired differences of two configs.

A collection has one repeat of each fold, in every combination (4 folds of 3 repeats: 81).
Separated: the mean of the members' scores. Concatenated: the score of the concatenated embeddings.

Source: Musgrave et al., A Metric Learning Reality Check, ECCV 2020, section 3.2.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike
from scipy.special import stdtr, stdtrit

from dmlbench.evaluation.collections.concatenated import concatenated_scores
from dmlbench.evaluation.embeddings.embed import ModelDistances, ModelEmbeddings
from dmlbench.evaluation.evaluate import Evaluation
from dmlbench.evaluation.metrics.registry import (
    DEFAULT_METRICS,
    DEFAULT_RECALL_AT,
    in_table_order,
    of_queries,
    score_names,
    scores_of,
)
from dmlbench.evaluation.search.unit_vectors import TILE_BYTES
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.results.store import Coordinates, run_name
from dmlbench.types import ConfigError, RunError

MAX_COLLECTIONS = 2**14
_ROUNDING = 1e-9
"""Standard errors below it are rounding."""


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
    """Score all collections of a config. A collection consists of one run from each fold.

    The separated score of a collection is the mean of its runs' scores. The concatenated score is the score of the
    concatenated embeddings of its runs. To compute the concatenated score, the function ranks the gallery by the sum of
    the runs' exact similarities, or by the sum of the runs' distances if you pass ``distances``. If gallery items tie,
    the lower index comes first.

    Args:
        members: query embeddings [Q, D] of all runs; ``members[fold][repeat]`` belongs to one run. D and the number of
            repeats may differ between folds.
        galleries: gallery embeddings of the same runs, indexed like ``members``. None: the gallery of a query is all
            other queries.
        scores: known scores of the runs as fractions: ``scores[fold][repeat][name]``. None computes them.
        metrics: names of ranking metrics for concatenated embeddings. If you pass ``scores``, ``metrics`` may be empty;
            the table then has only separated scores.
        recall_at: the values of K for metrics such as ``recall_at_k``.
        tile_bytes: how many bytes of memory to use in addition to the embeddings and the scores of each query.
        device: the device that computes similarities. None uses the embeddings' device.
        distances: the distance by which each run compares embeddings, indexed like ``members``. None: the Euclidean
            distance of unit vectors.
        progress: whether to show a progress bar.

    Returns:
        A table with one row per collection. The columns ``repeat_fold0``, ``repeat_fold1``, ... hold the repeat chosen
        from each fold; from row to row, the repeat of the last fold changes fastest. The columns ``separated_<score>``
        and ``concatenated_<score>`` hold the scores as fractions. The table has a separated score only if all runs have
        this score.
    """
    _check_members(members, galleries)
    for what, values in (("galleries", galleries), ("distances", distances), ("scores", scores)):
        if values is not None and [len(fold) for fold in values] != [len(fold) for fold in members]:
            raise RunError(
                f"{what}: got {[len(fold) for fold in values]} entries by fold, expected "
                f"{[len(fold) for fold in members]}, one for each run, or None."
            )
    names = score_names(of_queries(scores_of(metrics, recall_at))) if metrics or scores is None else ()
    if not names and scores is None:
        raise ConfigError(f"metrics: got {', '.join(metrics)}, expected a ranking metric for concatenated embeddings.")
    if lacking := [name for name in names for fold in scores or () for run in fold if name not in run]:
        raise RunError(f"the runs' scores lack '{lacking[0]}'. Evaluate them again with these metrics.")
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
    """Mean and std of each score column of ``collections``."""
    names = [str(name) for name in frame if not str(name).startswith("repeat_fold")]
    return {name: mean_and_std(frame[name]) for name in names}


def mean_and_std(values: ArrayLike) -> dict[str, float | None]:
    """Mean and population standard deviation; a single value has no standard deviation."""
    found = np.asarray(values, dtype=np.float64)
    return {"mean": float(found.mean()), "std": float(found.std()) if len(found) > 1 else None}


def confidence_interval(scores: Sequence[Sequence[float]], level: float = 0.95) -> tuple[float, float] | None:
    """Compute the two-sided t interval of a config's mean score from the scores of its runs.

    Fold f of F has n_f repeats, whose scores have mean m_f and sample variance s_f^2. The center of the interval is the
    mean of the m_f. Its half width is t sqrt(sum_f (s_f^2 / n_f)) / F, where t is the (1 + level) / 2 quantile of
    Student's t distribution with sum_f (n_f - 1) degrees of freedom. If every fold has n repeats, the half width is t
    sqrt(sum_f s_f^2) / (F sqrt(n)), with F (n - 1) degrees of freedom. The interval covers the variation between seeds,
    but not between folds.

    Args:
        scores: scores of the runs: ``scores[fold][repeat]``.
        level: coverage of the interval, in (0, 1).

    Returns:
        (low, high), or None if a fold has fewer than two repeats.
    """
    if not 0 < level < 1:
        raise ConfigError(f"level: got {level}, expected a number between 0 and 1.")
    if any(len(fold) < 2 for fold in scores):
        return None
    mean, error, freedom = _mean_and_error(scores)
    half = float(stdtrit(freedom, (1 + level) / 2)) * error
    return mean - half, mean + half


def _mean_and_error(scores: Sequence[Sequence[float]]) -> tuple[float, float, int]:
    """Mean over folds, its standard error and degrees of freedom."""
    mean = float(np.mean([np.mean(fold) for fold in scores]))
    error = float(np.sqrt(sum(np.var(fold, ddof=1) / len(fold) for fold in scores))) / len(scores)
    return mean, error, sum(len(fold) - 1 for fold in scores)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """p-values corrected for their number: all that are below a level are so together (Holm 1979). None stays None."""
    known = np.array([value for value in p_values if value is not None])
    order = np.argsort(known, kind="stable")
    factors = np.arange(len(order), 0, -1)
    corrected = np.minimum(np.maximum.accumulate(factors * known[order]), 1.0)
    values = iter(corrected[np.argsort(order)])
    return [None if value is None else float(next(values)) for value in p_values]


def p_value_text(p_value: float) -> str:
    """A p-value with two significant digits, or as many as keep it on its side of the level 0.05."""
    texts = (f"{p_value:.{digits}g}" for digits in range(2, 18))
    return next(text for text in texts if (float(text) < 0.05) == (p_value < 0.05))


def _check_members(members: ModelEmbeddings, galleries: ModelEmbeddings | None) -> None:
    if not members or not all(len(fold) for fold in members):
        raise RunError(f"runs by fold: got {[len(fold) for fold in members]}, expected at least one of every fold.")
    count = prod(len(fold) for fold in members)
    if count > MAX_COLLECTIONS:
        raise ConfigError(f"collections: got {count}, expected at most {MAX_COLLECTIONS}. Aggregate fewer repeats.")
    _check_same_images(members, "query")
    if galleries is not None:
        _check_same_images(galleries, "gallery")


def _check_same_images(members: ModelEmbeddings, name: str) -> None:
    first = members[0][0]
    for f, fold in enumerate(members):
        for r, member in enumerate(fold):
            for what in ("ids", "labels"):
                if not torch.equal(getattr(first, what).cpu(), getattr(member, what).cpu()):
                    raise RunError(
                        f"the {name} {what} of fold {f}, repeat {r} differ from those of fold 0, repeat 0. "
                        "Aggregate only runs on one version of one data set."
                    )


@dataclass(frozen=True)
class PairedDifference:
    """Mean scores of two configs, their difference and its confidence interval, all as fractions.

    Attributes:
        first: mean score of the first config: the mean over repeats in each fold, then the mean over folds.
        second: mean score of the second config, computed in the same way.
        difference: ``second - first``.
        interval: confidence interval (low, high) of the difference; None if there are too few pairs, or no seed
            changes either config.
        p_value: p-value of the two-sided t test that the difference is 0; None without an interval.
        n_pairs: number of pairs, equal to the number of runs of each config.
        over: the variation that the interval covers. If every fold has only one pair of runs, ``over`` is "folds": the
            variation between training classes and seeds. Else it is "repeats within folds": the variation between
            seeds.
    """

    first: float
    second: float
    difference: float
    interval: tuple[float, float] | None
    p_value: float | None
    n_pairs: int
    over: str = "repeats within folds"


def paired_difference(
    first: Mapping[Coordinates, float], second: Mapping[Coordinates, float], *, level: float = 0.95
) -> PairedDifference:
    """Compare two configs by the scores of their runs, paired by fold and repeat.

    Two runs of the same fold and repeat share seed and training classes. This reduces noise in the difference of their
    scores, d = second - first. ``confidence_interval`` computes the interval from these
    differences. If each of the F folds has a single pair, the interval is the t interval over the F differences, with
    F - 1 degrees of freedom. An interval over collections (one run per fold) would be too narrow, because collections
    share runs.

    Args:
        first: scores of the first config's runs, by (fold, repeat).
        second: scores of the second config's runs, with the same keys.
        level: coverage of the interval, in (0, 1).
    """
    lonely = sorted(set(first) ^ set(second))
    if lonely or not first:
        names = ", ".join(map(run_name, lonely)) or "all"
        raise RunError(f"both configs need the same folds and repeats. Missing in one of them: {names}.")
    folds = sorted({fold for fold, _ in first})
    pairs = [[(first[key], second[key]) for key in sorted(first) if key[0] == fold] for fold in folds]
    means = np.mean([np.mean(fold, axis=0) for fold in pairs], axis=0)
    differences = [[b - a for a, b in fold] for fold in pairs]
    over = "repeats within folds"
    if all(len(fold) == 1 for fold in differences):
        differences, over = [[d for (d,) in differences]], "folds"
    interval, p_value = confidence_interval(differences, level), None
    if interval is not None:
        mean, error, freedom = _mean_and_error(differences)
        if error > _ROUNDING:
            p_value = float(2 * stdtr(freedom, -abs(mean) / error))
        else:  # no seed changes either config
            interval = None
    difference = float(means[1] - means[0])
    return PairedDifference(float(means[0]), float(means[1]), difference, interval, p_value, len(first), over)
