"""Entropic optimal transport from pixels to prototypes, solved exactly; the core of generalized sum pooling (GSP).

Problem, per image: n pixels of mass 1/n each, of which the share mu is moved to m prototypes at cost c_ij while the
rest rho_j stays where it is; the plan pi minimizes cost - entropy / epsilon. With l_j = log sum_i exp(-epsilon c_ij)
the solution depends on one scalar u per image, the root of mean_j sigmoid(u + l_j) = mu:

    sigma_j = sigmoid(u + l_j)      rho_j = (1 - sigma_j) / n      pi_ij = softmax_i(-epsilon c_ij) sigma_j / n

Symbols: mu = transport_ratio, epsilon = smoothing.

Source: Gürbüz, Şener & Alatan, Generalized Sum Pooling for Metric Learning, ICCV 2023, propositions 4.2 and 4.3. Its
iteration converges to the root above; its printed gradient has a misplaced factor (``_ExactTransport`` has it right).
"""

import math
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from dmlbench.types import ConfigError, check_at_least, check_positive

Solver = Literal["exact", "fixed_point"]

# The section search narrows the bracket of order statistics 25 times, near enough for Newton's method on the logit of
# the mean to reach the precision of the type in these steps (masses of spreads 0.1 to 800; float32: 3e-6 of a sigmoid,
# float64: 4e-14). More steps gain nothing.
_SECTION_ROUNDS = 2
_SECTION_POINTS = 4
_NEWTON_STEPS = {torch.float32: 3, torch.float64: 5}


class TransportPlan(NamedTuple):
    """Weights p_j = sigma_j / (n mu) [B, n] and histogram z_i = (1 / mu) sum_j pi_ij [B, m]; rows of both sum to 1."""

    weights: Tensor
    histogram: Tensor


def clip_norm(rows: Tensor) -> Tensor:
    """x / max(1, |x|) of vectors [..., D]."""
    return rows / torch.linalg.vector_norm(rows, dim=-1, keepdim=True).clamp(min=1.0)


def prototype_cost(features: Tensor, prototypes: Tensor) -> Tensor:
    """c_ij = | clip_norm(prototype_i) - clip_norm(feature_j) | [B, m, n] of features [B, n, D] and prototypes [m, D].

    In float32 (float64 for float64 features), also under autocast. Where a feature equals a prototype the gradient is
    0.
    """
    batch, pixels, size = features.shape
    dtype = torch.promote_types(features.dtype, torch.float32)
    with torch.autocast(features.device.type, enabled=False):
        x = clip_norm(features.to(dtype)).reshape(batch * pixels, size)
        y = clip_norm(prototypes.to(dtype))
        if dtype == torch.float64:
            distance = torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")  # [B n, m]
        else:
            distance = _Float32Distance.apply(x, y)
        return distance.view(batch, pixels, -1).transpose(1, 2)


class _Float32Distance(torch.autograd.Function):
    """Euclidean distances [N, m] of the float32 rows x [N, D] and y [m, D], which lie in the unit ball.

    The forward pass is one product in float64, as |x|^2 + |y|^2 - 2 x'y in float32 loses half the digits of a small
    distance.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        wide_x, wide_y = x.double(), y.double()
        square = torch.addmm(wide_y.square().sum(dim=1), wide_x, wide_y.T, alpha=-2)
        square = square + wide_x.square().sum(dim=1, keepdim=True)
        # Rows closer than the resolution of float32 unit vectors are the same point. NaN is passed on.
        resolution = (2 * torch.finfo(torch.float32).eps) ** 2
        distance = torch.where(square <= resolution, 0.0, square).sqrt().float()
        ctx.save_for_backward(x, y, distance)
        return distance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, y, distance = ctx.saved_tensors
        with torch.autocast(x.device.type, enabled=False):
            share = torch.where(distance > 0, grad / distance, 0.0)  # of (x - y) in the gradient, [N, m]
            grad_x = x * share.sum(dim=1, keepdim=True) - share @ y
            grad_y = y * share.sum(dim=0)[:, None] - share.T @ x
        return grad_x, grad_y


def transport_weights(
    cost: Tensor, *, transport_ratio: float, smoothing: float, solver: Solver = "exact", iterations: int = 100
) -> TransportPlan:
    """Weights and histogram of every image, in float32 (float64 for a float64 cost).

    ``exact`` finds the root directly and differentiates it in closed form. ``fixed_point`` runs the paper's
    Algorithm 3 in the log domain and differentiates its iterations, for comparison: 100 of them are off by 5e-4 at
    smoothing 50 and by 0.1 at smoothing 100.

    ``transport_ratio = 1`` is average pooling: weights are 1/n without gradient, and the histogram is
    mean_j softmax_i(-smoothing c_ij).

    The cost [B, m, n] is not negative. ``transport_ratio`` is mu in (0, 1], the share of the pixels' mass that moves;
    ``smoothing`` is epsilon > 0: large values select pixels sharply.
    """
    check_transport(transport_ratio=transport_ratio, smoothing=smoothing, solver=solver, iterations=iterations)
    with torch.autocast(cost.device.type, enabled=False):
        cost = cost.to(torch.promote_types(cost.dtype, torch.float32))
        if solver == "exact" or transport_ratio == 1:
            return TransportPlan(*_ExactTransport.apply(cost, float(transport_ratio), float(smoothing)))
        log_rest, plan = _fixed_point(cost, transport_ratio=transport_ratio, smoothing=smoothing, iterations=iterations)
        weights = (1.0 / cost.shape[2] - log_rest.exp()) / transport_ratio
        return TransportPlan(weights, plan.sum(dim=2) / transport_ratio)


def check_transport(*, transport_ratio: float, smoothing: float, solver: Solver, iterations: int) -> None:
    """Raise ``ConfigError`` where ``transport_weights`` would."""
    if not 0 < transport_ratio <= 1:
        raise ConfigError(f"transport_ratio: got {transport_ratio}, expected above 0 and at most 1 (average pooling).")
    check_positive(smoothing=smoothing)
    check_at_least(1, iterations=iterations)


def _logit(share: float) -> float:
    share = min(share, 1 - 2**-53)  # a transport_ratio next to 1 may round to 1 when multiplied by the pixels
    return math.log(share) - math.log1p(-share)


def _kth_largest(rows: Tensor, k: int) -> Tensor:
    """[B, 1], the k-th largest of [B, n]; an unsorted top k from the nearer end is faster than sorting."""
    count = rows.shape[1]
    if k <= (count + 1) // 2:
        return rows.topk(k, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    return rows.topk(count - k + 1, dim=1, largest=False, sorted=False).values.amax(dim=1, keepdim=True)


def _solve_logits(log_mass: Tensor, ratio: float) -> Tensor:
    """u + l [B, n] with mean_j sigmoid(u + l_j) = ratio, for l [B, n] and 0 < ratio < 1.

    With t = ratio n and l_(k) the k-th largest mass, the root lies in a bracket of two order statistics:

        u <= logit(t / K) - l_(K), K > t, as each of the K largest has at least the sigmoid of l_(K);
        u >= logit((t - k + 1) / (n - k + 1)) - l_(k), k < t + 1, as each of the n - k + 1 smallest has at most l_(k)'s.

    The smallest K and the largest k are the same unless t is an integer. l_(k) as the origin keeps float32's digits.
    Newton's steps are taken on logit(mean) - logit(ratio): on the mean itself they stall in the flat stretches that a
    large smoothing makes. The number of operations is fixed, so that nothing waits for the device.
    """
    pixels = log_mass.shape[1]
    total = ratio * pixels
    rounded = 1e-9 * pixels  # 14.999999999 pixels count as 15
    k = max(math.ceil(total - rounded), 1)
    k_above = min(max(math.floor(total + rounded) + 1, k), pixels)
    origin = _kth_largest(log_mass, k)  # [B, 1]
    relative = log_mass - origin
    low = torch.full_like(origin, _logit((total - (k - 1)) / (pixels - k + 1)))
    high = torch.full_like(origin, _logit(total / k_above))
    if k_above > k:
        high = high + (origin - _kth_largest(log_mass, k_above))
    inner = torch.arange(1, _SECTION_POINTS + 1, device=log_mass.device, dtype=log_mass.dtype)
    for _ in range(_SECTION_ROUNDS):
        section = (high - low) / (_SECTION_POINTS + 1)
        points = torch.addcmul(low, section, inner)  # [B, points]
        sums = (points[:, :, None] + relative[:, None, :]).sigmoid_().sum(dim=2)
        low = torch.addcmul(low, section, (sums < total).sum(dim=1, keepdim=True))
        high = low + section
    offset = (low + high) / 2
    tiny = torch.finfo(log_mass.dtype).tiny
    rounding = 2 * torch.finfo(log_mass.dtype).eps
    for _ in range(_NEWTON_STEPS[log_mass.dtype]):
        logits = relative + offset
        taken, left = torch.sigmoid(logits), logits.neg_().sigmoid_()  # left = 1 - taken without cancellation
        mass, rest = taken.sum(dim=1, keepdim=True), left.sum(dim=1, keepdim=True)
        slope = taken.mul_(left).sum(dim=1, keepdim=True).clamp_(min=tiny)
        excess = (mass / rest).log_().sub_(_logit(ratio))
        # On a plateau at the root (integer ratio * n, large smoothing) excess is rounding and slope nearly 0: stay.
        numerator = F.hardshrink(excess, rounding).mul_(mass).mul_(rest)
        offset = torch.addcdiv(offset, numerator, slope, value=-1.0 / pixels).clamp_(low, high)
    return relative.add_(offset)


class _ExactTransport(torch.autograd.Function):
    """cost [B, m, n] -> weights [B, n], histogram [B, m].

    Backward, with a_ij = softmax_i(-epsilon c_ij), r_j = 1 - sigma_j, G = dL/dz, g = dL/dp + a'G:

        dL/dc_ij = -epsilon a_ij p_j (G_i - (a'G)_j + r_j (g_j - sum_k p_k r_k g_k / sum_k p_k r_k))

    where the mean of g keeps sum_j sigma_j fixed: proposition 4.3 in terms of sigma, with rho inside the diagonal
    factor.

    On a CPU, exp2 takes a third of exp's time, and a product with a row vector a sixth of the one with a column.
    """

    @staticmethod
    def forward(ctx: Any, cost: Tensor, ratio: float, smoothing: float) -> tuple[Tensor, Tensor]:
        pixels = cost.shape[2]
        scale = smoothing / math.log(2)
        nearest = cost.amin(dim=1).mul_(scale)  # [B, n], in powers of 2
        assignment = torch.add(nearest[:, None, :], cost, alpha=-scale).exp2_()  # [B, m, n], laid out as the cost
        sums = assignment.sum(dim=1)
        assignment.mul_(sums.reciprocal()[:, None, :])  # columns sum to 1
        if ratio == 1:
            weights = torch.full_like(nearest, 1.0 / pixels)
            left = torch.zeros_like(nearest)
        else:
            logits = _solve_logits(sums.log_().sub_(nearest, alpha=math.log(2)), ratio)
            weights = torch.sigmoid(logits).div_(pixels * ratio)
            left = logits.neg_().sigmoid_()
        histogram = torch.bmm(weights[:, None, :], assignment.transpose(1, 2))[:, 0]  # [B, m]
        ctx.save_for_backward(assignment, weights, left)
        ctx.smoothing = smoothing
        return weights, histogram

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_weights: Tensor, grad_histogram: Tensor) -> tuple[Tensor, None, None]:
        assignment, weights, left = ctx.saved_tensors
        with torch.autocast(assignment.device.type, enabled=False):
            scaled = grad_histogram * -ctx.smoothing  # every term below carries -epsilon
            expected = torch.bmm(scaled[:, None, :], assignment)[:, 0]  # a'G, [B, n]
            total = torch.add(expected, grad_weights, alpha=-ctx.smoothing)
            share = weights * left
            tiny = torch.finfo(share.dtype).tiny
            mean = (share * total).sum(dim=1, keepdim=True) / share.sum(dim=1, keepdim=True).clamp_(min=tiny)
            column = total.sub_(mean).mul_(left).sub_(expected)
            grad_cost = torch.empty_like(assignment)  # [B, m, n], laid out alike: mixed layouts double the time
            torch.add(scaled[:, :, None], column[:, None, :], out=grad_cost)
            return grad_cost.mul_(assignment).mul_(weights[:, None, :]), None, None


def _fixed_point(cost: Tensor, *, transport_ratio: float, smoothing: float, iterations: int) -> tuple[Tensor, Tensor]:
    """Algorithm 3 with t = exp(log_scale) from t = 1: log rho [B, n] and pi = t exp(-epsilon c) diag(rho) [B, m, n]."""
    scores = -smoothing * cost
    log_mass = scores.logsumexp(dim=1)  # [B, n]
    pixels = cost.shape[2]
    log_scale = log_mass.new_zeros(log_mass.shape[0], 1)
    log_rest = log_mass
    for _ in range(iterations):
        log_rest = F.logsigmoid(-(log_scale + log_mass)) - math.log(pixels)  # log rho, [B, n]
        log_scale = math.log(transport_ratio) - (log_mass + log_rest).logsumexp(dim=1, keepdim=True)
    return log_rest, torch.exp(scores + (log_rest + log_scale)[:, None, :])
