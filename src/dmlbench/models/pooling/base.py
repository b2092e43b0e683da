"""What a pooling is: the contract that every module of this folder fulfils."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torch import Tensor, nn

from dmlbench.models.projection import Projection


@dataclass(frozen=True)
class Pooled:
    """What a pooling returns: embedding [B, D], not normalized, and named side outputs (see ``types.ModelOutput``)."""

    embedding: Tensor
    side: dict[str, Tensor] = field(default_factory=dict)


class Pooling(nn.Module):
    """Map [B, C, H, W] to embedding [B, D]; subclasses implement ``forward``.

    The projection C to D is passed in, because some poolings project first and pool then, others pool first.
    ``forward`` changes no state: what has to change between training steps changes in ``observe``, which the training
    loop calls after the model's forward and before the loss. Whatever affects a later step is a parameter or a buffer,
    so that a run continues exactly from its ``state_dict``.

    Attributes:
        provides: names of the side outputs that ``forward`` gives once the pooling has started; regularizers that
            require a name can be checked against it before a run.
        needs: "map", or "native" for a pooling that takes what the backbone's own pooling returns, as a 1 x 1 map.
    """

    provides: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[Literal["map", "native"]] = "map"

    def forward(self, x: Tensor, project: Projection) -> Pooled:
        """Pool a map.

        Args:
            x: [B, C, H, W], of any memory format and floating-point type.
            project: takes [B, C] as well as [B, C, H, W].
        """
        raise NotImplementedError

    def observe(self, pooled: Pooled, *, step: int) -> None:
        """Take note of a training batch; most poolings have nothing to note.

        Args:
            pooled: what ``forward`` returned for the batch.
            step: number of the training step under way, counted from 1.
        """

    def contributions(self, x: Tensor, project: Projection) -> Tensor | None:
        """How much each location counts in the embedding, to look at: [B, H, W], rows sum to 1; None where unknown.

        Args as for ``forward``. By default the side output "weights".
        """
        return self(x, project).side.get("weights")

    def nearest_prototypes(self, x: Tensor, project: Projection) -> Tensor | None:
        """Index of the prototype that dominates at each location, [B, H, W]; None for poolings without prototypes."""
        return None

    @property
    def started(self) -> bool:
        """False as long as the pooling works in a provisional way and its side outputs may be missing."""
        return True

    def input_width(self, embedding_size: int) -> int:
        """Dimensions that the pooling wants of the projection for embeddings of ``embedding_size``."""
        return embedding_size

    def output_width(self, projected_size: int) -> int:
        """Dimensions of the embedding for a projection to ``projected_size``."""
        return projected_size
