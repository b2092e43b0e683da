"""Losses of the cosines between a batch and one proxy per class, for many more proxies than images."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

MIN_LENGTH = 1e-12  # below it a vector counts as this long, as in torch's ``normalize``

Evaluate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def loss_of_cosines(x: Tensor, proxies: Tensor, evaluate: Evaluate) -> Tensor:
    """A loss of the logits l_bc = x_b . p_c / |p_c|, whose gradient by the logits is known along with its value.

    With g = dloss/dl, the gradients are sum over c of g_bc p_c / |p_c| for x_b, and for p_c
    sum over b of g_bc (x_b - l_bc p_c / |p_c|) / |p_c|. The proxies are read where they lie, and the second sum is
    split: normalized copies of all proxies would cost more than the products.

    Args:
        x: [B, D], unit vectors times a scale of the cosines.
        evaluate: gets the products x_b . p_c [B, C] and 1 / |p_c| [C]; returns the loss, and g_bc / |p_c| [B, C] in a
            new tensor. It may write into the products, but must restore them.
    """
    return cast("Tensor", _LossOfCosines.apply(x, proxies, evaluate))


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
