"""The interface of heads, and the linear head: from a backbone's channels to the embedding's dimensions."""

from typing import ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from pytorch_metric_learning.distances import BaseDistance, LpDistance
from torch import Tensor, nn

from dmlbench.models.closed_form import ClosedForm, Moments, closed_form
from dmlbench.types import ConfigError, check_at_least, check_choice

Init = Literal["glorot_uniform", "kaiming_uniform_a5", "he_normal_fan_out", "orthogonal", "identity"] | ClosedForm


class Head(nn.Module):
    """From a backbone's maps to embeddings and their distance; ``conf/head`` names subclasses.

    A constructor gets those of these arguments that it has:
        in_features: channels of the pooling's input, mostly the last map.
        in_channels: channels of every map, low to high.
        map_sizes: height and width of every map.
        out_features: dimensions that the pooling wants of a projection for the configured embedding.

    A head of several levels has ``num_levels`` among its arguments.
    """

    pools: ClassVar[bool] = False  # without a ``Pooling``

    def make_distance(self) -> BaseDistance:
        """Euclidean distance of unit vectors, unless a head has its own."""
        return LpDistance(normalize_embeddings=True, p=2, power=1)


class Projection(Head):
    """y = W norm(x) + b, per row of [B, C] or per pixel of [B, C, H, W].

    The optional norms (layer norm, L2 norm) have no parameters. Rows are divided by their L2 norm, pixels by that of
    the image's average pixel: the average of projected pixels is then the projection of the pooled, normalized map.
    The product is taken in float32, also under autocast: embeddings rounded to bfloat16 would move retrieval scores.

    Source: GSP code (glorot_uniform, no bias); Teh et al., ProxyNCA++, 2020, section 3.5 (layer norm).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | None,
        *,
        bias: bool | None = None,
        layer_norm: bool = False,
        normalize: bool | None = None,
        init: Init = "glorot_uniform",
        shrinkage: float = 1e-3,
    ) -> None:
        """
        Args:
            out_features: D; None: C.
            bias: None: with closed forms, whose bias subtracts the mean.
            layer_norm: subtract the mean over channels and divide by their standard deviation first.
            normalize: divide rows by their L2 norm, pixels by that of the average pixel; None: with closed forms.
            init: ``glorot_uniform``: W uniform in +-sqrt(6 / (C + D)), b at 0; ``kaiming_uniform_a5``: both uniform in
                +-1 / sqrt(C), as ``torch.nn.Linear`` starts; ``he_normal_fan_out``: W from N(0, 2 / D), b at 0;
                ``orthogonal``: W with orthonormal rows or columns, b at 0; ``identity``: W = I; ``pca``, ``lda``,
                ``learned_whitening``: fitted to the training images before the first step, see ``closed_form``.
            shrinkage: added to the diagonal of the within-class covariance (lda, learned_whitening).
        """
        super().__init__()
        check_choice("init", init, [*get_args(get_args(Init)[0]), *get_args(ClosedForm)])
        out_features = in_features if out_features is None else out_features
        check_at_least(1, in_features=in_features, out_features=out_features)
        check_at_least(0, shrinkage=shrinkage)
        self.closed_form = next((form for form in get_args(ClosedForm) if form == init), None)
        if self.closed_form is not None and bias is False:
            raise ConfigError(f"head.bias: got false with init={init}, expected true. The bias subtracts the mean.")
        self.in_features = in_features
        self.out_features = out_features
        self.layer_norm = layer_norm
        self.normalize = self.closed_form is not None if normalize is None else normalize
        self.shrinkage = shrinkage
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        has_bias = self.closed_form is not None if bias is None else bias
        self.bias = nn.Parameter(torch.zeros(out_features)) if has_bias else None
        if init == "glorot_uniform" or self.closed_form is not None:
            nn.init.xavier_uniform_(self.weight)
        elif init == "identity":
            nn.init.eye_(self.weight)
        elif init == "he_normal_fan_out":
            nn.init.kaiming_normal_(self.weight, mode="fan_out")
        elif init == "orthogonal":
            nn.init.orthogonal_(self.weight)
        else:
            for parameter in self.parameters():
                nn.init.uniform_(parameter, -(in_features**-0.5), in_features**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C] to [B, D], or [B, C, H, W] to [B, D, H, W] (channels last in memory)."""
        if x.ndim not in (2, 4) or x.shape[1] != self.in_features:
            raise ConfigError(f"projection: got a map of {tuple(x.shape)}, expected {self.in_features} channels.")
        rows = x if x.ndim == 2 else x.permute(0, 2, 3, 1)  # [B, H, W, C]
        with torch.autocast(x.device.type, enabled=False):
            rows = self.normalized(rows.to(self.weight.dtype))
            projected = F.linear(rows, self.weight, self.bias)
        return projected if x.ndim == 2 else projected.permute(0, 3, 1, 2)

    def normalized(self, rows: Tensor) -> Tensor:
        """The rows [B, C] or pixels [B, ..., C] that W multiplies."""
        if self.layer_norm:
            rows = F.layer_norm(rows, (self.in_features,))
        if not self.normalize:
            return rows
        average = rows.flatten(1, -2).mean(dim=1) if rows.ndim > 2 else rows
        norms = average.norm(dim=1).clamp_min(1e-12)
        return rows / norms.view(-1, *[1] * (rows.ndim - 1))

    def check_closed_form(self, num_classes: int) -> None:
        """Raise ConfigError if the closed form has fewer than ``out_features`` dimensions."""
        most, reason = self.in_features, ""
        if self.closed_form == "lda" and num_classes - 1 < most:
            most, reason = num_classes - 1, ", the number of training classes minus one"
        if self.out_features > most:
            size, form = self.out_features, self.closed_form
            raise ConfigError(f"head.out_features: got {size} for {form}, expected at most {most}{reason}.")

    @torch.no_grad()
    def fit(self, moments: Moments) -> None:
        """Take weight and bias of the closed form."""
        assert self.closed_form and self.bias is not None
        self.check_closed_form(moments.num_classes)
        weight, bias = closed_form(moments, self.closed_form, self.out_features, self.shrinkage)
        self.weight.copy_(weight)
        self.bias.copy_(bias)

    def finished(self, embedding: Tensor) -> Tensor:
        """The embedding [B, D] of a pooled and projected image; heads override this."""
        return embedding

    def check_embedding_size(self, size: int) -> None:
        """Raise ConfigError if the head cannot make embeddings of this size."""


class LayerNormalizedProjection(Projection):
    """A linear head whose output has zero mean and unit variance over its dimensions (layer norm without weights).

    Source: Lim et al., HIST, CVPR 2022; ljin0429/HIST e7d650c8, code/net/resnet.py.
    """

    def finished(self, embedding: Tensor) -> Tensor:
        return F.layer_norm(embedding, embedding.shape[1:])
