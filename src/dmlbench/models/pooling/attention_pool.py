"""Attention pooling: multi-head attention of learned queries to the pixels."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dmlbench.models.pooling.base import Pooled, WeightedPooling, check_width, start_glorot
from dmlbench.models.projection import Projection
from dmlbench.types import ConfigError, check_positive

Merge = Literal["concatenate", "mean"]

LAYER_NORM_EPSILON = 1e-6  # of vision transformers (public code of Dosovitskiy et al. 2021)


def check_heads(width: int, num_heads: int) -> None:
    if num_heads < 1 or width % num_heads:
        raise ConfigError(f"num_heads: got {num_heads}, expected a divisor of the width ({width}).")


def standardize(x: Tensor) -> Tensor:
    """Layer norm over the channels of [B, C, ...] without weights and bias, which callers apply to smaller tensors."""
    centered = x - x.mean(dim=1, keepdim=True)
    variance = (centered * centered).mean(dim=1, keepdim=True)  # square() takes three times as long
    return centered * (variance + LAYER_NORM_EPSILON).rsqrt()


def attend(queries: Tensor, keys: Tensor, values: Tensor, *, num_heads: int) -> tuple[Tensor, Tensor]:
    """Multi-head attention: per head h, out_qh = sum_n a_qhn v_nh with a_qh = softmax_n(q_qh . k_nh / sqrt(d)).

    Of queries [B or 1, Q, W], keys [B, N, W] and values [B, N, V], W = num_heads d, V a multiple of num_heads. Returns
    the concatenated heads [B, Q, V] and log a [B, num_heads, Q, N].

    Source: Vaswani et al., Attention Is All You Need, 2017, equation 1 and section 3.2.2.
    """
    q, k, v = (rows.unflatten(2, (num_heads, -1)).transpose(1, 2) for rows in (queries, keys, values))
    log_weights = F.log_softmax((q * q.shape[-1] ** -0.5) @ k.transpose(2, 3), dim=-1)  # [B, heads, Q, N]
    return (log_weights.exp() @ v).transpose(1, 2).flatten(2), log_weights


def mean_weights(log_weights: Tensor, *, height: int, width: int) -> Tensor:
    """Mean attention [B, H, W] of heads and queries to the last HW of N tokens, of sum 1, from log a [B, heads, Q, N].

    Logarithms stay finite where nearly all attention goes to the tokens before the pixels.
    """
    pixels = log_weights[..., -height * width :].flatten(1, 2)  # [B, heads Q, HW]
    return pixels.logsumexp(dim=1).softmax(dim=1).view(-1, height, width)


class AttentionPool(WeightedPooling):
    """Attention pooling by learned queries: u_q = multi-head attention of query q to the pixels, then the projection.

    Keys are W_k norm(x_j) and values W_v norm(x_j) + b_v, with an affine layer norm over channels; a bias of the keys
    would not change the attention. The queries are parameters without a linear layer, and the projection is the output
    layer: of the mean over queries, or to D / num_queries dimensions of each (``concatenate``).
    W_k acts on the queries, W_v and the layer norm's weights on the attended sums, not on each pixel: the same value in
    less time. The norm's bias adds the same number to all logits and leaves the attention as it is.

    In float32, also under autocast. Side output: "weights" [B, H, W], the attention averaged over heads and queries.

    Source: Lee et al., Set Transformer, 2019, section 3.2 (learned seeds; without their residual and feed-forward
    layers); Yu et al., CoCa, 2022, section 3.2 (one attention layer with learned queries as pooling).
    """

    averages_pixels = False

    def __init__(self, num_channels: int, *, num_queries: int = 1, num_heads: int = 8, merge: Merge = "mean") -> None:
        super().__init__()
        check_heads(num_channels, num_heads)
        check_positive(num_queries=num_queries)
        self.num_queries = num_queries
        self.num_heads = num_heads
        self.merge = merge
        self.queries = nn.Parameter(torch.empty(num_queries, num_channels))
        nn.init.trunc_normal_(self.queries, std=0.02)
        self.norm = nn.LayerNorm(num_channels, eps=LAYER_NORM_EPSILON)
        self.key = nn.Linear(num_channels, num_channels, bias=False)
        self.value = nn.Linear(num_channels, num_channels)
        start_glorot(self)

    def forward(self, x: Tensor, project: Projection) -> Pooled:
        check_width(x, self.key.in_features)
        with torch.autocast(x.device.type, enabled=False):
            pixels = standardize(x.to(self.queries.dtype).flatten(2)).transpose(1, 2)  # [B, HW, C]
            heads = (self.num_heads, -1)
            queries = self.queries.unflatten(1, heads) * self.num_heads**0.5  # scaled by sqrt(d), not by sqrt(C)
            directions = torch.einsum("qhd,hdc->hqc", queries, self.key.weight.unflatten(0, heads)).flatten(0, 1)
            directions = (directions * self.norm.weight)[None]
            sums, log_weights = attend(directions, pixels, pixels, num_heads=1)
            sums = sums * self.norm.weight + self.norm.bias  # [B, h Q, C]
            values = torch.einsum("bhqc,hdc->bqhd", sums.unflatten(1, heads), self.value.weight.unflatten(0, heads))
            pooled = values.flatten(2) + self.value.bias  # [B, Q, C]
            weights = mean_weights(log_weights, height=x.shape[2], width=x.shape[3])
        if self.merge == "mean":
            return Pooled(project(pooled.mean(dim=1)), {"weights": weights})
        parts = project(pooled.flatten(0, 1))  # [B Q, D / Q]
        return Pooled(parts.view(x.shape[0], -1), {"weights": weights})

    def input_width(self, embedding_size: int) -> int:
        if self.merge == "mean":
            return embedding_size
        if embedding_size % self.num_queries:
            raise ConfigError(
                f"num_queries: got {self.num_queries}, expected a divisor of the embedding size {embedding_size}."
            )
        return embedding_size // self.num_queries

    def output_width(self, projected_size: int) -> int:
        return projected_size if self.merge == "mean" else projected_size * self.num_queries
