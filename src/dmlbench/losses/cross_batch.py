"""Cross-batch metric learning (XML): prototypes fitted to some classes make embeddings for others."""

import torch
from torch import Tensor

from dmlbench.device_copies import to_device
from dmlbench.losses.class_splits import ClassSplits, Halves
from dmlbench.losses.regularizer import DmlLoss, Regularizer
from dmlbench.losses.ridge import ridge_predict
from dmlbench.types import ModelOutput, check_positive


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
