"""DiVA's head: a linear layer whose output consists of weighted unit vectors."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from dmlbench.models.projection import Init, Projection
from dmlbench.types import ConfigError


class UnitParts(Projection):
    """[w_1 p_1 / |p_1|, ..., w_P p_P / |p_P|] of the pooled embedding [p_1, ..., p_P], parts of one size.

    The cosine of two images is the mean of their parts' cosines, weighted by w^2.

    Source: Milbich et al., DiVA, ECCV 2020: linear layers over the same features, concatenated at test time.
    """

    weights: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        weights: Sequence[float] = (1.0, 1.0, 1.0, 1.0),
        bias: bool = False,
        init: Init = "glorot_uniform",
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, init=init)
        if not weights or not min(weights) > 0:
            raise ConfigError(f"head.weights: got {list(weights)}, expected one positive number for each part.")
        self.register_buffer("weights", torch.tensor(weights, dtype=torch.float32), persistent=False)

    def finished(self, embedding: Tensor) -> Tensor:
        parts = normalize(embedding.unflatten(1, (self.weights.shape[0], -1)), dim=2)  # [B, P, D / P]
        return (parts * self.weights[:, None]).flatten(1)

    def check_embedding_size(self, size: int) -> None:
        if size % len(self.weights):
            raise ConfigError(
                f"head.out_features: got embeddings of {size} dimensions, expected a multiple of {len(self.weights)}."
            )
