"""AVSL's distance: nodes of several levels, unreliable ones replaced by what the level below infers.

Letters: L levels, r nodes of each, k edges of a node, Q and N images, P pairs of them, u = 2^-24.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pytorch_metric_learning.distances import BaseDistance
from torch import Tensor, nn

from dmlbench.models.avsl_tiles import AvslTiles
from dmlbench.types import ConfigError, RunError, check_at_least, check_share

Variant = Literal["official", "paper"]
Inference = Literal["rectified", "reliable", "top", "concat"]

_EPSILON = 1e-8  # of the public code, in the sum of a node's edges
_ROUNDING = 2.0**-24
_SIGMOID_ROUNDINGS = 16  # of the value 1: several times what libraries, and fast exponentials of kernels, promise


@dataclass(frozen=True)
class Attribution:
    """Parts of the distance of each pair; levels ascend."""

    nodes: Tensor  # delta [P, L, r], squared differences
    reliabilities: Tensor  # p [P, L, r] in (0, 1); 1 at the lowest level
    rectified: Tensor  # delta-hat [P, L, r]
    sensitivities: Tensor  # lambda [P, L, r]; the distance is the sum of sensitivities times nodes
    distance: Tensor  # [P]


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
                f"AVSL embeddings: got {rows.shape[-1]} numbers, expected {size}. Compare embeddings of the same model."
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

        ``maps`` are, for each pair of adjacent levels from below, the normalized activation maps [B, r, S] of both at
        one size. An edge is the mean over the batch of their inner products (eq. 3). Returns mean and maximum of
        |new - old| edges, [L - 1, 2]; 0 at the first batch.
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
                "AVSL has no edges yet: it estimates them in training. Train for a step, load a checkpoint, or set "
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

    @torch.no_grad()
    def float32_error(self, queries: Tensor, gallery: Tensor) -> tuple[float, float]:
        """(relative, absolute): a float32 distance d of rows of two sets is right up to ``relative * d + absolute``.

        It holds for every order of summation. With S^l >= the sum of a pair's nodes of level l, that is (largest
        length of an e^l + that of an e'^l)^2, 4 for unit embeddings:

        - All terms are products and sums of numbers >= 0, so that a rounding changes the distance by at most u of
          itself. There are 3 roundings in a node, per level k + 2 in an edge, k in its product and 5 in the rest, and
          r - 1 in the last sum: relative = (3 + (L - 1) (2 k + 7) + r) u / (1 - the same).
        - A reliability errs by eps = 5 u gain (max |alpha| max |c| max |c'| + max |beta|) / 4 for its argument (the
          sigmoid's slope is at most 1/4) + 16 u for the sigmoid + 4 u where p x + (1 - p) y is y + p (x - y). Such an
          error moves weight between a node and what is inferred for it. With a^L = 1 and a^(l-1) = |W~|^T a^l, the
          most that a node of a level can weigh: absolute = eps sum_{l >= 2} sum_{m <= l} max(a^m) S^m.

        Without reliabilities (``top``, ``concat``) the distance is |x|^2 + |y|^2 - 2 x y of n numbers, which cancel:
        n + 8 roundings of at most sum_l S^l.

        Edges below 0 (variant paper) cancel. Then all is absolute: the first part times sum_l max(a^l) S^l; and the sum
        that an edge is divided by errs by as many times more as the largest sum of a node's |W~|.

        Source: Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., lemma 3.1.
        """
        lengths, certainty = [], []
        for rows in (queries, gallery):
            e, c = self.levels(rows)
            lengths.append(e.norm(dim=-1).amax(0).double().cpu())  # [L]
            certainty.append(float(c.abs().max()))
        reach = (1.001 * (lengths[0] + lengths[1])).square().tolist()
        if self.inference in ("top", "concat"):
            counted = reach[-1:] if self.inference == "top" else reach
            share = _gamma(8 + len(counted) * self.level_size)
            return 0.0, share * sum(counted)
        steepest = float(self.alpha.abs().max()) * certainty[0] * certainty[1] + float(self.beta.abs().max())
        epsilon = 1.02 * _ROUNDING * (5 * self.gain * steepest / 4 + _SIGMOID_ROUNDINGS + 4)
        if self.inference == "reliable":
            return _bounded(_gamma(5 + self.level_size), epsilon * reach[-1])
        self.require_edges()
        edges = self.normalized_edges().double().cpu()
        weight = torch.ones(self.level_size, dtype=torch.float64)
        weighed = [reach[-1]]  # max(a^l) S^l, from above
        for level in range(self.num_levels - 2, -1, -1):
            weight = edges[level].abs().T @ weight
            weighed.append(1.001 * float(weight.max()) * reach[level])
        # level m counts once for every l >= max(m, 2)
        absolute = epsilon * sum(x * min(place + 1, self.num_levels - 1) for place, x in enumerate(weighed))
        excess = max(1.0, float(edges.abs().sum(-1).max()))
        per_level = self.top_k * (1 + excess) + 7
        relative = _gamma(3 + (self.num_levels - 1) * per_level + self.level_size)
        if bool((edges < 0).any()):
            return 0.0, absolute + relative * sum(weighed)
        return _bounded(relative, absolute + 2.0**-100)  # squares of the least differences vanish

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

    def level(self, index: int) -> "LevelDistance":
        """Squared Euclidean distance of one level's unit embeddings, 0 being the lowest."""
        return LevelDistance(self, index)

    def of_detached_nodes(self) -> "InferredDistance":
        """This distance with gradients to alpha, beta and certainties alone (eq. 10)."""
        return InferredDistance(self)


class BorrowedDistance(BaseDistance):
    """A model's distance for losses and miners, which must not register its parameters as their own."""

    def __init__(self, owner: Any) -> None:
        super().__init__(owner.normalize_embeddings, owner.p, owner.power, owner.is_inverted)
        self.owner = (owner,)  # in a tuple, which registers no parameters

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        return self.owner[0].compute_mat(query_emb, ref_emb)

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        return self.owner[0].pairwise_distance(query_emb, ref_emb)


class LevelDistance(BorrowedDistance):
    """Squared Euclidean distance of one level's part of AVSL's rows, 0 being the lowest."""

    def __init__(self, owner: AvslDistance, index: int) -> None:
        super().__init__(owner)
        self._index = index

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        x, y = self._embeddings(query_emb), self._embeddings(ref_emb)
        squares = x.square().sum(1)[:, None] + y.square().sum(1)[None]
        return (squares - 2 * x @ y.T).clamp(min=0)

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        return (self._embeddings(query_emb) - self._embeddings(ref_emb)).square().sum(1)

    def _embeddings(self, rows: Tensor) -> Tensor:
        return self.owner[0].levels(rows)[0][:, self._index]


class InferredDistance(BorrowedDistance):
    """AVSL's distance of detached nodes: gradients reach alpha, beta and certainties alone."""

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        return self.pairwise_distance(query_emb[:, None], ref_emb[None])

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        return self.owner[0].compute(query_emb, ref_emb, detach=True)


def _gamma(roundings: float) -> float:
    share = roundings * _ROUNDING
    return 1.01 * share / (1 - share) if share < 0.01 else math.inf


def _bounded(relative: float, absolute: float) -> tuple[float, float]:
    return (relative, absolute) if math.isfinite(relative) else (0.0, math.inf)
