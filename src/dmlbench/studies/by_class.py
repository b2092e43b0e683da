"""Which prototypes the classes of a data set use: numbers to keep, and their picture."""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure, SubFigure

from dmlbench.apps.pictures import plt
from dmlbench.experiment import Setup
from dmlbench.studies.trained import Described
from dmlbench.types import IntArray

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
    (batch,) = list(setup.batches(described.rows[shown]))
    contributions, nearest = setup.model.explain(batch.images)
    assert nearest is not None and contributions is not None
    pixels = batch.images.to(torch.uint8).permute(0, 2, 3, 1).contiguous().cpu().numpy()  # [S, H, W, 3]
    return {
        "classes": [str(name) for name in setup.data.table.class_names],
        "histogram": described.by_class(described.histogram).tolist(),
        "shown": {
            "shape": list(pixels.shape),
            "pixels": base64.b64encode(pixels.tobytes()).decode(),
            "nearest": nearest.cpu().tolist(),
            "weights": [[[round(w, 6) for w in row] for row in one] for one in contributions.cpu().tolist()],
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
    grid = figure.add_gridspec(len(histogram), 1 + 2 * per_class, width_ratios=[6, *([1] * 2 * per_class)])
    axes = figure.add_subplot(grid[:, 0])
    left = np.zeros(len(histogram))
    for prototype, share in enumerate(histogram.T):
        axes.barh(range(len(histogram)), share, left=left, color=_COLORS[prototype % len(_COLORS)])
        left += share
    axes.set_yticks(range(len(histogram)), found["classes"], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_title(title, fontsize=8)
    for i, image in enumerate(pixels):
        line, column = divmod(i, per_class)
        nearest, weights = (np.array(found["shown"][key][i]) for key in ("nearest", "weights"))
        colors = np.array([_COLORS[p % len(_COLORS)] for p in nearest.ravel()]).reshape(*nearest.shape, 3)
        strength = (weights / weights.max())[..., None]
        for offset, shown in ((0, image), (1, strength * colors + (1 - strength))):
            place = figure.add_subplot(grid[line, 1 + 2 * column + offset])
            place.imshow(shown)
            place.axis("off")


def spread(values: Sequence[float] | IntArray) -> str:
    """Mean and population deviation in percent, as printed."""
    return f"{100 * np.mean(values):.1f} ± {100 * np.std(values):.1f}"
