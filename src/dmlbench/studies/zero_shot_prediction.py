"""Whether attributes predict classes that they were not fitted to, with and without the zero-shot loss (GSP, figure 5).

Source: Y. Z. Gürbüz, O. Şener, A. A. Alatan, "Generalized Sum Pooling for Metric Learning", ICCV 2023, section 5.1 and
    supplement 2.3: CIFAR-10, 8 prototypes, ProxyNCA++; a linear map is fitted from the histograms of five classes to
    their mean embeddings, and predicts those of the other five. The length of the training is not given.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from omegaconf import DictConfig

from dmlbench.apps.pictures import plt
from dmlbench.losses.cross_batch import ridge_predict
from dmlbench.studies.record import Claim, Findings, Float, Parts, require_positive, spread
from dmlbench.studies.trained import (
    describe,
    draw_by_class,
    entropy,
    halves,
    prototypes_by_class,
    sample_test_rows,
    side_by_side,
    tied_to_classes,
    trained_by,
    trained_setup,
)
from dmlbench.types import IntArray

_WAYS = {"without ZSR": "regularizer=none", "with ZSR": "regularizer=zsr"}
_TOLD = 0.02
"""Bits of entropy below which histograms do not differ."""
_DISTANCES = {"l2": "Euclidean", "cosine": "cosine"}


def zero_shot(
    histograms: Float, means: Float, splits: list[tuple[IntArray, IntArray]], *, ridge: float
) -> dict[str, dict[str, list[float]]]:
    """Predict mean embeddings of half of the classes by a map fitted to the other half.

    Args:
        histograms: [C, m].
        means: [C, D].
        splits: classes to fit to, and classes to predict.

    Returns:
        by distance, for every split: "accuracy", the share of classes whose prediction is nearest to their own mean,
        and "map", the mean of 1 / the rank of their own mean.
    """
    found: dict[str, dict[str, list[float]]] = {key: {"accuracy": [], "map": []} for key in _DISTANCES}
    for fitted, other in splits:
        z, y = (torch.from_numpy(values[fitted]) for values in (histograms, means))
        predicted = ridge_predict(z, y, torch.from_numpy(histograms[other]), ridge=ridge).numpy()
        true = means[other]
        apart = {
            "l2": np.linalg.norm(predicted[:, None] - true[None], axis=2),
            "cosine": -_unit(predicted) @ _unit(true).T,
        }
        for key, distance in apart.items():
            own = np.diag(distance)[:, None]
            rank = 1 + (distance < own).sum(axis=1)
            found[key]["accuracy"].append(float((rank == 1).mean()))
            found[key]["map"].append(float((1 / rank).mean()))
    return found


def _unit(rows: Float) -> Float:
    unit: Float = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-300)
    return unit


def conduct(cfg: DictConfig, parts: Parts) -> Findings:
    """Train with and without the loss, then predict."""
    require_positive(cfg, "splits", "eval_images", "prototypes")

    def compute(name: str) -> Any:
        pooling = ("pooling=gsp", f"pooling.num_prototypes={cfg.prototypes}")
        setup = trained_setup(cfg, [*pooling, _WAYS[name]], parts)
        rows = sample_test_rows(setup, count=cfg.eval_images, seed=cfg.seed)
        described = describe(setup, rows)
        histograms, means = (described.by_class(values) for values in (described.histogram, described.embedding))
        splits = halves(described.num_classes, cfg.splits, seed=cfg.seed)
        of_classes = prototypes_by_class(setup, described, images=2)
        return {**zero_shot(histograms, means, splits, ridge=cfg.ridge), **of_classes, "images": len(rows)}

    found = parts.get(list(_WAYS), compute, describe="trainings")
    without, with_ = (found[way] for way in _WAYS)
    bits = {way: entropy(np.array(one["histogram"])) for way, one in found.items()}
    tied = tied_to_classes(np.array(with_["histogram"]))
    shares = tied > _TOLD and abs(bits["with ZSR"] - bits["without ZSR"]) > _TOLD  # all alike, they tell nothing
    rows = tuple(
        (way, *(spread(one[key][score]) for key in _DISTANCES for score in ("map", "accuracy")),
         f"{bits[way]:.2f} of {np.log2(cfg.prototypes):.2f}")
        for way, one in found.items()
    )  # fmt: skip
    half = len(without["classes"]) - len(without["classes"]) // 2
    chance = 100 * float(np.mean(1 / np.arange(1, half + 1)))
    gains = {key: np.array(with_[key]["map"]) - np.array(without[key]["map"]) for key in _DISTANCES}
    claims = (
        *(Claim("5.1, figure 5", f"zero-shot MAP is substantially superior with the loss ({_DISTANCES[key]} distance)",
                f"{100 * gain.mean():+.1f} points, better in {np.mean(gain > 0):.0%} of {len(gain)} splits, worse in "
                f"{np.mean(gain < 0):.0%}", bool(gain.mean() > 0)) for key, gain in gains.items()),
        Claim("5.1, figure 5", "with the loss the prototypes are transferable: classes share them",
              f"entropy of a class's histogram: {bits['without ZSR']:.2f} bits without, {bits['with ZSR']:.2f} with; "
              f"with it a prototype tells {tied:.2f} bits of the class",
              bits["with ZSR"] > bits["without ZSR"] if shares else None),
    )  # fmt: skip
    notes = (
        f"trained by: {trained_by(cfg)}",
        f"{cfg.prototypes} prototypes, {without['images']:,} test images, {cfg.splits} random halves of the classes, "
        f"ridge {cfg.ridge:g}; mean ± population deviation over the halves",
        f"by chance: MAP {chance:.1f} %, nearest {100 / half:.1f} % of {half} classes",
    )
    heads = ("prototypes", *(f"{score}, {_DISTANCES[key]}, %" for key in _DISTANCES for score in ("MAP", "nearest")),
             "entropy of a class, bits")  # fmt: skip
    title = "Zero-shot prediction of CIFAR-10's classes from prototypes"
    return Findings(title, heads, rows, claims, notes, _figure(found, title))


def _figure(found: Mapping[str, Any], title: str) -> Figure:
    figure = plt.figure(figsize=(11, 5.2), layout="constrained")
    for part, (way, one) in zip(side_by_side(figure, [1, 1]), found.items(), strict=True):
        scores = ", ".join(f"{_DISTANCES[key]} {100 * np.mean(one[key]['map']):.1f}" for key in _DISTANCES)
        draw_by_class(part, one, f"{way}: MAP {scores}")
    figure.suptitle(title, fontsize=10)
    return figure
