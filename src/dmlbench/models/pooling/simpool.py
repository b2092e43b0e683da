"""SimPool: attention of an image's average to its pixels, followed by a generalized mean."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dmlbench.models.pooling.attention_pool import LAYER_NORM_EPSILON, mean_weights, standardize
from dmlbench.models.pooling.base import Pooled, Variant, WeightedPooling, check_width
from dmlbench.models.projection import Projection
from dmlbench.types import check_positive


class SimPool(WeightedPooling):
    """project(u) with u = (sum_j a_j (y_j - min y + epsilon)^power)^(1 / power), per channel.

    y_j = norm(x_j) is the affine layer norm of a pixel over its channels, and
    a = softmax_j((W_q mean_i x_i) . (W_k y_j) / sqrt(C)) with a single head; the query is the average of the features
    before the norm. The minimum makes the powers real. Without a power, u = sum_j a_j y_j.

    The variants differ in min y, one number for all channels. ``paper``: of each image. ``official``, as in the public
    code: of the whole batch, so that an embedding depends on the other images of its batch, also in evaluation.
    Epsilon, which keeps the root's gradient finite at 0, is the code's.
    In float32, also under autocast. Side output: "weights" [B, H, W], the attention a.

    Source: Psomas et al., Keep It SimPool: Who Said Supervised Transformers Suffer from Attention Deficit?, ICCV 2023,
    equations 12 to 17, with power for the paper's gamma = (1 - alpha) / 2; public code billpsomas/simpool, sp.py.
    """

    def __init__(
        self, num_channels: int, *, power: float | None = 2.0, epsilon: float = 1e-6, variant: Variant = "paper"
    ) -> None:
        super().__init__()
        check_positive(epsilon=epsilon, power=1.0 if power is None else power)
        self.power = power
        self.epsilon = epsilon
        self.variant = variant
        self.norm = nn.LayerNorm(num_channels, eps=LAYER_NORM_EPSILON)
        self.query = nn.Linear(num_channels, num_channels, bias=False)
        self.key = nn.Linear(num_channels, num_channels, bias=False)

    def forward(self, x: Tensor, project: Projection) -> Pooled:
        check_width(x, self.key.in_features)
        with torch.autocast(x.device.type, enabled=False):
            x = x.to(self.query.weight.dtype)
            height, width = x.shape[2:]
            pixels = x.flatten(2)  # [B, C, HW]
            query = self.query(pixels.mean(dim=2)) @ self.key.weight * self.norm.weight  # [B, C]; not W_k on each pixel
            keys = standardize(pixels)
            values = torch.addcmul(self.norm.bias[:, None], keys, self.norm.weight[:, None])
            if self.power is not None:
                smallest = values.amin(dim=(1, 2) if self.variant == "paper" else (0, 1, 2), keepdim=True)
                values = (values - smallest + self.epsilon).log().mul(self.power).exp()  # half the time of pow
            # Not ``attend``: with channels first, no gradient is copied to another order.
            log_weights = F.log_softmax(query[:, None] * query.shape[1] ** -0.5 @ keys, dim=2)  # [B, 1, HW]
            pooled = (values @ log_weights.exp().transpose(1, 2))[..., 0]  # [B, C]
            if self.power is not None:
                pooled = pooled.pow(1.0 / self.power)
            weights = mean_weights(log_weights[:, None], height=height, width=width)
        return Pooled(project(pooled), {"weights": weights})
