"""Entropic optimal transport from pixels to prototypes, solved exactly: the core of generalized sum pooling.

Problem, per image: n pixels of mass 1/n each, of which the share mu is moved to m prototypes at cost c_ij while the
rest rho_j stays where it is; the plan pi minimizes cost - entropy / epsilon. With l_j = log sum_i exp(-epsilon c_ij)
the solution depends on one scalar u per image, the root of mean_j sigmoid(u + l_j) = mu:

    sigma_j = sigmoid(u + l_j)      rho_j = (1 - sigma_j) / n      pi_ij = softmax_i(-epsilon c_ij) sigma_j / n

Symbols: mu = transport_ratio, epsilon = smoothing.

Source: Gürbüz & Alatan, Generalized Sum Pooling for Metric Learning, ICCV 2023, propositions 4.2 and 4.3. Its
iteration converges to the root above; its gradient as printed has a misplaced factor, and is given in full below.
"""

import math
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from dmlbench.types import ConfigError

Solver = Literal["exact", "fixed_point"]

# From its start the iteration below needs three to five steps in float64, whatever the smoothing (tests/models).
_STEPS = {torch.float32: 4, torch.float64: 5}
_MAX_STEP = 8.0


class TransportPlan(NamedTuple):
    """weights p_j = sigma_j / (n mu) [B, n] and histogram z_i = (1 / mu) sum_j pi_ij [B, m]; rows of both sum to 1."""

    weights: Tensor
    histogram: Tensor


def clip_norm(rows: Tensor) -> Tensor:
    """x / max(1, |x|): vectors [..., D] outside the unit ball are put on its surface."""
    return rows / torch.linalg.vector_norm(rows, dim=-1, keepdim=True).clamp(min=1.0)


def prototype_cost(features: Tensor, prototypes: Tensor) -> Tensor:
    """c_ij = | clip_norm(prototype_i) - clip_norm(feature_j) |, the distance itself, not its square.

    Computed in float32 (float64 for float64 inputs) whatever autocast says. Where a feature equals a prototype the
    gradient is 0.

    Args:
        features: [B, n, D].
        prototypes: [m, D].

    Returns:
        [B, m, n].
    """
    batch, pixels, size = features.shape
    dtype = torch.promote_types(features.dtype, torch.float32)
    with torch.autocast(features.device.type, enabled=False):
        x = clip_norm(features.to(dtype)).reshape(batch * pixels, size)
        y = clip_norm(prototypes.to(dtype))
        distance: Tensor  # [B n, m]
        if dtype == torch.float64:
            distance = torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")
        else:
            distance = _Float32Distance.apply(x, y)
        return distance.view(batch, pixels, -1).transpose(1, 2)


class _Float32Distance(torch.autograd.Function):
    """Euclidean distances [N, m] of the float32 rows x [N, D] and y [m, D], which lie in the unit ball.

    The forward pass is one product in float64: |x|^2 + |y|^2 - 2 x'y in float32 loses half the digits of a small
    distance, and forming all differences costs three times as much. Gradients need no such care.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        wide_x, wide_y = x.double(), y.double()
        square = torch.addmm(wide_y.square().sum(dim=1), wide_x, wide_y.T, alpha=-2)
        square = square + wide_x.square().sum(dim=1, keepdim=True)
        # Below the resolution of float32 unit vectors two rows are the same point.
        resolution = (2 * torch.finfo(torch.float32).eps) ** 2
        distance = torch.where(square > resolution, square, 0.0).sqrt().float()
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
    """Solve the transport problem of every image.

    ``exact`` finds the root directly and differentiates it in closed form. ``fixed_point`` runs the paper's
    Algorithm 3 (in the log domain, so that it stays finite) and differentiates its iterations, for comparison: 100 of
    them are off by 5e-4 at smoothing 50 and by 0.1 at smoothing 100.

    ``transport_ratio = 1`` is average pooling exactly: weights are 1/n without gradient, and the histogram
    mean_j softmax_i(-smoothing c_ij) keeps its own.

    Args:
        cost: [B, m, n], not negative.
        transport_ratio: mu in (0, 1], the share of the pixels' mass that is moved.
        smoothing: epsilon > 0; large values select pixels sharply.
        solver: ``exact`` or ``fixed_point``.
        iterations: of ``fixed_point``, at least 1.

    Returns:
        Weights and histogram in float32 (float64 for a float64 cost).

    Raises:
        ConfigError: an argument outside its range.
    """
    check_transport(transport_ratio=transport_ratio, smoothing=smoothing, solver=solver, iterations=iterations)
    with torch.autocast(cost.device.type, enabled=False):
        cost = cost.to(torch.promote_types(cost.dtype, torch.float32))
        if solver == "exact" or transport_ratio == 1:
            weights, histogram = _ExactTransport.apply(cost, float(transport_ratio), float(smoothing))
            return TransportPlan(weights, histogram)
        return _fixed_point(cost, transport_ratio=transport_ratio, smoothing=smoothing, iterations=iterations)


def check_transport(*, transport_ratio: float, smoothing: float, solver: Solver, iterations: int) -> None:
    """Raise ``ConfigError`` where ``transport_weights`` would."""
    if not 0 < transport_ratio <= 1:
        raise ConfigError(f"transport_ratio ({transport_ratio}) must be above 0 and at most 1 (1 is average pooling)")
    if not (smoothing > 0 and math.isfinite(smoothing)):
        raise ConfigError(f"smoothing ({smoothing}) must be above 0 and finite; the paper uses 0.5 to 10")
    if solver not in get_args(Solver):
        raise ConfigError(f"solver '{solver}' is unknown; choose one of {', '.join(get_args(Solver))}")
    if iterations < 1:
        raise ConfigError(f"iterations ({iterations}) must be at least 1")


def _solve_offset(log_mass: Tensor, ratio: float) -> Tensor:
    """u [B, 1] with mean_j sigmoid(u + l_j) = ratio, for l [B, n] and 0 < ratio < 1.

    A fixed number of tensor operations, so that nothing waits for the device. The start solves the problem of large
    smoothing, where the pixels of largest l are taken whole and the k-th in part; between two pixels of very different
    l the mean is flat, and the start lies no farther than its middle. From there Halley's iteration on
    g(u) = logit(mean) - logit(ratio), an almost linear function, with

        g' = V / (M (1 - M)),   g'' / g' = (V - 2 W) / V - g' (1 - 2 M),   M, V, W = mean of s, s (1 - s), s^2 (1 - s).
    """
    pixels = log_mass.shape[1]
    mass = ratio * pixels
    k = min(max(math.ceil(mass - 1e-9 * pixels), 1), pixels)
    part = min(max(mass - (k - 1), 1e-12), 1 - 1e-12)  # of the k-th largest
    top = log_mass.topk(min(k + 1, pixels), dim=1).values
    offset = math.log(part) - math.log1p(-part) - top[:, k - 1 : k]
    if k < pixels:
        offset = torch.minimum(offset, (top[:, k - 1 : k] + top[:, k : k + 1]) * -0.5)
    if k > 1:
        offset = torch.maximum(offset, (top[:, k - 1 : k] + top[:, k - 2 : k - 1]) * -0.5)
    limits = torch.finfo(log_mass.dtype)
    for _ in range(_STEPS[log_mass.dtype]):
        taken = torch.sigmoid(offset + log_mass)
        spread = torch.addcmul(taken, taken, taken, value=-1)  # s (1 - s)
        mean = taken.mean(dim=1, keepdim=True)
        variance = spread.mean(dim=1, keepdim=True).clamp_(min=limits.tiny)
        third = spread.mul_(taken).mean(dim=1, keepdim=True)
        # Where the mean is flat, its rounding would be taken for a long way to go: such an error counts as none.
        error = F.hardshrink(mean - ratio, 2 * limits.eps * ratio)
        excess = torch.log1p(error / ratio).sub_(torch.log1p(error / (ratio - 1)))  # g
        slope = variance / torch.addcmul(mean, mean, mean, value=-1)
        newton = excess.div_(slope)
        bend = torch.addcmul(third / variance, slope, 0.5 - mean).sub_(0.5)  # -g'' / (2 g')
        step = newton / (newton * bend).clamp_(-0.5, 0.5).add_(1)
        offset = offset - step.clamp_(-_MAX_STEP, _MAX_STEP)
    return offset


class _ExactTransport(torch.autograd.Function):
    """cost [B, m, n] -> weights [B, n], histogram [B, m].

    Backward, with a_ij = softmax_i(-epsilon c_ij), v_j = sigma_j (1 - sigma_j), G = dL/dz, g = dL/dp + a'G:

        dL/dl_j  = v_j (g_j - sum_k v_k g_k / sum_k v_k) / (n mu)        # the mean keeps sum_j sigma_j fixed
        dL/dc_ij = -epsilon a_ij (p_j (G_i - (a'G)_j) + dL/dl_j)

    which is proposition 4.3 in terms of sigma, with rho inside the diagonal factor.
    """

    @staticmethod
    def forward(ctx: Any, cost: Tensor, ratio: float, smoothing: float) -> tuple[Tensor, Tensor]:
        # In place where it can be: passes over [B, m, n] are what this costs.
        least = cost.amin(dim=1, keepdim=True)
        assignment = torch.sub(least, cost).mul_(smoothing).exp_()  # [B, m, n]
        total = assignment.sum(dim=1, keepdim=True)
        assignment.div_(total)  # columns sum to 1
        log_mass = torch.add(total.log_(), least, alpha=-smoothing)[:, 0]  # [B, n]
        pixels = cost.shape[2]
        if ratio == 1:
            weights = torch.full_like(log_mass, 1.0 / pixels)
            variance = torch.zeros_like(log_mass)
        else:
            logits = _solve_offset(log_mass, ratio) + log_mass
            taken = torch.sigmoid(logits)
            weights = taken / (pixels * ratio)
            variance = taken * torch.sigmoid(-logits)
        histogram = torch.bmm(assignment, weights[:, :, None])[:, :, 0]  # [B, m]
        ctx.save_for_backward(assignment, weights, variance)
        ctx.smoothing = smoothing
        ctx.mass = pixels * ratio
        return weights, histogram

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_weights: Tensor, grad_histogram: Tensor) -> tuple[Tensor, None, None]:
        assignment, weights, variance = ctx.saved_tensors
        with torch.autocast(assignment.device.type, enabled=False):
            expected = torch.bmm(grad_histogram[:, None, :], assignment)[:, 0]  # a'G, [B, n]
            total = grad_weights + expected
            tiny = torch.finfo(variance.dtype).tiny
            mean = (variance * total).sum(dim=1, keepdim=True) / variance.sum(dim=1, keepdim=True).clamp(min=tiny)
            grad_log_mass = variance * (total - mean) / ctx.mass
            alone = torch.addcmul(grad_log_mass, weights, expected, value=-1) * -ctx.smoothing
            grad_cost = torch.baddbmm(
                alone[:, None, :], grad_histogram[:, :, None], weights[:, None, :], alpha=-ctx.smoothing
            )
            return grad_cost.mul_(assignment), None, None


def _fixed_point(cost: Tensor, *, transport_ratio: float, smoothing: float, iterations: int) -> TransportPlan:
    """Algorithm 3 with t = exp(log_scale) from t = 1; pi = t exp(-epsilon c) diag(rho) after the last iteration."""
    scores = -smoothing * cost
    log_mass = scores.logsumexp(dim=1)  # [B, n]
    pixels = cost.shape[2]
    log_scale = log_mass.new_zeros(log_mass.shape[0], 1)
    log_rest = log_mass
    for _ in range(iterations):
        log_rest = F.logsigmoid(-(log_scale + log_mass)) - math.log(pixels)  # log rho, [B, n]
        log_scale = math.log(transport_ratio) - (log_mass + log_rest).logsumexp(dim=1, keepdim=True)
    weights = (1.0 / pixels - log_rest.exp()) / transport_ratio
    plan = torch.exp(scores + (log_rest + log_scale)[:, None, :])  # [B, m, n]
    return TransportPlan(weights, plan.sum(dim=2) / transport_ratio)
