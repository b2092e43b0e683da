"""The last layer of a network adapted to a few images of each class, from features that were computed before."""

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
    """How the layer is trained: Adam, margin loss with fixed boundaries, negatives weighted by distance.

    Attributes:
        steps: batches.
        lr: learning rate.
        weight_decay: of the layer's matrix, as Adam means it.
        batch_size: images of a batch at most, 112 in the public code.
        images_per_class: of them of each class.
        beta: boundary of the margin loss, which the public code does not train here.
        margin: half the width of the band around it.
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
            raise ConfigError(f"steps ({self.steps}) must be at least 1; zero-shot scores come with every call")
        if not self.lr > 0:
            raise ConfigError(f"the learning rate ({self.lr}) must be above 0; set lr_factor, or lr")
        if self.weight_decay < 0:
            raise ConfigError(f"weight_decay ({self.weight_decay}) must not be negative")
        if self.images_per_class < 2:
            raise ConfigError(f"images_per_class ({self.images_per_class}) must be at least 2: an image and a positive")
        if self.batch_size < 2 * self.images_per_class:
            raise ConfigError(
                f"batch_size ({self.batch_size}) must hold images_per_class ({self.images_per_class}) of two classes"
            )


def adapt(
    features: CachedFeatures, support: IntArray, labels: IntArray, adaptation: Adaptation, *, seed: int
) -> Projection:
    """A copy of the projection, trained on the support set alone; all else stays as it is.

    Args:
        features: of all images.
        support: [S] positions in ``features``.
        labels: [S] classes of these, any integers.
        adaptation: how.
        seed: of batches and triplets; nothing else is random.

    Raises:
        ConfigError: there are fewer than two classes.
    """
    names, classes = np.unique(labels, return_inverse=True)
    if len(names) < 2:
        raise ConfigError(f"the support set has {len(names)} class; a margin to another one needs two")
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
    # Products of single batches are so small that threads wait for each other longer than they compute; with one of
    # them, the result does not depend on their number either.
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
