"""The signal-to-noise ratio of two embeddings, finite where an embedding has no variance."""

from pytorch_metric_learning.distances import SNRDistance
from torch import Tensor

_LEAST_VARIANCE = 1e-12


class SnrDistance(SNRDistance):
    """Variance of the difference over the anchor's variance, which counts as at least 1e-12.

    Source: Yuan et al., Signal-to-Noise Ratio: A Robust Distance Metric for Deep Metric Learning, CVPR 2019, eq. 5;
    otherwise as PML's SNRDistance, which divides by 0.
    """

    def __init__(self, *, normalize_embeddings: bool = True) -> None:
        super().__init__(normalize_embeddings=normalize_embeddings)

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        noise = (query_emb[:, None] - ref_emb[None]).var(dim=2)
        return noise / query_emb.var(dim=1).clamp(min=_LEAST_VARIANCE)[:, None]

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        return (query_emb - ref_emb).var(dim=1) / query_emb.var(dim=1).clamp(min=_LEAST_VARIANCE)
