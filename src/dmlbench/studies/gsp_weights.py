"""Pooling weights on a small map of colors, by linear program and smoothed (GSP, section 4.2, figure 2).

Source: Y. Z. Gürbüz, O. Şener, A. A. Alatan, "Generalized Sum Pooling for Metric Learning", ICCV 2023, section 4.2: a
    map of 10 x 10 x 3, prototypes red and blue, half of the map green, mu = 0.2. Where the colors lie, how much they
    vary and the smoothing are not given.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray

from dmlbench.apps.pictures import plt
from dmlbench.models.transport import prototype_cost, transport_weights
from dmlbench.studies.record import Claim, Findings, Float, Parts, several_values
from dmlbench.types import ConfigError, check_at_least

SIDE = 10
_RED, _GREEN, _BLUE = np.eye(3)
_COVERED = 0.5
"""A pixel counts as used from this share of an even weight on."""


def color_map(noise: float, *, seed: int) -> tuple[Float, NDArray[np.bool_]]:
    """A map [10, 10, 3] in [0, 1], red and blue blocks of 25 pixels on green, and which pixels are red or blue."""
    colors = np.broadcast_to(_GREEN, (SIDE, SIDE, 3)).copy()
    colors[1:6, :5] = _RED
    colors[4:9, 5:] = _BLUE
    is_informative = colors[..., 1] == 0
    return np.clip(colors + np.random.default_rng(seed).normal(0, noise, colors.shape), 0, 1), is_informative


def linear_program(cost: Float, ratio: float) -> Float:
    """Solve the unsmoothed problem (P1) for costs [m, n]: weights [n].

    The nearest pixels are taken whole until their mass is ``ratio``, the last of them in part.
    """
    pixels = cost.shape[1]
    weights = np.empty(pixels)
    weights[np.argsort(cost.min(axis=0), kind="stable")] = np.clip(ratio - np.arange(pixels) / pixels, 0, 1 / pixels)
    return weights / ratio


def conduct(args: Any, parts: Parts) -> Findings:
    """Solve both problems."""
    smoothings = several_values(args, "smoothings")[::-1]
    if not 0 < args.transport_ratio < 1:
        raise ConfigError(f"transport_ratio: got {args.transport_ratio}, expected a number between 0 and 1.")
    check_at_least(0, noise=args.noise, seed=args.seed)
    colors, is_informative = color_map(args.noise, seed=args.seed)
    features = torch.from_numpy(colors.reshape(1, -1, 3))
    cost = prototype_cost(features, torch.from_numpy(np.stack([_RED, _BLUE])))
    names = {"linear program": None, **{f"epsilon = {value:g}": value for value in smoothings}, "GAP": 0.0}

    def compute(name: str) -> list[float]:
        smoothing = names[name]
        if smoothing is None:
            return linear_program(cost[0].numpy(), args.transport_ratio).tolist()
        ratio = args.transport_ratio if smoothing else 1.0
        return transport_weights(cost, transport_ratio=ratio, smoothing=smoothing or 1.0).weights[0].tolist()

    found = parts.get(list(names), compute, describe="weights")
    mask = is_informative.ravel()
    even = 1 / mask.sum()
    weights_by = {name: np.array(weights) for name, weights in found.items()}
    measured = {
        name: {
            "informative": float(weights[mask].sum()),
            "used": float((weights[mask] >= _COVERED * even).mean()),
            "apart": float(np.abs(weights - weights_by["linear program"]).sum() / 2),
            "from_gap": float(np.abs(weights - 1 / len(mask)).sum() / 2),
        }
        for name, weights in weights_by.items()
    }
    rows = tuple((name, *(f"{100 * value:.1f}" for value in one.values())) for name, one in measured.items())
    program, sharp, flat = (
        measured[name] for name in ("linear program", f"epsilon = {smoothings[0]:g}", f"epsilon = {smoothings[-1]:g}")
    )
    smooth = {name: one["used"] * one["informative"] for name, one in measured.items() if name.startswith("epsilon")}
    name_of_best = max(smooth, key=smooth.__getitem__)
    best = measured[name_of_best]
    claims = (
        Claim("4.2, figure 2", "with mu underestimated the linear program ignores informative pixels",
              f"it uses {100 * program['used']:.0f} % of the red and blue pixels", program["used"] < 1),
        Claim("4.2, figure 2", "smoothed, the weights are desirable even so",
              f"{name_of_best}: {100 * best['used']:.0f} % of these pixels are used, with "
              f"{100 * best['informative']:.0f} % of the weight", best["used"] > program["used"]),
        Claim("4.2", "for epsilon to 0 the weights are uniform, as of GAP",
              f"{100 * flat['from_gap']:.1f} % of the weight lies elsewhere at epsilon = {smoothings[-1]:g}, "
              f"{100 * sharp['from_gap']:.1f} % at {smoothings[0]:g}", flat["from_gap"] < sharp["from_gap"]),
        Claim("4.2", "for large epsilon they are similar to top-k",
              f"{100 * sharp['apart']:.1f} % of the weight lies elsewhere than the linear program's at epsilon = "
              f"{smoothings[0]:g}, {100 * flat['apart']:.1f} % at {smoothings[-1]:g}", sharp["apart"] < flat["apart"]),
    )  # fmt: skip
    notes = (
        f"mu = {args.transport_ratio:g}, true share 0.5; where the colors lie, noise of {args.noise:g} a channel (seed "
        f"{args.seed}, without it all red and blue pixels are alike) and the values of epsilon are ours",
        f"used: with at least {_COVERED:g} of the weight that it would have if red and blue pixels shared it evenly",
        "lies elsewhere: half of the sum of absolute differences of the weights",
    )
    heads = ("weights", "on red and blue, %", "red and blue pixels used, %", "elsewhere than the linear program's, %",
             "elsewhere than GAP's, %")  # fmt: skip
    title = "Pooling weights on a map of colors"
    return Findings(title, heads, rows, claims, notes, _figure(found, colors, title))


def _figure(found: Mapping[str, Any], colors: Float, title: str) -> Figure:
    figure, panels = plt.subplots(1, 1 + len(found), figsize=(2 * (1 + len(found)), 2.5), layout="constrained")
    panels[0].imshow(colors)
    panels[0].set_title("map", fontsize=9)
    for axes, (name, weights) in zip(panels[1:], found.items(), strict=True):
        axes.imshow(np.array(weights).reshape(SIDE, SIDE), cmap="Greys", vmin=0, vmax=max(weights))
        axes.set_title(name, fontsize=9)
    for axes in panels:
        axes.set(xticks=[], yticks=[])
    figure.suptitle(f"{title}: higher ones darker, each from 0 to its largest", fontsize=9)
    return figure
