"""Generalized sum pooling (GSP): an average over the pixels that optimal transport matches to learned prototypes."""

import logging
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dmlbench.models.pooling.base import Pooled, Pooling
from dmlbench.models.projection import Projection
from dmlbench.models.transport import Solver, check_transport, clip_norm, prototype_cost, transport_weights
from dmlbench.types import ConfigError

logger = logging.getLogger(__name__)


def greedy_k_center(initial: Tensor, candidates: Tensor, count: int) -> Tensor:
    """Pick the candidate that is farthest from everything initial or picked, ``count`` times.

    Ties go to the smaller row. Nothing waits for the device.

    Args:
        initial: [I, D] points that are covered from the start and not returned.
        candidates: [N, D].
        count: number of picks; beyond the distinct candidates they repeat.

    Returns:
        [count, D] in the order of the picks.
    """
    nearest = torch.cdist(candidates, initial, compute_mode="donot_use_mm_for_euclid_dist").amin(dim=1)  # [N]
    picks = []
    for _ in range(count):
        pick = candidates.index_select(0, nearest.argmax().view(1))  # [1, D]
        picks.append(pick)
        nearest = torch.minimum(nearest, torch.linalg.vector_norm(candidates - pick, dim=1))
    return torch.cat(picks)


class Gsp(Pooling):
    """sum_j p_j project(x)_j, with the transport's weights p over the pixels (see ``models.transport``).

    Until its prototypes have started it pools as GAP, and gives no "histogram". They start from the embeddings of the
    first training batches after ``start_step``: ``observe`` copies them, u / max(1, |u|), into a memory; with the batch
    that fills it the prototypes are set, in place, by greedy k-center from the memory's first m rows as initial set
    over its other rows as candidates. The batch that fills the memory takes its last rows, over older ones if need be.

    Side outputs: "pooled" [B, D] (the embedding), "weights" [B, H, W] (rows sum to 1), "histogram" [B, m] (the share
    of every prototype; rows sum to 1).

    Source: Gürbüz & Alatan, Generalized Sum Pooling for Metric Learning, ICCV 2023, section 4; start of the
    prototypes as in the authors' TensorFlow code (yetigurbuz/generalized-sum-pooling).
    """

    provides: ClassVar[tuple[str, ...]] = ("histogram", "weights", "pooled")
    memory: Tensor
    filled: Tensor
    prototypes_started: Tensor

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
    ) -> None:
        """
        Args:
            embedding_size: D, the width of the projection.
            num_prototypes: m (paper: 64; 128 for SOP and In-shop).
            transport_ratio: mu in (0, 1] (paper: 0.3); 1 is average pooling.
            smoothing: epsilon > 0 (paper: 5 or 0.5).
            solver: ``exact``, or ``fixed_point`` as in the paper.
            iterations: of ``fixed_point`` (paper: 100).
            memory_rows: embeddings that the prototypes are chosen from (paper's code: 1,024), at least 2 m.
            start_step: training steps before the memory begins to fill (warm-up of proxy losses).

        Raises:
            ConfigError: an argument outside its range.
        """
        super().__init__()
        check_transport(transport_ratio=transport_ratio, smoothing=smoothing, solver=solver, iterations=iterations)
        if embedding_size < 1 or num_prototypes < 1:
            raise ConfigError(
                f"embedding_size ({embedding_size}) and num_prototypes ({num_prototypes}) must be positive"
            )
        if memory_rows < 2 * num_prototypes:
            raise ConfigError(
                f"memory_rows ({memory_rows}) must be at least twice num_prototypes ({num_prototypes}): as many rows "
                "begin the choice as are chosen; raise memory_rows or lower num_prototypes"
            )
        if start_step < 0:
            raise ConfigError(f"start_step ({start_step}) must not be negative")
        self.embedding_size = embedding_size
        self.num_prototypes = num_prototypes
        self.transport_ratio = transport_ratio
        self.smoothing = smoothing
        self.solver: Solver = solver
        self.iterations = iterations
        self.start_step = start_step
        # Never replaced by another tensor: the optimizer was built with this one.
        self.prototypes = nn.Parameter(torch.empty(num_prototypes, embedding_size))
        nn.init.kaiming_normal_(self.prototypes)
        self.register_buffer("memory", torch.zeros(memory_rows, embedding_size))
        self.register_buffer("filled", torch.zeros((), dtype=torch.int64))
        self.register_buffer("prototypes_started", torch.zeros((), dtype=torch.bool))
        # The same two facts as Python values: reading a buffer on a GPU in every step would wait for it.
        self._filled = 0
        self._started = False

    @property
    def started(self) -> bool:
        return self._started

    def forward(self, x: Tensor, project: Projection) -> Pooled:
        features = project(x)  # [B, D, H, W]
        if features.shape[1] != self.embedding_size:
            raise ConfigError(
                f"gsp has embedding_size {self.embedding_size}, but the projection gives {features.shape[1]}; "
                "set both to the same"
            )
        batch, _, height, width = features.shape
        rows = features.flatten(2).transpose(1, 2)  # [B, HW, D]
        if not self._started:
            pooled = rows.mean(dim=1)
            uniform = rows.new_full((batch, height, width), 1.0 / (height * width))
            return Pooled(pooled, {"pooled": pooled, "weights": uniform})
        plan = transport_weights(
            prototype_cost(rows, self.prototypes),
            transport_ratio=self.transport_ratio,
            smoothing=self.smoothing,
            solver=self.solver,
            iterations=self.iterations,
        )
        with torch.autocast(x.device.type, enabled=False):
            pooled = torch.bmm(plan.weights[:, None, :], rows.to(plan.weights.dtype))[:, 0]  # [B, D]
        weights = plan.weights.view(batch, height, width)
        return Pooled(pooled, {"pooled": pooled, "weights": weights, "histogram": plan.histogram})

    def nearest_prototypes(self, x: Tensor, project: Projection) -> Tensor | None:
        """The prototype that takes the largest part of each location's mass: the nearest one. None before the start."""
        if not self._started:
            return None
        rows = project(x).flatten(2).transpose(1, 2)
        return prototype_cost(rows, self.prototypes).argmin(dim=1).view(x.shape[0], *x.shape[2:])

    @torch.no_grad()
    def observe(self, pooled: Pooled, *, step: int) -> None:
        if self._started or step <= self.start_step:
            return
        capacity = self.memory.shape[0]
        rows = clip_norm(pooled.embedding.detach().to(self.memory.dtype))[-capacity:]
        end = min(self._filled + len(rows), capacity)
        self.memory[end - len(rows) : end].copy_(rows)
        self._filled = end
        self.filled.fill_(end)
        if end == capacity:
            first = self.num_prototypes
            self.prototypes.copy_(greedy_k_center(self.memory[:first], self.memory[first:], first))
            self._started = True
            self.prototypes_started.fill_(True)
            logger.info("step %d: %d prototypes start from %d embeddings", step, self.num_prototypes, capacity)

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)  # type: ignore[no-untyped-call, unused-ignore]
        self._filled = int(self.filled)
        self._started = bool(self.prototypes_started)
