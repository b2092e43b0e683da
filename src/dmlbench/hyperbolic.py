"""The Poincare ball: its exponential map, geodesic distance and Riemannian gradient."""

import math
from typing import Any

import torch
from pytorch_metric_learning.distances import BaseDistance
from torch import Tensor
from torch.autograd.function import once_differentiable

from dmlbench.types import RunError, check_positive

_BORDER = 1e-3  # share of the radius that points keep from the border, as in the public code
_ROUNDING = 2.0**-24
_FUNCTION_ROUNDINGS = 24  # of sqrt, asinh and the factors around them, on any device


def to_ball(x: Tensor, *, curvature: float, clip_radius: float | None = None) -> Tensor:
    """Map vectors [..., D] to the Poincare ball by the exponential map at 0, cut to ``clip_radius`` first.

    exp_0(x) = tanh(sqrt(c) |x|) x / (sqrt(c) |x|), at most (1 - 1e-3) / sqrt(c) long.
    """
    if clip_radius is not None:
        x = x * (clip_radius / (x.norm(dim=-1, keepdim=True) + 1e-5)).clamp(max=1.0)
    length = x.norm(dim=-1, keepdim=True).clamp(min=1e-5)
    share = torch.tanh(math.sqrt(curvature) * length).clamp(max=1 - _BORDER)
    return x * (share / (math.sqrt(curvature) * length))


def riemannian(x: Tensor, curvature: float) -> Tensor:
    """x [..., D], whose gradient is scaled by ((1 - c |x|^2) / 2)^2, the inverse of the ball's metric."""
    return _RiemannianGradient.apply(x, curvature)


class _RiemannianGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, curvature: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.curvature = curvature
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad * (1 - ctx.curvature * x.square().sum(-1, keepdim=True)).square() / 4, None


class PoincareDistance(BaseDistance):
    """Geodesic distance in the Poincare ball of curvature -c.

    d(x, y) = 2 / sqrt(c) asinh(sqrt(c) |x - y| / sqrt((1 - c |x|^2) (1 - c |y|^2)))

    This equals 2 / sqrt(c) artanh(sqrt(c) |(-x) + y|) with Moebius addition, as the public code computes it, but for
    the 1e-5 which that code adds to a denominator.

    Source: Ermolov et al., Hyperbolic Vision Transformers, CVPR 2022, eqs. 1 and 2; htdt/hyp_metric c89de049,
    hyptorch/pmath.py.
    """

    is_symmetric = True
    compares_vectors = True  # losses of cosines may take the embeddings, too: a direction keeps its meaning in the ball

    def __init__(self, curvature: float = 0.1) -> None:
        super().__init__(normalize_embeddings=False, p=2, power=1)
        check_positive(curvature=curvature)
        self.curvature = curvature

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        """Distances [Q, R] of points [Q, D] and [R, D]."""
        # differences, not products: those of near points cancel, and their gradient is not finite
        lengths = torch.cdist(query_emb, ref_emb, compute_mode="donot_use_mm_for_euclid_dist")
        return self._of_lengths(lengths, self._room(query_emb)[:, None], self._room(ref_emb)[None])

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        """Distances [P] of points [P, D], pair by pair."""
        lengths = (query_emb - ref_emb).norm(dim=-1)
        return self._of_lengths(lengths, self._room(query_emb), self._room(ref_emb))

    def _room(self, x: Tensor) -> Tensor:
        """1 - c |x|^2 of points [N, D]."""
        room = 1 - self.curvature * x.square().sum(-1)
        if x.device.type == "cpu" and not x.requires_grad and bool((room <= 0).any()):
            raise RunError(
                f"hyperbolic distance: got a point with norm {float(x.norm(dim=-1).max()):.4g}, expected below "
                f"{self.curvature**-0.5:.4g}. Compare embeddings of a hyperbolic head with the same curvature."
            )
        return room

    def _of_lengths(self, lengths: Tensor, room: Tensor, other_room: Tensor) -> Tensor:
        root = math.sqrt(self.curvature)
        return torch.asinh(root * lengths * (room * other_room).rsqrt()) * (2 / root)

    @torch.no_grad()
    def float32_error(self, queries: Tensor, gallery: Tensor) -> tuple[float, float]:
        """(relative, absolute): a float32 distance of rows of two sets is right up to ``relative * d + absolute``.

        u = 2^-24. |x - y|^2 has D + 2 roundings, and half as many remain under the root. 1 - c |x|^2 errs by (D + 1) u
        c |x|^2, which is at most (D + 1) u times k = c |x|^2 / (1 - c |x|^2) of itself, halved under the root. asinh
        does not enlarge a relative error.
        """
        largest = max(float(rows.double().square().sum(-1).max()) for rows in (queries, gallery))
        share = min(self.curvature * largest, 1 - 1e-9)
        size = queries.shape[-1]
        roundings = (size + 2) / 2 + (size + 2) * share / (1 - share) + _FUNCTION_ROUNDINGS
        relative = 1.02 * roundings * _ROUNDING
        return (relative, 2.0**-100) if relative < 0.02 else (0.0, math.inf)
