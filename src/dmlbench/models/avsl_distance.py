"""AVSL's distance: nodes of several levels, unreliable ones replaced by what the level below infers.

Letters: L levels, r nodes of each, Q and N images, P pairs of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from pytorch_metric_learning.distances import BaseDistance
from torch import Tensor, nn

from dmlbench.models.avsl_rounding import float32_error
from dmlbench.models.avsl_tiles import AvslTiles
from dmlbench.models.borrowed_distances import InferredDistance, LevelDistance
from dmlbench.types import ConfigError, RunError, check_at_least, check_share

Variant = Literal["official", "paper"]
Inference = Literal["rectified", "reliable", "top", "concat"]

_EPSILON = 1e-8  # of the public code, in the sum of a node's edges


@dataclass(frozen=True)
class Attribution:
    """Parts of the distance of each pair; levels ascend.

    Attributes:
        nodes: delta [P, L, r], squared differences.
        reliabilities: p [P, L, r] in (0, 1); 1 at the lowest level.
        rectified: delta-hat [P, L, r].
        sensitivities: lambda [P, L, r]; the distance is the sum of sensitivities times nodes.
        distance: [P].
    """

    nodes: Tensor
    reliabilities: Tensor
    rectified: Tensor
    sensitivities: Tensor
    distance: Tensor


class AvslDistance(BaseDistance):
    """Squared distance of the top level whose unreliable nodes are inferred from the level below, and so on.

    An image is one row of 2 L r numbers: unit embeddings e^1 .. e^L, then certainties c^1 .. c^L. With the nodes
    delta^l = (e^l - e'^l)^2, the reliabilities p^l = sigmoid(gain (alpha^l c^l c'^l + beta^l)) and the edges W~^l, of
    which every node keeps the top_k strongest to the level below, normalized to sum to 1:

        delta-hat^1 = delta^1,
        delta-hat^l = p^l delta^l + (1 - p^l) W~^l delta-hat^(l-1),    d = sum of delta-hat^L.

    variant:
        official: gain 10; edges below 0 count as 0.
        paper: gain 1; edges as they are.
    inference (paper, table 2):
        rectified: d as above.
        reliable: sum of p^L delta^L, without edges ("+ M & R").
        top: sum of delta^L ("+ M").
        concat: sum of all levels' nodes ("+ M (concat)").

    Source: Zhang et al., Attributable Visual Similarity Learning, 2022, eqs. 1, 4, 6-9, 11; zbr17/AVSL fd2686e4,
    collectors/avsl_collector.py.
    """

    edges: Tensor
    updates: Tensor
    is_symmetric = True  # squares of differences and products of certainties are the same from both sides

    def __init__(
        self,
        num_levels: int = 3,
        level_size: int = 512,
        *,
        top_k: int = 128,
        momentum: float = 0.5,
        inference: Inference = "rectified",
        variant: Variant = "official",
    ) -> None:
        super().__init__(normalize_embeddings=False, p=2, power=1)
        check_at_least(2, num_levels=num_levels)
        check_at_least(1, level_size=level_size)
        if not 1 <= top_k <= level_size:
            raise ConfigError(f"head.top_k: got {top_k}, expected 1 to head.level_size ({level_size}).")
        check_share(momentum=momentum)
        self.num_levels = num_levels
        self.level_size = level_size
        self.top_k = top_k
        self.momentum = momentum
        self.inference = inference
        self.variant = variant
        self.gain = 10.0 if variant == "official" else 1.0
        self.alpha = nn.Parameter(torch.ones(num_levels - 1, level_size))
        self.beta = nn.Parameter(torch.zeros(num_levels - 1, level_size))
        # [l, i, j]: node i of level l + 2, node j of level l + 1
        self.register_buffer("edges", torch.zeros(num_levels - 1, level_size, level_size))
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))

    @property
    def infers(self) -> bool:
        """Whether alpha and beta, hence the certainties, take part."""
        return self.inference in ("rectified", "reliable")

    def levels(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings and certainties [N, L, r] of rows [N, 2 L r]."""
        size = 2 * self.num_levels * self.level_size
        if rows.shape[-1] != size:
            raise RunError(
                f"rows of AVSL: got {rows.shape[-1]} numbers, expected {size} ({self.num_levels} levels of "
                f"{self.level_size} nodes). Compare rows of one model."
            )
        parts = rows.unflatten(-1, (2, self.num_levels, self.level_size))
        return parts[..., 0, :, :], parts[..., 1, :, :]

    def pack(self, embeddings: Tensor, certainties: Tensor) -> Tensor:
        """Rows [N, 2 L r] of unit embeddings and certainties [N, L, r]."""
        return torch.stack([embeddings, certainties], dim=-3).flatten(-3)

    def normalized_edges(self) -> Tensor:
        """W~ [L - 1, r, r]; rows sum to 1 (official: a node without an edge above 0 has none)."""
        edges = self.edges.relu() if self.variant == "official" else self.edges
        # a stable sort: which of equal edges are kept must not depend on device and precision
        strongest, place = (x[..., : self.top_k] for x in edges.sort(dim=-1, descending=True, stable=True))
        total = strongest.sum(-1, keepdim=True) + (_EPSILON if self.variant == "official" else 0.0)
        return torch.zeros_like(edges).scatter_(-1, place, strongest / total)

    @torch.no_grad()
    def observe(self, maps: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Update the edges by a training batch: the first is copied, later ones enter with 1 - momentum.

        Args:
            maps: for each pair of adjacent levels, from below, normalized activation maps [B, r, S] of the lower and of
                the higher level at one size. An edge is the mean over the batch of their inner products (eq. 3).

        Returns:
            Mean and maximum of |new - old| edges, [L - 1, 2]; 0 at the first batch.
        """
        cast = [(low.to(self.edges.dtype), high.to(self.edges.dtype)) for low, high in maps]
        seen = torch.stack([torch.einsum("bis,bjs->ij", high, low) / len(high) for low, high in cast])
        # no host-device copy: reading the counter would wait for the device
        share = torch.where(self.updates == 0, 1.0, (1.0 - self.momentum) * torch.ones_like(self.edges[0, 0, 0]))
        old = self.edges.clone()
        self.edges.lerp_(seen, share)
        change = (self.edges - old).abs() * (self.updates > 0)
        self.updates += 1
        return torch.stack([change.mean((1, 2)), change.amax((1, 2))], 1)

    def require_edges(self) -> None:
        if self.inference == "rectified" and not bool(self.updates > 0):
            raise RunError(
                "AVSL has no edges yet: training batches make them. Train for a step, load a checkpoint, or set "
                "head.inference=reliable, top or concat."
            )

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        """Distances [Q, N] of rows [Q, 2 L r] and [N, 2 L r]: by arrays [Q, N, r] for a graph, else by tiles."""
        if torch.is_grad_enabled():
            return self.compute(query_emb[:, None], ref_emb[None])
        dtype = torch.promote_types(torch.promote_types(query_emb.dtype, ref_emb.dtype), self.alpha.dtype)
        return self.tiles(dtype=dtype, device=query_emb.device)(query_emb, ref_emb)

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        """Distances [P] of rows [P, 2 L r], pair by pair."""
        return self.compute(query_emb, ref_emb)

    def nodes(self, first: Tensor, second: Tensor, *, detach: bool = False) -> tuple[Tensor, Tensor]:
        """Nodes and products of certainties, [.., L, r]."""
        (e, c), (f, d) = self.levels(first), self.levels(second)
        if detach:
            e, f = e.detach(), f.detach()
        return (e - f).square(), c * d

    def reliabilities(self, certainty: Tensor) -> Tensor:
        """p [.., L, r] of products of certainties [.., L, r]; 1 at the lowest level."""
        above = torch.sigmoid(self.gain * (self.alpha * certainty[..., 1:, :] + self.beta))
        return torch.cat([torch.ones_like(above[..., :1, :]), above], dim=-2)

    def rectified(self, nodes: Tensor, reliability: Tensor, edges: Tensor) -> list[Tensor]:
        """delta-hat [.., r] of every level, ascending."""
        levels = [nodes[..., 0, :]]
        for level in range(1, self.num_levels):
            p = reliability[..., level, :]
            levels.append(p * nodes[..., level, :] + (1 - p) * (levels[-1] @ edges[level - 1].T))
        return levels

    def compute(self, first: Tensor, second: Tensor, *, detach: bool = False) -> Tensor:
        """Distances of rows that broadcast against each other."""
        nodes, certainty = self.nodes(first, second, detach=detach)
        if self.inference == "concat":
            return nodes.sum((-2, -1))
        if self.inference == "top":
            return nodes[..., -1, :].sum(-1)
        reliability = self.reliabilities(certainty)
        if self.inference == "reliable":
            return (reliability[..., -1, :] * nodes[..., -1, :]).sum(-1)
        if self.updates.device.type == "cpu":  # elsewhere reading the counter would wait for the device in every step
            self.require_edges()
        return self.rectified(nodes, reliability, self.normalized_edges())[-1].sum(-1)

    def tiles(self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> AvslTiles:
        return AvslTiles(self, dtype=dtype, device=device)

    def shortlist_rows(self, rows: Tensor) -> Tensor:
        """The top level's embeddings [N, r], whose Euclidean distance ranks candidates cheaply."""
        return self.levels(rows)[0][:, -1]

    def float32_error(self, query_emb: Tensor, ref_emb: Tensor) -> tuple[float, float]:
        """See ``avsl_rounding``."""
        return float32_error(self, query_emb, ref_emb)

    def attribute(self, query_emb: Tensor, ref_emb: Tensor) -> Attribution:
        """Nodes, reliabilities and sensitivities of pairs of rows [P, 2 L r] (eq. 11).

        lambda^L = p^L, and below 1^T (1 - p^L) W~^L .. p^l; without inference the sensitivities are 1 or 0.
        """
        self.require_edges()
        nodes, certainty = self.nodes(query_emb, ref_emb)
        reliability = self.reliabilities(certainty)  # [P, L, r]
        edges = self.normalized_edges()
        rectified = self.rectified(nodes, reliability, edges)
        sensitivity = torch.zeros_like(nodes)
        if self.inference == "rectified":
            left = torch.ones_like(nodes[..., 0, :])  # weight that the levels above leave to a node
            for level in range(self.num_levels - 1, -1, -1):
                p = reliability[..., level, :]
                sensitivity[..., level, :] = left * p
                left = (left * (1 - p)) @ edges[level - 1] if level else left
        elif self.inference == "concat":
            sensitivity.fill_(1.0)
        else:
            sensitivity[..., -1, :] = reliability[..., -1, :] if self.inference == "reliable" else 1.0
        distance = (sensitivity * nodes).sum((-2, -1))
        return Attribution(nodes, reliability, torch.stack(rectified, -2), sensitivity, distance)

    def level(self, index: int) -> LevelDistance:
        """Squared Euclidean distance of one level's unit embeddings, 0 being the lowest."""
        return LevelDistance(self, index)

    def of_detached_nodes(self) -> InferredDistance:
        """This distance with gradients to alpha, beta and certainties alone (eq. 10)."""
        return InferredDistance(self)
