"""Generalized sum pooling (GSP): an average over the pixels that optimal transport matches to learned prototypes.

Also how the prototypes of transport poolings start: from the first training embeddings.
"""

import logging
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dmlbench.models.pooling.base import Pooled, Pooling, project_pixels
from dmlbench.models.pooling.gem import generalized_mean, power_shares
from dmlbench.models.pooling.global_pooling import share_of_largest
from dmlbench.models.projection import Projection
from dmlbench.models.transport import Solver, check_transport, clip_norm, prototype_cost, transport_weights
from dmlbench.types import ConfigError, check_at_least, check_positive

logger = logging.getLogger(__name__)


def greedy_k_center(initial: Tensor, candidates: Tensor, count: int) -> Tensor:
    """Pick the candidate [N, D] farthest from everything initial [I, D] or picked, ``count`` times: [count, D].

    Ties go to the smaller row; beyond the distinct candidates picks repeat. Nothing waits for the device.
    """
    nearest = torch.cdist(candidates, initial, compute_mode="donot_use_mm_for_euclid_dist").amin(dim=1)  # [N]
    picks = []
    for _ in range(count):
        pick = candidates.index_select(0, nearest.argmax().view(1))  # [1, D]
        picks.append(pick)
        nearest = torch.minimum(nearest, torch.linalg.vector_norm(candidates - pick, dim=1))
    return torch.cat(picks)


class PrototypePooling(Pooling):
    """A pooling with m prototypes in the space of the projection; subclasses implement ``forward``.

    The prototypes start from the average-pooled embeddings of the first training batches after ``start_step``:
    ``observe`` copies them, u / max(1, |u|), into a memory of ``memory_rows``; with the batch that fills it (whose rows
    may replace older ones) the prototypes are set by greedy k-center from the memory's first m rows as initial set over
    its other rows as candidates. The side output "pooled" is copied, or the embedding where there is none.

    Source: the authors' TensorFlow code of GSP (yetigurbuz/generalized-sum-pooling).
    """

    memory: Tensor
    filled: Tensor
    prototypes_started: Tensor

    def __init__(self, width: int, num_prototypes: int, *, memory_rows: int, start_step: int) -> None:
        super().__init__()
        if memory_rows < 2 * num_prototypes:
            raise ConfigError(f"memory_rows: got {memory_rows}, expected >= 2 * num_prototypes ({num_prototypes}).")
        check_at_least(0, start_step=start_step)
        self.num_prototypes = num_prototypes
        self.start_step = start_step
        # Changed in place only: the optimizer holds this tensor.
        self.prototypes = nn.Parameter(torch.empty(num_prototypes, width))
        nn.init.kaiming_normal_(self.prototypes)
        self.register_buffer("memory", torch.zeros(memory_rows, width))
        self.register_buffer("filled", torch.zeros((), dtype=torch.int64))
        self.register_buffer("prototypes_started", torch.zeros((), dtype=torch.bool))
        # Copies on the host: reading a buffer on a GPU in every step would wait for it.
        self._filled = 0
        self._started = False

    @property
    def started(self) -> bool:
        return self._started

    @torch.no_grad()
    def observe(self, pooled: Pooled, *, step: int) -> None:
        if self._started or step <= self.start_step:
            return
        capacity, width = self.memory.shape
        averages = pooled.side.get("pooled", pooled.embedding)[:, :width]
        rows = clip_norm(averages.detach().to(self.memory.dtype))[-capacity:]
        end = min(self._filled + len(rows), capacity)
        self.memory[end - len(rows) : end].copy_(rows)
        self._filled = end
        self.filled.fill_(end)
        if end == capacity:
            first = self.num_prototypes
            self.prototypes.copy_(greedy_k_center(self.memory[:first], self.memory[first:], first))
            self._started = True
            self.prototypes_started.fill_(True)
            logger.info("step %d: initialized %d prototypes from %d embeddings", step, self.num_prototypes, capacity)

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._filled = int(self.filled)
        self._started = bool(self.prototypes_started)


class Gsp(PrototypePooling):
    """sum_j p_j project(x)_j, with the transport's weights p over the pixels (see ``models.transport``).

    Until its prototypes have started (see ``PrototypePooling``) it pools as GAP, without "histogram".

    ``weighting: residual`` treats the prototypes as background: pixels are weighted by the mass that is not moved,
    rho_j / (1 - mu) = (1/n - mu p_j) / (1 - mu).

    ``combine`` adds another pooling; n p_j has mean 1:

        gmp:           sum_j p_j project(x)_j + project(max_j x_j)
        weighted_gmp:  project(max_j n p_j x_j); project(max_j x_j) until the start
        gem:           project((mean_j max(n p_j x_j, epsilon)^power)^(1 / power)), power learned; GAP until the start

    Side outputs: "pooled" [B, D] (the embedding without ``gmp``'s maximum; the average until the start), "weights"
    [B, H, W] (rows sum to 1), "histogram" z [B, m] (shares of the prototypes in the moved mass; rows sum to 1) and
    "reconstruction" [B, D] (sum_i z_i prototype_i).

    Source: Gürbüz, Şener & Alatan, Generalized Sum Pooling for Metric Learning, ICCV 2023, section 4, algorithm 2 (gem)
    and appendix B.2 (residual); start of the prototypes, sum with the maximum and order of gem as in the authors'
    TensorFlow code, weighted_gmp as in their PyTorch code for LIBC (yetigurbuz/generalized-sum-pooling b765b889,
    pytorch/gsp/embed_layer.py).
    """

    provides = ("histogram", "weights", "pooled", "reconstruction")

    def __init__(
        self,
        embedding_size: int,
        num_prototypes: int = 64,
        *,
        transport_ratio: float = 0.3,
        smoothing: float = 5.0,
        solver: Solver = "exact",
        iterations: int = 100,
        memory_rows: int = 1024,
        start_step: int = 0,
        weighting: Literal["transported", "residual"] = "transported",
        combine: Literal["gmp", "weighted_gmp", "gem"] | None = None,
        power: float = 3.0,
        epsilon: float = 1e-6,
    ) -> None:
        solution: dict[str, Any] = {"solver": solver, "iterations": iterations}
        check_transport(transport_ratio=transport_ratio, smoothing=smoothing, **solution)
        check_positive(num_prototypes=num_prototypes, power=power, epsilon=epsilon)
        if weighting == "residual" and transport_ratio == 1:
            raise ConfigError(f"transport_ratio: got {transport_ratio}, expected below 1 with weighting=residual.")
        super().__init__(embedding_size, num_prototypes, memory_rows=memory_rows, start_step=start_step)
        self.transport_ratio = transport_ratio
        self.smoothing = smoothing
        self._solution = solution
        self.weighting = weighting
        self.combine = combine
        self.epsilon = epsilon
        if combine == "gem":
            self.power = nn.Parameter(torch.full((1, 1, 1), float(power)))

    def forward(self, x: Tensor, project: Projection) -> Pooled:
        rows = project_pixels(x, project, self.prototypes.shape[1])  # [B, HW, D]
        batch, _, height, width = x.shape
        side: dict[str, Tensor] = {}
        if self._started:
            cost, ratio = prototype_cost(rows, self.prototypes), self.transport_ratio
            plan = transport_weights(cost, transport_ratio=ratio, smoothing=self.smoothing, **self._solution)
            side["histogram"] = plan.histogram
            pixel_weights = plan.weights
            if self.weighting == "residual":
                stays = 1.0 / (height * width) - ratio * plan.weights
                pixel_weights = stays / (1 - ratio)
            with torch.autocast(x.device.type, enabled=False):
                side["reconstruction"] = plan.histogram @ self.prototypes
                if self.combine == "gem":
                    pooled = project(generalized_mean(_weighted(x, pixel_weights), self.power, self.epsilon))
                elif self.combine == "weighted_gmp":
                    pooled = project(_weighted(x, pixel_weights).amax(dim=(2, 3)))
                else:
                    pooled = torch.bmm(pixel_weights[:, None, :], rows.to(pixel_weights.dtype))[:, 0]  # [B, D]
            side["weights"] = pixel_weights.view(batch, height, width)
        else:
            pooled = rows.mean(dim=1)
            side["weights"] = rows.new_full((batch, height, width), 1.0 / (height * width))
        side["pooled"] = pooled
        if self.combine == "gmp":
            pooled = pooled + project(x.amax(dim=(2, 3)))
        elif self.combine == "weighted_gmp" and not self._started:
            pooled = project(x.amax(dim=(2, 3)))
        return Pooled(pooled, side)

    def contributions(self, x: Tensor, project: Projection) -> Tensor:
        """The weights; with ``gmp`` their mean with the maximum's, else shares of the weighted maxima or powers."""
        weights = self(x, project).side["weights"]
        if self.combine == "gmp":
            return (weights + share_of_largest(x, 1)) / 2
        if self.combine == "weighted_gmp":
            return share_of_largest(_weighted(x, weights), 1)
        if self.combine == "gem" and self._started:
            return power_shares(_weighted(x, weights), self.power, self.epsilon)
        return weights

    def nearest_prototypes(self, x: Tensor, project: Projection) -> Tensor | None:
        """The nearest prototype, which takes most of a location's mass."""
        if not self._started:
            return None
        rows = project_pixels(x, project, self.prototypes.shape[1])
        return prototype_cost(rows, self.prototypes).argmin(dim=1).view(x.shape[0], *x.shape[2:])


def _weighted(x: Tensor, weights: Tensor) -> Tensor:
    """The features [B, C, H, W] times their weights [B, H, W] or [B, HW], scaled to a mean of 1."""
    relative = weights.view(x.shape[0], 1, *x.shape[2:]) * x[0, 0].numel()
    return x.to(relative.dtype) * relative
