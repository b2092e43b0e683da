"""How far AVSL's distance in float32 can be from exact arithmetic on the same rows.

Letters: L levels, r nodes of each, k edges of a node, u = 2^-24.
"""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dmlbench.models.avsl_distance import AvslDistance


_ROUNDING = 2.0**-24
_SIGMOID_ROUNDINGS = 16  # of the value 1: several times what libraries, and fast exponentials of kernels, promise


@torch.no_grad()
def float32_error(distance: "AvslDistance", queries: Tensor, gallery: Tensor) -> tuple[float, float]:
    """(relative, absolute): a float32 distance d of rows of the two sets is right up to ``relative * d + absolute``.

    It holds for every order of summation. With S^l >= the sum of a pair's nodes of level l, that is (largest length of
    an e^l + that of an e'^l)^2, 4 for unit embeddings:

    - All terms are products and sums of numbers >= 0, so that a rounding changes the distance by at most u of itself.
      There are 3 roundings in a node, per level k + 2 in an edge, k in its product and 5 in the rest, and r - 1 in the
      last sum: relative = (3 + (L - 1) (2 k + 7) + r) u / (1 - the same).
    - A reliability errs by eps = 5 u gain (max |alpha| max |c| max |c'| + max |beta|) / 4 for its argument (the
      sigmoid's slope is at most 1/4) + 16 u for the sigmoid + 4 u where p x + (1 - p) y is computed as y + p (x - y).
      Such an error moves weight between a node and what is inferred for it. With a^L = 1 and a^(l-1) = |W~|^T a^l, the
      most that a node of a level can weigh: absolute = eps sum_{l >= 2} sum_{m <= l} max(a^m) S^m.

    Without reliabilities (``top``, ``concat``) the distance is |x|^2 + |y|^2 - 2 x y of n numbers, which cancel: n + 8
    roundings of at most sum_l S^l.

    Edges below 0 (variant paper) cancel. Then all is absolute: the first part times sum_l max(a^l) S^l; and the sum
    that an edge is divided by errs by as many times more as the largest sum of a node's |W~|.

    Source: Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., lemma 3.1.
    """
    lengths, certainty = [], []
    for rows in (queries, gallery):
        e, c = distance.levels(rows)
        lengths.append(e.norm(dim=-1).amax(0).double().cpu())  # [L]
        certainty.append(float(c.abs().max()))
    reach = (1.001 * (lengths[0] + lengths[1])).square().tolist()
    if distance.inference in ("top", "concat"):
        counted = reach[-1:] if distance.inference == "top" else reach
        share = _gamma(8 + len(counted) * distance.level_size)
        return 0.0, share * sum(counted)
    steepest = float(distance.alpha.abs().max()) * certainty[0] * certainty[1] + float(distance.beta.abs().max())
    epsilon = 1.02 * _ROUNDING * (5 * distance.gain * steepest / 4 + _SIGMOID_ROUNDINGS + 4)
    if distance.inference == "reliable":
        return _bounded(_gamma(5 + distance.level_size), epsilon * reach[-1])
    distance.require_edges()
    edges = distance.normalized_edges().double().cpu()
    weight = torch.ones(distance.level_size, dtype=torch.float64)
    weighed = [reach[-1]]  # max(a^l) S^l, from above
    for level in range(distance.num_levels - 2, -1, -1):
        weight = edges[level].abs().T @ weight
        weighed.append(1.001 * float(weight.max()) * reach[level])
    # level m counts once for every l >= max(m, 2)
    absolute = epsilon * sum(x * min(place + 1, distance.num_levels - 1) for place, x in enumerate(weighed))
    excess = max(1.0, float(edges.abs().sum(-1).max()))
    per_level = distance.top_k * (1 + excess) + 7
    relative = _gamma(3 + (distance.num_levels - 1) * per_level + distance.level_size)
    if bool((edges < 0).any()):
        return 0.0, absolute + relative * sum(weighed)
    return _bounded(relative, absolute + 2.0**-100)  # squares of the least differences vanish


def _gamma(roundings: float) -> float:
    share = roundings * _ROUNDING
    return 1.01 * share / (1 - share) if share < 0.01 else math.inf


def _bounded(relative: float, absolute: float) -> tuple[float, float]:
    return (relative, absolute) if math.isfinite(relative) else (0.0, math.inf)
