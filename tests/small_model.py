"""A model small enough for float64 and loops: a convolution, the layers that are asked for, a pooling, a projection."""

from typing import Any

from torch import Tensor, nn

from dmlbench.models.pooling.base import Pooled
from dmlbench.models.projection import Projection
from dmlbench.types import ModelOutput


class CountedBatches:
    """What a sampler's state is for: the number of the last batch."""

    step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


class SmallModel(nn.Module):
    """Images [B, 3, 6, 6] to embeddings [B, 4] in whatever type its parameters have."""

    def __init__(self, pooling: nn.Module, *layers: nn.Module) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Tanh(), *layers)
        self.pooling = pooling
        self.projection = Projection(6, 4)

    def forward(self, images: Tensor) -> ModelOutput:
        pooled = self.pooling(self.backbone(images), self.projection)
        return ModelOutput(pooled.embedding, pooled.side)

    @property
    def observer(self) -> nn.Module:
        return self.pooling

    def observe(self, output: ModelOutput, *, step: int) -> None:
        self.pooling.observe(Pooled(output.embedding, output.side), step=step)
