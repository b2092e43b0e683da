"""A head that concatenates the embeddings of several levels."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from dmlbench.models.net import LevelsHead
from dmlbench.models.pooling.base import Pooling
from dmlbench.models.projection import Projection
from dmlbench.types import ConfigError, ModelOutput


class ConcatenatedLevels(LevelsHead):
    """[u_1 | ... | u_L] of the unit embeddings u_l of the L highest maps; one pooling serves all levels."""

    def __init__(self, in_channels: Sequence[int], out_features: int, *, num_levels: int = 2) -> None:
        super().__init__()
        if not 1 <= num_levels <= len(in_channels):
            raise ConfigError(
                f"head.num_levels: got {num_levels}, expected 1 to {len(in_channels)}, the number of the backbone's "
                "maps. Use a backbone with several maps, such as resnet20_levels."
            )
        self.projections = nn.ModuleList(Projection(channels, out_features) for channels in in_channels[-num_levels:])
        self.out_features = out_features

    def forward(self, maps: Sequence[Tensor], pooling: Pooling | None) -> ModelOutput:
        assert pooling is not None
        highest = maps[-len(self.projections) :]
        pooled = [pooling(x, project) for x, project in zip(highest, self.projections, strict=True)]
        return ModelOutput(torch.cat([normalize(one.embedding) for one in pooled], 1), pooled[-1].side)

    def embedding_size(self, pooling: Pooling | None) -> int:
        assert pooling is not None
        return len(self.projections) * pooling.output_width(self.out_features)
