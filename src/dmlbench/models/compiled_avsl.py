"""Compiled steps of AVSL's distance: a level's nodes, and how they are mended by what lies below, in a pass each.

It needs numba. Operation by operation the same takes five passes over arrays that are larger than a core's own cache.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dmlbench.machine_code import compiled_fused

FloatArray = NDArray[np.float32]

_ONE = np.float32(1)
_MINUS_LOG2_E = np.float32(-1 / math.log(2))
_LARGEST = np.float32(126)  # exponent whose power of 2, and its inverse, are ordinary numbers
_ROUNDER = np.float32(1.5 * 2**23)  # added to a small number, it leaves the whole part in the lowest bits
_BITS_OF_ONE = 127 - int(_ROUNDER.view(np.int32))  # what these bits lack to be an exponent
# 2^y = sum of (y ln 2)^k / k! for |y| <= 1/2: the next term is below 2^-27
_C1, _C2, _C3, _C4, _C5, _C6, _C7 = (np.float32(math.log(2) ** k / math.factorial(k)) for k in range(1, 8))


@compiled_fused
def _fill_nodes(nodes: FloatArray, e: FloatArray, f: FloatArray, is_cross: bool) -> None:
    for i in range(nodes.shape[0]):
        e_i = e[i]
        for j in range(nodes.shape[1]):
            f_j, nodes_ij = f[j if is_cross else i], nodes[i, j]
            for k in range(nodes.shape[2]):
                difference = e_i[k] - f_j[k]
                nodes_ij[k] = difference * difference


@compiled_fused
def _rectify(
    nodes: FloatArray,
    below: FloatArray,
    e: FloatArray,
    scaled: FloatArray,
    f: FloatArray,
    d: FloatArray,
    beta: FloatArray,
    is_cross: bool,
) -> None:
    for i in range(below.shape[0]):
        e_i, scaled_i = e[i], scaled[i]
        for j in range(below.shape[1]):
            other = j if is_cross else i
            f_j, d_j, below_ij, nodes_ij = f[other], d[other], below[i, j], nodes[i, j]
            for k in range(below.shape[2]):
                power = (beta[k] + scaled_i[k] * d_j[k]) * _MINUS_LOG2_E
                power = -_LARGEST if power < -_LARGEST else power
                power = _LARGEST if power > _LARGEST else power
                rounded = power + _ROUNDER
                y = power - (rounded - _ROUNDER)
                bits = (np.float32(rounded).view(np.int32) + np.int32(_BITS_OF_ONE)) << np.int32(23)
                part = ((((((_C7 * y + _C6) * y + _C5) * y + _C4) * y + _C3) * y + _C2) * y + _C1) * y + _ONE
                p = _ONE / (_ONE + part * np.int32(bits).view(np.float32))
                difference = e_i[k] - f_j[k]
                nodes_ij[k] = below_ij[k] + p * (difference * difference - below_ij[k])


def fill_nodes(nodes: Tensor, e: Tensor, f: Tensor) -> None:
    """``nodes`` = (e - f)^2, of e [a, 1, r] and f [1, b, r], or [a, 1, r] with b = 1; in float32 on the CPU."""
    e_rows, f_rows = (x.flatten(0, 1).contiguous().numpy() for x in (e, f))
    _fill_nodes(nodes.numpy(), e_rows, f_rows, f.shape[0] == 1)


def rectify(nodes: Tensor, below: Tensor, e: Tensor, scaled: Tensor, f: Tensor, d: Tensor, beta: Tensor) -> None:
    """``nodes`` = b + p ((e - f)^2 - b) with p = sigmoid(beta + scaled d), in float32 on the CPU.

    The sigmoid is right up to 2 roundings of the value 1.

    Args:
        nodes: result [a, b, r].
        below: b [a, b, r], what the level below says of the nodes.
        e, scaled: [a, 1, r].
        f, d: [1, b, r], or [a, 1, r] with b = 1: pair by pair.
        beta: [r].
    """
    e_rows, scaled_rows, f_rows, d_rows = (x.flatten(0, 1).contiguous().numpy() for x in (e, scaled, f, d))
    _rectify(nodes.numpy(), below.numpy(), e_rows, scaled_rows, f_rows, d_rows, beta.numpy(), f.shape[0] == 1)


def try_out() -> None:
    """Compile both steps, for what may go wrong there."""
    one = torch.ones(1, 1, 1)
    fill_nodes(torch.empty_like(one), one, one)
    rectify(torch.empty_like(one), one, one, one, one, one, one[0, 0])
