"""HIER: hierarchical proxies in the Poincare ball, as ancestors of images and of each other."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dmlbench.hyperbolic import PoincareDistance, riemannian, to_ball
from dmlbench.losses.regularizer import DmlLoss, Regularizer
from dmlbench.types import ModelOutput, check_at_least, check_positive


class HierarchicalRegularizer(Regularizer):
    """Proxies of no class, one of which is to be the lowest common ancestor of each two related points.

    For triplets (i, j, k) of points, i and j related and k not, the ancestor a of i and j is drawn among the proxies by
    a Gumbel softmax of -max(d_ia, d_ja) / temperature, the ancestor b of all three likewise; where a is not b,

        (d_ia - d_ib + margin)_+ + (d_ja - d_jb + margin)_+ + (d_kb - d_ka + margin)_+

    and 0 where they are one proxy; the mean over triplets of the batch's embeddings, plus that of the proxies
    themselves. Related are two points that are among each other's ``num_neighbors`` nearest by exp(-d), to which images
    of one class add 1. Each point with two or more of them gives ``triplets_per_point`` random triplets.

    Embeddings must lie in the ball: head=hyperbolic with the same curvature.

    Source: Kim et al., HIER: Metric Learning Beyond Class Labels via Hierarchical Regularization, CVPR 2023, eqs. 5-8;
    tjddus9597/HIER-CVPR23 3986a744, hier/losses.py.
    """

    def __init__(
        self, weight: float, embedding_size: int, *, num_proxies: int = 512, curvature: float = 0.1,
        clip_radius: float = 2.3, temperature: float = 0.1, margin: float = 0.1, num_neighbors: int = 20,
        triplets_per_point: int = 50,
    ) -> None:  # fmt: skip
        super().__init__(weight)
        check_at_least(2, num_proxies=num_proxies, num_neighbors=num_neighbors)
        check_at_least(1, embedding_size=embedding_size, triplets_per_point=triplets_per_point)
        check_positive(clip_radius=clip_radius, temperature=temperature)
        check_at_least(0, margin=margin)
        self.clip_radius = clip_radius
        self.temperature = temperature
        self.margin = margin
        self.num_neighbors = num_neighbors
        self.triplets_per_point = triplets_per_point
        self.distance = PoincareDistance(curvature)
        start = torch.randn(num_proxies, embedding_size) / math.sqrt(embedding_size)
        self.proxies = nn.Parameter(0.9 * clip_radius * start)

    @property
    def of_head(self) -> Mapping[str, float]:
        return {"curvature": self.distance.curvature, "clip_radius": self.clip_radius}

    def forward(self, output: ModelOutput, labels: Tensor, dml_loss: DmlLoss) -> Tensor:
        curvature, size = self.distance.curvature, len(labels)
        proxies = riemannian(to_ball(self.proxies, curvature=curvature, clip_radius=self.clip_radius), curvature)
        nodes = torch.cat([output.embedding, proxies.to(output.embedding.dtype)])
        distances = self.distance(nodes, nodes)  # [B + P, B + P]
        with torch.no_grad():
            of_images, of_proxies = (torch.exp(-distances[part, part]) for part in (slice(size), slice(size, None)))
            of_images += labels[:, None] == labels
        return self._of_points(of_images, distances[:size, size:]) + self._of_points(
            of_proxies, distances[size:, size:]
        )

    def _of_points(self, similarities: Tensor, to_proxies: Tensor) -> Tensor:
        """The mean over triplets of N points, by similarities [N, N] and distances to the proxies [N, P]."""
        triplets, counted = draw_triplets(similarities, self.num_neighbors, self.triplets_per_point)
        noise = [_gumbel(to_proxies, len(triplets[0])) for _ in range(2)]
        values = ancestor_losses(to_proxies, triplets, noise, temperature=self.temperature, margin=self.margin)
        return (values * counted).sum() / counted.sum().clamp(min=1)


@torch.no_grad()
def draw_triplets(similarities: Tensor, num_neighbors: int, per_point: int) -> tuple[list[Tensor], Tensor]:
    """Random triplets (i, j, k), [T] each, of N points, and which of them count [T], 0 or 1; T = N per_point.

    As in the public code, k may be i itself, and a point of fewer than two reciprocal neighbors does not count.
    """
    size = len(similarities)
    nearest = similarities.topk(min(num_neighbors, size)).indices
    near = torch.zeros_like(similarities).scatter_(1, nearest, 1.0)
    mutual = (near * near.T).fill_diagonal_(0)
    number = mutual.sum(1, keepdim=True)  # [N, 1]
    order = mutual.sort(dim=1, descending=True, stable=True).indices  # the related ones first
    uniform = torch.rand(2, size, per_point, dtype=mutual.dtype, device=mutual.device)
    related = order.gather(1, (uniform[0] * number).long().clamp(max=size - 1))
    other = order.gather(1, (number + uniform[1] * (size - number)).long().clamp(max=size - 1))
    anchor = torch.arange(size, device=order.device)[:, None].expand(-1, per_point)
    counted = (number >= 2).to(similarities.dtype).expand(-1, per_point)
    return [x.flatten() for x in (anchor, related, other)], counted.flatten()


def ancestor_losses(
    distances: Tensor, triplets: list[Tensor], noise: list[Tensor], *, temperature: float, margin: float
) -> Tensor:
    """Losses [T] of triplets by distances [N, P] to the proxies and Gumbel noise [T, P] of both draws."""
    of_i, of_j, of_k = (distances[x] for x in triplets)  # [T, P] each
    of_pair = torch.maximum(of_i, of_j)
    pair = _choice(-of_pair / temperature + noise[0])
    all_three = _choice(-torch.maximum(of_pair, of_k) / temperature + noise[1])
    # d_ia - d_ib of the three points; b must be nearer to k than a is
    i, j, k = ((x * (pair - all_three)).sum(1) for x in (of_i, of_j, of_k))
    value = torch.relu(i + margin) + torch.relu(j + margin) + torch.relu(margin - k)
    return value * (pair.argmax(1) != all_three.argmax(1))


def _choice(logits: Tensor) -> Tensor:
    """One-hot rows of the largest logits [T, P], with the gradient of their softmax."""
    soft = logits.softmax(1)
    return F.one_hot(soft.argmax(1), logits.shape[1]).to(soft.dtype) - soft.detach() + soft


def _gumbel(like: Tensor, rows: int) -> Tensor:
    return -torch.empty(rows, like.shape[1], dtype=like.dtype, device=like.device).exponential_().log()
