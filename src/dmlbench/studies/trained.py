"""Models that studies train as runs, and what these say of images."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from omegaconf import DictConfig

from dmlbench.apps.trained import load_run
from dmlbench.config import compose
from dmlbench.evaluation.embeddings.embed import embed
from dmlbench.experiment import Setup
from dmlbench.runner import run
from dmlbench.types import ConfigError, IntArray

Float = NDArray[np.float64]

_PATHS = ("output_dir", "data_dir", "cache_dir")


def run_of(cfg: DictConfig, overrides: Sequence[str]) -> Path:
    """The complete run of one of a study's models, trained if need be.

    Args:
        cfg: of the study: ``train`` are the overrides of all its models, ``training`` the user's own above them.
        overrides: what makes this model, above both.

    Raises:
        ConfigError, DataError, RunError: as of ``dmlbench train``.
    """
    own = [str(override) for override in cfg.training or ()]
    if wrong := [override for override in own if "=" not in override]:
        raise ConfigError(
            f"training ({', '.join(wrong)}) must be overrides of dmlbench train, such as fit.max_steps=100"
        )
    paths = [f"paths.{key}='{cfg.paths[key]}'" for key in _PATHS]
    rest = [f"base_seed={cfg.seed}", f"device={cfg.device}", *paths]
    return run(compose("train", [*cfg.train, *own, *overrides, *rest]))


def load(cfg: DictConfig, run_dir: Path) -> Setup:
    """The trained model, and the data that it was trained on."""
    return load_run(run_dir, {}, device=cfg.device)


@dataclass(frozen=True)
class Described:
    """What a model says of images.

    Attributes:
        embedding: [N, D], not normalized.
        histogram: [N, m], rows sum to 1.
        labels: [N].
        rows: [N] of the table.
    """

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


def some_of_each(labels: IntArray, rows: IntArray, *, count: int, seed: int) -> IntArray:
    """So many rows of each class at most, drawn at random, in their order."""
    rng = np.random.default_rng(seed)
    chosen = [rng.permutation(rows[labels[rows] == label])[:count] for label in np.unique(labels[rows])]
    return np.sort(np.concatenate(chosen))


def describe(setup: Setup, rows: IntArray) -> Described:
    """Embeddings and histograms over the prototypes, in one pass over the images."""
    size = int(setup.model.embedding_size)

    def both(images: torch.Tensor) -> torch.Tensor:
        output = setup.model(images)
        return torch.cat([output.embedding, output.side["histogram"].to(output.embedding.dtype)], dim=1)

    found = embed(both, setup.batches(rows), device=setup.device, progress=False, count=len(rows), describe="images")
    values = found.rows.double().numpy()
    return Described(values[:, :size], values[:, size:], found.labels.numpy(), rows)


def halves(num_classes: int, count: int, *, seed: int) -> list[tuple[IntArray, IntArray]]:
    """So many random halves of the classes, each with the other half."""
    rng = np.random.default_rng(seed)
    orders = [rng.permutation(num_classes) for _ in range(count)]
    cut = num_classes // 2
    return [(np.sort(order[:cut]), np.sort(order[cut:])) for order in orders]


def entropy(histograms: Float) -> float:
    """Mean entropy of rows that sum to 1, in bits."""
    rows = np.asarray(histograms)
    return float(-(rows * np.log2(np.maximum(rows, 1e-300))).sum(axis=1).mean())


def tied_to_classes(histograms: Float) -> float:
    """Bits that a prototype tells of the class, for mean histograms [C, m] of equally frequent classes: their mutual
    information, 0 where all classes use the prototypes alike and log2 C where each has its own."""
    return entropy(histograms.mean(axis=0, keepdims=True)) - entropy(histograms)
