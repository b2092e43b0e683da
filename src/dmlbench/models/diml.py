"""DIML: reranking of nearest neighbors by an optimal flow between the cells of two images.

Letters: B images, D dimensions of the embedding, g x g cells of an image, T queries, K neighbors of each.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from pytorch_metric_learning.distances import BaseDistance
from torch import Tensor

from dmlbench.types import RunError, check_at_least

_COLDEST = 0.005  # exp(-2 / 0.005) is 1e-174, whose sums and quotients float64 holds


def cells_of(projected: Tensor, grid_size: int) -> Tensor:
    """Cells [B, g g, D], row by row, of projected maps [B, D, H, W].

    A cell is the mean of its part of the map, which is first resized to 4 g x 4 g (bilinear, corners aligned) where g
    does not divide H and W.
    """
    if projected.shape[2] % grid_size or projected.shape[3] % grid_size:
        projected = F.interpolate(projected, size=4 * grid_size, mode="bilinear", align_corners=True)
    return F.adaptive_avg_pool2d(projected, grid_size).flatten(2).transpose(1, 2)


class DimlDistance(BaseDistance):
    """Similarity of a query to its nearest neighbors: cosine of the centers plus similarity of the matched cells.

    An image is one row [center | g g cells]: its embedding and its projected map's cells, D numbers each, all taken as
    unit vectors. With s[i, j] the cosine of the neighbor's cell i and the query's cell j,

        similarity = cosine of the centers + sum_ij T[i, j] s[i, j],   K[i, j] = exp((s[i, j] - 1) / temperature)

    where T = diag(r) K diag(c) has marginals u (neighbor's cells) and v (query's), by Sinkhorn's updates r = u / K c,
    c = v / K^T r from ones. u[i] is relu(cosine of cell i and the query's center) over (their sum + 1e-5), v[j]
    likewise. The updates of a query's whole list end when the mean change of r is below ``tolerance``, so that values
    are defined for lists only. Where all of u or of v is 0, the sum is 0 (NaN in the public code).

    Source: Zhao et al., Towards Interpretable Deep Metric Learning with Structural Matching, ICCV 2021, section 3;
    wl-zhao/DIML c15dbea6, utilities/diml.py, evaluation/eval_diml.py.
    """

    def __init__(
        self,
        *,
        grid_size: int = 4,
        num_neighbors: int = 100,
        temperature: float = 0.05,
        max_iterations: int = 100,
        tolerance: float = 0.1,
        marginals: Literal["cross_correlation", "uniform"] = "cross_correlation",
    ) -> None:
        super().__init__(is_inverted=True)
        check_at_least(1, grid_size=grid_size, num_neighbors=num_neighbors, max_iterations=max_iterations)
        check_at_least(_COLDEST, temperature=temperature)
        check_at_least(0, tolerance=tolerance)
        self.grid_size = grid_size
        self.num_neighbors = num_neighbors
        self.temperature = temperature
        self.max_iterations = max_iterations
        self.tolerance = tolerance
        self.marginals = marginals

    @property
    def description(self) -> str:
        """Label of the reranking in results."""
        return f"DIML, {self.grid_size} x {self.grid_size}, first {self.num_neighbors}"

    def center_rows(self, rows: Tensor) -> Tensor:
        """Centers [N, D] of rows [N, (1 + g g) D], whose cosine makes the lists."""
        return self._parts(rows)[:, 0]

    def reranked_similarities(self, queries: Tensor, neighbors: Tensor, known: Tensor) -> Tensor:
        """Similarities [T, K] of queries [T, (1 + g g) D] and their neighbors [T, K, (1 + g g) D].

        ``known`` [T, K] is False after the end of a shorter list.
        """
        query, other = (F.normalize(self._parts(x), dim=-1) for x in (queries, neighbors))
        cosine = torch.einsum("td,tkd->tk", query[:, 0], other[:, :, 0])
        similarity = torch.einsum("tkid,tjd->tkij", other[:, :, 1:], query[:, 1:])
        if self.marginals == "uniform":
            u = v = torch.full_like(similarity[..., 0], 1 / self.grid_size**2)
        else:
            u = torch.einsum("td,tkid->tki", query[:, 0], other[:, :, 1:]).relu()
            v = torch.einsum("tjd,tkd->tkj", query[:, 1:], other[:, :, 0]).relu()
            u, v = (x / (x.sum(-1, keepdim=True) + 1e-5) for x in (u, v))
        flows = ((u > 0).any(-1) & (v > 0).any(-1))[..., None]
        u, v = (x.where(flows, 1.0) for x in (u, v))
        plan = self._plan(torch.exp((similarity - 1) / self.temperature), u, v, flows & known[..., None])
        return cosine + (plan * similarity).sum((-2, -1)).where(flows[..., 0], 0.0)

    def _plan(self, kernel: Tensor, u: Tensor, v: Tensor, counts: Tensor) -> Tensor:
        """T [T, K, g g, g g] of each list by its own number of updates; ``counts`` [T, K, 1] take part in their end."""
        r, c = torch.ones_like(u), torch.ones_like(v)
        goes_on = torch.ones(len(u), 1, 1, dtype=torch.bool, device=u.device)
        size = (counts.sum((-2, -1), keepdim=True) * u.shape[-1]).clamp(min=1)
        for _ in range(self.max_iterations):
            new_r = u / (kernel @ c[..., None])[..., 0]
            new_c = v / (new_r[..., None, :] @ kernel)[..., 0, :]
            change = ((new_r - r).abs() * counts).sum((-2, -1), keepdim=True) / size
            r, c = new_r.where(goes_on, r), new_c.where(goes_on, c)
            goes_on = goes_on & ~(change < self.tolerance)
            if not bool(goes_on.any()):
                break
        return r[..., None] * kernel * c[..., None, :]

    def _parts(self, rows: Tensor) -> Tensor:
        count = 1 + self.grid_size**2
        if rows.shape[-1] % count:
            raise RunError(
                f"DIML embeddings: got {rows.shape[-1]} numbers, expected a multiple of {count}. Embed the images "
                "again."
            )
        return rows.unflatten(-1, (count, -1))

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        raise RunError(
            "DIML reranks candidate lists. It does not define a pairwise distance. Compare center_rows(rows)."
        )

    pairwise_distance = compute_mat
