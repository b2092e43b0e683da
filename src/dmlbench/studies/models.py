"""Models that studies train as runs, and the prototypes that their test images use."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure, SubFigure

from dmlbench.apps.loading import load_run
from dmlbench.apps.pictures import plt
from dmlbench.config import compose_run, listed
from dmlbench.evaluation.embeddings.embed import embed
from dmlbench.experiment import Setup
from dmlbench.runner import run
from dmlbench.studies.record import Float, Parts
from dmlbench.types import ConfigError, IntArray

_GAP = 2
"""White pixels around each image."""
_COLORS = plt.get_cmap("tab20").colors  # type: ignore[attr-defined]  # of a listed map


def run_of(args: Any, overrides: Sequence[str]) -> Path:
    """Train one of a study's models where it is missing, and return its run directory.

    Its overrides win over ``train`` and ``training`` of the study.
    """
    own = list(map(str, listed(args.training)))
    if wrong := [override for override in own if "=" not in override]:
        raise ConfigError(f"training: got {', '.join(wrong)}, expected overrides such as fit.max_steps=100.")
    paths = [f"paths.{key}='{getattr(args.paths, key)}'" for key in ("output_dir", "data_dir", "cache_dir")]
    rest = [f"base_seed={args.seed}", f"device={args.device}", *paths]
    return run(compose_run([*args.train, *own, *overrides, *rest])[0])


def trained_by(args: Any) -> str:
    return " ".join([*args.train, *map(str, listed(args.training))])


def trained_setup(args: Any, overrides: Sequence[str], parts: Parts) -> Setup:
    """Load the trained model and its data, to which the parts are bound."""
    setup = load_run(run_of(args, overrides), {}, device=args.device)
    parts.bind(data=setup.data.table.fingerprint)
    return setup


# Test images and the prototypes that they use


@dataclass(frozen=True)
class Described:
    """The outputs of a model for N rows of a table: embeddings [N, D], histograms over the prototypes [N, m]."""

    embedding: Float
    histogram: Float
    labels: IntArray
    rows: IntArray

    @property
    def num_classes(self) -> int:
        return int(self.labels.max()) + 1

    def by_class(self, values: Float) -> Float:
        """Means over the images of each class, [C, ...]."""
        return np.stack([values[self.labels == label].mean(axis=0) for label in range(self.num_classes)])


def sample_test_rows(setup: Setup, *, count: int, seed: int) -> IntArray:
    """Draw at most ``count`` test images of each class, sorted."""
    test = setup.data.split.test
    assert test is not None
    rng, labels = np.random.default_rng(seed), setup.data.table.labels[test.query]
    chosen = [rng.permutation(test.query[labels == label])[:count] for label in np.unique(labels)]
    return np.sort(np.concatenate(chosen))


def describe(setup: Setup, rows: IntArray) -> Described:
    """Embeddings and histograms of images, in one pass."""
    size = int(setup.model.embedding_size)

    def both(images: torch.Tensor) -> torch.Tensor:
        output = setup.model(images)
        return torch.cat([output.embedding, output.side["histogram"].to(output.embedding.dtype)], dim=1)

    found = embed(both, setup.batches(rows), device=setup.device, progress=False, count=len(rows), describe="images")
    values = found.rows.double().numpy()
    return Described(values[:, :size], values[:, size:], found.labels.numpy(), rows)


def halves(num_classes: int, count: int, *, seed: int) -> list[tuple[IntArray, IntArray]]:
    """Split the classes into random halves ``count`` times."""
    rng = np.random.default_rng(seed)
    orders = [rng.permutation(num_classes) for _ in range(count)]
    cut = num_classes // 2
    return [(np.sort(order[:cut]), np.sort(order[cut:])) for order in orders]


def entropy(histograms: Float) -> float:
    """Mean entropy of rows that sum to 1, in bits."""
    return float(-(histograms * np.log2(np.maximum(histograms, 1e-300))).sum(axis=1).mean())


def tied_to_classes(histograms: Float) -> float:
    """Mutual information of prototype and class in bits, from mean histograms [C, m] of equally frequent classes."""
    return entropy(histograms.mean(axis=0, keepdims=True)) - entropy(histograms)


def prototypes_by_class(setup: Setup, described: Described, *, images: int) -> dict[str, Any]:
    """Mean histogram [C, m] of every class, and where each prototype dominates in the first ``images`` of each."""
    labels = described.labels
    shown = np.concatenate([np.flatnonzero(labels == label)[:images] for label in range(described.num_classes)])
    batches = list(setup.batches(described.rows[shown]))
    explained = [setup.model.explain(batch.images) for batch in batches]
    contributions, nearest = (torch.cat([one[part] for one in explained]).cpu() for part in (0, 1))  # type: ignore[misc]
    all_pixels = torch.cat([batch.images.to(torch.uint8) for batch in batches])
    pixels = all_pixels.permute(0, 2, 3, 1).contiguous().cpu().numpy()  # [S, H, W, 3]
    return {
        "classes": [str(name) for name in setup.data.table.class_names],
        "histogram": described.by_class(described.histogram).tolist(),
        "shown": {
            "shape": list(pixels.shape),
            "pixels": base64.b64encode(pixels.tobytes()).decode(),
            "nearest": nearest.tolist(),
            "weights": [[[round(w, 6) for w in row] for row in one] for one in contributions.tolist()],
        },
    }


def draw_by_class(figure: Figure | SubFigure, found: Mapping[str, Any], title: str) -> None:
    """Draw the histogram of each class as a bar, and its images beside their dominant prototypes.

    The stronger a location's weight in the pooling, the stronger its color.
    """
    histogram = np.array(found["histogram"])  # [C, m]
    shape = found["shown"]["shape"]
    pixels = np.frombuffer(base64.b64decode(found["shown"]["pixels"]), dtype=np.uint8).reshape(shape)
    per_class = shape[0] // len(histogram)
    axes, pictures = figure.subplots(1, 2, width_ratios=[3, 2 * per_class])
    left = np.zeros(len(histogram))
    for prototype, share in enumerate(histogram.T):
        axes.barh(range(len(histogram)), share, left=left, color=_COLORS[prototype % len(_COLORS)])
        left += share
    axes.set_yticks(range(len(histogram)), found["classes"], fontsize=7)
    axes.set_ylim(len(histogram) - 0.5, -0.5)
    axes.set_xlim(0, 1)
    axes.set_title(title, fontsize=8)
    tiles = []
    for image, nearest, weights in zip(pixels, found["shown"]["nearest"], found["shown"]["weights"], strict=True):
        colors = np.array(_COLORS)[np.array(nearest) % len(_COLORS)]  # [h, w, 3]
        strength = (np.array(weights) / np.max(weights))[..., None]
        rows, columns = (np.arange(n) * old // n for n, old in zip(image.shape[:2], colors.shape[:2], strict=True))
        tiles += [image / 255, (strength * colors + (1 - strength))[rows][:, columns]]  # by the nearest pixel
    framed = [np.pad(tile, ((_GAP, _GAP), (_GAP, _GAP), (0, 0)), constant_values=1) for tile in tiles]
    lines = [np.concatenate(framed[i : i + 2 * per_class], axis=1) for i in range(0, len(framed), 2 * per_class)]
    extent = (0, 2 * per_class, len(histogram) - 0.5, -0.5)
    pictures.imshow(np.concatenate(lines), extent=extent, aspect="auto", interpolation="nearest")
    pictures.axis("off")
