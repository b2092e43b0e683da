"""Cross-batch metric learning (XML): prototypes fitted to some classes make embeddings for others.

Its halves of a batch without a common class, and its ridge regression, serve zero-shot regularization, too.
"""

import logging
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dmlbench.device_copies import to_device
from dmlbench.losses.base import SeededDraws
from dmlbench.losses.regularizer import DmlLoss, Regularizer
from dmlbench.types import ConfigError, IntArray, ModelOutput, check_at_least, check_positive

logger = logging.getLogger(__name__)

Halves = tuple[Tensor, Tensor]  # rows of the first and of the second half, ascending, on the CPU
HalvesBy = Literal["random", "alternate"]


class ClassSplits(SeededDraws):
    """Split batches by class.

    ``random`` shuffles the classes of a batch and cuts this order where the halves are nearest to equal numbers of
    images. ``alternate`` sorts the classes and puts every other one into the first half.
    """

    def __init__(self, num_splits: int = 1, halves: HalvesBy = "random") -> None:
        super().__init__()
        check_at_least(1, num_splits=num_splits)
        if halves == "alternate" and num_splits > 1:
            raise ConfigError(
                f"num_splits: got {num_splits}, expected 1 with halves=alternate, where all splits are the same."
            )
        self.num_splits = num_splits
        self.halves = halves
        self._has_warned = False

    def forward(self, labels: Tensor) -> list[Halves]:
        """``num_splits`` pairs of halves; none for a batch of fewer than two classes."""
        rng = self.next_generator("class splits")
        classes, class_of = np.unique(labels.cpu().numpy(), return_inverse=True)
        if len(classes) < 2:
            if not self._has_warned:
                logger.warning(
                    "a batch of %d images has a single class, so it has no class-disjoint halves: its regularizers "
                    "are 0. Raise sampler.classes_per_batch. (Logged once.)",
                    len(labels),
                )
            self._has_warned = True
            return []
        in_first = (torch.from_numpy(self._first_half(class_of, rng)) for _ in range(self.num_splits))
        return [(x.nonzero()[:, 0], (~x).nonzero()[:, 0]) for x in in_first]

    def _first_half(self, class_of: IntArray, rng: np.random.Generator) -> NDArray[np.bool_]:
        """Which rows are in the first half, given each row's class in [0, C), C > 1."""
        if self.halves == "alternate":
            return class_of % 2 == 0
        sizes = np.bincount(class_of)
        order = rng.permutation(len(sizes))
        imbalance = np.abs(2 * np.cumsum(sizes[order])[:-1] - len(class_of))
        return np.isin(class_of, order[: int(imbalance.argmin()) + 1])


def ridge_predict(inputs: Tensor, targets: Tensor, queries: Tensor, *, ridge: float) -> Tensor:
    """Fit a linear map to (inputs [N, m], targets [N, D]) and apply it to the queries [M, m], for [M, D].

    With rows as columns, Z = inputs', Y = targets' and Q = queries':

        A = argmin_A |A Z - Y|^2 + ridge |A|^2,    A Q = Y (Z'Z + ridge I)^-1 Z' Q = Y Z' (Z Z' + ridge I)^-1 Q

    The smaller of the two Gram matrices is factored.

    Source: GSP (Gürbüz et al., ICCV 2023) problem P3 and its solution; XML (Gürbüz & Alatan, ICIP 2023), section 2.3.
    """
    z, y, q = (rows.to(torch.float64) for rows in (inputs, targets, queries))
    if len(z) <= z.shape[1]:
        predicted = (q @ z.T) @ solve_gram(z @ z.T, y, ridge=ridge)
    else:
        predicted = q @ solve_gram(z.T @ z, z.T @ y, ridge=ridge)
    return predicted.to(targets.dtype)


def solve_gram(gram: Tensor, right: Tensor, *, ridge: float) -> Tensor:
    """(gram + ridge I)^-1 right by Cholesky; NaN where the sum is not positive definite in the given precision.

    Give float64: a Gram matrix squares the condition of its rows, and the ridge has to count next to its largest entry.
    """
    regularized = gram + ridge * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    # The variant that raises would wait for a GPU, and would hide a NaN of the network behind an error about matrices.
    factor, failure = torch.linalg.cholesky_ex(regularized)
    solution = torch.cholesky_solve(right, factor)
    return torch.where(failure > 0, torch.nan, solution)


def cross_batch_loss(
    histogram: Tensor, pooled: Tensor, labels: Tensor, halves: Halves, dml_loss: DmlLoss, *, ridge: float
) -> Tensor:
    """The metric learning loss of embeddings made from histograms by prototypes of the other half.

        V_k = argmin_V sum_{i in b_k} |V z_i - y_i|^2 + ridge |V|^2
        L = dml_loss({V_2 z_i}, i in b_1) + dml_loss({V_1 z_i}, i in b_2)

    for histograms z [B, m] and pooled embeddings y [B, D].

    Source: Gürbüz & Alatan, Generalizable Embeddings with Cross-batch Metric Learning, equations 2.8 and 2.10. The text
    below 2.9 has the ridge epsilon for each half, which is taken here; 2.9 itself prints epsilon / 2.
    """
    labels = labels.cpu()
    first, second = (to_device(half, pooled.device) for half in halves)
    made_first = ridge_predict(histogram[second], pooled[second], histogram[first], ridge=ridge)
    made_second = ridge_predict(histogram[first], pooled[first], histogram[second], ridge=ridge)
    return dml_loss(made_first, labels[halves[0]]) + dml_loss(made_second, labels[halves[1]])


class CrossBatchRegularizer(Regularizer):
    """Mean of ``cross_batch_loss`` over random class-disjoint halves of the batch, 0 for a batch of one class.

    Losses of pairs need two classes in each half: take batches of at least four classes.
    """

    requires = ("histogram", "pooled")
    labels_on_host = True

    def __init__(self, weight: float, *, ridge: float = 0.05, num_splits: int = 1) -> None:
        super().__init__(weight)
        check_positive(ridge=ridge)
        self.ridge = ridge
        self.splits = ClassSplits(num_splits)

    def forward(self, output: ModelOutput, labels: Tensor, dml_loss: DmlLoss) -> Tensor:
        dtype = output.embedding.dtype
        histogram, pooled = (output.side[name].to(dtype) for name in self.requires)
        splits = self.splits(labels)
        values = [cross_batch_loss(histogram, pooled, labels, halves, dml_loss, ridge=self.ridge) for halves in splits]
        return torch.stack(values).mean() if values else 0.0 * (histogram.sum() + pooled.sum())
