"""Figures of splits: how their distance grows (figures 1 and S1), and an embedding of their images (figure S2)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dmlbench.apps.pictures import plt, save_figure
from dmlbench.oodml.frechet import Float
from dmlbench.oodml.sequence import Step
from dmlbench.types import IntArray

_SEED = 0


def draw_progression(ways: Mapping[str, Mapping[str, Any]], path: Path, *, dataset: str) -> None:
    """Draw distances over exchanged and removed classes; several ways are scaled to [0, 1] (figure S1).

    Args:
        ways: documents of ``dmlbench oodml splits`` by label.
    """
    normalized = len(ways) > 1
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True, constrained_layout=True)
    for name, file in ways.items():
        steps = file["way"]
        distances = np.array([step["distance"] for step in steps])
        low, high = distances.min(), distances.max()
        scaled = (distances - low) / (high - low) if normalized else distances
        signed = [-step["count"] if step["kind"] == "reversed" else step["count"] for step in steps]
        for axes, kinds in ((left, ("reversed", "default", "exchanged")), (right, ("removed",))):
            chosen = [i for i, step in enumerate(steps) if step["kind"] in kinds]
            if chosen:
                axes.plot([signed[i] for i in chosen], scaled[chosen], marker=".", label=name)
        if not normalized:
            picked = [split["distance"] for split in file["splits"]]
            for axes in (left, right):
                for distance in picked:
                    axes.axhline(distance, color="0.85", linewidth=0.8, zorder=0)
            if file["alike"]:
                left.axhline(np.mean(file["alike"]), color="tab:green", linestyle=":", label="same classes, at random")
    left.axvline(0, color="0.6", linewidth=0.8)
    left.set_xlabel("classes exchanged (left of 0: for halves more alike)")
    right.set_xlabel("classes removed from each half")
    left.set_ylabel("squared Fréchet distance" + (", brought to [0, 1]" if normalized else ""))
    left.legend(fontsize=7)
    grey = "" if normalized else "; grey lines: the splits in the file"
    figure.suptitle(f"{dataset}: distance between train and test half{grey}", fontsize=9)
    save_figure(figure, path)


def draw_embedding(
    rows: Float, labels: IntArray, picked: Sequence[Step], path: Path, *, points: int, title: str
) -> None:
    """Draw a random sample of images, colored by the halves of the easiest, a medium and the hardest split.

    Args:
        picked: splits, ascending in distance.
        points: images at most.

    Source: T. Milbich et al., figure S2, which uses UMAP; here t-SNE (scikit-learn), after 50 principal components.
    """
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    chosen = np.sort(np.random.default_rng(_SEED).permutation(len(rows))[:points])
    some = PCA(min(50, len(chosen), rows.shape[1]), random_state=_SEED).fit_transform(rows[chosen])
    perplexity = min(30, max(2, (len(chosen) - 1) // 3))
    places = TSNE(init="pca", perplexity=perplexity, random_state=_SEED).fit_transform(some)
    shown = {0: "easy", len(picked) // 2: "medium", len(picked) - 1: "hard"}
    figure, panels = plt.subplots(1, len(shown), figsize=(3.4 * len(shown), 3.6), constrained_layout=True)
    for axes, (i, name) in zip(np.atleast_1d(panels), shown.items(), strict=True):
        step = picked[i]
        for half, classes, color in (("train", step.train, "tab:blue"), ("test", step.test, "tab:red")):
            mine = np.isin(labels[chosen], classes)
            axes.scatter(*places[mine].T, s=4, color=color, alpha=0.6, linewidths=0, label=half)
        axes.set_title(f"{name}: split {i + 1}, distance {step.distance:.1f}", fontsize=9)
        axes.set_xticks([])
        axes.set_yticks([])
    np.atleast_1d(panels)[0].legend(fontsize=7, markerscale=3)
    figure.suptitle(f"{title}: {len(chosen):,} of {len(rows):,} images by t-SNE", fontsize=8)
    save_figure(figure, path)
