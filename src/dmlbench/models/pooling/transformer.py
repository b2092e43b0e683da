"""Transformer pooling: a class token that attends to the pixels in every encoder layer."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dmlbench.models.pooling.attention_pool import LAYER_NORM_EPSILON, attend, check_heads, mean_weights
from dmlbench.models.pooling.base import Pooled, WeightedPooling, project_pixels, start_glorot
from dmlbench.models.projection import Projection
from dmlbench.types import ConfigError, check_at_least

_WAVELENGTHS = 10_000.0  # Vaswani et al. 2017, section 3.5


def sine_positions(height: int, width: int, features: int, *, device: torch.device | None = None) -> Tensor:
    """Sine and cosine positions [height width, features]: the row in the first half of the features, then the column.

    Pixel i has sin(i w_k) in the first quarter and cos(i w_k) in the second, w_k = 10000^(-k / (features / 4)).

    Source: Vaswani et al. 2017, section 3.5, for two axes as in Beyer et al., Better plain ViT baselines for
    ImageNet-1k, 2022.
    """
    if features % 4:
        raise ConfigError(f"width of sine positions: got {features}, expected a multiple of 4.")
    steps = torch.arange(features // 4, dtype=torch.float64, device=device)
    frequencies = _WAVELENGTHS ** (-4.0 * steps / features)
    halves = []
    for length in (height, width):
        angles = torch.arange(length, dtype=torch.float64, device=device)[:, None] * frequencies
        halves.append(torch.cat([angles.sin(), angles.cos()], dim=1))  # [length, features / 2]
    rows = halves[0][:, None].expand(-1, width, -1)
    columns = halves[1][None].expand(height, -1, -1)
    return torch.cat([rows, columns], dim=2).flatten(0, 1)


class EncoderLayer(nn.Module):
    """z' = z + W_o attention(norm(z)), z'' = z' + W_2 gelu(W_1 norm(z')), for the first tokens or for all.

    Source: Dosovitskiy et al., An Image is Worth 16x16 Words, 2021, equations 2 and 3.
    """

    def __init__(self, width: int, *, num_heads: int, mlp_ratio: float) -> None:
        super().__init__()
        hidden = round(width * mlp_ratio)
        self.num_heads = num_heads
        self.norm_attention = nn.LayerNorm(width, eps=LAYER_NORM_EPSILON)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width, eps=LAYER_NORM_EPSILON)
        self.expand = nn.Linear(width, hidden)
        self.contract = nn.Linear(hidden, width)
        start_glorot(self)

    def forward(self, tokens: Tensor, *, first: int | None = None) -> tuple[Tensor, Tensor]:
        """Update the first of the tokens [B, N, width], which attend to all; also returns log attention."""
        normed = self.norm_attention(tokens)
        query, key, value = self.query(normed[:, :first]), self.key(normed), self.value(normed)
        attended, log_weights = attend(query, key, value, num_heads=self.num_heads)
        renewed = tokens[:, :first] + self.out(attended)
        return renewed + self.contract(F.gelu(self.expand(self.norm_mlp(renewed)))), log_weights


class Transformer(WeightedPooling):
    """norm(z_L) of the class token, after L encoder layers over [class token; project(x)_1, ..., project(x)_HW].

    The GSP study replaces GAP by 1, 2, 4 or 8 layers of ViT with a class token, without details or public code. Here,
    pixels are projected first, as by GAP and GSP, so that the layers work on D dimensions (or on ``width``, followed by
    a linear layer to D without bias). As in ViT, norms come before attention and feed-forward part and at the end, with
    GELU; unlike ViT, no dropout and no position encoding but with ``position=sine``.

    In float32, also under autocast. Side output: "weights" [B, H, W], the class token's attention to the pixels in the
    last layer, averaged over heads and scaled to sum 1.

    Source: Gürbüz, Şener & Alatan, Generalized Sum Pooling for Metric Learning, ICCV 2023, supplement 1.3 (TFM-1 to
    TFM-8); Dosovitskiy et al., An Image is Worth 16x16 Words, 2021, equations 1 to 4.
    """

    averages_pixels = False

    def __init__(
        self,
        embedding_size: int,
        *,
        num_layers: int = 1,
        num_heads: int = 2,
        width: int | None = None,
        mlp_ratio: float = 4.0,
        position: Literal["none", "sine"] = "none",
    ) -> None:
        super().__init__()
        width = embedding_size if width is None else width
        check_at_least(1, num_layers=num_layers, hidden_width=mlp_ratio * width)
        check_heads(width, num_heads)
        if position == "sine":
            sine_positions(1, 1, width)
        self.embedding_size = embedding_size
        self.width = width
        self.position = position
        self.class_token = nn.Parameter(torch.empty(width))
        nn.init.trunc_normal_(self.class_token, std=0.02)
        layers = (EncoderLayer(width, num_heads=num_heads, mlp_ratio=mlp_ratio) for _ in range(num_layers))
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(width, eps=LAYER_NORM_EPSILON)
        self.head = None if width == embedding_size else nn.Linear(width, embedding_size, bias=False)
        if self.head is not None:
            nn.init.xavier_uniform_(self.head.weight)

    def forward(self, x: Tensor, project: Projection) -> Pooled:
        pixels = project_pixels(x, project, self.width)  # [B, HW, width]
        height, width = x.shape[2:]
        with torch.autocast(x.device.type, enabled=False):
            if self.position == "sine":
                pixels = pixels + sine_positions(height, width, self.width, device=x.device).to(pixels.dtype)
            tokens = torch.cat([self.class_token.expand(x.shape[0], 1, -1), pixels], dim=1)  # [B, 1 + HW, width]
            for layer in self.layers[:-1]:
                tokens, _ = layer(tokens)
            last, log_weights = self.layers[-1](tokens, first=1)
            pooled = self.norm(last[:, 0])
            if self.head is not None:
                pooled = self.head(pooled)
            weights = mean_weights(log_weights, height=height, width=width)
        return Pooled(pooled, {"weights": weights})

    def input_width(self, embedding_size: int) -> int:
        return self.width

    def output_width(self, projected_size: int) -> int:
        return self.embedding_size
