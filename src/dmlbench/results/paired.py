"""The difference of two configs from runs that share fold, repeat and seed."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dmlbench.results.collections import confidence_interval
from dmlbench.results.store import Coordinates, run_name
from dmlbench.types import RunError


@dataclass(frozen=True)
class PairedDifference:
    """Mean scores of two configs as fractions, and their difference second - first.

    Attributes:
        first, second: mean over folds of the mean over repeats.
        interval: of the difference; None if there are too few pairs.
        n_pairs: runs of each config.
        over: what varies within the interval: "repeats within folds" (seeds), or "folds" (training classes, too) if
            every fold has a single pair.
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

    Runs of the same fold and repeat share seed and training classes, so their effect cancels in d = second - first.
    The interval is ``confidence_interval`` of d. If every fold has a single pair, it is the t interval of the folds' d
    with F - 1 degrees of freedom. Collections of fold models share runs: an interval over them would be too narrow.

    Args:
        first: scores by (fold, repeat).
        second: scores of the same runs of the other config.
        level: coverage in (0, 1).
    """
    lonely = sorted(set(first) ^ set(second))
    if lonely or not first:
        names = ", ".join(map(run_name, lonely)) or "all"
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
