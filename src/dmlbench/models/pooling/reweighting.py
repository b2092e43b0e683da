"""CroW and T-SMK: weights from the magnitude of the features, without a learned network."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dmlbench.models.pooling import base
from dmlbench.models.pooling.base import Pooled, Variant, WeightedPooling
from dmlbench.models.projection import Projection
from dmlbench.types import check_positive


class Crow(WeightedPooling):
    """project(sum_j a_j i * y_j) with y = relu(x): pixels weighted by a, channels by i (cross-dimensional weighting).

        a_j = sqrt(S_j / |S|),   S_j = sum_k y_jk
        i_k = log((C epsilon + sum_h q_h) / (epsilon + q_k))

    q_k is, in the variant ``paper``, the share of pixels where y_k is not 0, which has no gradient. ``official``, the
    code of the GSP study, takes mean_j sigmoid(y_jk) instead, and the mean over the pixels instead of the sum. The
    paper's whitening of the sums, which is not learned, is omitted: the projection follows.

    Where S_j is 0, y_j and the gradient through a_j are 0 (the limit; NaN in the public code).
    Side output: "weights" [B, H, W], a_j / sum_j a_j.

    Source: Kalantidis et al., Cross-Dimensional Weighting for Aggregated Deep Convolutional Features, 2016;
    yetigurbuz/generalized-sum-pooling (tensorflow).
    """

    def __init__(self, *, epsilon: float = 1e-16, variant: Variant = "official") -> None:
        super().__init__()
        check_positive(epsilon=epsilon)
        self.epsilon = epsilon
        self.variant = variant

    def forward(self, x: Tensor, project: Projection) -> Pooled:
        with torch.autocast(x.device.type, enabled=False):
            y = F.relu(base.at_least_float32(x))
            attention = _pixel_weights(y)
            presence = torch.sigmoid(y) if self.variant == "official" else (y > 0).to(y.dtype)
            presence = presence.mean(dim=(2, 3))  # q, [B, C]
            total = presence.sum(dim=1, keepdim=True) + y.shape[1] * self.epsilon
            channels = torch.log(total / (presence + self.epsilon))  # [B, C]
            pooled = base.weighted_sum(y, attention) * channels
            if self.variant == "official":
                pooled = pooled / (x.shape[2] * x.shape[3])
        return Pooled(project(pooled), {"weights": base.shares(attention)})


def _pixel_weights(y: Tensor) -> Tensor:
    """a [B, H, W] of y >= 0; 0 with gradient 0 where the pixel is 0."""
    mass = y.sum(dim=1)  # S, [B, H, W]
    norm = torch.linalg.vector_norm(mass, dim=(1, 2), keepdim=True)
    share = mass / norm.clamp(min=torch.finfo(mass.dtype).tiny)
    some = share > 0
    # The inner ``where`` keeps the infinite slope of the root at 0 out of the gradient.
    return torch.where(some, torch.where(some, share, 1.0).sqrt(), 0.0)


class Tsmk(WeightedPooling):
    """mean_j |x_j| (W s_j + b), s the map smoothed by a moving average; W is the projection (T-SMK of the GSP study).

    Attention is the norm of the features before smoothing; windows at the border average over their own pixels. It is
    computed as project(mean_i w_i x_i) + b mean_j |x_j| with w = A'|x| for the moving average A.

    In the variant ``paper`` the attention takes part in the gradient, as in the authors' code (gtolias/how);
    ``official``, the code of the GSP study, stops it there. W and b are learned as in the study (paper: whitening by
    PCA, frozen). The paper's kernel over binary codes of single features is not part of a pooling.
    Side output: "weights" [B, H, W], w_i / sum_i w_i.

    Source: Tolias et al., Learning and Aggregating Deep Local Descriptors for Instance-Level Recognition, ECCV 2020;
    yetigurbuz/generalized-sum-pooling (tensorflow).
    """

    def __init__(self, embedding_size: int, *, pool_size: int = 3, variant: Variant = "official") -> None:
        super().__init__()
        base.check_odd(pool_size=pool_size)
        self.pool_size = pool_size
        self.variant = variant
        self.bias = nn.Parameter(torch.zeros(embedding_size))

    def forward(self, x: Tensor, project: Projection) -> Pooled:
        with torch.autocast(x.device.type, enabled=False):
            x = base.at_least_float32(x)
            norm = torch.linalg.vector_norm(x, dim=1)  # [B, H, W]
            if self.variant == "official":
                norm = norm.detach()
            weights = self._window_sum(norm / self._window_sum(torch.ones_like(norm)))
            pooled = base.weighted_sum(x, weights) / (x.shape[2] * x.shape[3])
            projected = project(pooled)
            base.check_width(projected, len(self.bias))
            embedding = projected + norm.mean(dim=(1, 2))[:, None] * self.bias
        return Pooled(embedding, {"weights": base.shares(weights)})

    def _window_sum(self, values: Tensor) -> Tensor:
        """[B, H, W] to the sums over windows around each pixel, 0 outside of the map."""
        size = self.pool_size
        return F.avg_pool2d(values[:, None], size, stride=1, padding=size // 2, divisor_override=1)[:, 0]
