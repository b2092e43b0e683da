"""Differentiable average precision of a batch: Smooth-AP, SupAP, and ROADMAP, which adds a calibration loss."""

from collections.abc import Callable

import torch
from pytorch_metric_learning.distances import DotProductSimilarity
from pytorch_metric_learning.losses import ContrastiveLoss
from torch import Tensor
from torch.nn.functional import normalize

from dmlbench.device_copies import to_device
from dmlbench.losses.base import WholeBatchLoss
from dmlbench.types import ConfigError, check_at_least, check_positive

Step = Callable[[Tensor, Tensor], Tensor]

_STEEPEST = 50.0  # exponents beyond it count as it, as in the public codes


class SmoothAp(WholeBatchLoss):
    """One minus average precision with sigmoids in place of the steps of its ranks, averaged over queries.

    Every row of the batch is a query q, P are the rows of its class, q included. With cosines s and the step h:
    rank(q, x) = 1 + sum over z != x of h(s_qz - s_qx), rank_P(q, x) the same over z in P alone,
    loss = mean over q of (1 - mean over x in P of rank_P(q, x) / rank(q, x)),    h(d) = sigmoid(d / temperature).

    As in the public code, the query is among what it searches and counts as found: a query without positives still
    pushes away what is almost as near as itself.

    Source: Brown et al., Smooth-AP, ECCV 2020, eq. 5; Andrew-Brown1/Smooth_AP 59927ec4, src/Smooth_AP_loss.py.
    """

    labels_on_host = True  # how many pairs there are decides shapes

    def __init__(self, *, temperature: float = 0.01) -> None:
        super().__init__()
        check_positive(temperature=temperature)
        self.temperature = temperature

    def of_batch(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        rows = normalize(embeddings)
        return one_minus_ap(rows @ rows.T, labels, self.step)

    def step(self, difference: Tensor, relevant: Tensor) -> Tensor:
        """h [P, B] of similarities minus a positive's, [P, B]; ``relevant`` where they are a positive's, too."""
        return _sigmoid(difference, self.temperature)


class SupAp(SmoothAp):
    """``SmoothAp`` with steps that never count a rank too low.

    Positives count by the true step (1 where d >= 0), hence without gradient. Negatives count by
    sigmoid(d / temperature) where d <= 0, by 1/2 more than that where 0 < d <= margin, and by
    slope (d - margin) + offset beyond it. The public default of ``offset``, 1.44, is the paper's; None takes the value
    that makes the step continuous.

    Source: Ramzi et al., Robust and Decomposable Average Precision for Image Retrieval, NeurIPS 2021, eq. 5;
    elias-ramzi/ROADMAP fed37d75, roadmap/losses/smooth_rank_ap.py.
    """

    def __init__(
        self, *, temperature: float = 0.01, slope: float = 100.0, margin: float = 0.05, offset: float | None = 1.44
    ) -> None:
        super().__init__(temperature=temperature)
        check_positive(slope=slope)
        check_at_least(0, margin=margin)
        self.slope = slope
        self.margin = margin
        at_margin = float(_sigmoid(torch.tensor(margin, dtype=torch.float64), temperature)) + 0.5
        self.offset = at_margin if offset is None else offset

    def step(self, difference: Tensor, relevant: Tensor) -> Tensor:
        smooth = _sigmoid(difference, self.temperature)
        linear = self.slope * (difference - self.margin) + self.offset
        of_negatives = torch.where(difference > self.margin, linear, smooth + 0.5 * (difference > 0))
        return torch.where(relevant, (difference >= 0).to(difference.dtype), of_negatives)


class Roadmap(SupAp):
    """SupAP plus a calibration loss, the contrastive loss of cosines.

    loss = ap_weight SupAP + calibration_weight (mean of (positive_margin - s)_+ over non-zero positives
        + mean of (s - negative_margin)_+ over non-zero negatives)

    Source: Ramzi et al. 2021, eqs. 6 and 7, where the weights are 1 - lambda and lambda; elias-ramzi/ROADMAP fed37d75,
    roadmap/config/loss/roadmap.yaml, where both are 1.
    """

    def __init__(
        self, *, positive_margin: float = 0.9, negative_margin: float = 0.6, ap_weight: float = 1.0,
        calibration_weight: float = 1.0, temperature: float = 0.01, slope: float = 100.0, margin: float = 0.05,
        offset: float | None = 1.44,
    ) -> None:  # fmt: skip
        super().__init__(temperature=temperature, slope=slope, margin=margin, offset=offset)
        check_at_least(0, ap_weight=ap_weight, calibration_weight=calibration_weight)
        if not negative_margin < positive_margin:
            raise ConfigError(
                f"loss.negative_margin: got {negative_margin}, expected below positive_margin ({positive_margin})."
            )
        self.ap_weight = ap_weight
        self.calibration_weight = calibration_weight
        self.calibration = ContrastiveLoss(positive_margin, negative_margin, distance=DotProductSimilarity())

    def of_batch(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        calibration = self.calibration(embeddings, to_device(labels, embeddings.device))
        return self.ap_weight * super().of_batch(embeddings, labels) + self.calibration_weight * calibration


def one_minus_ap(s: Tensor, labels: Tensor, step: Step) -> Tensor:
    """Mean over queries of 1 - AP of similarities s [B, B] and labels [B] on the host; see ``SmoothAp``."""
    same = labels.cpu()[:, None] == labels.cpu()
    query, item = (to_device(x, s.device) for x in torch.where(same))  # [P] each
    relevant = to_device(same, s.device)[query]  # [P, B]
    difference = s[query] - s[query, item, None]
    itself = torch.arange(len(s), device=s.device) == item[:, None]
    above = step(difference, relevant).masked_fill(itself, 0)
    precision = (1 + (above * relevant).sum(1)) / (1 + above.sum(1))
    share = to_device(same.sum(1).to(s.dtype).reciprocal(), s.device)[query]
    return 1 - (precision * share).sum() / len(s)


def _sigmoid(difference: Tensor, temperature: float) -> Tensor:
    return torch.sigmoid((difference / temperature).clamp(-_STEEPEST, _STEEPEST))
