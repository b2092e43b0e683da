"""ProxyAnchor, and losses of the cosines between a batch and one proxy per class, for many more proxies than images."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import normalize

from dmlbench.losses.base import WholeBatchLoss
from dmlbench.losses.initialization import init_class_vectors
from dmlbench.types import check_at_least, check_positive, check_share

Evaluate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

MIN_LENGTH = 1e-12  # below it a vector counts as this long, as in torch's ``normalize``


class ProxyAnchor(WholeBatchLoss):
    """Pull each proxy's hardest images of its class and push away the hardest of the other classes.

    With s_bc the cosine of image b and the proxy of class c, C classes, of which C+ are in the batch:
    loss = 1/C+ sum over the C+ classes of log (1 + sum over b of class c of exp(-alpha (s_bc - margin)))
         + 1/C sum over all C classes of log (1 + sum over b of other classes of exp(alpha (s_bc + margin))).

    With ``positive_mean="images"`` the first part is the mean over the batch's images of their classes' terms: a class
    with twice as many images counts twice.

    A class that is all of the batch has no second term. A row of zeros, or a proxy, has the cosine 0 with all.

    Source: Kim et al. 2020, eq. 4; tjddus9597/Proxy-Anchor-CVPR2020 51db5703, code/losses.py. Values, gradients and
    initial proxies are those of pytorch-metric-learning's ProxyAnchorLoss, which makes several copies of all proxies.
    ``positive_mean="images"``: Confusezius/Characterizing_Generalization_in_DeepMetricLearning e8a4171c,
    criteria/oproxy.py.
    """

    has_proxies = True

    def __init__(
        self,
        num_classes: int,
        embedding_size: int,
        *,
        alpha: float = 32.0,
        margin: float = 0.1,
        positive_mean: Literal["classes", "images"] = "classes",
        init: str = "he_normal",
        init_std: float | None = None,
    ) -> None:
        super().__init__()
        check_at_least(2, num_classes=num_classes)
        check_positive(alpha=alpha)
        check_share(margin=margin)
        self.num_classes = num_classes
        self.positive_mean = positive_mean
        self.alpha = alpha
        self.margin = margin
        self.proxies = nn.Parameter(torch.empty(num_classes, embedding_size))
        init_class_vectors(self.proxies, init, init_std)

    def of_batch(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        evaluate = partial(
            _evaluate, labels=labels, offset=self.alpha * self.margin, by_class=self.positive_mean == "classes"
        )
        return loss_of_cosines(self.alpha * normalize(embeddings), self.proxies, evaluate)


def _evaluate(
    products: Tensor, inverse: Tensor, *, labels: Tensor, offset: float, by_class: bool
) -> tuple[Tensor, Tensor]:
    """Loss and its slope, as ``loss_of_cosines`` asks for, of the logits l = alpha s = products * inverse.

    The second term of a class is taken as h + log (exp(-h) + sum of exp(l + offset - h)) with h = max(0, the largest
    l + offset), so that nothing overflows and neither the 1 nor the sum is lost.
    """
    right = (torch.arange(len(labels), device=labels.device), labels)
    at_right, inverse_at_right = products[right], inverse[labels]  # [B]
    positive, slope_at_right = _positive_part(at_right * inverse_at_right, labels, offset, by_class)
    products[right] = -torch.inf
    highest = (products.amax(0) * inverse).add_(offset).clamp_(min=0)  # [C]
    slope = torch.addcmul(offset - highest, products, inverse).exp_()  # [B, C]
    total = slope.sum(0)
    negative = highest + torch.log1p(torch.expm1(-highest) + total)  # [C]
    slope.mul_(inverse / (torch.exp(-highest) + total) / len(inverse))
    slope[right] = slope_at_right * inverse_at_right
    products[right] = at_right
    return positive + negative.mean(), slope


def _positive_part(logits: Tensor, labels: Tensor, offset: float, by_class: bool) -> tuple[Tensor, Tensor]:
    """The first sum, over the classes of the batch, and its slope [B], of each image's logit alpha s_by [B]."""
    # Over pairs of images, because sums into bins of the classes have no fixed order on a GPU.
    same = labels[:, None] == labels[None, :]  # [B, B]
    exponents = offset - logits
    zero = logits.new_zeros(())
    of_class = exponents.expand(len(labels), -1).masked_fill(~same, -torch.inf)  # [B, B], those of b's class
    terms = of_class.logsumexp(1).logaddexp(zero)
    images = same.sum(1).to(logits.dtype)  # [B] of b's class
    share = images.reciprocal() if by_class else torch.ones_like(images)  # b's share of its class's term
    slope = (exponents - terms).exp_().neg_() * (share * images)  # of all shares of the class's term
    return (share * terms).sum() / share.sum(), slope / share.sum()


def loss_of_cosines(x: Tensor, proxies: Tensor, evaluate: Evaluate) -> Tensor:
    """A loss of the logits l_bc = x_b . p_c / |p_c|, whose gradient by the logits is known along with its value.

    With g = dloss/dl, the gradients are sum over c of g_bc p_c / |p_c| for x_b, and for p_c
    sum over b of g_bc (x_b - l_bc p_c / |p_c|) / |p_c|. The proxies are read where they lie, and the second sum is
    split: normalized copies of all proxies would cost more than the products.

    ``x`` [B, D] are unit vectors times a scale. ``evaluate`` gets the products x_b . p_c [B, C] and 1 / |p_c| [C]; it
    returns the loss, and g_bc / |p_c| [B, C] in a new tensor. It may write into the products, but must restore them.
    """
    return _LossOfCosines.apply(x, proxies, evaluate)


class _LossOfCosines(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, proxies: Tensor, evaluate: Evaluate) -> Tensor:
        length = torch.linalg.vector_norm(proxies, dim=1)  # [C]
        inverse = length.clamp(min=MIN_LENGTH).reciprocal_()
        products = (proxies @ x.T).T  # [B, C]; on a CPU a third quicker this way round
        value, slope = evaluate(products, inverse)
        # In place, and here rather than in the backward pass: large tensors cost most when they are made.
        along = products.mul_(slope).sum(0).mul_(inverse).mul_(inverse)  # [C]
        ctx.save_for_backward(x, proxies, along.masked_fill_(length < MIN_LENGTH, 0), slope)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, proxies, along, slope = ctx.saved_tensors
        grad_x = grad_proxies = None
        if ctx.needs_input_grad[0]:
            grad_x = (slope @ proxies).mul_(grad)
        if ctx.needs_input_grad[1]:
            grad_proxies = (proxies * (-grad * along)[:, None]).addmm_(slope.T, x * grad)
        return grad_x, grad_proxies, None
