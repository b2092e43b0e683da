"""The linear head: from a backbone's channels to the embedding's dimensions, for vectors and for whole maps."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dmlbench.models.head import Head
from dmlbench.types import ConfigError


class Projection(Head):
    """y = W norm(x) + b, per row of [B, C] or per pixel of [B, C, H, W]; W starts Glorot uniform, b at 0.

    The optional layer norm has no parameters and stands before the linear layer (ProxyNCA++ places it after the
    pooling). The product is always taken in float32, also under autocast: it is a small part of the work, and
    embeddings rounded to bfloat16 would move retrieval scores.

    Source: GSP code (glorot_uniform, no bias); Teh et al., ProxyNCA++, 2020, section 3.5 (layer norm).
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False, layer_norm: bool = False) -> None:
        """
        Args:
            in_features: C, channels of the backbone's last map.
            out_features: D, what the pooling wants of the projection.
            bias: add b.
            layer_norm: subtract the mean over channels and divide by their standard deviation first.

        Raises:
            ConfigError: a width below 1.
        """
        super().__init__()
        if in_features < 1 or out_features < 1:
            raise ConfigError(f"a projection from {in_features} to {out_features} features; both must be at least 1")
        self.in_features = in_features
        self.out_features = out_features
        self.layer_norm = layer_norm
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        nn.init.xavier_uniform_(self.weight)
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[B, C] to [B, D], or [B, C, H, W] to [B, D, H, W] (channels last in memory).

        Raises:
            ConfigError: x has another number of channels than ``in_features``.
        """
        if x.ndim not in (2, 4) or x.shape[1] != self.in_features:
            raise ConfigError(f"the projection takes {self.in_features} channels, but was given {tuple(x.shape)}")
        rows = x if x.ndim == 2 else x.permute(0, 2, 3, 1)  # [B, H, W, C]
        with torch.autocast(x.device.type, enabled=False):
            rows = rows.to(self.weight.dtype)
            if self.layer_norm:
                rows = F.layer_norm(rows, (self.in_features,))
            projected = F.linear(rows, self.weight, self.bias)
        return projected if x.ndim == 2 else projected.permute(0, 3, 1, 2)

    def finished(self, embedding: Tensor) -> Tensor:
        """What becomes of the pooled embedding [B, D]; a head that computes on with it overrides this."""
        return embedding

    def check_embedding_size(self, size: int) -> None:
        """Raises ConfigError if embeddings of this size do not suit the head; the linear head takes every size."""

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, layer_norm={self.layer_norm}"
