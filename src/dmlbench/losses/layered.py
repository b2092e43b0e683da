"""Losses of AVSL's distances: one for every level, and one for the distance inferred from all levels.

Letters: B images, L levels, r nodes of each, C classes, K of them compared with.
"""

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from pytorch_metric_learning.distances import BaseDistance
from torch import Tensor, nn

from dmlbench.device_copies import to_device
from dmlbench.losses.base import BatchLabels, WholeBatchLoss
from dmlbench.types import ConfigError, check_at_least, check_positive


class LeveledDistance(Protocol):
    """A distance of rows of several levels, such as AVSL's (see there)."""

    num_levels: int
    level_size: int

    @property
    def infers(self) -> bool: ...
    def levels(self, rows: Tensor) -> tuple[Tensor, Tensor]: ...
    def pack(self, embeddings: Tensor, certainties: Tensor) -> Tensor: ...
    def level(self, index: int) -> BaseDistance: ...
    def of_detached_nodes(self) -> BaseDistance: ...


class LayeredLoss(nn.Module):
    """loss = sum over levels of level_weights[l] L(d^l) + final_weight L(d), d with its nodes detached.

    Every term has its own loss, any of PML's that takes a ``distance``. The last term trains what infers d and is
    absent where nothing is inferred.

    Source: Zhang et al., Attributable Visual Similarity Learning, 2022, eq. 10.
    """

    compares_levels = True
    labels_on_host = True  # as losses and miners may want them
    made_for_each_level = ("loss", "miner")

    def __init__(
        self,
        loss: Callable[..., nn.Module],
        distance: LeveledDistance,
        *,
        level_weights: Sequence[float] = (1.0, 1.0, 1.0),
        final_weight: float = 1.0,
        miner: Callable[..., nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.level_weights = checked_weights(level_weights, final_weight, distance)
        self.final_weight = final_weight if distance.infers else 0.0
        distances = [distance.level(level) for level in range(distance.num_levels)]
        if self.final_weight:
            distances.append(distance.of_detached_nodes())
        self.losses = nn.ModuleList([loss(distance=each) for each in distances])
        self.miners = nn.ModuleList([] if miner is None else [miner(distance=each) for each in distances])

    def forward(self, embeddings: Tensor, labels: Tensor, indices_tuple: tuple[Tensor, ...] | None = None) -> Tensor:
        batch_labels = BatchLabels.of(labels, embeddings.device)
        total = embeddings.new_zeros(())
        for n, (weight, loss) in enumerate(zip([*self.level_weights, self.final_weight], self.losses, strict=False)):
            chosen = indices_tuple
            if self.miners and chosen is None:
                chosen = self.miners[n](embeddings, batch_labels.wanted_by(self.miners[n]))
            total = total + weight * loss(embeddings, batch_labels.wanted_by(loss), chosen)
        return total


class LayeredProxyAnchor(WholeBatchLoss):
    """ProxyAnchor on AVSL's distances: of each level to proxies of the level, and on the distance inferred from all.

    In the inferred distance, a proxy's certainty is one number per level, the mean over the batch's images and nodes.
    With more than ``max_classes`` classes, only the proxies of the batch's classes are compared with: those of all of
    SOP would need 4 GB per level.

    Source: Zhang et al., Attributable Visual Similarity Learning, 2022, eqs. 10 and 14, sections 4.2 and 5;
    zbr17/AVSL fd2686e4, collectors/avsl_collector.py, examples/samples_avsl.sh.
    """

    compares_levels = True
    has_proxies = True
    labels_on_host = True

    def __init__(
        self,
        num_classes: int,
        distance: LeveledDistance,
        *,
        alpha: float = 16.0,
        pos_margin: float = 1.8,
        neg_margin: float = 2.2,
        final_pos_margin: float = 1.8,
        final_neg_margin: float = 2.2,
        level_weights: Sequence[float] = (1.0, 1.0, 1.0),
        final_weight: float = 1.0,
        max_classes: int = 1000,
    ) -> None:
        super().__init__()
        check_at_least(2, num_classes=num_classes)
        check_positive(alpha=alpha)
        check_at_least(1, max_classes=max_classes)
        self.alpha = alpha
        self.margins = (pos_margin, neg_margin)
        self.final_margins = (final_pos_margin, final_neg_margin)
        self.level_weights = checked_weights(level_weights, final_weight, distance)
        self.final_weight = final_weight if distance.infers else 0.0
        self.max_classes = max_classes
        self._distance = (distance,)  # the model's: in a tuple, which registers no parameters
        # as the public code starts them: He's for leaky ReLU with slope sqrt(5)
        scale = math.sqrt(1 / 3 / distance.level_size)
        self.proxies = nn.Parameter(scale * torch.randn(num_classes, distance.num_levels, distance.level_size))

    def of_batch(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        (distance,) = self._distance
        device = embeddings.device
        classes = torch.arange(len(self.proxies), device=device)
        if len(classes) > self.max_classes:
            classes = to_device(labels.cpu().unique(), device)
        unit, certainties = distance.levels(embeddings)  # [B, L, r]
        proxies = F.normalize(self.proxies[classes], dim=-1)  # [K, L, r]
        same = to_device(labels, device)[:, None] == classes  # [B, K]
        total = embeddings.new_zeros(())
        for level, weight in enumerate(self.level_weights):
            squared = 2 - 2 * unit[:, level] @ proxies[:, level].T
            total = total + weight * proxy_anchor_of_distances(squared, same, alpha=self.alpha, margins=self.margins)
        if self.final_weight:
            certainty = certainties.mean((0, 2))[:, None].expand_as(proxies)  # one number per level
            inferred = distance.of_detached_nodes()(embeddings, distance.pack(proxies, certainty))
            part = proxy_anchor_of_distances(inferred, same, alpha=self.alpha, margins=self.final_margins)
            total = total + self.final_weight * part
        return total


def proxy_anchor_of_distances(distances: Tensor, same: Tensor, *, alpha: float, margins: tuple[float, float]) -> Tensor:
    """ProxyAnchor in terms of distances d_bk [B, K] between images and proxies of their (``same``) or other classes.

    1/K+ sum over the K+ proxies with images of log(1 + sum over their images of exp(alpha (d_bk - pos_margin)))
    + 1/K sum over all proxies of log(1 + sum over the other images of exp(-alpha (d_bk - neg_margin))).

    With squared distances d = 2 - 2s of unit vectors, ProxyAnchor(32, 0.1) on cosines s is this with alpha 16 and
    margins (1.8, 2.2).

    Source: Zhang et al., Attributable Visual Similarity Learning, 2022, eq. 14.
    """
    zero = distances.new_zeros(1, distances.shape[1])
    positive = (alpha * (distances - margins[0])).masked_fill(~same, -torch.inf)
    negative = (-alpha * (distances - margins[1])).masked_fill(same, -torch.inf)
    pulled, pushed = (torch.cat([zero, x]).logsumexp(0) for x in (positive, negative))
    return pulled.sum() / same.any(0).sum() + pushed.mean()  # a proxy without images is pulled by log 1 = 0


def checked_weights(level_weights: Sequence[float], final_weight: float, distance: LeveledDistance) -> list[float]:
    weights = [float(weight) for weight in level_weights]
    if len(weights) != distance.num_levels:
        raise ConfigError(
            f"level_weights: got {weights}, expected one number for each of the {distance.num_levels} levels. "
            f"Set loss.level_weights={[1.0] * distance.num_levels}."
        )
    if min(*weights, final_weight) < 0 or not any(weights):
        raise ConfigError(
            f"level_weights, final_weight: got {weights} and {final_weight}, expected at least 0 and one positive "
            "level weight."
        )
    return weights
