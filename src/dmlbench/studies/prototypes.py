"""Prototypes of CIFAR-10: whether they stand for average pooling, and whether they serve other classes.

Sources: Y. Z. Gürbüz, A. A. Alatan, "Generalizable Embeddings with Cross-batch Metric Learning" (XML), section 3.2,
    figures 3 and 4: lemma 2.1 (prototypes that cover the features within delta represent an average within delta), and
    MAP of embeddings that prototypes predict for the classes they were fitted to (MAPc) and for the other half of the
    classes (MAPx). The loss, the length of the training and the kind of MAP are not given.
    Y. Z. Gürbüz, O. Şener, A. A. Alatan, "Generalized Sum Pooling for Metric Learning" (GSP), ICCV 2023, section 5.1,
    figure 5 and supplement 2.3: 8 prototypes, ProxyNCA++; a linear map is fitted from the histograms of five classes
    to their mean embeddings, and predicts those of the other five. The length of the training is not given.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from scipy.spatial.distance import cdist
from torch import Tensor

from dmlbench.apps.pictures import plt
from dmlbench.evaluation.evaluate import evaluate_arrays
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.experiment import Setup
from dmlbench.losses.xml import ridge_predict
from dmlbench.models.net import PooledModel
from dmlbench.models.pooling.gsp import greedy_k_center
from dmlbench.studies import models
from dmlbench.studies.models import Described
from dmlbench.studies.record import Claim, Findings, Float, Parts, require_positive, spread
from dmlbench.types import IntArray

Splits = list[tuple[IntArray, IntArray]]
"""Halves of the classes: to fit to, and to predict."""

_XML = {"without XML": "regularizer=xml_reconstruction", "with XML": "regularizer=xml"}
"""Without it the prototypes are fitted to the batches themselves (section 2.2): the loss alone would not train them."""
_POINTS = 3000
_ZSR = {"without ZSR": "regularizer=none", "with ZSR": "regularizer=zsr"}
_TOLD = 0.02
"""Bits of entropy below which histograms do not differ."""
_DISTANCES = {"l2": "Euclidean", "cosine": "cosine"}


def _trained(args: Any, parts: Parts, pooling: str, regularizer: str) -> tuple[Described, Splits, dict[str, Any]]:
    """Train a model with prototypes: its outputs for test images, halves of the classes, and what is drawn."""
    overrides = [f"pooling={pooling}", f"pooling.num_prototypes={args.prototypes}", regularizer]
    setup = models.trained_setup(args, overrides, parts)
    described = models.describe(setup, models.sample_test_rows(setup, count=args.eval_images, seed=args.seed))
    splits = models.halves(described.num_classes, args.splits, seed=args.seed)
    shown = models.prototypes_by_class(setup, described, images=2)
    return described, splits, {**shown, "images": len(described.labels)}


# XML, figures 3 and 4


def cover(features: Tensor, count: int) -> tuple[Tensor, float]:
    """Pick prototypes [count, D] by greedy k-center from the rows [N, D]; return them and their covering radius."""
    first = features[:1]
    prototypes = first if count == 1 else torch.cat([first, greedy_k_center(first, features, count - 1)])
    return prototypes, float(torch.cdist(features, prototypes).amin(dim=1).max())


def discrepancy(features: Tensor, prototypes: Tensor) -> dict[str, Tensor]:
    """Distance of each image's average feature from the combination of the prototypes assigned to its features.

    Of features [B, n, D] and prototypes [m, D].

    Returns:
        [B] by rule of assignment: "nearest" prototype, bounded by the covering radius (lemma 2.1), and largest inner
        "product" (equation 2.2), the same for prototypes of equal length only.
    """
    average = features.mean(dim=1)
    indices = {
        "nearest": torch.cdist(features, prototypes[None]).argmin(dim=2),
        "product": (features @ prototypes.T).argmax(dim=2),
    }
    return {
        rule: torch.linalg.vector_norm(prototypes[index].mean(dim=1) - average, dim=1)
        for rule, index in indices.items()
    }


@torch.inference_mode()
def local_features(setup: Setup, rows: IntArray) -> Tensor:
    """Project the pixels of the last map: [N, HW, D] in float64."""
    model = setup.model
    assert isinstance(model, PooledModel)
    maps = [
        model.projection(model.backbone(model.backbone.preprocess(batch.images))[-1]) for batch in setup.batches(rows)
    ]
    return torch.cat(maps).flatten(2).transpose(1, 2).double().cpu().contiguous()


def cross_class(described: Described, splits: Splits, *, ridge: float, metric: str) -> Any:
    """Score embeddings that a linear map predicts from histograms.

    Returns:
        "fitted": all images by a map fitted to all; "crossed": by split, the second half by a map fitted to the first;
        "same": the second half by a map fitted to itself; "own": the embeddings themselves.
    """
    spec = EvaluationSpec(metrics=(metric,), recall_at=(1,))
    z, y = (torch.from_numpy(values) for values in (described.histogram, described.embedding))
    labels = described.labels

    def score(rows: Tensor, of: IntArray) -> float:
        return float(evaluate_arrays(rows.float(), labels[of], spec=spec).scores[metric])

    every = np.arange(len(labels))
    found: dict[str, Any] = {"own": score(y, every), "fitted": score(ridge_predict(z, y, z, ridge=ridge), every)}
    crossed, same = [], []
    for first, second in splits:
        mine, other = (np.flatnonzero(np.isin(labels, classes)) for classes in (first, second))
        crossed.append(score(ridge_predict(z[mine], y[mine], z[other], ridge=ridge), other))
        same.append(score(ridge_predict(z[other], y[other], z[other], ridge=ridge), other))
    return {**found, "crossed": crossed, "same": same}


def xml(args: Any, parts: Parts) -> Findings:
    """Train the three models, then cover, fit and predict."""
    require_positive(args, "images", "centers", "splits", "eval_images", "prototypes")

    def compute(name: str) -> Any:
        if name == "cover":
            setup = models.trained_setup(args, ["pooling=gap", "head.out_features=2"], parts)
            return _covered(setup, models.sample_test_rows(setup, count=args.images, seed=args.seed), args)
        described, splits, shown = _trained(args, parts, "gap_histogram", _XML[name])
        return {**cross_class(described, splits, ridge=args.ridge, metric=args.metric), **shown}

    found = parts.get(["cover", *_XML], compute, describe="trainings")
    covered, (without, with_) = found["cover"], (found[way] for way in _XML)
    bits = {way: models.entropy(np.array(found[way]["histogram"])) for way in _XML}
    tied = {way: models.tied_to_classes(np.array(found[way]["histogram"])) for way in _XML}
    heads = ("prototypes", "MAPc, %", "MAPx, %", "of the same halves, fitted to themselves, %", "embeddings, %",
             "entropy of a class, bits")  # fmt: skip
    rows = tuple(
        (way, f"{100 * one['fitted']:.1f}", spread(one["crossed"]), spread(one["same"]), f"{100 * one['own']:.1f}",
         f"{bits[way]:.2f} of {np.log2(args.prototypes):.2f}")
        for way, one in zip(_XML, (without, with_), strict=True)
    )  # fmt: skip
    gain = np.array(with_["crossed"]) - np.array(without["crossed"])
    seen = 100 * (with_["fitted"] - without["fitted"])
    near, product = (max(covered[rule]) for rule in ("nearest", "product"))
    claims = (
        Claim("3.2, figure 3; lemma 2.1", "an average and its combination of prototypes differ by less than delta",
              f"delta {covered['delta']:.3f}, largest difference {near:.3f} of {len(covered['nearest'])} images "
              "(nearest prototype)", near <= covered["delta"]),
        Claim("claim 2.1, equation 2.2", "the same with the prototype of the largest inner product",
              f"largest difference {product:.3f}: {np.mean(np.array(covered['product']) > covered['delta']):.0%} of "
              "them above delta; the lemma needs prototypes of equal length", product <= covered["delta"]),
        Claim("3.2, figure 4", "MAPx is superior with XML",
              f"{100 * gain.mean():+.1f} points, better in {np.mean(gain > 0):.0%} of {len(gain)} splits",
              bool(gain.mean() > 0)),
        Claim("3.2, figure 4", "MAPc is similar", f"{seen:+.1f} points", None),
        Claim("3.2, figure 4", "without XML prototypes are fitted to classes, with it classes share them",
              f"a prototype tells {tied['without XML']:.2f} bits of the class without XML, {tied['with XML']:.2f} with "
              f"(entropy of a class {bits['without XML']:.2f} and {bits['with XML']:.2f})",
              tied["without XML"] > tied["with XML"]),
    )  # fmt: skip
    notes = (
        f"trained by: {models.trained_by(args)}",
        "without XML the prototypes learn |V Z - Y|^2 instead (section 2.2)",
        f"figure 3: {args.centers} prototypes by greedy k-center among the pixels of {args.images} test images a "
        "class, embeddings of two dimensions",
        f"figure 4: {args.prototypes} prototypes, {without['images']:,} test images, {args.splits} random halves of "
        f"the classes, ridge {args.ridge:g}; MAP is {args.metric}; the paper names neither the loss nor the kind of "
        "MAP",
        "MAPx ranks among half of the classes, MAPc among all: compare MAPx with the column of the same halves",
    )
    title = "Prototypes of CIFAR-10 with and without XML"
    return Findings(title, heads, rows, claims, notes, _xml_figure(found, title))


def _covered(setup: Setup, rows: IntArray, args: Any) -> dict[str, Any]:
    features = local_features(setup, rows)  # [N, HW, 2]
    flat = features.flatten(0, 1)
    prototypes, delta = cover(flat, args.centers)
    apart = discrepancy(features, prototypes)
    some = np.random.default_rng(args.seed).permutation(len(flat))[:_POINTS]
    shown = int(apart["nearest"].argmax())
    return {
        "delta": delta,
        "prototypes": prototypes.tolist(),
        **{rule: values.tolist() for rule, values in apart.items()},
        "points": np.round(flat[some].numpy(), 5).tolist(),
        "sample": features[shown].tolist(),
    }


def _xml_figure(found: Mapping[str, Any], title: str) -> Figure:
    figure = plt.figure(figsize=(15, 5.2), layout="constrained")
    subfigures: Any = figure.subfigures(1, 3, width_ratios=[1.1, 1, 1])
    left, *others = subfigures
    covered = found["cover"]
    prototypes, delta = np.array(covered["prototypes"]), covered["delta"]
    upper, lower = left.subplots(1, 2, width_ratios=[1, 1])
    upper.scatter(*np.array(covered["points"]).T, s=1, color="0.6", linewidths=0)
    for place in prototypes:
        upper.add_patch(plt.Circle(tuple(place), delta, fill=False, color="tab:blue", linewidth=0.5))
    upper.scatter(*prototypes.T, s=9, color="tab:red", zorder=3, linewidths=0)
    upper.set_aspect("equal", adjustable="datalim")
    upper.set_title(f"{len(prototypes)} prototypes, covering radius {delta:.2f}", fontsize=8)
    sample = np.array(covered["sample"])
    nearest = np.linalg.norm(sample[:, None] - prototypes[None], axis=2).argmin(axis=1)
    lower.scatter(*sample.T, s=6, color="0.5", linewidths=0, label="pixels of an image")
    lower.scatter(*prototypes[np.unique(nearest)].T, s=22, color="tab:red", linewidths=0, label="their prototypes")
    lower.scatter(*sample.mean(axis=0), marker="x", color="black", label="average", zorder=3)
    lower.scatter(*prototypes[nearest].mean(axis=0), marker="+", color="tab:green", label="of prototypes", zorder=3)
    lower.legend(fontsize=6)
    lower.set_title(f"the image with the largest difference, {max(covered['nearest']):.2f}", fontsize=8)
    for part, way in zip(others, _XML, strict=True):
        one = found[way]
        shown = f"{way}: MAPc {100 * one['fitted']:.1f}, MAPx {100 * np.mean(one['crossed']):.1f}"
        models.draw_by_class(part, one, shown)
    figure.suptitle(title, fontsize=10)
    return figure


# GSP, figure 5


def zero_shot(histograms: Float, means: Float, splits: Splits, *, ridge: float) -> dict[str, dict[str, list[float]]]:
    """Predict mean embeddings [C, D] of half of the classes from histograms [C, m] by a map fitted to the other half.

    Returns:
        by distance, for every split: "accuracy", the share of classes whose prediction is nearest to their own mean,
        and "map", the mean of 1 / the rank of their own mean.
    """
    found: dict[str, dict[str, list[float]]] = {key: {"accuracy": [], "map": []} for key in _DISTANCES}
    for fitted, other in splits:
        z, y = (torch.from_numpy(values[fitted]) for values in (histograms, means))
        predicted = ridge_predict(z, y, torch.from_numpy(histograms[other]), ridge=ridge).numpy()
        for key, name in _DISTANCES.items():
            distance = cdist(predicted, means[other], metric=name.lower())
            own = np.diag(distance)[:, None]
            rank = 1 + (distance < own).sum(axis=1)
            found[key]["accuracy"].append(float((rank == 1).mean()))
            found[key]["map"].append(float((1 / rank).mean()))
    return found


def zero_shot_prediction(args: Any, parts: Parts) -> Findings:
    """Train with and without the loss, then predict."""
    require_positive(args, "splits", "eval_images", "prototypes")

    def compute(name: str) -> Any:
        described, splits, shown = _trained(args, parts, "gsp", _ZSR[name])
        histograms, means = (described.by_class(values) for values in (described.histogram, described.embedding))
        return {**zero_shot(histograms, means, splits, ridge=args.ridge), **shown}

    found = parts.get(list(_ZSR), compute, describe="trainings")
    without, with_ = (found[way] for way in _ZSR)
    bits = {way: models.entropy(np.array(one["histogram"])) for way, one in found.items()}
    tied = models.tied_to_classes(np.array(with_["histogram"]))
    shares = tied > _TOLD and abs(bits["with ZSR"] - bits["without ZSR"]) > _TOLD  # all alike, they tell nothing
    rows = tuple(
        (way, *(spread(one[key][score]) for key in _DISTANCES for score in ("map", "accuracy")),
         f"{bits[way]:.2f} of {np.log2(args.prototypes):.2f}")
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
        f"trained by: {models.trained_by(args)}",
        f"{args.prototypes} prototypes, {without['images']:,} test images, {args.splits} random halves of the classes, "
        f"ridge {args.ridge:g}; mean ± population deviation over the halves",
        f"by chance: MAP {chance:.1f} %, nearest {100 / half:.1f} % of {half} classes",
    )
    heads = ("prototypes", *(f"{score}, {_DISTANCES[key]}, %" for key in _DISTANCES for score in ("MAP", "nearest")),
             "entropy of a class, bits")  # fmt: skip
    title = "Zero-shot prediction of CIFAR-10's classes from prototypes"
    figure = plt.figure(figsize=(11, 5.2), layout="constrained")
    subfigures: Any = figure.subfigures(1, 2)
    for part, (way, one) in zip(subfigures, found.items(), strict=True):
        scores = ", ".join(f"{_DISTANCES[key]} {100 * np.mean(one[key]['map']):.1f}" for key in _DISTANCES)
        models.draw_by_class(part, one, f"{way}: MAP {scores}")
    figure.suptitle(title, fontsize=10)
    return Findings(title, heads, rows, claims, notes, figure)
