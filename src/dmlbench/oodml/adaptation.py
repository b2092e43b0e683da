"""Adapt the projection of a trained model to a few images of each class, from cached features."""

import contextlib
import copy
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from dmlbench.data.batches.samplers import RepeatingClassBatchSampler
from dmlbench.losses.margin_oodml import MarginOodml
from dmlbench.losses.miners import distance_weighted_triplets
from dmlbench.models.projection import Projection
from dmlbench.oodml.cached_features import CachedFeatures
from dmlbench.runtime import derive_seed, single_threaded_torch
from dmlbench.training.optim import OptimizerSettings, make_optimizer
from dmlbench.types import ConfigError, IntArray


@dataclass(frozen=True)
class Adaptation:
    """Adam on the margin loss with fixed boundaries and distance-weighted negatives.

    Attributes:
        batch_size: at most; 112 in the public code.
        beta: boundary of the margin loss, which the public code does not train here.
    """

    steps: int
    lr: float
    weight_decay: float
    batch_size: int = 112
    images_per_class: int = 2
    beta: float = 1.2
    margin: float = 0.2

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"steps: got {self.steps}, expected at least 1.")
        if not self.lr > 0:
            raise ConfigError(f"learning rate: got {self.lr}, expected a positive number. Set lr_factor.")
        if self.images_per_class < 2:
            raise ConfigError(f"images_per_class: got {self.images_per_class}, expected at least 2.")
        if self.batch_size < 2 * self.images_per_class:
            raise ConfigError(f"batch_size: got {self.batch_size}, expected at least 2 * {self.images_per_class}.")


def adapt(
    features: CachedFeatures, support: IntArray, labels: IntArray, adaptation: Adaptation, *, seed: int
) -> Projection:
    """Train a copy of the projection on the support.

    Args:
        support: [S] positions in ``features``.
        labels: [S].
        seed: of batches and triplets; nothing else is random.
    """
    names, classes = np.unique(labels, return_inverse=True)
    if len(names) < 2:
        raise ConfigError(f"support: got {len(names)} class, expected at least two.")
    device = features.device
    projection = copy.deepcopy(features.projection).requires_grad_(True)
    loss = MarginOodml(len(names), margin=adaptation.margin, beta=adaptation.beta, learn_beta=False).to(device)
    optimizer = make_optimizer(
        {"head": list(projection.named_parameters())},
        OptimizerSettings(partial(torch.optim.Adam, fused=True), adaptation.lr, adaptation.weight_decay),
        modules=(projection,),
    )
    batches = RepeatingClassBatchSampler(
        np.asarray(classes, dtype=np.int64),
        classes_per_batch=min(adaptation.batch_size // adaptation.images_per_class, len(names)),
        images_per_class=adaptation.images_per_class,
        seed=derive_seed(seed, "batches"),
    )
    triplets = torch.Generator(device).manual_seed(derive_seed(seed, "triplets"))
    positions, of_class = torch.from_numpy(support), torch.from_numpy(np.asarray(classes, dtype=np.int64))
    # Threads wait longer than they compute such small products, and one thread makes the result reproducible.
    with single_threaded_torch() if features.pooling is None else contextlib.nullcontext():
        for _ in range(adaptation.steps):
            rows = torch.from_numpy(next(batches).rows)
            batch_labels = of_class[rows]  # on the host, as loss and triplets want them
            embeddings = features.embeddings(positions[rows], projection)
            mined = distance_weighted_triplets(embeddings, batch_labels, generator=triplets)
            optimizer.zero_grad()
            loss(embeddings, batch_labels, mined).backward()
            optimizer.step()
    return projection.requires_grad_(False)
