"""MAP@R over mu, the share of the pixels that GSP transports (GSP, section 5.2.2, figure 7 right).

Source: Y. Z. Gürbüz, O. Şener, A. A. Alatan, "Generalized Sum Pooling for Metric Learning", ICCV 2023. The figure names
    neither data set nor loss; its grid is not given.
"""

import numpy as np
from matplotlib.figure import Figure
from omegaconf import DictConfig
from scipy.stats import spearmanr

from dmlbench.apps.pictures import plt
from dmlbench.studies.record import Claim, Findings, Parts, several_values
from dmlbench.studies.trained import Scores, mean, notes_on_runs, score_rows, scores_of
from dmlbench.types import ConfigError


def conduct(cfg: DictConfig, parts: Parts) -> Findings:
    """Train and test at every mu."""
    values = several_values(cfg, "transport_ratios")
    if values[-1] > 1:
        raise ConfigError(f"transport_ratios: got {values}, expected two or more numbers in (0, 1].")
    configs = {f"mu = {value:g}": ("pooling=gsp", f"pooling.transport_ratio={value}") for value in values}
    found = scores_of(configs, cfg, parts)
    means = {value: mean(found[f"mu = {value:g}"]) for value in values}
    best = max(means, key=lambda value: means[value])
    low, high = ([means[value] for value in values if (value <= cfg.low) == is_low] for is_low in (True, False))
    shown = ", ".join(f"{value:g}: {score:.1f}" for value, score in means.items())
    scores = list(means.values())
    of_growing = [*low[-1:], *high]  # what is said of the low ones is that they are alike
    falls = bool(np.all(np.diff(of_growing) < 0)) if high and len(of_growing) > 1 else None
    if falls is False and low and high and np.mean(high) < np.mean(low):
        falls = None  # lower on the whole, but not step by step
        shown += f" (rank correlation {spearmanr(values, scores).statistic:.1f}: on the whole, not at every step)"
    claims = (
        Claim("5.2.2, figure 7", "similar performance for lower mu",
              f"up to {cfg.low:g} MAP@R differs by {max(low) - min(low):.1f} points" if low else "none was tried",
              None),
        Claim("5.2.2, figure 7", "performance falls as mu grows", shown, falls),
        Claim("5.2.2", "0.3 is suggested", f"best at {best:g}", None),
    )  # fmt: skip
    notes = (f"lower mu: at most {cfg.low:g}; mu = 1 is average pooling", *notes_on_runs(cfg))
    title = "GSP over mu, the share of the pixels that is transported"
    figure = _figure(values, found, title)
    return Findings(title, ("mu", "MAP@R, %", "P@1, %"), score_rows(found), claims, notes, figure)


def _figure(values: list[float], found: dict[str, Scores], title: str) -> Figure:
    figure, panels = plt.subplots(1, 2, figsize=(8, 3.3), layout="constrained")
    for axes, metric, label in zip(panels, ("map_at_r", "p_at_1"), ("MAP@R, %", "P@1, %"), strict=True):
        runs = 100 * np.array([found[f"mu = {value:g}"][metric] for value in values])  # [values, runs]
        middle, deviation = runs.mean(axis=1), runs.std(axis=1)
        axes.plot(values, middle, marker="o", markersize=4)
        axes.fill_between(values, middle - deviation, middle + deviation, alpha=0.2)
        axes.set_xlabel("mu")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    figure.suptitle(title, fontsize=9)
    return figure
