"""HIST: class distributions, and a hypergraph network that classifies a batch by its relations to classes."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dmlbench.losses.base import WholeBatchLoss
from dmlbench.losses.initialization import init_class_vectors
from dmlbench.types import check_at_least, check_positive


class Hist(WholeBatchLoss):
    """Hypergraph-induced semantic tuplet loss.

    Class c is a normal distribution of mean m_c (a unit vector) and variances v_c = exp(relu6(l_c)). With unit
    embeddings x_b, D_bc = sum over dimensions of (x_b - m_c)^2 / v_c:

        distribution loss: cross-entropy of the logits -scale D_bc;
        hypergraph: an edge per class of the batch; H_bc = 1 for c = y_b, else exp(-alpha D_bc);
        tuplet loss: cross-entropy of a hypergraph network of two layers on the embeddings, not normalized,
            G W2 leaky_relu(batch_norm(G W1 x)),  G = Dv^-1/2 H De^-1 H^T Dv^-1/2  (node and edge degrees Dv, De),

    loss = distribution loss + tuplet_weight * tuplet loss.

    The public code trains the distributions at 1e-1 and the network at 5 or 10 times the backbone's rate:
    ``optim.lr_multipliers`` has "loss" for all of them and "network" for the network alone.

    Source: Lim et al., Hypergraph-Induced Semantic Tuplet Loss for Deep Metric Learning, CVPR 2022, eqs. 2 to 9;
    ljin0429/HIST e7d650c8, code/hist.py.
    """

    has_proxies = True
    compares_images = True  # by its hypergraph and batch norm

    def __init__(
        self, num_classes: int, embedding_size: int, *, scale: float = 32.0, alpha: float = 0.9,
        hidden_size: int = 512, tuplet_weight: float = 1.0,
    ) -> None:  # fmt: skip
        super().__init__()
        check_at_least(2, num_classes=num_classes)
        check_at_least(1, embedding_size=embedding_size, hidden_size=hidden_size)
        check_positive(scale=scale, alpha=alpha)
        check_at_least(0, tuplet_weight=tuplet_weight)
        self.num_classes = num_classes
        self.scale = scale
        self.alpha = alpha
        self.tuplet_weight = tuplet_weight
        self.means = nn.Parameter(torch.empty(num_classes, embedding_size))
        self.log_variances = nn.Parameter(torch.empty(num_classes, embedding_size))
        init_class_vectors(self.means, "he_normal")
        init_class_vectors(self.log_variances, "he_normal")
        self.network = HypergraphNetwork(embedding_size, hidden_size, num_classes)

    def of_batch(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        distances = self.mahalanobis(F.normalize(embeddings))  # [B, C]
        distribution = F.cross_entropy(-self.scale * distances, labels)
        if not self.tuplet_weight:
            return distribution
        same = labels[:, None] == labels
        incidence = torch.where(same, 1.0, torch.exp(-self.alpha * distances[:, labels]))  # [B, B]
        # an edge per row, of which each of a class's n rows has 1 / n: one edge per class, in shapes that never change
        logits = self.network(embeddings, incidence, same.sum(0).to(incidence.dtype).reciprocal())
        return distribution + self.tuplet_weight * F.cross_entropy(logits, labels)

    def mahalanobis(self, x: Tensor) -> Tensor:
        """Squared Mahalanobis distances [B, C] of rows [B, D] to all distributions, with products only."""
        means = F.normalize(self.means)
        precision = torch.exp(-F.relu6(self.log_variances))
        weighted = means * precision
        return x.square() @ precision.T - 2 * x @ weighted.T + (means * weighted).sum(1)


class HypergraphNetwork(nn.Module):
    """Two layers of a hypergraph neural network (Feng et al., AAAI 2019) with batch norm between them."""

    def __init__(self, in_features: int, hidden_size: int, out_features: int) -> None:
        super().__init__()
        self.first = nn.Linear(in_features, hidden_size)
        self.batch_norm = nn.BatchNorm1d(hidden_size)
        self.second = nn.Linear(hidden_size, out_features)

    def forward(self, nodes: Tensor, incidence: Tensor, edge_weights: Tensor) -> Tensor:
        """Outputs [B, O] of nodes [B, D], incidence H [B, E] and weights [E] of the edges."""
        scaled = incidence * (incidence @ edge_weights).rsqrt()[:, None]  # Dv^-1/2 H
        spread = (scaled * (edge_weights / incidence.sum(0))) @ scaled.T  # G [B, B]
        hidden = F.leaky_relu(self.batch_norm(spread @ self.first(nodes)), 0.1)
        return spread @ self.second(hidden)
