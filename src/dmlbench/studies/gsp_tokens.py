"""Average pooling and GSP on bags of trainable tokens, a part of which all classes share (GSP, figure 3a).

Source: Y. Z. Gürbüz, O. Şener, A. A. Alatan, "Generalized Sum Pooling for Metric Learning", ICCV 2023, section 5.1 and
    supplement 2.1. The size of the vectors, the loss and GSP's values are not given.
"""

import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.path import Path as Polygon
from pytorch_metric_learning.distances import LpDistance
from pytorch_metric_learning.losses import ContrastiveLoss
from scipy.spatial import ConvexHull
from torch import Tensor, nn

from dmlbench.apps.pictures import plt
from dmlbench.components import component
from dmlbench.evaluation.evaluate import evaluate
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.losses.objective import Objective
from dmlbench.models.net import MetricModel
from dmlbench.models.pooling.base import Pooled, Pooling
from dmlbench.runtime import derive_seed, generator, seed_everything
from dmlbench.studies.record import Claim, Findings, Float, Parts, require_positive, spread
from dmlbench.training.fit import FitSettings, fit
from dmlbench.types import Batch, ConfigError, EmbeddingSet, ModelOutput

NUM_CLASSES, TOKENS_OF_EACH, TOKENS_OF_A_BAG = 16, 4, 50
"""Classes, tokens of each class and of the background, and tokens of a sample (GSP, section 5.1 and supplement 2.1)."""
_NUM_TOKENS = (NUM_CLASSES + 1) * TOKENS_OF_EACH
_BACKGROUND = NUM_CLASSES * TOKENS_OF_EACH
"""First token of the background."""
_TITLES = {"gap": "GAP", "gsp": "GSP"}


def bags(
    per_class: int, rng: np.random.Generator, *, mixing_mean: float = 0.5, mixing_std: float = 0.1
) -> tuple[Tensor, Tensor]:
    """Draw token numbers [16 per_class, 50] and labels [16 per_class] of samples of every class.

    The share of class tokens of a sample is drawn from N(mixing_mean, mixing_std^2) and clipped to [0, 1].
    """
    labels = np.repeat(np.arange(NUM_CLASSES), per_class)
    shares = np.clip(rng.normal(mixing_mean, mixing_std, len(labels)), 0, 1)
    own = np.rint(shares * TOKENS_OF_A_BAG).astype(np.int64)  # [N] tokens of the class, which come first
    numbers = rng.integers(0, TOKENS_OF_EACH, (len(labels), TOKENS_OF_A_BAG))
    is_own = np.arange(TOKENS_OF_A_BAG) < own[:, None]
    first = np.where(is_own, labels[:, None] * TOKENS_OF_EACH, _BACKGROUND)
    return torch.from_numpy(numbers + first), torch.from_numpy(labels)


class TokenBatches:
    """Endless batches of new bags, each drawn from the seed and its number."""

    def __init__(self, per_class: int, *, seed: int, mixing: Mapping[str, float]) -> None:
        self.per_class, self.seed, self.mixing, self.count = per_class, seed, mixing, 0

    def __next__(self) -> Batch:
        self.count += 1
        numbers, labels = bags(self.per_class, generator("tokens", self.seed, self.count), **self.mixing)
        return Batch(numbers, labels, torch.arange(len(labels)))

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class TokenModel(MetricModel):
    """Pools the vectors of tokens [B, 50], as if these were pixels, to embeddings [B, D]."""

    pooling: Pooling

    def __init__(self, pooling: Pooling, size: int, *, limit: float) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.empty(_NUM_TOKENS, size).uniform_(-limit, limit))
        self.pooling = pooling
        self.project: Any = nn.Identity()
        self.distance = LpDistance(normalize_embeddings=False, p=2, power=1)
        self.embedding_size = size

    def forward(self, images: Tensor) -> ModelOutput:
        vectors = self.tokens[images]  # [B, 50, D]
        pooled: Pooled = self.pooling(vectors.transpose(1, 2)[..., None], self.project)
        return ModelOutput(pooled.embedding, pooled.side)

    @property
    def provides(self) -> tuple[str, ...]:
        return self.pooling.provides

    def parameter_groups(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        return {"backbone": [("tokens", self.tokens)], "pooling": list(self.pooling.named_parameters())}


@torch.no_grad()
def scores(model: TokenModel, numbers: Tensor, labels: Tensor) -> dict[str, float]:
    """P@1 and MAP@R of bags, by Euclidean distance without normalization."""
    rows = model(numbers).embedding.float()
    found = EmbeddingSet(rows, labels, torch.arange(len(labels)))
    return evaluate(found, spec=EvaluationSpec(metrics=("p_at_1", "map_at_r")), distance=model.distance).scores


@torch.no_grad()
def weight_of_background(model: TokenModel, numbers: Tensor) -> float:
    """Mean share of the pooling weights on background tokens."""
    side = model(numbers).side
    weights = side["weights"].flatten(1) if "weights" in side else torch.full(numbers.shape, 1 / numbers.shape[1])
    return float((weights * (numbers >= _BACKGROUND)).sum(dim=1).mean())


def hull_of(points: Float) -> Float | None:
    """Corners of the convex hull of points [N, 2]; None if they lie on a line."""
    if len(points) < 3 or np.linalg.matrix_rank(points - points.mean(axis=0)) < 2:
        return None
    corners: Float = points[ConvexHull(points).vertices]
    return corners


def share_in_other_hulls(points: Float, labels: Sequence[int]) -> float:
    """Share of the points [N, 2] in the convex hull of another class."""
    of = np.asarray(labels)
    inside = np.zeros(len(points), dtype=bool)
    for label in np.unique(of):
        if (hull := hull_of(points[of == label])) is not None:
            inside |= Polygon(hull).contains_points(points) & (of != label)
    return float(inside.mean())


def conduct(args: Any, parts: Parts) -> Findings:
    """Train both poolings from every seed."""
    require_positive(args, "repeats", "epochs", "steps_per_epoch", "samples_per_class", "validation_samples",
                     "test_samples")  # fmt: skip
    if args.embedding_size < 2:
        raise ConfigError(f"embedding_size: got {args.embedding_size}, expected 2 or more for the figure.")
    seeds = range(args.seed, args.seed + args.repeats)
    names = {f"{way}, seed {seed}": (way, seed) for seed in seeds for way in _TITLES}
    found = parts.get(list(names), lambda name: _trained(*names[name], args, parts), describe="trainings")
    by_way = {way: [found[f"{way}, seed {seed}"] for seed in seeds] for way in _TITLES}
    columns = ("map_at_r", "p_at_1", "background", "overlap")
    steps = {way: ", ".join(f"{one['best_step']} of {one['steps']}" for one in runs) for way, runs in by_way.items()}
    rows = tuple((_TITLES[way], *(spread([one[key] for one in runs]) for key in columns), steps[way])
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
    pooling = args.pooling
    notes = (
        f"{NUM_CLASSES} classes of 4 tokens and 4 of the background, samples of 50 tokens, of the class the share "
        f"N({args.mixing_mean:g}, {args.mixing_std:g}); Adam {args.lr:g}, tokens cut to ±{args.limit:g}, patience of "
        f"{args.patience} epochs, {args.samples_per_class} samples of each class in a batch; no normalization",
        f"by the public code: epochs of {args.steps_per_epoch} batches, memory filled after step "
        f"{pooling['start_step']}",
        f"not given, so ours: {args.embedding_size} dimensions, contrastive loss with margin {args.margin:g}, GSP with "
        f"m = {pooling['num_prototypes']}, mu = {pooling['transport_ratio']:g}, epsilon = {pooling['smoothing']:g}; at "
        f"most {args.epochs} epochs",
        f"on {args.test_samples} new samples of each class; mean ± population deviation over {args.repeats} seeds from "
        f"{args.seed} on",
    )
    heads = ("pooling", "MAP@R, %", "P@1, %", "weight on the background, %", "in another class's hull, %", "best step")
    title = "Bags of trainable tokens"
    return Findings(title, heads, rows, claims, notes, _figure(found, args.seed, title))


def _trained(way: str, seed: int, args: Any, parts: Parts) -> dict[str, Any]:
    mixing = {"mixing_mean": args.mixing_mean, "mixing_std": args.mixing_std}
    validation, test = (
        bags(getattr(args, f"{part}_samples"), generator("tokens", part, seed), **mixing)
        for part in ("validation", "test")
    )
    seed_everything(derive_seed(seed, "tokens"))  # the same tokens for both
    pooling = component({"_target_": "dmlbench.models.pooling.global_pooling.Gap"}) if way == "gap" else None
    model = TokenModel(pooling or component(args.pooling), args.embedding_size, limit=args.limit)
    objective = Objective(ContrastiveLoss(pos_margin=0.0, neg_margin=args.margin, distance=model.distance))
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    def clip(*_: Any) -> None:
        with torch.no_grad():
            model.tokens.clamp_(-args.limit, args.limit)

    def validate() -> Mapping[str, float]:
        model.eval()
        return scores(model, *validation)

    optimizer.register_step_post_hook(clip)
    batches = TokenBatches(args.samples_per_class, seed=seed, mixing=mixing)
    steps = args.steps_per_epoch
    settings = FitSettings(args.epochs * steps, steps, patience=args.patience, keep="both", log_every=steps)
    folder = parts.path.with_name(f"{parts.path.stem}.running") / f"{way}-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    cpu = torch.device("cpu")
    result = fit(model, objective, batches, validate, optimizer, settings, folder, device=cpu)  # resumes
    shutil.rmtree(folder.parent if len(list(folder.parent.iterdir())) == 1 else folder)
    model.eval()
    numbers, labels = test
    rows = model(numbers).embedding.detach().double().numpy()
    tokens = model.tokens.detach().double().numpy()
    plane = np.eye(2) if rows.shape[1] == 2 else np.linalg.svd(rows - rows.mean(axis=0))[2][:2].T
    prototypes = np.empty((0, rows.shape[1]))
    if way == "gsp":
        prototypes = model.pooling.get_parameter("prototypes").detach().double().numpy()
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


def _figure(found: Mapping[str, Any], seed: int, title: str) -> Figure:
    figure, panels = plt.subplots(1, len(_TITLES), figsize=(10, 5), layout="constrained", squeeze=False)
    colors = plt.get_cmap("tab20")
    for axes, (way, name) in zip(panels[0], _TITLES.items(), strict=True):
        one = found[f"{way}, seed {seed}"]
        points, labels, tokens = np.array(one["points"]), np.array(one["labels"]), np.array(one["tokens"])
        for label in range(NUM_CLASSES):
            own, color = points[labels == label], colors(label)
            axes.scatter(*own.T, s=3, color=color, linewidths=0)
            if (hull := hull_of(own)) is not None:
                axes.fill(*hull.T, color=color, alpha=0.25, linewidth=0)
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
    return figure
