"""AVSL's distance as losses and miners hold it, without registering the owner's parameters."""

from pytorch_metric_learning.distances import BaseDistance
from torch import Tensor

from dmlbench.models.avsl_formula import AvslFormula
from dmlbench.types import ConfigError


class LevelDistance(BaseDistance):
    """Squared Euclidean distance of one level's part of AVSL's rows, 0 being the lowest."""

    def __init__(self, owner: AvslFormula, index: int) -> None:
        super().__init__(normalize_embeddings=False, p=2, power=1)
        if not 0 <= index < owner.num_levels:
            raise ConfigError(f"level: got {index}, expected 0 to {owner.num_levels - 1}.")
        self._owner = (owner,)  # in a tuple, which registers no parameters
        self._index = index

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        x, y = (self._owner[0].levels(rows)[0][:, self._index] for rows in (query_emb, ref_emb))
        squares = x.square().sum(1)[:, None] + y.square().sum(1)[None]
        return (squares - 2 * x @ y.T).clamp(min=0)

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        x, y = (self._owner[0].levels(rows)[0][:, self._index] for rows in (query_emb, ref_emb))
        return (x - y).square().sum(1)


class InferredDistance(BaseDistance):
    """AVSL's distance of detached nodes: gradients reach alpha, beta and certainties alone."""

    def __init__(self, owner: AvslFormula) -> None:
        super().__init__(normalize_embeddings=False, p=2, power=1)
        self._owner = (owner,)

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        return self._owner[0].compute(query_emb[:, None], ref_emb[None], detach=True)

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        return self._owner[0].compute(query_emb, ref_emb, detach=True)


class BorrowedDistance(BaseDistance):
    """A model's distance in a loss or a miner."""

    def __init__(self, owner: BaseDistance) -> None:
        super().__init__(
            normalize_embeddings=owner.normalize_embeddings,
            p=owner.p,
            power=owner.power,
            is_inverted=owner.is_inverted,
        )
        self.owner = (owner,)

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        return self.owner[0].compute_mat(query_emb, ref_emb)

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        return self.owner[0].pairwise_distance(query_emb, ref_emb)
