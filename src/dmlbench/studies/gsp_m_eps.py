"""MAP@R over the number of prototypes m and the smoothing epsilon (GSP, supplement 1.5, figure 10 and table 7).

Source: Y. Z. Gürbüz, O. Şener, A. A. Alatan, "Generalized Sum Pooling for Metric Learning", ICCV 2023: on CUB, with mu
    = 0.3. The paper's own grids are conf/experiment/gsp/figure10a, figure10b and table7.
"""

import numpy as np
from matplotlib.figure import Figure
from omegaconf import DictConfig

from dmlbench.apps.pictures import plt
from dmlbench.studies.record import Claim, Findings, Float, Parts, several_values
from dmlbench.studies.trained import mean, notes_on_runs, score_rows, scores_of

_BASELINE = "GAP"


def conduct(cfg: DictConfig, parts: Parts) -> Findings:
    """Train and test at every pair of values, and with average pooling."""
    prototypes, smoothings = several_values(cfg, "prototypes"), several_values(cfg, "smoothings")
    ratio = f"pooling.transport_ratio={cfg.transport_ratio}"
    configs = {_BASELINE: ("pooling=gap",)} | {
        _name(m, value): ("pooling=gsp", f"pooling.num_prototypes={m}", f"pooling.smoothing={value}", ratio)
        for m in prototypes
        for value in smoothings
    }
    found = scores_of(configs, cfg, parts)
    grid = np.array([[mean(found[_name(m, value)]) for value in smoothings] for m in prototypes])
    at_m, at_smoothing = np.unravel_index(int(grid.argmax()), grid.shape)
    over_m, over_smoothing = (float(np.ptp(grid.mean(axis=axis))) for axis in (1, 0))
    claims = (
        Claim("1.5, figure 10a", "with C2 on CUB best at m = 64 and epsilon = 5",
              f"best at {_name(prototypes[at_m], smoothings[at_smoothing])}, {grid.max():.1f} % (GAP "
              f"{mean(found[_BASELINE]):.1f})", None),
        Claim("table 7", "MAP@R depends on both (with C2 on CUB from 35.36 to 40.63, 39.77 without GSP)",
              f"from {grid.min():.1f} to {grid.max():.1f}; means differ by {over_m:.1f} over m and by "
              f"{over_smoothing:.1f} over epsilon", None),
    )  # fmt: skip
    notes = (f"mu = {cfg.transport_ratio:g}; the data are others than the paper's", *notes_on_runs(cfg))
    title = "GSP over the number of prototypes and the smoothing"
    figure = _figure(prototypes, smoothings, grid, mean(found[_BASELINE]), title)
    return Findings(title, ("pooling", "MAP@R, %", "P@1, %"), score_rows(found), claims, notes, figure)


def _name(prototypes: int, smoothing: float) -> str:
    return f"m = {prototypes}, epsilon = {smoothing:g}"


def _figure(prototypes: list[int], smoothings: list[float], grid: Float, baseline: float, title: str) -> Figure:
    size = (1.8 + 1.1 * len(smoothings), 1.8 + 0.8 * len(prototypes))
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    image = axes.imshow(grid, cmap="viridis")
    for (row, column), value in np.ndenumerate(grid):
        color = "black" if value - grid.min() > 0.6 * np.ptp(grid) else "white"  # the scale's upper end is bright
        axes.text(column, row, f"{value:.1f}", ha="center", va="center", color=color, fontsize=9)
    axes.set_xticks(range(len(smoothings)), [f"{value:g}" for value in smoothings])
    axes.set_yticks(range(len(prototypes)), [str(m) for m in prototypes])
    axes.set_xlabel("epsilon")
    axes.set_ylabel("m")
    figure.colorbar(image, label="MAP@R, %")
    axes.set_title(f"{title}\n(GAP: {baseline:.1f})", fontsize=8)
    return figure
