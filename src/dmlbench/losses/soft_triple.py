"""SoftTriple: a softmax over classes with several centers each."""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from dmlbench.losses.base import WholeBatchLoss
from dmlbench.types import check_at_least, check_positive


class SoftTriple(WholeBatchLoss):
    """Softmax over soft similarities to classes that have several centers, plus a part that merges centers.

    With unit vectors x and w_ck, s_c = sum over k of softmax_k(x.w_ck / gamma) x.w_ck, and y the class of x:
    loss = mean over the batch of the cross entropy of la (s_c - margin [c = y])
           + tau / (C K (K - 1)) sum over classes c and pairs k < l of sqrt(2 + 1e-5 - 2 w_ck.w_cl).
    PML's class has the same first part; its regularizer compares all centers of all classes, 128 GB on the 11,318
    classes of SOP, so here each class compares its own.

    Source: Qian et al. 2019; code idstcv/SoftTriple, loss/SoftTriple.py (the 1e-5 is its own).
    """

    has_proxies = True

    def __init__(
        self,
        num_classes: int,
        embedding_size: int,
        *,
        centers_per_class: int = 10,
        la: float = 20.0,
        gamma: float = 0.1,
        margin: float = 0.01,
        tau: float = 0.2,
        init: Literal["official", "normal"] = "official",
    ) -> None:
        super().__init__()
        check_at_least(1, centers_per_class=centers_per_class)
        check_positive(la=la, gamma=gamma)
        check_at_least(0, margin=margin, tau=tau)
        self.num_classes = num_classes
        self.la = la
        self.gamma = gamma
        self.margin = margin
        self.tau = tau
        self.centers = nn.Parameter(torch.empty(num_classes, centers_per_class, embedding_size))
        bound = (num_classes * centers_per_class) ** -0.5
        _ = nn.init.normal_(self.centers) if init == "normal" else nn.init.uniform_(self.centers, -bound, bound)
        upper = torch.triu_indices(centers_per_class, centers_per_class, offset=1)
        self.register_buffer("_pairs", upper, persistent=False)

    _pairs: Tensor

    def of_batch(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        centers = normalize(self.centers, dim=2)  # [C, K, D]
        s = (normalize(embeddings) @ centers.flatten(0, 1).T).unflatten(1, centers.shape[:2])  # [B, C, K]
        s = ((s / self.gamma).softmax(2) * s).sum(2)  # [B, C]
        shifted = s.scatter_add(1, labels[:, None], s.new_full((len(s), 1), -self.margin))
        value = cross_entropy(self.la * shifted, labels)
        if self.tau and self._pairs.shape[1]:
            gram = centers @ centers.transpose(1, 2)  # [C, K, K]
            between = gram[:, self._pairs[0], self._pairs[1]].clamp(max=1)
            value = value + self.tau * ((2 + 1e-5 - 2 * between).sqrt().mean() / 2)
        return value
