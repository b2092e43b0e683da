"""Distances in losses and miners, which must not register the parameters of the model's distance as their own."""

from typing import TYPE_CHECKING, Any

from pytorch_metric_learning.distances import BaseDistance
from torch import Tensor

if TYPE_CHECKING:
    from dmlbench.models.avsl_distance import AvslDistance


class BorrowedDistance(BaseDistance):
    """The distance of a model."""

    def __init__(self, owner: Any) -> None:
        super().__init__(
            normalize_embeddings=owner.normalize_embeddings,
            p=owner.p,
            power=owner.power,
            is_inverted=owner.is_inverted,
        )
        self.owner = (owner,)  # in a tuple, which registers no parameters

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        matrix: Tensor = self.owner[0].compute_mat(query_emb, ref_emb)
        return matrix

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        pairs: Tensor = self.owner[0].pairwise_distance(query_emb, ref_emb)
        return pairs


class LevelDistance(BorrowedDistance):
    """Squared Euclidean distance of one level's part of AVSL's rows, 0 being the lowest."""

    def __init__(self, owner: "AvslDistance", index: int) -> None:
        super().__init__(owner)
        self._index = index

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        x, y = self._embeddings(query_emb), self._embeddings(ref_emb)
        squares = x.square().sum(1)[:, None] + y.square().sum(1)[None]
        return (squares - 2 * x @ y.T).clamp(min=0)

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        return (self._embeddings(query_emb) - self._embeddings(ref_emb)).square().sum(1)

    def _embeddings(self, rows: Tensor) -> Tensor:
        embeddings: Tensor = self.owner[0].levels(rows)[0][:, self._index]
        return embeddings


class InferredDistance(BorrowedDistance):
    """AVSL's distance of detached nodes: gradients reach alpha, beta and certainties alone."""

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        return self.pairwise_distance(query_emb[:, None], ref_emb[None])

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        distances: Tensor = self.owner[0].compute(query_emb, ref_emb, detach=True)
        return distances
