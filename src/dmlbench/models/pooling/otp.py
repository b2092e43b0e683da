"""Optimal transport pooling (OTP): one transported average of the pixels per prototype."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from dmlbench.models.pooling.base import Pooled, project_pixels, width_of_parts
from dmlbench.models.pooling.global_pooling import uniform_shares
from dmlbench.models.pooling.gsp import PrototypePooling
from dmlbench.models.projection import Projection
from dmlbench.models.transport import prototype_cost
from dmlbench.types import check_at_least, check_positive


def balanced_plan(cost: Tensor, *, smoothing: float, iterations: int) -> Tensor:
    """Entropic transport plan pi_ij = exp(f_i + g_j - smoothing c_ij) [B, m, n] between uniform distributions.

    Sinkhorn's iteration in the log domain from f = 0: g makes the columns sum to 1/n, f the rows to 1/m, and a last g
    makes the columns exact.
    """
    scores = -smoothing * cost
    log_row, log_column = -math.log(cost.shape[1]), -math.log(cost.shape[2])
    f = scores.new_zeros(*cost.shape[:2], 1)  # [B, m, 1]
    for _ in range(iterations):
        g = log_column - (scores + f).logsumexp(dim=1, keepdim=True)  # [B, 1, n]
        f = log_row - (scores + g).logsumexp(dim=2, keepdim=True)
    g = log_column - (scores + f).logsumexp(dim=1, keepdim=True)
    return torch.exp(scores + f + g)


class Otp(PrototypePooling):
    """sqrt(m) [sum_j pi_1j f_j | ... | sum_j pi_mj f_j] over the projected pixels f = project(x) with d dimensions.

    pi moves all the mass of the pixels to the prototypes, in equal shares, at the cost of GSP (``prototype_cost``).
    Until the prototypes have started (see ``PrototypePooling``) the embedding is the average of the pixels followed by
    zeros. The projection has d dimensions, and the embedding m d. If ``feature_size`` is None, d is
    ``embedding_size`` / m, and otherwise ``embedding_size`` is not used.

    Source: Mialon et al., A Trainable Optimal Transport Embedding for Feature Aggregation, ICLR 2021, in the form of
    GSP's appendix B.1; smoothing, iterations and start as in yetigurbuz/generalized-sum-pooling.
    """

    def __init__(
        self,
        *,
        num_prototypes: int = 8,
        feature_size: int | None = 16,
        embedding_size: int | None = None,
        smoothing: float = 2.0,
        iterations: int = 10,
        memory_rows: int = 1024,
        start_step: int = 0,
    ) -> None:
        check_positive(num_prototypes=num_prototypes, smoothing=smoothing)
        check_at_least(1, iterations=iterations)
        width = width_of_parts(num_prototypes, feature_size, embedding_size)
        super().__init__(width, num_prototypes, memory_rows=memory_rows, start_step=start_step)
        self.smoothing = smoothing
        self.iterations = iterations

    def input_width(self, embedding_size: int) -> int:
        return self.prototypes.shape[1]

    def output_width(self, projected_size: int) -> int:
        return self.prototypes.numel()

    def forward(self, x: Tensor, project: Projection) -> Pooled:
        rows = project_pixels(x, project, self.prototypes.shape[1])  # [B, HW, d]
        if not self._started:
            average = rows.mean(dim=1)
            return Pooled(F.pad(average, (0, self.prototypes[1:].numel())), {"pooled": average})
        cost = prototype_cost(rows, self.prototypes)  # [B, m, HW]
        with torch.autocast(x.device.type, enabled=False):
            plan = balanced_plan(cost, smoothing=self.smoothing, iterations=self.iterations)
            sets = plan @ rows.to(plan.dtype)  # [B, m, d]
        return Pooled(math.sqrt(self.num_prototypes) * sets.flatten(1))

    def contributions(self, x: Tensor, project: Projection) -> Tensor:
        return uniform_shares(x)

    def nearest_prototypes(self, x: Tensor, project: Projection) -> Tensor | None:
        """The prototype that takes most of each location's mass."""
        if not self._started:
            return None
        cost = prototype_cost(project_pixels(x, project, self.prototypes.shape[1]), self.prototypes)
        plan = balanced_plan(cost, smoothing=self.smoothing, iterations=self.iterations)  # [B, m, n]
        return plan.argmax(dim=1).view(x.shape[0], *x.shape[2:])
