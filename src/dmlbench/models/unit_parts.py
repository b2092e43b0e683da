"""A linear head whose output is cut into parts that are unit vectors, each with a weight of its own (DiVA)."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from dmlbench.models.projection import Projection
from dmlbench.types import ConfigError


class UnitParts(Projection):
    """[w_1 p_1 / |p_1|, ..., w_P p_P / |p_P|] of the pooled embedding [p_1, ..., p_P], parts of one size.

    The cosine of two images is the mean of their parts' cosines, weighted by w^2. Losses of single parts, which
    normalize them, do not see the weights.

    Source: Milbich et al., DiVA, ECCV 2020: linear layers over the same features, side by side when models are tested.
    """

    weights: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        weights: Sequence[float] = (1.0, 1.0, 1.0, 1.0),
        bias: bool = False,
    ) -> None:
        """
        Args:
            in_features: C, channels of the backbone's last map.
            out_features: what the pooling wants of the projection.
            weights: w, of each part, above 0; as many as there are parts.
            bias: add one to the projection.

        Raises:
            ConfigError: a width below 1, or no parts, or a weight that is not above 0.
        """
        super().__init__(in_features, out_features, bias=bias)
        if not weights or not min(weights) > 0:
            raise ConfigError(f"weights ({list(weights)}) of the parts must be above 0, and there must be some")
        self.register_buffer("weights", torch.tensor(weights, dtype=torch.float32), persistent=False)

    def finished(self, embedding: Tensor) -> Tensor:
        parts = normalize(embedding.unflatten(1, (self.weights.shape[0], -1)), dim=2)  # [B, P, D / P]
        return (parts * self.weights[:, None]).flatten(1)

    def check_embedding_size(self, size: int) -> None:
        """
        Raises:
            ConfigError: the embedding cannot be cut into as many parts of one size.
        """
        if size % len(self.weights):
            raise ConfigError(
                f"embeddings of {size} dimensions are not {len(self.weights)} parts of one size; set "
                f"head.out_features to a multiple of {len(self.weights)}"
            )
