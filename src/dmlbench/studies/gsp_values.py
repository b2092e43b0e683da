"""MAP@R over values of GSP (GSP, section 5.2.2, figure 7 right; supplement 1.5, figure 10 and table 7).

Source: Y. Z. Gürbüz, O. Şener, A. A. Alatan, "Generalized Sum Pooling for Metric Learning", ICCV 2023. Figure 7 names
    neither data set nor loss; its grid is not given. Figure 10 and table 7 are on CUB, with mu = 0.3; their grids are
    conf/experiment/gsp/figure10a, figure10b and table7.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from scipy.stats import spearmanr

from dmlbench.apps.pictures import plt
from dmlbench.results.store import read_result
from dmlbench.studies.models import run_of, trained_by
from dmlbench.studies.record import Claim, Findings, Float, Parts, require_positive, several_values, spread
from dmlbench.types import ConfigError

_METRICS = {"map_at_r": "MAP@R, %", "p_at_1": "P@1, %"}
_BASELINE = "GAP"

Scores = dict[str, list[float]]
"""By metric, a value for each run."""


def over_mu(args: Any, parts: Parts) -> Findings:
    """Train and test at every mu, the share of the pixels that is transported."""
    values = several_values(args, "transport_ratios")
    if values[-1] > 1:
        raise ConfigError(f"transport_ratios: got {values}, expected two or more numbers in (0, 1].")
    configs = {f"mu = {value:g}": ("pooling=gsp", f"pooling.transport_ratio={value}") for value in values}
    found = scores_of(configs, args, parts)
    means = {value: _mean(found[f"mu = {value:g}"]) for value in values}
    best = max(means, key=lambda value: means[value])
    low, high = ([means[value] for value in values if (value <= args.low) == is_low] for is_low in (True, False))
    shown = ", ".join(f"{value:g}: {score:.1f}" for value, score in means.items())
    of_growing = [*low[-1:], *high]  # what is said of the low ones is that they are alike
    falls = bool(np.all(np.diff(of_growing) < 0)) if high and len(of_growing) > 1 else None
    if falls is False and low and high and np.mean(high) < np.mean(low):
        falls = None  # lower on the whole, but not step by step
        correlation = spearmanr(values, list(means.values())).statistic
        shown += f" (rank correlation {correlation:.1f}: on the whole, not at every step)"
    claims = (
        Claim("5.2.2, figure 7", "similar performance for lower mu",
              f"up to {args.low:g} MAP@R differs by {max(low) - min(low):.1f} points" if low else "none was tried",
              None),
        Claim("5.2.2, figure 7", "performance falls as mu grows", shown, falls),
        Claim("5.2.2", "0.3 is suggested", f"best at {best:g}", None),
    )  # fmt: skip
    title = "GSP over mu, the share of the pixels that is transported"
    figure, panels = plt.subplots(1, 2, figsize=(8, 3.3), layout="constrained")
    for axes, (metric, label) in zip(panels, _METRICS.items(), strict=True):
        runs = 100 * np.array([found[f"mu = {value:g}"][metric] for value in values])  # [values, runs]
        middle, deviation = runs.mean(axis=1), runs.std(axis=1)
        axes.plot(values, middle, marker="o", markersize=4)
        axes.fill_between(values, middle - deviation, middle + deviation, alpha=0.2)
        axes.set(xlabel="mu", ylabel=label)
        axes.grid(alpha=0.3)
    figure.suptitle(title, fontsize=9)
    note = f"lower mu: at most {args.low:g}; mu = 1 is average pooling"
    return _findings(title, "mu", found, claims, note, args, figure)


def over_m_and_epsilon(args: Any, parts: Parts) -> Findings:
    """Train and test at every pair of numbers of prototypes m and smoothings epsilon, and with average pooling."""
    prototypes, smoothings = several_values(args, "prototypes"), several_values(args, "smoothings")
    ratio = f"pooling.transport_ratio={args.transport_ratio}"
    configs = {_BASELINE: ("pooling=gap",)} | {
        f"m = {m}, epsilon = {value:g}": (
            "pooling=gsp", f"pooling.num_prototypes={m}", f"pooling.smoothing={value}", ratio
        )
        for m in prototypes
        for value in smoothings
    }  # fmt: skip
    found = scores_of(configs, args, parts)
    means = {name: _mean(scores) for name, scores in found.items()}
    baseline = means.pop(_BASELINE)
    grid = np.array(list(means.values())).reshape(len(prototypes), len(smoothings))
    best = max(means, key=lambda name: means[name])
    over_m, over_smoothing = (float(np.ptp(grid.mean(axis=axis))) for axis in (1, 0))
    claims = (
        Claim("1.5, figure 10a", "with C2 on CUB best at m = 64 and epsilon = 5",
              f"best at {best}, {grid.max():.1f} % (GAP {baseline:.1f})", None),
        Claim("table 7", "MAP@R depends on both (with C2 on CUB from 35.36 to 40.63, 39.77 without GSP)",
              f"from {grid.min():.1f} to {grid.max():.1f}; means differ by {over_m:.1f} over m and by "
              f"{over_smoothing:.1f} over epsilon", None),
    )  # fmt: skip
    title = "GSP over the number of prototypes and the smoothing"
    note = f"mu = {args.transport_ratio:g}; the data are others than the paper's"
    figure = _heat_map(prototypes, smoothings, grid, f"{title}\n(GAP: {baseline:.1f})")
    return _findings(title, "pooling", found, claims, note, args, figure)


def scores_of(configs: Mapping[str, Sequence[str]], args: Any, parts: Parts) -> dict[str, Scores]:
    """Test scores over ``args.folds`` and ``args.repeats`` of configs, given as overrides by name."""
    require_positive(args, "repeats")
    if not args.folds:
        raise ConfigError("folds: got none, expected at least one, such as folds=[0].")
    names = {
        f"{config}, fold {fold}, repeat {repeat}": (config, f"fold={fold}", f"repeat={repeat}")
        for config in configs
        for fold in args.folds
        for repeat in range(args.repeats)
    }

    def compute(name: str) -> dict[str, float]:
        config, *where = names[name]
        result: dict[str, Any] = read_result(run_of(args, [*configs[config], *where]))
        parts.bind(data=result["dataset_fingerprint"])
        return {metric: result["metrics"]["test"][metric] for metric in ("p_at_1", "map_at_r")}

    found = parts.get(list(names), compute, describe="runs")
    return {
        config: {
            metric: [found[name][metric] for name, (of, *_) in names.items() if of == config] for metric in _METRICS
        }
        for config in configs
    }


def _mean(scores: Scores) -> float:
    """Mean MAP@R in percent."""
    return 100 * float(np.mean(scores["map_at_r"]))


def _findings(
    title: str, what: str, found: Mapping[str, Scores], claims: tuple[Claim, ...], note: str, args: Any,
    figure: Figure,
) -> Findings:  # fmt: skip
    rows = tuple((name, *(spread(scores[metric]) for metric in _METRICS)) for name, scores in found.items())
    notes = (
        note,
        f"runs: {trained_by(args)}",
        f"test scores of folds {', '.join(map(str, args.folds))}, {args.repeats} repeats each; mean ± population "
        "deviation over these runs, which share their seeds from row to row",
    )
    return Findings(title, (what, *_METRICS.values()), rows, claims, notes, figure)


def _heat_map(prototypes: list[int], smoothings: list[float], grid: Float, title: str) -> Figure:
    size = (1.8 + 1.1 * len(smoothings), 1.8 + 0.8 * len(prototypes))
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    image = axes.imshow(grid, cmap="viridis")
    for (row, column), value in np.ndenumerate(grid):
        color = "black" if value - grid.min() > 0.6 * np.ptp(grid) else "white"  # the scale's upper end is bright
        axes.text(column, row, f"{value:.1f}", ha="center", va="center", color=color, fontsize=9)
    axes.set_xticks(range(len(smoothings)), [f"{value:g}" for value in smoothings])
    axes.set_yticks(range(len(prototypes)), [str(m) for m in prototypes])
    axes.set(xlabel="epsilon", ylabel="m")
    figure.colorbar(image, label="MAP@R, %")
    axes.set_title(title, fontsize=8)
    return figure
