"""Means, spreads and intervals of a cell's scores."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy import stats

from dmlbench.types import ConfigError


def summarize(frame: pd.DataFrame) -> dict[str, tuple[float, float | None]]:
    """Mean and population standard deviation over the rows of each score column of ``collections``.

    Columns that start with ``repeat_fold`` are coordinates and are left out. One row has no spread: its std is None.

    Raises:
        ConfigError: the frame has no row.
    """
    if frame.empty:
        raise ConfigError("there is no collection to summarize; give at least one row")
    summary: dict[str, tuple[float, float | None]] = {}
    for name in frame.columns:
        if not str(name).startswith("repeat_fold"):
            values = frame[name].to_numpy(dtype=np.float64)
            summary[str(name)] = (float(values.mean()), float(values.std()) if len(values) > 1 else None)
    return summary


def confidence_interval(scores: Sequence[Sequence[float]], level: float = 0.95) -> tuple[float, float] | None:
    """Two-sided interval of a cell's mean score from its runs' own scores.

    With F folds of n_f repeats, mean m_f and sample variance s_f^2: the mean of the m_f, plus and minus the t quantile
    with sum_f (n_f - 1) degrees of freedom times sqrt(sum_f s_f^2 / n_f) / F. For n repeats in every fold that is
    F (n - 1) degrees of freedom and sqrt(sum_f s_f^2) / (F sqrt(n)). It speaks of other seeds, not of other folds.

    Args:
        scores: [fold][repeat].
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
    half = float(stats.t.ppf((1 + level) / 2, sum(len(fold) - 1 for fold in scores))) * error
    return mean - half, mean + half
