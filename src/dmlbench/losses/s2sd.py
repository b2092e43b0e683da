"""Simultaneous similarity-based self-distillation (S2SD): small embeddings learn from larger ones of the same batch."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div, log_softmax, normalize, softmax

from dmlbench.losses.objective import Objective
from dmlbench.losses.regularizer import DmlLoss, Regularizer
from dmlbench.types import ModelOutput, check_at_least, check_positive


def similarity_distillation(rows: Tensor, teacher: Tensor, *, temperature: float) -> Tensor:
    """How far each row's distribution over the batch is from the teacher's, which gets no gradient.

        T² mean_i KL(softmax_j(t_i' t_j / T) || softmax_j(s_i' s_j / T)),    s, t unit rows; j = i is included

    Source: Roth et al., S2SD, ICML 2021, section 3 (there without the mean over the batch); the mean as in the
    authors' code.
    """
    s, t = normalize(rows), normalize(teacher.detach())
    predicted, wanted = log_softmax(s @ s.T / temperature, dim=1), softmax(t @ t.T / temperature, dim=1)
    return temperature**2 * kl_div(predicted, wanted, reduction="batchmean")


class SimilaritySelfDistillation(Regularizer):
    """Further heads of larger sizes train with the loss and teach the embeddings their similarities, as features do.

    With heads h_1 .. h_m (linear, ReLU, linear) over pooled features f, KL as of ``similarity_distillation`` and
    embeddings e, the value is

        mean_i dml_i(h_i(f)) + (g mean_i KL(e, h_i(f)) + g_f KL(e, f)) / weight

    so that the objective is (1 - weight) dml(e) + weight mean_i dml_i + g mean_i KL + g_f KL: with weight 0.5, mixed
    convexly, that of paper and code. ``make_objective`` makes dml_i, with its own boundaries or proxies, for a size.

    Source: Roth et al., Simultaneous Similarity-based Self-Distillation for Deep Metric Learning, ICML 2021; numbers
    as in the code (MLforHealth/S2SD 1ef26e4e, criteria/s2sd.py, parameters.py).
    """

    requires = ("features", "features_max")
    labels_on_host = True  # as objectives want them

    def __init__(
        self,
        weight: float,
        feature_size: int,
        make_objective: Callable[[int], Objective],
        *,
        sizes: Sequence[int] = (512, 1024, 1536, 2048),
        distillation_weight: float = 50.0,
        feature_weight: float = 50.0,
        feature_delay: int = 1000,
        temperature: float = 1.0,
        max_pooling: bool = True,
    ) -> None:
        super().__init__(weight)
        check_at_least(1, feature_size=feature_size, sizes=min(sizes, default=0))
        check_at_least(
            0, distillation_weight=distillation_weight, feature_weight=feature_weight, feature_delay=feature_delay
        )
        check_positive(temperature=temperature)
        self.distillation_weight = distillation_weight
        self.feature_weight = feature_weight
        self.feature_delay = feature_delay
        self.temperature = temperature
        self.max_pooling = max_pooling
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(feature_size, size), nn.ReLU(), nn.Linear(size, size)) for size in sizes
        )
        self.objectives = nn.ModuleList(make_objective(size) for size in sizes)

    def forward(self, output: ModelOutput, labels: Tensor, dml_loss: DmlLoss) -> Tensor:
        rows = output.embedding
        features = output.side["features"] + (output.side["features_max"] if self.max_pooling else 0)
        features = features.to(rows.dtype)
        losses, distances = [], []
        for head, objective in zip(self.heads, self.objectives, strict=True):
            larger = head(features)
            losses.append(objective(ModelOutput(larger), labels, step=1)["dml"])  # it knows no steps
            distances.append(similarity_distillation(rows, larger, temperature=self.temperature))
        distilled = self.distillation_weight * torch.stack(distances).mean()
        if self.step > self.feature_delay and self.feature_weight:
            of_features = similarity_distillation(rows, features, temperature=self.temperature)
            distilled = distilled + self.feature_weight * of_features
        return torch.stack(losses).mean() + distilled / self.weight
