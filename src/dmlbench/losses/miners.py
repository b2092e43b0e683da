"""Miners that pytorch-metric-learning (PML) lacks."""

from collections.abc import Callable
from typing import Literal

import torch
from pytorch_metric_learning.distances import BaseDistance, LpDistance
from torch import Tensor, nn
from torch.nn.functional import normalize

from dmlbench.device_copies import to_device
from dmlbench.losses.base import BatchLabels
from dmlbench.types import ConfigError, check_at_least

Triplets = tuple[Tensor, Tensor, Tensor]


def log_inverse_density(distances: Tensor, size: int) -> Tensor:
    """-log q(d) + constant of distances d in (0, 2], q their density between random points on the unit sphere.

        q(d) ~ d^(size - 2) (1 - d^2 / 4)^((size - 3) / 2)

    Source: Wu et al., Sampling Matters in Deep Embedding Learning, ICCV 2017, section 4.
    """
    rest = (1 - distances.square() / 4).clamp(min=torch.finfo(distances.dtype).tiny)  # opposite points are 2 apart
    return (2.0 - size) * distances.log() - (size - 3) / 2 * rest.log()


def drawn_by_distance(
    rows: Tensor, allowed: Tensor, *, cutoff: float = 0.5, generator: torch.Generator | None = None
) -> Tensor:
    """[B]: for each of the unit vectors [B, D] one of those ``allowed`` [B, B], drawn with the weight 1 / q(d).

    A row without any draws index 0. Distances below ``cutoff`` count as it. The generator is on the rows' device.
    """
    distances = (2 - 2 * rows @ rows.T).clamp(min=0).sqrt().clamp(min=cutoff)
    log_weights = log_inverse_density(distances, rows.shape[1])
    # The largest of log w + Gumbel noise is a draw by w, and nothing waits for the device.
    noise = torch.empty_like(log_weights).exponential_(generator=generator).log()
    return (log_weights - noise).masked_fill_(~allowed, -torch.inf).argmax(1)


def drawn_evenly(allowed: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """[T]: for each row of ``allowed`` [T, B] one of its true columns; index 0 where there is none."""
    uniform = torch.rand(allowed.shape, generator=generator, device=allowed.device)
    return uniform.masked_fill_(~allowed, -1).argmax(1)


def distance_weighted_triplets(
    embeddings: Tensor, labels: Tensor, *, cutoff: float = 0.5, generator: torch.Generator | None = None
) -> Triplets:
    """Draw a triplet for each image: a positive evenly from its class, and a negative by ``drawn_by_distance``.

    Images without a positive or without a negative in the batch have no triplet.
    """
    labels, device = labels.cpu(), embeddings.device
    same = labels[:, None] == labels
    different = ~same
    same = same.fill_diagonal_(False)
    anchors = to_device((same.any(1) & different.any(1)).nonzero()[:, 0], device)
    rows = normalize(embeddings.detach())
    negatives = drawn_by_distance(rows, to_device(different, device), cutoff=cutoff, generator=generator)
    positives = drawn_evenly(to_device(same, device), generator)
    return anchors, positives[anchors], negatives[anchors]


class DistanceWeighted(nn.Module):
    """One triplet per image, its negative drawn with the weight 1 / q(d) of its distance (``log_inverse_density``).

    PML's miner differs: it leaves out negatives farther than 1.4, draws a triplet for each positive, and subtracts the
    maximum of the whole matrix, so that most rows underflow in 512 dimensions and have no triplet.

    Source: Wu et al., Sampling Matters in Deep Embedding Learning, ICCV 2017, section 4;
    Confusezius/Characterizing_Generalization_in_DeepMetricLearning e8a4171c, batchminer/distance.py, where the cutoff
    at 1.4 is commented out.
    """

    labels_on_host = True

    def __init__(self, *, cutoff: float = 0.5) -> None:
        super().__init__()
        if not 0 < cutoff < 2:
            raise ConfigError(f"cutoff: got {cutoff}, expected a distance in (0, 2).")
        self.cutoff = cutoff

    def forward(self, embeddings: Tensor, labels: Tensor) -> Triplets:
        return distance_weighted_triplets(embeddings, labels, cutoff=self.cutoff)


class SwitchedNegatives(nn.Module):
    """Rho-regularization: with probability rho, a triplet pushes away another image of the anchor's class.

    This counteracts the collapse of classes to points. The image is drawn evenly from the class in the batch, without
    the anchor. The positive of such a triplet:

    - ``official``: the anchor itself, so that the triplet only pushes (positives.append(i) in the public code).
    - ``paper``: the positive that the miner drew. With two images a class, pull and push cancel.

    "R-Margin" is the margin loss with distance-weighted triplets treated so.

    Source: Roth et al., Revisiting Training Strategies and Generalization Performance in Deep Metric Learning, ICML
    2020, section 5 (rho-regularization); Confusezius/Characterizing_Generalization_in_DeepMetricLearning e8a4171c,
    batchminer/rho_distance.py.
    """

    labels_on_host = True  # as the miner may want them

    def __init__(
        self,
        miner: Callable[[Tensor, Tensor], Triplets],
        *,
        switch_probability: float = 0.4,
        variant: Literal["official", "paper"] = "official",
    ) -> None:
        super().__init__()
        if not 0 <= switch_probability <= 1:
            raise ConfigError(f"switch_probability: got {switch_probability}, expected a probability in [0, 1].")
        self.miner = miner
        self.switch_probability = switch_probability
        self.variant = variant

    def forward(self, embeddings: Tensor, labels: Tensor) -> Triplets:
        batch_labels = BatchLabels.of(labels, embeddings.device)
        mined = self.miner(embeddings, batch_labels.wanted_by(self.miner))
        if len(mined) != 3:
            raise ConfigError(f"{type(self.miner).__name__} returns pairs, expected triplets. Use DistanceWeighted.")
        anchor, positive, negative = mined
        if not len(anchor):
            return mined
        labels = batch_labels.on_device
        same = labels[anchor][:, None] == labels  # [T, B]
        same &= torch.arange(len(labels), device=labels.device) != anchor[:, None]
        drawn = drawn_evenly(same)  # a triplet has a positive, so no row is empty
        switched = torch.rand(len(anchor), device=anchor.device) < self.switch_probability
        if self.variant == "official":
            positive = torch.where(switched, anchor, positive)
        return anchor, positive, torch.where(switched, drawn, negative)


class RandomPositiveHardestNegative(nn.Module):
    """One triplet for each image that has a positive: a random positive and the nearest negative beyond a floor.

    Negatives nearer than min(cutoff, largest distance within a class of the batch) count as that far; the first of
    equally near ones is taken. A batch of one class has none.

    Source: zbr17/AVSL fd2686e4, link_margin.yaml and link_avsl_margin.yaml, which take HardSelector of gedml 0.2.2
    (core/selectors/hard_selector.py).
    """

    labels_on_host = True

    def __init__(self, *, cutoff: float = 0.5, distance: BaseDistance | None = None) -> None:
        super().__init__()
        check_at_least(0, cutoff=cutoff)
        self.cutoff = cutoff
        self.distance = LpDistance() if distance is None else distance

    @torch.no_grad()
    def forward(self, embeddings: Tensor, labels: Tensor) -> Triplets:
        _, class_of, sizes = labels.cpu().unique(return_inverse=True, return_counts=True)
        has_both = (sizes[class_of] > 1) & (len(sizes) > 1)
        labels, anchors = (to_device(x, embeddings.device) for x in (labels, has_both.nonzero()[:, 0]))
        distances = self.distance(embeddings)  # [B, B]
        same = labels[:, None] == labels
        floor = distances.masked_fill(~same, -torch.inf).amax().clamp(max=self.cutoff)
        negatives = distances.clamp(min=floor).masked_fill(same, torch.inf).argmin(1)
        return anchors, drawn_evenly(same.fill_diagonal_(False))[anchors], negatives[anchors]
