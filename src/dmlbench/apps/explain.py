"""Pictures of what a trained pooling looks at: its weights, and its prototypes, laid over the images."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib import colormaps
from matplotlib import pyplot as plt
from numpy.typing import NDArray
from torch.nn import functional as F

from dmlbench.apps.loading import load_run, row_of
from dmlbench.apps.pictures import save_figure, shortened
from dmlbench.experiment import Setup
from dmlbench.models.net import PooledModel
from dmlbench.results.caveats import OTHER_DATA
from dmlbench.runtime import generator
from dmlbench.types import ConfigError, IntArray, RunError

_INCHES = 1.25  # a tile's side
_NUM_COLORS = 20


@dataclass(frozen=True)
class Explained:
    """One run's view of images."""

    label: str  # of the column
    images: NDArray[np.uint8]  # [B, 3, H, W], as the network saw them
    weights: NDArray[np.float32]  # [B, H, W] contribution of each place, 1 being that of average pooling
    prototypes: IntArray | None  # [B, H, W] index of the dominant prototype


def explain_runs(
    run_dirs: Sequence[Path], *, images: Sequence[int | str] | None, num_images: int, device: str, path: Path
) -> None:
    """Write a PNG: images in rows; for each run the weights of its pooling, and its prototypes where it has any.

    ``images`` are rows of the data set's table or paths in it; None draws ``num_images`` test images.
    """
    runs = [load_run(run_dir, {"num_workers": 0}, device=device) for run_dir in run_dirs]
    tables = [run.data.table for run in runs]
    if len({table.fingerprint for table in tables}) > 1:
        raise RunError("run: got runs on different data, expected runs on the same data set.")
    rows = _rows(runs[0], images, num_images)
    explained = [explain_run(run, rows, run_dir.resolve()) for run, run_dir in zip(runs, run_dirs, strict=True)]
    labels = [one.label for one in explained]
    explained = [
        replace(one, label=f"{run_dir.resolve().parent.name}\n{run_dir.name}") if labels.count(one.label) > 1 else one
        for one, run_dir in zip(explained, run_dirs, strict=True)
    ]
    captions = [tables[0].class_names[tables[0].labels[row]] for row in rows]
    draw(explained, captions, path, notes=tables[0].notes)


def _rows(run: Setup, images: Sequence[int | str] | None, num_images: int) -> IntArray:
    table = run.data.table
    if images is not None:
        return np.array([row_of(table, image) for image in images], dtype=np.int64)
    part = run.data.split.test or run.data.split.val
    assert part is not None  # a protocol looks at one of them
    count = len(part.query)
    chosen = generator("explain", count).choice(count, size=min(num_images, count), replace=False)
    return np.asarray(part.query[np.sort(chosen)])


def explain_run(run: Setup, rows: IntArray, run_dir: Path) -> Explained:
    """What the pooling of a loaded run looks at in images of its data set."""
    if run.model.explains_pairs:
        raise ConfigError("head=avsl explains pairs of images. Give one run and pair=<image>,<another>.")
    images, weights, prototypes = [], [], []
    for batch in run.batches(rows):
        shares, nearest = run.model.explain(batch.images)
        if shares is None and not isinstance(run.model, PooledModel):
            raise RunError(
                f"head={run.choices.get('head')} has no contributions to show. Explain a run of another head."
            )
        if shares is None:
            name = run.choices.get("pooling", "its pooling")
            raise RunError(
                f"pooling={name} has no contributions to show. Give its class a method `contributions` (see Pooling in "
                "docs/python.md), or explain a run of another pooling."
            )
        images.append(batch.images.cpu().numpy())
        size = batch.images.shape[2:]
        larger = F.interpolate(shares[:, None].float() * shares[0].numel(), size=size, mode="bilinear")
        weights.append(larger[:, 0].cpu().numpy())
        if nearest is not None:
            larger = F.interpolate(nearest[:, None].float(), size=size, mode="nearest")
            prototypes.append(larger[:, 0].cpu().numpy().astype(np.int64))
    label = f"{run.choices.get('pooling', run_dir.parent.name)}\n{run_dir.name}"
    indices = np.concatenate(prototypes) if prototypes else None
    return Explained(label, np.concatenate(images), np.concatenate(weights), indices)


def overlay(one: Explained, most: float) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.uint8] | None]:
    """Images [B, H, W, 3], these with the weights laid over them, and with the prototypes or None.

    Places that count as in average pooling are white, those that count more are red, up to ``most`` times as much, and
    those that count less blue. Prototypes are told apart by colors, those of no weight fade.
    """
    grey = one.images.mean(axis=1)[..., None] / 255
    colors = colormaps["RdBu_r"](_scale(most)(one.weights))[..., :3]
    weights = 0.35 * (0.35 + 0.65 * grey) + 0.65 * colors
    prototypes = None
    if one.prototypes is not None:
        colors = colormaps["tab20"](one.prototypes % _NUM_COLORS)[..., :3]
        strength = np.clip(one.weights / most, 0.0, 1.0)[..., None]
        prototypes = _bytes((1 - strength) * grey * 0.6 + strength * colors)
    return np.moveaxis(one.images, 1, -1), _bytes(weights), prototypes


def greatest_weight(explained: Sequence[Explained]) -> float:
    """The end of a scale that all of them share."""
    return max(2.0, float(np.percentile(np.concatenate([one.weights.ravel() for one in explained]), 99.5)))


def _scale(most: float) -> matplotlib.colors.TwoSlopeNorm:
    return matplotlib.colors.TwoSlopeNorm(vcenter=1.0, vmin=0.0, vmax=most)


def _bytes(fractions: NDArray[np.floating]) -> NDArray[np.uint8]:
    return np.asarray((255 * fractions).round(), dtype=np.uint8)


def draw(explained: Sequence[Explained], captions: Sequence[str], path: Path, notes: Sequence[str] = ()) -> None:
    """Write the picture: a row an image, a column for the image and one or two for each run, on one scale."""
    most = greatest_weight(explained)
    shown = [("image", overlay(explained[0], most)[0])]
    for one in explained:
        _, weights, prototypes = overlay(one, most)
        shown.append((one.label, weights))
        if prototypes is not None:
            shown.append(("prototypes", prototypes))
    columns, rows = len(shown), len(captions)
    size = (_INCHES * columns + 1.3, _INCHES * rows + 0.5)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for column, (title, pictures) in enumerate(shown):
        for row, axis in enumerate(axes[:, column]):
            axis.set(xticks=[], yticks=[])
            axis.imshow(pictures[row])
        axes[0, column].set_title(title, fontsize=8)
    for row, caption in enumerate(captions):
        axes[row, 0].set_ylabel(shortened(caption), fontsize=7)
    mappable = matplotlib.cm.ScalarMappable(_scale(most), "RdBu_r")
    bar = figure.colorbar(mappable, ax=axes, shrink=min(1.0, 3.0 / rows), pad=0.02)
    bar.set_label("weight over that of average pooling", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    if notes:
        figure.supxlabel(textwrap.fill(f"{OTHER_DATA}{'; '.join(notes)}", 18 * columns), fontsize=7)
    save_figure(figure, path)
