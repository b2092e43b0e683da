"""The interface of poolings."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torch import Tensor, nn

from dmlbench.models.projection import Projection


@dataclass(frozen=True)
class Pooled:
    """Embedding [B, D], not normalized, and named side outputs (see ``types.ModelOutput``)."""

    embedding: Tensor
    side: dict[str, Tensor] = field(default_factory=dict)


class Pooling(nn.Module):
    """Map [B, C, H, W] to embedding [B, D]; subclasses implement ``forward``.

    The projection C to D is an argument, because poolings project before or after they pool. Training calls
    ``observe``, which alone changes state, between the forward pass and the loss.

    Attributes:
        provides: names of the side outputs that ``forward`` gives once the pooling has started.
        needs: "native" for a pooling of the backbone's own vector, given as a 1 x 1 map.
    """

    provides: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[Literal["map", "native"]] = "map"

    def forward(self, x: Tensor, project: Projection) -> Pooled:
        """Pool x [B, C, H, W], of any memory format and floating-point type."""
        raise NotImplementedError

    def observe(self, pooled: Pooled, *, step: int) -> None:
        """Update state by the output for a training batch; ``step`` counts from 1."""

    def contributions(self, x: Tensor, project: Projection) -> Tensor | None:
        """Share of each location in the embedding, [B, H, W], rows sum to 1; None where unknown."""
        return self(x, project).side.get("weights")

    def nearest_prototypes(self, x: Tensor, project: Projection) -> Tensor | None:
        """Index of the prototype that dominates at each location, [B, H, W]; None before the start or without any."""
        return None

    @property
    def started(self) -> bool:
        """False while the pooling works provisionally, maybe without its side outputs."""
        return True

    def input_width(self, embedding_size: int) -> int:
        """Dimensions that the pooling wants of the projection for embeddings of ``embedding_size``."""
        return embedding_size

    def output_width(self, projected_size: int) -> int:
        """Dimensions of the embedding for a projection to ``projected_size``."""
        return projected_size
