"""AVSL's distance as training, search and explanations use it.

Letters: L levels, r nodes of each, Q and N images, P pairs of them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dmlbench.models.avsl_formula import AvslFormula
from dmlbench.models.avsl_rounding import float32_error
from dmlbench.models.avsl_tiles import AvslTiles
from dmlbench.models.borrowed_distances import InferredDistance, LevelDistance


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


class AvslDistance(AvslFormula):
    """``AvslFormula`` with searches in little memory, distances of single levels, and attributions."""

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        """Distances [Q, N] of rows [Q, 2 L r] and [N, 2 L r]; in chunks where no graph is made."""
        if torch.is_grad_enabled():
            return super().compute_mat(query_emb, ref_emb)
        dtype = torch.promote_types(torch.promote_types(query_emb.dtype, ref_emb.dtype), self.alpha.dtype)
        return self.tiles(dtype=dtype, device=query_emb.device)(query_emb, ref_emb)

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
