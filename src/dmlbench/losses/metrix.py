"""Metrix: mixtures of two embeddings, with labels interpolated by the same factor."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pytorch_metric_learning.distances import BaseDistance, CosineSimilarity, LpDistance
from pytorch_metric_learning.losses import ContrastiveLoss, MultiSimilarityLoss
from pytorch_metric_learning.reducers import PerAnchorReducer
from pytorch_metric_learning.utils.loss_and_miner_utils import convert_to_pairs
from torch import Tensor, nn
from torch.nn.functional import normalize

from dmlbench.device_copies import to_device
from dmlbench.losses.base import SeededDraws
from dmlbench.losses.proxy_anchor import ProxyAnchor
from dmlbench.types import ConfigError, IntArray, check_at_least, check_positive

Pairs = Literal["positive_negative", "anchor_negative"]
BoolArray = NDArray[np.bool_]


class Metrix(SeededDraws):
    """Add to a loss of pairs the same loss of mixed embeddings with interpolated labels.

    total = loss(batch) + weight * mixed(batch). A loss that gives an anchor a the value
    S+(sum over its positives of r+(s)) + S-(sum over its negatives of r-(s)), s their cosine with a, gives mixtures
    v = lambda x + (1 - lambda) n of a first unit vector x (label 1) and a negative n (label 0)

        S+(sum over v of lambda r+(s_av)) + S-(sum over v of (1 - lambda) r-(s_av)),

    reduced over the anchors as the loss itself is. x is a positive of a, or a itself; which of ``pairs``, and lambda of
    Beta(alpha, alpha), are drawn once a step. ProxyAnchor's anchors are proxies. Embeddings are mixed (the paper's
    Metrix/embed), not images or features, and only pairs that a miner has chosen, of the ``num_hard_negatives`` most
    similar to each anchor. In evaluation mode, and for regularizers, the value is that of the wrapped loss.

    variant:
        paper: every positive of an anchor is mixed with its negatives, and every anchor with its own.
        official: as the public code of the contrastive loss. Each positive pair mixes the anchor's first positive in
            the batch, and only an anchor without positives is mixed with its negatives: none in a balanced batch, where
            the code fails and the mixed part is 0 here. (Its weights are 0.4 for positives, 0.3 for anchors.)

    A mixture of opposite vectors has the cosine 0. The public code of multi-similarity is not followed: it looks
    mixtures up by rows of the batch, leaves negatives unmixed and weights plain sums by lambda.

    Source: Venkataramanan et al., It Takes Two to Tango: Mixup for Deep Metric Learning, ICLR 2022, its generic loss as
    the authors' slides and poster have it; billpsomas/Metrix_ICLR22 7ce730ca and billpsomas/metrix b6797035, train.py
    and mixup/.
    """

    labels_on_host = True

    def __init__(
        self,
        loss: nn.Module,
        *,
        weight: float = 0.4,
        alpha: float = 2.0,
        pairs: Sequence[Pairs] = ("positive_negative", "anchor_negative"),
        num_hard_negatives: int | None = None,
        variant: Literal["paper", "official"] = "paper",
    ) -> None:
        super().__init__()
        check_positive(weight=weight, alpha=alpha)
        check_at_least(1, pairs=len(pairs), num_hard_negatives=1 if num_hard_negatives is None else num_hard_negatives)
        if type(loss) not in _OF_MIXTURES:
            raise ConfigError(
                f"Metrix does not support {type(loss).__name__}. Set loss@loss.loss=contrastive, multi_similarity or "
                "proxy_anchor."
            )
        if not isinstance(loss, ProxyAnchor):
            _of_cosines(loss.distance, torch.zeros(()))
            if any(isinstance(module, PerAnchorReducer) for module in loss.modules()):
                raise ConfigError(
                    "Metrix does not support PerAnchorReducer, which keeps one value per pair: a pair has several "
                    "mixtures. Choose another reducer."
                )
        if variant == "official" and not isinstance(loss, ContrastiveLoss):
            raise ConfigError(
                f"loss.variant: got official with {type(loss).__name__}, expected ContrastiveLoss. Set "
                "loss.variant=paper."
            )
        self.loss = loss
        self.weight = weight
        self.alpha = alpha
        self.pairs = tuple(pairs)
        self.num_hard_negatives = num_hard_negatives
        self.variant = variant

    def forward(self, embeddings: Tensor, labels: Tensor, indices_tuple: tuple[Tensor, ...] | None = None) -> Tensor:
        value: Tensor = self.loss(embeddings, to_device(labels, embeddings.device), indices_tuple)
        if not self.training:
            return value
        rng = self.next_generator("metrix")
        pairs = self.pairs[int(rng.integers(len(self.pairs)))]
        share = float(rng.beta(self.alpha, self.alpha))
        return value + self.weight * self.mixed_part(embeddings, labels, pairs, share, indices_tuple)

    def mixed_part(
        self,
        embeddings: Tensor,
        labels: Tensor,
        pairs: Pairs,
        share: float,
        indices_tuple: tuple[Tensor, ...] | None = None,
    ) -> Tensor:
        """The loss of mixtures, without its weight; ``share`` is lambda."""
        if indices_tuple is not None and self.variant == "official":
            raise ConfigError("loss.variant: got official with a miner, but it mixes all pairs. Set miner=null.")
        on_cpu = labels.cpu().numpy()
        labels = to_device(labels, embeddings.device)
        unit = normalize(embeddings)
        gram = unit @ unit.T  # [B, B]
        classes, s = labels, gram  # of anchors: [A], [A, B]
        known = on_cpu
        if isinstance(self.loss, ProxyAnchor):
            proxies = self.loss.proxies
            known = np.unique(on_cpu) if pairs == "positive_negative" else np.arange(len(proxies))
            classes = to_device(torch.from_numpy(known), labels.device)
            s = normalize(proxies[classes] if pairs == "positive_negative" else proxies) @ unit.T
        negative = classes[:, None] != labels  # [A, B]
        same = known[:, None] == on_cpu
        if s is gram:
            np.fill_diagonal(same, False)
        first, is_first = (to_device(torch.from_numpy(x), labels.device) for x in self._firsts(same, pairs))  # [A, P]
        if indices_tuple is not None:
            a, p, b, n = convert_to_pairs(indices_tuple, labels)
            mined = torch.zeros((2, *s.shape), dtype=torch.bool, device=s.device)
            mined[0, a, p] = True
            mined[1, b, n] = True
            negative = negative & mined[1]
            if pairs == "positive_negative":
                is_first = is_first & mined[0].gather(1, first)
        if self.num_hard_negatives is not None:
            similar = s.detach().masked_fill(~negative, -torch.inf)
            hardest = similar.topk(min(self.num_hard_negatives, s.shape[1])).indices
            negative = negative & torch.zeros_like(negative).scatter(1, hardest, True)
        if pairs == "positive_negative":
            to_first, between = s.gather(1, first), gram[first]  # [A, P], [A, P, B]
        else:
            to_first, between = s.new_ones(len(s), 1), s[:, None]  # the anchor itself
        mixed = share * to_first[:, :, None] + (1 - share) * s[:, None]
        squared = share**2 + (1 - share) ** 2 + 2 * share * (1 - share) * between  # lengths of the mixtures
        chosen = is_first[:, :, None] & negative[:, None]  # [A, P, B]
        cosines = mixed * squared.clamp(min=_LEAST).rsqrt()
        return _OF_MIXTURES[type(self.loss)](self.loss, cosines, chosen, share, (embeddings, labels))

    def _firsts(self, same: BoolArray, pairs: Pairs) -> tuple[IntArray, BoolArray]:
        """Rows of what is mixed with an anchor's negatives [A, P], filled up, and which count; ``same`` is [A, B]."""
        if pairs == "anchor_negative":
            num_positives = same.sum(1, keepdims=True)
            is_meant = num_positives == 0 if self.variant == "official" else num_positives >= 0
            return np.zeros((len(same), 1), np.int64), is_meant
        first = np.argsort(~same, axis=1, kind="stable")[:, : max(same.sum(1), default=0)]
        is_first = np.take_along_axis(same, first, 1)
        return (first[:, :1].repeat(first.shape[1], 1) if self.variant == "official" else first), is_first


_LEAST = 1e-12  # below it a squared length or distance counts as this much

Batch = tuple[Tensor, Tensor]  # embeddings and labels, for reducers


def _of_cosines(distance: BaseDistance, s: Tensor) -> Tensor:
    """The distance of unit vectors, computed from their cosines ``s``."""
    if type(distance) is CosineSimilarity:
        return s if distance.power == 1 else s**distance.power
    if type(distance) is LpDistance and distance.normalize_embeddings and distance.p == 2:
        return (2 - 2 * s).clamp(min=_LEAST) ** (distance.power / 2)
    raise ConfigError(
        f"distance of the wrapped loss: got {type(distance).__name__}, expected CosineSimilarity, or LpDistance with "
        "normalize_embeddings=true and p=2."
    )


def _contrastive(loss: ContrastiveLoss, s: Tensor, chosen: Tensor, share: float, batch: Batch) -> Tensor:
    """By the loss's own reducers: positives with the factor lambda, negatives with 1 - lambda, of every mixture."""
    anchor, _, negative = chosen.nonzero(as_tuple=True)
    d = _of_cosines(loss.distance, s[chosen])
    terms = {"pos": share * loss.get_per_pair_loss(d, "pos"), "neg": (1 - share) * loss.get_per_pair_loss(d, "neg")}
    of_each = {
        f"{kind}_loss": {"losses": x if len(x) else 0, "indices": (anchor, negative), "reduction_type": f"{kind}_pair"}
        for kind, x in terms.items()
    }
    return loss.reducer(of_each, *batch)


def _multi_similarity(loss: MultiSimilarityLoss, s: Tensor, chosen: Tensor, share: float, batch: Batch) -> Tensor:
    d, margin = _of_cosines(loss.distance, s), loss.distance.margin
    positive = _log1p_sum(loss.alpha * margin(d, loss.base), chosen, share) / loss.alpha
    negative = _log1p_sum(loss.beta * margin(loss.base, d), chosen, 1 - share) / loss.beta
    anchors = torch.arange(len(s), device=s.device)
    of_each = {"losses": positive + negative, "indices": anchors, "reduction_type": "element"}
    return loss.reducer({"loss": of_each}, *batch)


def _proxy_anchor(loss: ProxyAnchor, s: Tensor, chosen: Tensor, share: float, _: Batch) -> Tensor:
    """Positive part / proxies that have mixtures + negative part / all proxies."""
    positive = _log1p_sum(-loss.alpha * (s - loss.margin), chosen, share)
    negative = _log1p_sum(loss.alpha * (s + loss.margin), chosen, 1 - share)
    return positive.sum() / chosen.any(2).any(1).sum().clamp(min=1) + negative.sum() / loss.num_classes


def _log1p_sum(exponents: Tensor, chosen: Tensor, factor: float) -> Tensor:
    """log (1 + factor * sum of exp) [A] over the chosen of [A, P, B]."""
    shifted = exponents + (math.log(factor) if factor else -math.inf)
    terms = shifted.masked_fill(~chosen, -torch.inf).flatten(1)
    return torch.cat([terms.new_zeros(len(terms), 1), terms], 1).logsumexp(1)


# of a loss, the cosines of anchors and mixtures [A, P, B], which of them count, lambda, and the batch
_OF_MIXTURES: dict[type[nn.Module], Any] = {
    ContrastiveLoss: _contrastive,
    MultiSimilarityLoss: _multi_similarity,
    ProxyAnchor: _proxy_anchor,
}
