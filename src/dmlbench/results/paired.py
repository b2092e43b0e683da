"""The difference of two configs from runs that share fold, repeat and seed."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dmlbench.results.collections import confidence_interval
from dmlbench.types import RunError

Coordinates = tuple[int, int]
"""Fold and repeat of a run."""


@dataclass(frozen=True)
class PairedDifference:
    """Mean score of a first and a second config, and of the second less the first.

    Attributes:
        first: mean over folds of the mean over repeats, as a fraction.
        second: the same of the other config.
        difference: second - first.
        interval: of the difference, or None where there are too few pairs.
        n_pairs: runs of each config.
        over: what varies within the interval: "repeats within folds" (other seeds), or "folds" (other training classes,
            too) where every fold has a single pair.
    """

    first: float
    second: float
    difference: float
    interval: tuple[float, float] | None
    n_pairs: int
    over: str = "repeats within folds"


def paired_difference(
    first: Mapping[Coordinates, float], second: Mapping[Coordinates, float], *, level: float = 0.95
) -> PairedDifference:
    """Compare two configs pair by pair.

    Runs of the same fold and repeat have the same seed and training classes, whatever the config, so what these do to
    both scores cancels in d = second - first. The interval is that of ``confidence_interval`` for the d: spread within
    folds only, F (n - 1) degrees of freedom. Where every fold has a single pair, it is the t interval of the folds' d,
    F - 1 degrees of freedom. It rests on the runs; collections of fold models share runs, and an interval over them
    would be too narrow.

    Args:
        first: score by (fold, repeat).
        second: the same of the other config, of the same runs.
        level: coverage in (0, 1).

    Raises:
        RunError: the runs are not the same, or there is none.
        ConfigError: ``level`` is not in (0, 1).
    """
    lonely = sorted(set(first) ^ set(second))
    if lonely or not first:
        names = ", ".join(f"fold{fold}_rep{repeat}" for fold, repeat in lonely) or "all"
        raise RunError(f"configs are compared run by run, and runs are missing in one of them: {names}")
    folds = sorted({fold for fold, _ in first})
    pairs = [[(first[key], second[key]) for key in sorted(first) if key[0] == fold] for fold in folds]
    means = np.mean([np.mean(fold, axis=0) for fold in pairs], axis=0)
    differences = [[b - a for a, b in fold] for fold in pairs]
    over = "repeats within folds"
    if all(len(fold) == 1 for fold in differences):
        differences, over = [[d for (d,) in differences]], "folds"
    interval = confidence_interval(differences, level)
    return PairedDifference(float(means[0]), float(means[1]), float(means[1] - means[0]), interval, len(first), over)
