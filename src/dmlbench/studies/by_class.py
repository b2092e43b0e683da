"""Which prototypes the classes of a data set use: numbers to keep, and their picture."""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure, SubFigure

from dmlbench.apps.pictures import plt
from dmlbench.experiment import Setup
from dmlbench.studies.trained import Described, Float
from dmlbench.types import IntArray

_GAP = 2
"""Pixels of white around each image."""
_COLORS = plt.get_cmap("tab20").colors  # type: ignore[attr-defined]  # of a listed map


def prototypes_by_class(setup: Setup, described: Described, *, images: int) -> dict[str, Any]:
    """Mean histogram [C, m] of every class, and of some images of each which prototype dominates where.

    Args:
        setup: the trained model.
        described: what it says of images of all classes.
        images: of each class, the first of ``described``, whose dominant prototypes are kept.
    """
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


def side_by_side(figure: Figure, widths: Sequence[float]) -> list[SubFigure]:
    """Parts of a figure from left to right, of these relative widths."""
    made: Any = figure.subfigures(1, len(widths), width_ratios=list(widths), squeeze=False)
    return list(made[0])


def draw_by_class(figure: Figure | SubFigure, found: Mapping[str, Any], title: str) -> None:
    """A bar a class, cut into the shares of the prototypes, and beside it images colored by the dominant prototype.

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
        tiles += [image / 255, _resized(strength * colors + (1 - strength), image.shape[:2])]
    framed = [np.pad(tile, ((_GAP, _GAP), (_GAP, _GAP), (0, 0)), constant_values=1) for tile in tiles]
    lines = [np.concatenate(framed[i : i + 2 * per_class], axis=1) for i in range(0, len(framed), 2 * per_class)]
    extent = (0, 2 * per_class, len(histogram) - 0.5, -0.5)
    pictures.imshow(np.concatenate(lines), extent=extent, aspect="auto", interpolation="nearest")
    pictures.axis("off")


def _resized(image: Float, size: tuple[int, int]) -> Float:
    """The nearest pixel's color at every place of a larger image."""
    at = [np.arange(length) * old // length for length, old in zip(size, image.shape[:2], strict=True)]
    enlarged: Float = image[at[0]][:, at[1]]
    return enlarged


def spread(values: Sequence[float] | IntArray) -> str:
    """Mean and population deviation in percent, as printed."""
    return f"{100 * np.mean(values):.1f} ± {100 * np.std(values):.1f}"
