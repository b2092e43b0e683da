"""LIBC: images of a batch exchange messages by attention."""

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, normalize

from dmlbench.losses.base import WholeBatchLoss
from dmlbench.losses.initialization import init_class_vectors
from dmlbench.types import ConfigError, check_at_least, check_positive, check_share


class Libc(WholeBatchLoss):
    """Cross entropy of the classes from embeddings, and from embeddings that the whole batch has refined.

    With x the embeddings as they come, h the rows U x / |x| + u, and in each of L layers
    g = norm(h + M(h)), h' = norm(g + W_2 relu(W_1 g)), norm a layer norm, M multi-head attention between all images:
    loss = backbone_weight * CE((A x + b) / temperature) + refined_weight * CE(B batch_norm(h_L) / temperature),
    means over the batch with smoothed labels. A head on d = D / num_heads dimensions gives image i
    sum over j of a_ij v_j with a_ij = exp s_ij / (1 + sum over k of exp s_ik), s_ij = q_i.k_j / sqrt(d).

    The 1 is the public code's; a softmax has none. Models are tested without this loss; batch norm has no statistics.

    Source: Seidenschwarz et al. 2021; dvl-tum/intra_batch a1ae3de8, net/gnn_base.py, net/attentions.py,
    net/utils.py, trainer.py.
    """

    has_proxies = True

    def __init__(
        self,
        num_classes: int,
        embedding_size: int,
        *,
        num_layers: int = 1,
        num_heads: int = 2,
        concatenate_layers: bool = False,
        dropout: float = 0.1,
        temperature: float = 0.2,
        label_smoothing: float = 0.1,
        backbone_weight: float = 1.0,
        refined_weight: float = 1.0,
        init: str = "kaiming_uniform_a5",
    ) -> None:
        super().__init__()
        check_at_least(1, num_layers=num_layers, num_heads=num_heads)
        check_share(dropout=dropout, label_smoothing=label_smoothing)
        check_positive(temperature=temperature)
        check_at_least(0, backbone_weight=backbone_weight, refined_weight=refined_weight)
        if not backbone_weight + refined_weight:
            raise ConfigError("backbone_weight, refined_weight: got 0 for both, expected one above 0.")
        if embedding_size % num_heads:
            raise ConfigError(f"num_heads: got {num_heads}, expected a divisor of the embedding size {embedding_size}.")
        self.num_classes = num_classes
        self.concatenate_layers = concatenate_layers
        self.temperature = temperature
        self.label_smoothing = label_smoothing
        self.backbone_weight = backbone_weight
        self.refined_weight = refined_weight
        self.classifier = nn.Linear(embedding_size, num_classes)
        if init != "kaiming_uniform_a5":  # which it has
            init_class_vectors(self.classifier.weight, init)
            nn.init.zeros_(self.classifier.bias)
        self.enter = nn.Linear(embedding_size, embedding_size)
        self.layers = nn.ModuleList(_layer(embedding_size, num_heads, dropout) for _ in range(num_layers))
        width = embedding_size * (num_layers if concatenate_layers else 1)
        self.norm = nn.BatchNorm1d(width, track_running_stats=False)
        self.norm.bias.requires_grad_(False)  # stays 0
        self.refined_classifier = nn.Linear(width, num_classes, bias=False)
        nn.init.normal_(self.refined_classifier.weight, std=0.001)

    def of_batch(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        parts = []
        if self.backbone_weight:
            parts.append(self.backbone_weight * self._cross_entropy(self.classifier(embeddings), labels))
        if self.refined_weight:
            refined = self.refined_classifier(self.norm(self._refined(embeddings)))
            parts.append(self.refined_weight * self._cross_entropy(refined, labels))
        return torch.stack(parts).sum()

    def _refined(self, embeddings: Tensor) -> Tensor:
        """[B, D], or [B, L D] of all layers."""
        if embeddings.shape[0] < 2:
            raise ConfigError("LIBC: got a batch of 1 image, expected at least 2 for batch norm. Raise the batch size.")
        hidden = [self.enter(normalize(embeddings))]
        # Plain products: a fused kernel's gradients may add up in another order each time.
        with sdpa_kernel(SDPBackend.MATH):
            for layer in self.layers:
                hidden.append(layer(hidden[-1]))
        return torch.cat(hidden[1:], dim=1) if self.concatenate_layers else hidden[-1]

    def _cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(logits / self.temperature, labels, label_smoothing=self.label_smoothing)


def _layer(width: int, num_heads: int, dropout: float) -> nn.TransformerEncoderLayer:
    """Torch's encoder layer, its norms behind the sums, with the 1 in its attention and the public code's start."""
    layer = nn.TransformerEncoderLayer(width, num_heads, dim_feedforward=4 * width, dropout=dropout)
    attention = nn.MultiheadAttention(width, num_heads, dropout=dropout, add_zero_attn=True)  # a key and value of zeros
    for weight in (*attention.in_proj_weight.data.chunk(3), attention.out_proj.weight):
        nn.init.xavier_uniform_(weight)  # queries, keys and values each by itself; biases are 0
    layer.self_attn = attention
    return layer
