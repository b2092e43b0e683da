"""ProxyNCA with the switches that lead from the original to ProxyNCA++."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from dmlbench.losses.base import WholeBatchLoss
from dmlbench.losses.proxy_anchor import loss_of_cosines
from dmlbench.types import check_at_least, check_positive


class ProxyNca(WholeBatchLoss):
    """Cross entropy of a softmax over squared distances to one proxy per class.

    With unit vectors x and p_c and d^2 = |x - p_c|^2 = 2 - 2 cos:
    loss = mean over the batch of -log (exp(-scale d^2(x, p_y)) / sum over c of exp(-scale d^2(x, p_c))).
    With ``assignment_probability`` the sum holds the right class (ProxyNCA++'s "proxy assignment probability", eq. 4 to
    6), else not (ProxyNCA, eq. 3, where the loss may be negative). Proxies start from N(0, proxy_std^2).

    Source: Movshovitz-Attias et al. 2017; Teh et al. 2020, eq. 3-6; euwern/proxynca_pp 217233d2, loss.py, whose
    ``scale`` multiplies the vectors: 3 there is a softmax_scale of 9 here.
    """

    has_proxies = True

    def __init__(
        self,
        num_classes: int,
        embedding_size: int,
        *,
        softmax_scale: float = 1.0,
        assignment_probability: bool = False,
        proxy_std: float = 0.125,
    ) -> None:
        super().__init__()
        check_at_least(2, num_classes=num_classes)
        check_positive(softmax_scale=softmax_scale, proxy_std=proxy_std)
        self.num_classes = num_classes
        self.softmax_scale = softmax_scale
        self.assignment_probability = assignment_probability
        self.proxies = nn.Parameter(torch.randn(num_classes, embedding_size) * proxy_std)

    def of_batch(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        # -scale (2 - 2 cos); the constant cancels between the two parts.
        scaled = 2 * self.softmax_scale * normalize(embeddings)
        evaluate = partial(_evaluate, labels=labels, count_right=self.assignment_probability)
        return loss_of_cosines(scaled, self.proxies, evaluate)


def _evaluate(products: Tensor, inverse: Tensor, *, labels: Tensor, count_right: bool) -> tuple[Tensor, Tensor]:
    """Mean over the batch of log (sum over c of exp l_c) - l_y for logits l = products * inverse, and its slope."""
    right = (torch.arange(len(labels), device=labels.device), labels)
    logits = products * inverse
    at_right = logits[right]  # [B]
    if not count_right:
        logits[right] = -torch.inf
    log_sum = logits.logsumexp(1, keepdim=True)  # [B, 1]
    slope = logits.sub_(log_sum).exp_()  # softmax(l)
    slope[right] -= 1
    return (log_sum[:, 0] - at_right).mean(), slope.mul_(inverse / len(labels))
