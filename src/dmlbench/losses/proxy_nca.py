"""ProxyNCA with the switches that lead from the original to ProxyNCA++."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import normalize

from dmlbench.types import ConfigError


class ProxyNca(nn.Module):
    """Cross entropy of a softmax over squared distances to one proxy per class.

    With unit vectors x and p_c and d^2 = |x - p_c|^2 = 2 - 2 cos:
    loss = mean over the batch of -log (exp(-scale d^2(x, p_y)) / sum over c of exp(-scale d^2(x, p_c))).
    The sum holds the right class (ProxyNCA++'s "proxy assignment probability", eq. 4 to 6), or not (ProxyNCA, eq. 3,
    where the loss may be negative).

    Source: Movshovitz-Attias et al. 2017; Teh et al. 2020, eq. 3-6; euwern/proxynca_pp 217233d2, loss.py, whose
    ``scale`` multiplies the vectors: 3 there is a softmax_scale of 9 here.
    """

    def __init__(
        self,
        num_classes: int,
        embedding_size: int,
        *,
        softmax_scale: float = 1.0,
        assignment_probability: bool = False,
        proxy_std: float = 0.125,
    ) -> None:
        """
        Args:
            num_classes: classes of the training set; at least 2.
            embedding_size: D.
            softmax_scale: 1 / temperature, above 0.
            assignment_probability: whether the right class is in the sum.
            proxy_std: proxies start from N(0, proxy_std^2); their length sets how fast they turn.

        Raises:
            ConfigError: a number is out of its range.
        """
        super().__init__()
        if num_classes < 2:
            raise ConfigError(f"num_classes ({num_classes}) must be at least 2: a proxy is compared with the others")
        if not (softmax_scale > 0 and proxy_std > 0):
            raise ConfigError(f"softmax_scale ({softmax_scale}) and proxy_std ({proxy_std}) must be above 0")
        self.num_classes = num_classes
        self.softmax_scale = softmax_scale
        self.assignment_probability = assignment_probability
        self.proxies = nn.Parameter(torch.randn(num_classes, embedding_size) * proxy_std)

    def forward(self, embeddings: Tensor, labels: Tensor, indices_tuple: tuple[Tensor, ...] | None = None) -> Tensor:
        """
        Args:
            embeddings: [B, D].
            labels: [B] in [0, num_classes).
            indices_tuple: None; every image is compared with every proxy.

        Raises:
            ConfigError: a miner has chosen pairs.
        """
        if indices_tuple is not None:
            raise ConfigError("ProxyNCA compares images with proxies and takes no pairs of a miner; set miner=null")
        # -scale (2 - 2 cos); the constant cancels between the two parts.
        scaled = 2 * self.softmax_scale * normalize(embeddings)
        value: Tensor = _CrossEntropyOverProxies.apply(scaled, self.proxies, labels, self.assignment_probability)
        return value


class _CrossEntropyOverProxies(torch.autograd.Function):
    """Mean over the batch of log (sum over c of exp l_c) - l_y for logits l_c = x . p_c / |p_c|.

    With g = dloss/dl = (softmax(l) - onehot(y)) / B [B, C], which the forward pass takes along, the gradients are
    g / |p| times p for x, and for p_c: sum over b of g_bc (x_b - l_bc p_c / |p_c|) / |p_c|.
    So the proxies, many more numbers than the batch and its logits, are read where they lie: normalizing them first
    would take several passes over copies of them and cost more than the products. For the same reason the sum stands
    outside: sum over b of g_bc l_bc needs the logits alone.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, proxies: Tensor, labels: Tensor, count_right: bool) -> Tensor:
        """
        Args:
            ctx: what the backward pass reads.
            x: [B, D].
            proxies: [C, D]; their lengths count as at least 1e-12, as in ``normalize``.
            labels: [B] in [0, C).
            count_right: whether the sum holds the right class y.
        """
        length = torch.linalg.vector_norm(proxies, dim=1)  # [C]
        inverse = length.clamp(min=1e-12).reciprocal_()
        logits = (x @ proxies.T).mul_(inverse)  # [B, C]
        right = (torch.arange(len(labels), device=labels.device), labels)
        at_right = logits[right]  # [B]
        if not count_right:
            logits[right] = -torch.inf
        log_sum = logits.logsumexp(1, keepdim=True)  # [B, 1]
        slope = (logits - log_sum).exp_()  # [B, C]; B times g
        slope[right] -= 1
        logits[right] = at_right
        # In place, and here rather than in the backward pass: large tensors cost most when they are made.
        along = logits.mul_(slope).sum(0)  # [C]
        ctx.save_for_backward(x, proxies, inverse, along.masked_fill_(length < 1e-12, 0), slope)
        return (log_sum[:, 0] - at_right).mean()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, proxies, inverse, along, slope = ctx.saved_tensors
        scale = inverse * (grad / len(x))  # [C]
        weights = slope * scale  # [B, C]; g / |p|
        grad_x = grad_proxies = None
        if ctx.needs_input_grad[0]:
            grad_x = weights @ proxies
        if ctx.needs_input_grad[1]:
            grad_proxies = (proxies * (-along * scale * inverse)[:, None]).addmm_(weights.T, x)
        return grad_x, grad_proxies, None, None
