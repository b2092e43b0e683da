"""Average pooling and GSP on bags of trainable tokens, a part of which all classes share (GSP, figure 3a).

Source: Y. Z. Gürbüz, O. Şener, A. A. Alatan, "Generalized Sum Pooling for Metric Learning", ICCV 2023, section 5.1 and
    supplement 2.1. The size of the vectors, the loss and GSP's values are not given.
"""

import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.path import Path as Polygon
from numpy.typing import NDArray
from omegaconf import DictConfig
from scipy.spatial import ConvexHull

from dmlbench.apps.pictures import plt, save_figure
from dmlbench.components import component
from dmlbench.runtime import derive_seed, generator, seed_everything
from dmlbench.studies.record import Claim, Findings, Parts
from dmlbench.studies.tokens import NUM_CLASSES, TokenModel, bags, scores, train, weight_of_background
from dmlbench.training.fit import FitSettings
from dmlbench.types import ConfigError

Float = NDArray[np.float64]

_TITLES = {"gap": "GAP", "gsp": "GSP"}


def share_in_other_hulls(points: Float, labels: Sequence[int]) -> float:
    """Share of the points [N, 2] that lie in the convex hull of another class."""
    of = np.asarray(labels)
    inside = np.zeros(len(points), dtype=bool)
    for label in np.unique(of):
        own = points[of == label]
        if len(own) > 2 and np.linalg.matrix_rank(own - own.mean(axis=0)) == 2:
            hull = Polygon(own[ConvexHull(own).vertices])
            inside |= hull.contains_points(points) & (of != label)
    return float(inside.mean())


def conduct(cfg: DictConfig, parts: Parts) -> Findings:
    """Train both poolings from every seed.

    Raises:
        ConfigError: a value out of its range.
    """
    for key in ("repeats", "epochs", "steps_per_epoch", "samples_per_class", "validation_samples", "test_samples"):
        if cfg[key] < 1:
            raise ConfigError(f"{key} ({cfg[key]}) must be at least 1")
    if cfg.embedding_size < 2:
        raise ConfigError(f"embedding_size ({cfg.embedding_size}) must be at least 2: the picture has two dimensions")
    seeds = range(cfg.seed, cfg.seed + cfg.repeats)
    names = {f"{way}, seed {seed}": (way, seed) for seed in seeds for way in _TITLES}
    found = parts.get(list(names), lambda name: _trained(*names[name], cfg, parts), describe="trainings")
    by_way = {way: [found[f"{way}, seed {seed}"] for seed in seeds] for way in _TITLES}
    columns = ("map_at_r", "p_at_1", "background", "overlap")
    rows = tuple((_TITLES[way], *(_percent([one[key] for one in runs]) for key in columns), _steps(runs))
                 for way, runs in by_way.items())  # fmt: skip
    means = {way: {key: float(np.mean([one[key] for one in runs])) for key in columns} for way, runs in by_way.items()}
    gap, gsp = means["gap"], means["gsp"]
    claims = (
        Claim("5.1, figure 3a", "GAP: overlapping convex hulls of the classes, GSP: well separated ones",
              f"in another class's hull: {100 * gap['overlap']:.1f} % of the samples with GAP, "
              f"{100 * gsp['overlap']:.1f} % with GSP", gsp["overlap"] < gap["overlap"]),
        Claim("5.1, figure 3a", "GAP: poor performance, GSP: a better one (the figure's numbers are not in the text)",
              f"MAP@R {100 * gap['map_at_r']:.1f} and {100 * gsp['map_at_r']:.1f} %",
              gsp["map_at_r"] > gap["map_at_r"]),
        Claim("5.1", "GSP learns to ignore background tokens",
              f"{100 * gsp['background']:.1f} % of its weight on them, of GAP's {100 * gap['background']:.1f} %",
              gsp["background"] < gap["background"]),
    )  # fmt: skip
    pooling = cfg.pooling
    notes = (
        f"{NUM_CLASSES} classes of 4 tokens and 4 of the background, samples of 50 tokens, of the class the share "
        f"N({cfg.mixing_mean:g}, {cfg.mixing_std:g}); Adam {cfg.lr:g}, tokens cut to ±{cfg.limit:g}, patience of "
        f"{cfg.patience} epochs, {cfg.samples_per_class} samples of each class in a batch; no normalization",
        f"by the public code: epochs of {cfg.steps_per_epoch} batches, memory filled after step {pooling.start_step}",
        f"not given, so ours: {cfg.embedding_size} dimensions, contrastive loss with margin {cfg.margin:g}, GSP with m "
        f"= {pooling.num_prototypes}, mu = {pooling.transport_ratio:g}, epsilon = {pooling.smoothing:g}; at most "
        f"{cfg.epochs} epochs",
        f"on {cfg.test_samples} new samples of each class; mean ± population deviation over {cfg.repeats} seeds from "
        f"{cfg.seed} on",
    )
    heads = ("pooling", "MAP@R, %", "P@1, %", "weight on the background, %", "in another class's hull, %", "best step")
    title = "Bags of trainable tokens"
    return Findings(title, heads, rows, claims, notes, partial(_draw, found, cfg.seed, title))


def _percent(values: Sequence[float]) -> str:
    return f"{100 * np.mean(values):.1f} ± {100 * np.std(values):.1f}"


def _steps(runs: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"{one['best_step']} of {one['steps']}" for one in runs)


def _trained(way: str, seed: int, cfg: DictConfig, parts: Parts) -> dict[str, Any]:
    mixing = {"mixing_mean": cfg.mixing_mean, "mixing_std": cfg.mixing_std}
    validation, test = (
        bags(cfg[f"{part}_samples"], generator("tokens", part, seed), **mixing) for part in ("validation", "test")
    )
    seed_everything(derive_seed(seed, "tokens"))  # the same tokens for both
    pooling = component({"_target_": "dmlbench.models.pooling.global_pooling.Gap"}) if way == "gap" else None
    model = TokenModel(pooling or component(cfg.pooling), cfg.embedding_size, limit=cfg.limit)
    steps = cfg.steps_per_epoch
    settings = FitSettings(cfg.epochs * steps, steps, patience=cfg.patience, keep="both", log_every=steps)
    folder = parts.path.with_name(f"{parts.path.stem}.running") / f"{way}-{seed}"
    result = train(
        model, folder, settings, lr=cfg.lr, limit=cfg.limit, per_class=cfg.samples_per_class, margin=cfg.margin,
        seed=seed, mixing=mixing, validation=validation,
    )  # fmt: skip
    shutil.rmtree(folder.parent if len(list(folder.parent.iterdir())) == 1 else folder)
    model.eval()
    numbers, labels = test
    rows = model(numbers).embedding.detach().double().numpy()
    tokens = model.tokens.detach().double().numpy()
    plane = np.eye(rows.shape[1], 2) if rows.shape[1] == 2 else np.linalg.svd(rows - rows.mean(axis=0))[2][:2].T
    prototypes = (
        model.pooling.get_parameter("prototypes").detach().double().numpy()
        if way == "gsp"
        else np.empty((0, rows.shape[1]))
    )
    return {
        **scores(model, numbers, labels),
        "background": weight_of_background(model, numbers),
        "overlap": share_in_other_hulls(rows @ plane, labels.tolist()),
        "best_step": result.best_step,
        "steps": result.step,
        "started": model.started,
        "points": np.round(rows @ plane, 6).tolist(),
        "labels": labels.tolist(),
        "tokens": np.round(tokens @ plane, 6).tolist(),
        "prototypes": np.round(prototypes @ plane, 6).tolist(),
    }


def _draw(found: Mapping[str, Any], seed: int, title: str, path: Path) -> None:
    """Samples of the first seed with the hulls of their classes, and the tokens."""
    figure, panels = plt.subplots(1, len(_TITLES), figsize=(10, 5), layout="constrained", squeeze=False)
    colors = plt.get_cmap("tab20")
    for axes, (way, name) in zip(panels[0], _TITLES.items(), strict=True):
        one = found[f"{way}, seed {seed}"]
        points, labels, tokens = np.array(one["points"]), np.array(one["labels"]), np.array(one["tokens"])
        for label in range(NUM_CLASSES):
            own, color = points[labels == label], colors(label)
            axes.scatter(*own.T, s=3, color=color, linewidths=0)
            if len(own) > 2 and np.linalg.matrix_rank(own - own.mean(axis=0)) == 2:
                axes.fill(*own[ConvexHull(own).vertices].T, color=color, alpha=0.25, linewidth=0)
            mine = tokens[4 * label : 4 * label + 4]
            axes.scatter(*mine.T, s=22, marker="^", color=color, edgecolors="black", linewidths=0.4)
        axes.scatter(*tokens[4 * NUM_CLASSES :].T, s=40, marker="X", color="black", label="background tokens")
        if one["prototypes"]:
            axes.scatter(
                *np.array(one["prototypes"]).T, s=12, marker="+", color="0.4", linewidths=0.8, label="prototypes"
            )
        axes.set_title(f"{name}: MAP@R {100 * one['map_at_r']:.1f} %", fontsize=9)
        axes.set_aspect("equal", adjustable="datalim")
        axes.legend(fontsize=7)
    figure.suptitle(f"{title}: samples (dots), hulls of their classes, tokens of classes (triangles)", fontsize=9)
    save_figure(figure, path)
