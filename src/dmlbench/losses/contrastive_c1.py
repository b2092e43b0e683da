"""C1, the contrastive loss on cosines that cross-batch memory was published with."""

from collections.abc import Callable

import torch
from pytorch_metric_learning.utils.loss_and_miner_utils import convert_to_pairs
from torch import Tensor, nn
from torch.nn.functional import normalize

from dmlbench.types import ConfigError, check_share

COLUMNS = 4096  # references at a time on a CPU, so that they and their cosines stay in its cache from pass to pass


class ContrastiveC1(nn.Module):
    """Pull all pairs of a class together and push apart pairs of two classes that are more similar than a margin.

    With s the cosine of a pair, B the batch, m ``neg_margin``, t ``tolerance`` and (i, j) ordered pairs:
    loss = 1/B (sum over positives with s < 1 - t of (1 - s) + sum over negatives with s > m of s).
    It jumps where a pair becomes active. With ``subtract_margins`` the terms are (1 - t - s) and (s - m): continuous,
    with the same gradient. t keeps an image from being paired with itself where pairs are not told by index.

    Without any pairs the loss is 0 with a gradient of 0. A row of zeros has the cosine 0 with all.

    Source: public code of XBM (Wang et al. 2020), msight-tech/research-xbm 223ecdc2, losses/contrastive_loss.py; with
    ``subtract_margins`` that of the GSP study (its supplement 1.6.7 calls both C1).
    """

    def __init__(self, neg_margin: float = 0.5, *, tolerance: float = 1e-5, subtract_margins: bool = False) -> None:
        super().__init__()
        if not -1 <= neg_margin < 1:
            raise ConfigError(f"neg_margin: got {neg_margin}, expected a cosine in [-1, 1).")
        check_share(tolerance=tolerance)
        self.neg_margin = neg_margin
        self.tolerance = tolerance
        self.subtract_margins = subtract_margins

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: tuple[Tensor, ...] | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Tensor:
        rows = normalize(embeddings)
        references = rows if ref_emb is None else normalize(ref_emb)
        if indices_tuple is not None:
            anchor, positive, other, negative = convert_to_pairs(indices_tuple, labels, ref_labels)
            s = rows @ references.T
            near, far = s[anchor, positive], s[other, negative]
            pulled, pushed = near < 1 - self.tolerance, far > self.neg_margin
            total = (far * pushed).sum() - (near * pulled).sum()
            return (total + self._constant(pulled, pushed)) / len(rows)
        same = labels[:, None] == (labels if ref_labels is None else ref_labels)[None, :]  # [B, R]
        different = ~same
        if ref_emb is None:
            same.fill_diagonal_(False)
        return self.of_masks(rows, references, same, different)

    def of_masks(self, rows: Tensor, references: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        """The loss of unit rows [B, D] and [R, D] and masks of pairs [B, R], for which nothing waits for the device."""
        # The loss is linear in s while the same pairs are active, with a slope of -1, 0 or 1. The sum of slope * s over
        # all pairs, taken this way round, leaves nothing of size [B, R] for the backward pass.
        if len(references) <= COLUMNS or rows.device.type != "cpu":
            pull, constant = self._sums(rows, references, positive, negative)
        else:
            masks = (mask.split(COLUMNS, dim=1) for mask in (positive, negative))
            parts = zip(references.split(COLUMNS), *masks, strict=True)
            pulls, constants = zip(*(self._sums(rows, *part) for part in parts), strict=True)
            pull, constant = sum(pulls[1:], pulls[0]), sum(constants[1:], constants[0])
        return ((pull * rows).sum() + constant) / len(rows)

    def _sums(self, rows: Tensor, references: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        """Sum of slope * reference over the active pairs of each row [B, D], and what else they add to the loss."""
        with torch.no_grad():
            s = rows @ references.T  # [B, R]
            near = _as_bytes(torch.lt, s, 1 - self.tolerance).bitwise_and_(positive.view(torch.int8))
            far = _as_bytes(torch.gt, s, self.neg_margin).bitwise_and_(negative.view(torch.int8))
            slope = (far - near).to(s.dtype)
        return slope @ references, self._constant(near, far)

    def _constant(self, positive: Tensor, negative: Tensor) -> Tensor:
        """What the active pairs add to the sum of slope * s."""
        num_positive = positive.count_nonzero()
        if self.subtract_margins:
            return num_positive * (1 - self.tolerance) - negative.count_nonzero() * self.neg_margin
        return num_positive


def _as_bytes(compare: Callable[..., Tensor], s: Tensor, bound: float) -> Tensor:
    """The comparison as int8 zeros and ones, which a CPU makes and turns into floats several times faster than bool."""
    return compare(s, bound, out=torch.empty_like(s, dtype=torch.int8))
