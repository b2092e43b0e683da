"""Which images of a batch are compared, where pytorch-metric-learning has no miner for it."""

import math
from collections.abc import Callable

import torch
from pytorch_metric_learning.miners import BaseMiner
from torch import Tensor, nn

from dmlbench.transfers import on_host, to_device
from dmlbench.types import ConfigError

Triplets = tuple[Tensor, Tensor, Tensor]


def log_inverse_density(distances: Tensor, size: int) -> Tensor:
    """-log q(d) + constant of distances d in (0, 2], q their density between random points on the unit sphere.

        q(d) ~ d^(size - 2) (1 - d^2 / 4)^((size - 3) / 2)

    Args:
        distances: of any shape.
        size: dimensions of the space.

    Source: Wu et al., Sampling Matters in Deep Embedding Learning, ICCV 2017, section 4.
    """
    rest = (1 - distances.square() / 4).clamp(min=torch.finfo(distances.dtype).tiny)  # opposite points are 2 apart
    return (2.0 - size) * distances.log() - (size - 3) / 2 * rest.log()


class SwitchedNegatives(nn.Module):
    """Rho-regularization: the negative of a triplet is, with probability rho, another image of the anchor's class.

    Pushing images of a class apart counteracts the collapse of classes to points. The image is drawn evenly from the
    class in the batch, without the anchor; it may be the triplet's positive. "R-Margin" is the margin loss with
    distance-weighted triplets treated so.

    Source: Roth et al., Revisiting Training Strategies and Generalization Performance in Deep Metric Learning, ICML
    2020, section 5 (rho-regularization); as ooDML (Milbich et al. 2021) uses it.
    """

    def __init__(self, miner: Callable[[Tensor, Tensor], Triplets], *, switch_probability: float = 0.4) -> None:
        """
        Args:
            miner: miner of triplets of pytorch-metric-learning.
            switch_probability: rho, in [0, 1].

        Raises:
            ConfigError: rho is no probability.
        """
        super().__init__()
        if not 0 <= switch_probability <= 1:
            raise ConfigError(f"switch_probability ({switch_probability}) must lie in [0, 1]")
        self.miner = miner
        self.switch_probability = switch_probability

    def forward(self, embeddings: Tensor, labels: Tensor) -> Triplets:
        """
        Args:
            embeddings: [B, D].
            labels: [B].

        Raises:
            ConfigError: the miner gives pairs.
        """
        mined = self.miner(embeddings, labels)
        if len(mined) != 3:
            raise ConfigError(
                f"{type(self.miner).__name__} gives pairs, not triplets; switch the negatives of a miner of triplets, "
                "such as DistanceWeightedMiner"
            )
        anchor, positive, negative = mined
        if not len(anchor):
            return mined
        same = labels[anchor][:, None] == labels[None, :]  # [T, B]
        same[torch.arange(len(anchor), device=anchor.device), anchor] = False
        drawn = torch.multinomial(same.float(), 1)[:, 0]  # a triplet has a positive, so no row is empty
        switched = torch.rand(len(anchor), device=anchor.device) < self.switch_probability
        return anchor, positive, torch.where(switched, drawn, negative)


class RandomPositiveHardestNegative(BaseMiner):  # type: ignore[misc]  # PML has no types
    """One triplet for each image that has a positive: a random positive and the nearest negative beyond a floor.

    Negatives nearer than min(cutoff, largest distance within a class of the batch) count as that far; the first of
    equally near ones is taken. So the cutoff keeps images that lie almost on the anchor from being preferred.

    Source: zbr17/AVSL fd2686e4, link_margin.yaml and link_avsl_margin.yaml, which take HardSelector of gedml 0.2.2
    (core/selectors/hard_selector.py).
    """

    def __init__(self, *, cutoff: float = 0.5, **kwargs: object) -> None:
        """
        Args:
            cutoff: upper limit of the floor, at least 0, in units of the distance.
            kwargs: ``distance``, of pytorch-metric-learning; Euclidean by default.

        Raises:
            ConfigError: a negative cutoff.
        """
        super().__init__(**kwargs)
        if not 0 <= cutoff < math.inf:
            raise ConfigError(f"cutoff: got {cutoff}, expected a number of at least 0. Set miner.cutoff=0.5.")
        self.cutoff = cutoff

    def mine(self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor) -> Triplets:
        """Of a batch with itself, [B, D] and [B]; of a batch of one class, no triplets."""
        _, class_of, sizes = on_host(labels).unique(return_inverse=True, return_counts=True)
        has_positive = (sizes[class_of] > 1) & (len(sizes) > 1)
        anchors = to_device(has_positive.nonzero()[:, 0], labels.device)
        if not len(anchors):
            return anchors, anchors, anchors
        distances = self.distance(embeddings, ref_emb)  # [B, B]
        same = labels[:, None] == ref_labels
        floor = distances.masked_fill(~same, -torch.inf).amax().clamp(max=self.cutoff)
        negatives = distances.clamp(min=floor).masked_fill(same, torch.inf).argmin(1)
        positives = torch.multinomial(same.fill_diagonal_(False)[anchors].float(), 1, replacement=True)[:, 0]
        return anchors, positives, negatives[anchors]
