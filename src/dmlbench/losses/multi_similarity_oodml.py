"""The multi-similarity loss as the ooDML study's code computes it."""

import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

from dmlbench.losses.base import WholeBatchLoss
from dmlbench.types import check_at_least, check_positive


class MultiSimilarityOodml(WholeBatchLoss):
    """Multi-similarity with its own choice of pairs, averaged over anchors that keep a pair.

    With cosines s_ij, an anchor i keeps negatives with s_ij + epsilon above its lowest positive and positives with
    s_ij - epsilon below its highest negative. The anchor itself counts as a positive here, so it is kept where a
    negative is within epsilon of it.

    loss = mean over anchors with a positive kept of 1/alpha log (1 + sum over them of exp(-alpha (s_ij - base)))
         + mean over anchors with a negative kept of 1/beta log (1 + sum over them of exp(beta (s_ij - base)))

    Without any pair a part is 0. (pytorch-metric-learning averages both parts over all images.)

    Source: Wang et al. 2019, eq. 15; Confusezius/Characterizing_Generalization_in_DeepMetricLearning e8a4171c,
    criteria/multisimilarity.py.
    """

    def __init__(self, *, alpha: float = 2.0, beta: float = 40.0, base: float = 0.5, epsilon: float = 0.1) -> None:
        super().__init__()
        check_positive(alpha=alpha, beta=beta)
        check_at_least(0, epsilon=epsilon)
        self.alpha, self.beta, self.base, self.epsilon = alpha, beta, base, epsilon

    def of_batch(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        rows = normalize(embeddings)
        s = rows @ rows.T
        same = labels[:, None] == labels[None, :]
        others = same & ~torch.eye(len(labels), dtype=torch.bool, device=labels.device)
        # An anchor without positives (negatives) keeps no negatives (positives).
        lowest = s.masked_fill(~others, torch.inf).amin(1, keepdim=True)
        highest = s.masked_fill(same, -torch.inf).amax(1, keepdim=True)
        positives = same & (s - self.epsilon < highest)
        negatives = ~same & (s + self.epsilon > lowest)
        return _part(s - self.base, positives, -self.alpha) + _part(s - self.base, negatives, self.beta)


def _part(differences: Tensor, kept: Tensor, scale: float) -> Tensor:
    """Mean of 1 / |scale| log (1 + sum of exp (scale * differences)) over the rows that keep an entry."""
    has_any = kept.any(1)
    # A finite fill: the gradient of logsumexp over -inf alone is NaN.
    logits = (scale * differences).masked_fill(~kept, torch.finfo(differences.dtype).min)
    terms = softplus(logits.logsumexp(1)).masked_fill(~has_any, 0) / abs(scale)
    return terms.sum() / has_any.sum().clamp(min=1)
