"""NetVLAD: residuals of the pixels to learned centers, summed by soft assignment."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dmlbench.models.pooling.base import Pooled, Pooling, Variant, project_pixels, width_of_parts
from dmlbench.models.pooling.global_pooling import uniform_shares
from dmlbench.models.projection import Projection
from dmlbench.types import check_positive


def _unit(rows: Tensor) -> Tensor:
    """v / max(|v|, 1e-6) along the last dimension, with a finite gradient at 0."""
    return rows * rows.square().sum(dim=-1, keepdim=True).clamp(min=1e-12).rsqrt()


class NetVlad(Pooling):
    """[v_1 | ... | v_K] of unit vectors v_k, over the projected pixels f = project(x) with d dimensions:

        a_jk = softmax_k(w_k' f_j + b_k)        v_k = unit(sum_j a_jk (f_j - c_k))

    The variant ``paper`` divides the whole by its norm, sqrt(K); ``official``, the code of the GSP study, does not.
    Both start without clustering, unlike the paper: centers and w Glorot uniform, b at 0. The projection has d
    dimensions, and the embedding K d. If ``feature_size`` is None, d is ``embedding_size`` / K,
    and otherwise ``embedding_size`` is not used.

    Source: Arandjelovic et al., NetVLAD, CVPR 2016, equation 4 and figure 2; GSP supplement 1.3 for the sizes.
    """

    def __init__(
        self,
        *,
        num_centers: int = 8,
        feature_size: int | None = 16,
        embedding_size: int | None = None,
        variant: Variant = "official",
    ) -> None:
        super().__init__()
        check_positive(num_centers=num_centers)
        width = width_of_parts(num_centers, feature_size, embedding_size)
        self.variant = variant
        self.centers = nn.Parameter(torch.empty(num_centers, width))
        self.assignment_weight = nn.Parameter(torch.empty(num_centers, width))
        self.assignment_bias = nn.Parameter(torch.zeros(num_centers))
        nn.init.xavier_uniform_(self.centers)
        nn.init.xavier_uniform_(self.assignment_weight)

    def input_width(self, embedding_size: int) -> int:
        return self.centers.shape[1]

    def output_width(self, projected_size: int) -> int:
        return self.centers.numel()

    def forward(self, x: Tensor, project: Projection) -> Pooled:
        rows = project_pixels(x, project, self.centers.shape[1])  # [B, HW, d]
        with torch.autocast(x.device.type, enabled=False):
            assignment = F.linear(rows, self.assignment_weight, self.assignment_bias).softmax(dim=2)  # [B, HW, K]
            # without the [B, HW, K, d] differences f_j - c_k
            residual = assignment.transpose(1, 2) @ rows - assignment.sum(dim=1)[:, :, None] * self.centers
            embedding = _unit(residual).flatten(1)  # [B, K d]
            if self.variant == "paper":
                embedding = _unit(embedding)
        return Pooled(embedding)

    def contributions(self, x: Tensor, project: Projection) -> Tensor:
        return uniform_shares(x)

    def nearest_prototypes(self, x: Tensor, project: Projection) -> Tensor:
        rows = project_pixels(x, project, self.centers.shape[1])
        assignment = F.linear(rows, self.assignment_weight, self.assignment_bias)
        return assignment.argmax(dim=2).view(x.shape[0], *x.shape[2:])
