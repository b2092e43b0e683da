"""The linear head: from a backbone's channels to the embedding's dimensions."""

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dmlbench.models.head import Head
from dmlbench.types import ConfigError, check_at_least, check_choice

Init = Literal["glorot_uniform", "kaiming_uniform_a5", "he_normal_fan_out"]


class Projection(Head):
    """y = W norm(x) + b, per row of [B, C] or per pixel of [B, C, H, W].

    The optional layer norm has no parameters. The product is taken in float32, also under autocast: embeddings
    rounded to bfloat16 would move retrieval scores.

    Source: GSP code (glorot_uniform, no bias); Teh et al., ProxyNCA++, 2020, section 3.5 (layer norm).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        layer_norm: bool = False,
        init: Init = "glorot_uniform",
    ) -> None:
        """
        Args:
            layer_norm: subtract the mean over channels and divide by their standard deviation first.
            init: ``glorot_uniform``: W uniform in +-sqrt(6 / (C + D)), b at 0; ``kaiming_uniform_a5``: both uniform in
                +-1 / sqrt(C), as ``torch.nn.Linear`` starts; ``he_normal_fan_out``: W from N(0, 2 / D), b at 0.
        """
        super().__init__()
        check_choice("init", init, get_args(Init))
        check_at_least(1, in_features=in_features, out_features=out_features)
        self.in_features = in_features
        self.out_features = out_features
        self.layer_norm = layer_norm
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None
        if init == "glorot_uniform":
            nn.init.xavier_uniform_(self.weight)
        elif init == "he_normal_fan_out":
            nn.init.kaiming_normal_(self.weight, mode="fan_out")
        else:
            for parameter in self.parameters():
                nn.init.uniform_(parameter, -(in_features**-0.5), in_features**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C] to [B, D], or [B, C, H, W] to [B, D, H, W] (channels last in memory)."""
        if x.ndim not in (2, 4) or x.shape[1] != self.in_features:
            raise ConfigError(f"projection: got a map of {tuple(x.shape)}, expected {self.in_features} channels.")
        rows = x if x.ndim == 2 else x.permute(0, 2, 3, 1)  # [B, H, W, C]
        with torch.autocast(x.device.type, enabled=False):
            rows = rows.to(self.weight.dtype)
            if self.layer_norm:
                rows = F.layer_norm(rows, (self.in_features,))
            projected = F.linear(rows, self.weight, self.bias)
        return projected if x.ndim == 2 else projected.permute(0, 3, 1, 2)

    def finished(self, embedding: Tensor) -> Tensor:
        """The embedding [B, D] of a pooled and projected image; heads override this."""
        return embedding

    def check_embedding_size(self, size: int) -> None:
        """Raise ConfigError if the head cannot make embeddings of this size."""
