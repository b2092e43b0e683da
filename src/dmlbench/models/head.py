"""The interface of heads."""

from typing import ClassVar

from pytorch_metric_learning.distances import BaseDistance, LpDistance
from torch import nn


class Head(nn.Module):
    """From a backbone's maps to embeddings and their distance; ``conf/head`` names subclasses.

    A constructor gets those of these arguments that it has:
        in_features: channels of the pooling's input, mostly the last map.
        in_channels: channels of every map, low to high.
        map_sizes: height and width of every map.
        out_features: dimensions that the pooling wants of a projection for the configured embedding.

    A head of several levels has ``num_levels`` among its arguments.

    Attributes:
        pools: whether it pools without a ``Pooling``.
    """

    pools: ClassVar[bool] = False

    def make_distance(self) -> BaseDistance:
        """Euclidean distance of unit vectors, unless a head has its own."""
        return LpDistance(normalize_embeddings=True, p=2, power=1)
