"""Pairwise cross-entropy: each positive pair against images at its two places in the other classes."""

import torch
from pytorch_metric_learning.distances import BaseDistance
from torch import Tensor

from dmlbench.device_copies import to_device
from dmlbench.losses.base import WholeBatchLoss
from dmlbench.types import check_positive

_ABSENT = -1e9  # logit of what takes no part, as in the public code


class PairwiseCrossEntropy(WholeBatchLoss):
    """Cross-entropy of each positive pair, summed over pairs of places.

    Let x_a^i be the i-th image of class a in the batch, and s = -d / tau (or a similarity over tau). For every i != j,
    loss_ij = mean over classes a of -log (exp s(x_a^i, x_a^j) /
        (sum over b of exp s(x_a^i, x_b^j) + sum over b != a of exp s(x_a^i, x_b^i))),
    and the loss is the sum of all loss_ij. A class with fewer images takes part with those it has.

    Source: Ermolov et al., Hyperbolic Vision Transformers, CVPR 2022, eq. 7; htdt/hyp_metric c89de049, train.py.
    """

    labels_on_host = True  # their order gives the places

    def __init__(self, distance: BaseDistance, *, temperature: float = 0.2) -> None:
        super().__init__()
        check_positive(temperature=temperature)
        self.distance = distance
        self.temperature = temperature

    def of_batch(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        labels = labels.cpu()
        same = labels[:, None] == labels
        place = same.tril(-1).sum(1)  # [B], i of x_a^i
        at_place = place[:, None] == torch.arange(int(place.max()) + 1)  # [B, M]
        classes = (at_place.T.double() @ same.double() @ at_place.double()).clamp(min=1)  # [M, M] with both places
        positive = same.fill_diagonal_(False)
        weight = (positive / classes[place][:, place]).to(embeddings.dtype)

        logits = self.distance(embeddings, embeddings) / self.temperature  # [B, B]
        logits = logits if self.distance.is_inverted else -logits
        others = logits + torch.eye(len(labels), dtype=logits.dtype, device=logits.device) * _ABSENT
        columns = [to_device(torch.where(column)[0], logits.device) for column in at_place.T]
        of_place = torch.stack([others[:, column].logsumexp(1) for column in columns], 1)  # [B, M]
        place = to_device(place, logits.device)
        own_place = of_place.gather(1, place[:, None])
        # at its own place an image's class has only the image itself, which "others" leaves out
        per_pair = torch.logaddexp(of_place[:, place], own_place) - logits  # [B, B]
        return (per_pair * to_device(weight, logits.device)).sum()
