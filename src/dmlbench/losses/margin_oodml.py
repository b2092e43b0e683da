"""The margin loss as the ooDML study's code computes it."""

import torch
from pytorch_metric_learning.utils.loss_and_miner_utils import convert_to_triplets, get_all_triplets_indices
from torch import Tensor, nn
from torch.nn.functional import normalize, relu

from dmlbench.device_copies import to_device
from dmlbench.types import check_at_least, check_positive


class MarginOodml(nn.Module):
    """Keep positives nearer, negatives farther than a learned boundary of the anchor's class.

    With d = sqrt(|x - y|^2 + 1e-8) of unit vectors and boundary b of the anchor's class, a triplet (a, p, n) has the
    terms relu(d_ap - b + margin) and relu(b - d_an + margin);
    loss = (sum of all terms + nu * sum of those triplets' boundaries) / number of triplets with a term above 0.
    Without such a triplet it is 0 with a gradient of 0. (PML's reduction counts a triplet with two terms twice.)

    The public code draws one triplet per anchor, weighted by distance (``miners.DistanceWeighted``).

    Source: Wu et al. 2017; Confusezius/Characterizing_Generalization_in_DeepMetricLearning e8a4171c,
    criteria/margin.py.
    """

    labels_on_host = True  # the number of all triplets decides shapes

    def __init__(
        self, num_classes: int, *, margin: float = 0.2, beta: float = 0.6, learn_beta: bool = True, nu: float = 0.0
    ) -> None:
        super().__init__()
        check_at_least(0, margin=margin, nu=nu)
        check_positive(beta=beta)
        self.margin = margin
        self.nu = nu
        self.num_classes = num_classes
        self.beta = nn.Parameter(torch.full((num_classes,), float(beta)), requires_grad=learn_beta)

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: tuple[Tensor, ...] | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Tensor:
        device = embeddings.device
        if indices_tuple is None and ref_labels is None:
            indices_tuple = tuple(to_device(x, device) for x in get_all_triplets_indices(labels.cpu()))
        labels = to_device(labels, device)
        anchor, positive, negative = convert_to_triplets(indices_tuple, labels, ref_labels, t_per_anchor="all")
        rows = normalize(embeddings)
        others = rows if ref_emb is None else normalize(ref_emb)
        beta = self.beta[labels[anchor]].to(rows.dtype)
        d_positive = ((rows[anchor] - others[positive]).square().sum(1) + 1e-8).sqrt()
        d_negative = ((rows[anchor] - others[negative]).square().sum(1) + 1e-8).sqrt()
        terms = relu(d_positive - beta + self.margin) + relu(beta - d_negative + self.margin)
        count = (terms > 0).sum().clamp(min=1)
        # The sum over no rows keeps the value differentiable where there is no triplet.
        return (terms.sum() + self.nu * (beta * (terms > 0)).sum()) / count + 0 * rows.sum()
