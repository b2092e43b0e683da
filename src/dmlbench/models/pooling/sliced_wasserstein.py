"""Sliced Wasserstein embedding: in every slice, how far reference points move to become the pixels."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dmlbench.models.pooling.base import Pooled, Pooling, project_pixels
from dmlbench.models.projection import Projection
from dmlbench.types import check_positive


class SlicedWasserstein(Pooling):
    """[g_1 | ... | g_s], in every slice l the displacements of m reference points under the one-dimensional Monge map:

        g_lk = Q_l((rank(r_lk) + 1) / (m + 1)) - r_lk

    with the learned reference points r_l, their ranks from 0, and Q_l the quantiles of the n numbers theta_l' f_j over
    the projected pixels f = project(x): linear between the j-th smallest at j / (n + 1), constant outside of them.
    theta_l is a learned unit vector.

    Returns m s dimensions, as in GSP's table 8. The authors' code takes r - Q, sums each slice to one number by learned
    weights, and permutes by the sorting order of r instead of its rank, which is the same while r is in order.

    Source: Naderializadeh et al., Pooling by Sliced-Wasserstein Embedding, NeurIPS 2021, section 4; slices and
    reference points (equally spaced in [-1, 1]) start as in its code.
    """

    averages_pixels = False

    def __init__(self, embedding_size: int, *, num_references: int = 8, num_slices: int = 16) -> None:
        super().__init__()
        check_positive(num_references=num_references, num_slices=num_slices)
        self.slices = nn.Parameter(torch.randn(num_slices, embedding_size))
        self.references = nn.Parameter(torch.linspace(-1, 1, num_references).repeat(num_slices, 1))  # [s, m]

    def output_width(self, projected_size: int) -> int:
        return self.references.numel()

    def forward(self, x: Tensor, project: Projection) -> Pooled:
        rows = project_pixels(x, project, self.slices.shape[1])  # [B, HW, D]
        with torch.autocast(x.device.type, enabled=False):
            values = (rows @ F.normalize(self.slices).T).transpose(1, 2)  # [B, s, HW]
            ordered = values.sort(dim=2).values
            points, pixels = self.references.shape[1], ordered.shape[2]
            rank = self.references.detach().argsort(dim=1).argsort(dim=1)  # [s, m]
            position = ((rank + 1).to(ordered.dtype) * ((pixels + 1) / (points + 1)) - 1).clamp(0, pixels - 1)
            below = position.floor().long()
            above = (below + 1).clamp(max=pixels - 1)
            low, high = (ordered.gather(2, at.expand(x.shape[0], -1, -1)) for at in (below, above))  # [B, s, m]
            quantiles = low + (position - below) * (high - low)
            # NaN sorts last, where no quantile may look: pass it on
            quantiles = quantiles + 0.0 * values.sum(dim=2, keepdim=True)
        return Pooled((quantiles - self.references).flatten(1))
