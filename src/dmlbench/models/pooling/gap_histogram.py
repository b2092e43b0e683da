"""Average pooling with a histogram over prototypes, for cross-batch metric learning (XML)."""

import torch
from torch import Tensor, nn

from dmlbench.models.pooling.base import Pooled, Pooling, Variant, project_pixels
from dmlbench.models.pooling.global_pooling import uniform_shares
from dmlbench.models.projection import Projection
from dmlbench.models.transport import clip_norm
from dmlbench.types import check_positive


class GapHistogram(Pooling):
    """y = mean_j f_j of the projected pixels f = project(x), and the histogram z of their nearest prototypes:

        z_i = mean_j softmax_i(smoothing nu_i' g_j)

    with g_j = f_j / max(1, |f_j|) in the variant ``official`` (the code that the published numbers come from) and
    g_j = f_j in the variant ``paper``. The embedding is y alone; the prototypes learn through the regularizer.

    Side outputs: "pooled" [B, D] (the embedding), "histogram" [B, m] (rows sum to 1) and "reconstruction" [B, D]
    (sum_i z_i nu_i; equation 2.3).

    Source: Gürbüz & Alatan, Cross-batch Metric Learning (XML), equation 2.4; the variant ``official`` as in
    yetigurbuz/generalized-sum-pooling (MetaGlobalPooling), which also starts the prototypes Glorot uniform.
    """

    provides = ("histogram", "pooled", "reconstruction")

    def __init__(
        self, embedding_size: int, num_prototypes: int = 64, *, smoothing: float = 10.0, variant: Variant = "official"
    ) -> None:
        super().__init__()
        check_positive(smoothing=smoothing, num_prototypes=num_prototypes)
        self.smoothing = smoothing
        self.variant = variant
        self.prototypes = nn.Parameter(torch.empty(num_prototypes, embedding_size))
        nn.init.xavier_uniform_(self.prototypes)

    def forward(self, x: Tensor, project: Projection) -> Pooled:
        rows = project_pixels(x, project, self.prototypes.shape[1])  # [B, HW, D]
        pooled = rows.mean(dim=1)
        with torch.autocast(x.device.type, enabled=False):
            points = clip_norm(rows) if self.variant == "official" else rows
            scores = self.smoothing * points @ self.prototypes.T  # [B, HW, m]
            histogram = scores.softmax(dim=2).mean(dim=1)
            reconstruction = histogram @ self.prototypes
        return Pooled(pooled, {"pooled": pooled, "histogram": histogram, "reconstruction": reconstruction})

    def contributions(self, x: Tensor, project: Projection) -> Tensor:
        return uniform_shares(x)

    def nearest_prototypes(self, x: Tensor, project: Projection) -> Tensor:
        rows = project_pixels(x, project, self.prototypes.shape[1])
        points = clip_norm(rows) if self.variant == "official" else rows
        return (points @ self.prototypes.T).argmax(dim=2).view(x.shape[0], *x.shape[2:])
