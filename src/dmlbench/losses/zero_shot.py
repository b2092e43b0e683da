"""Zero-shot regularization (ZSR): what predicts labels from prototype histograms must serve other classes, too."""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dmlbench.device_copies import to_device
from dmlbench.losses.regularizer import DmlLoss, Regularizer
from dmlbench.losses.xml import ClassSplits, Halves, HalvesBy, ridge_predict
from dmlbench.types import ModelOutput, check_at_least, check_positive

Reduction = Literal["batch", "halves"]


def zero_shot_loss(
    histogram: Tensor,
    labels: Tensor,
    label_embeddings: Tensor,
    halves: Halves,
    *,
    ridge: float,
    softmax_scale: float,
    reduction: Reduction = "batch",
) -> Tensor:
    """Cross-entropy of labels that are predicted by maps fitted to the other half of the batch.

    A_k = argmin_A sum_{i in b_k} |A z_i - v_{y_i}|^2 + ridge |A|^2 is fitted to half b_k; A_1 predicts label embeddings
    in b_2 and A_2 in b_1. With l_i = -log softmax_j(softmax_scale v_j' A z_i) at j = y_i:

        batch:   mean of l_i over both halves
        halves:  mean of l_i over b_1  +  mean of l_i over b_2

    for histograms z [B, m], labels y [B], label embeddings v [C, D] and halves b_1 and b_2 of any sizes. "batch" is
    algorithm 4 and the authors' code, "halves" equation 4.4.

    Source: Gürbüz, Şener & Alatan, Generalized Sum Pooling for Metric Learning, ICCV 2023: problem P3, equation 4.4
    (whose "1 +" counts j = y_i a second time and is left out, as in the authors' code) and algorithm 4.
    """
    labels, first, second = (to_device(x, histogram.device) for x in (labels, *halves))
    targets = label_embeddings[labels]  # [B, D]
    in_first = ridge_predict(histogram[second], targets[second], histogram[first], ridge=ridge)
    in_second = ridge_predict(histogram[first], targets[first], histogram[second], ridge=ridge)
    predicted = torch.cat([in_first, in_second])
    logits = softmax_scale * predicted @ label_embeddings.T  # [B, C]
    losses = F.cross_entropy(logits, torch.cat([labels[first], labels[second]]), reduction="none")
    return losses.mean() if reduction == "batch" else losses[: len(first)].mean() + losses[len(first) :].mean()


class ZeroShotRegularizer(Regularizer):
    """Mean of ``zero_shot_loss`` over class-disjoint halves of the batch, 0 for a batch of one class.

    The label embeddings start from N(0, 2 / num_classes). The authors' code takes even and odd rows as halves: random
    classes on CUB, Cars196, SOP and In-shop, whose sampler shuffles them, and always even against odd super-classes on
    collages of CIFAR-100. ``halves`` gives both for any order of rows.

    Source: as of ``zero_shot_loss``; scale and start of the label embeddings from the authors' code
    (yetigurbuz/generalized-sum-pooling b765b889, zsr_loss.py; samplers.py and cifar_collage.py have the order of rows).
    """

    requires = ("histogram",)
    labels_on_host = True

    def __init__(
        self,
        weight: float,
        num_classes: int,
        embedding_size: int,
        *,
        ridge: float = 0.05,
        softmax_scale: float = 9.5,
        num_splits: int = 1,
        halves: HalvesBy = "random",
        reduction: Reduction = "batch",
    ) -> None:
        super().__init__(weight)
        check_at_least(1, num_classes=num_classes, embedding_size=embedding_size)
        check_positive(softmax_scale=softmax_scale, ridge=ridge)
        self.ridge = ridge
        self.softmax_scale = softmax_scale
        self.reduction = reduction
        self.splits = ClassSplits(num_splits, halves)
        self.num_classes = num_classes
        self.label_embeddings = nn.Parameter(torch.empty(num_classes, embedding_size))
        nn.init.kaiming_normal_(self.label_embeddings, mode="fan_out")

    def forward(self, output: ModelOutput, labels: Tensor, dml_loss: DmlLoss) -> Tensor:
        histogram = output.side["histogram"].to(output.embedding.dtype)
        settings: Any = {"ridge": self.ridge, "softmax_scale": self.softmax_scale, "reduction": self.reduction}
        values = [
            zero_shot_loss(histogram, labels, self.label_embeddings, halves, **settings)
            for halves in self.splits(labels)
        ]
        return torch.stack(values).mean() if values else 0.0 * histogram.sum()
