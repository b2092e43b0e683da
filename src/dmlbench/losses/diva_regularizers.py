"""Regularizers of DiVA: decorrelation of parts, and self-similarity against a queue of keys."""

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from dmlbench.losses.base import Counters
from dmlbench.losses.diva import PARTS, check_parts, unit_parts
from dmlbench.losses.miners import log_inverse_density
from dmlbench.losses.regularizer import DmlLoss, Regularizer
from dmlbench.types import ConfigError, ModelOutput, check_at_least, check_positive

_LOG_SMALLEST = math.log(1e-45)  # of a weight beside the largest, as in the code


class PartDecorrelation(Regularizer):
    """How well three parts predict the discriminative one; regressors learn to predict it, the parts not to be so.

    With unit parts and for each of the others a regressor R (linear, ReLU, linear), o element by element, the value is

        - sum over other parts x of mean over images and dimensions of (discriminative o norm(R(x)))^2

    Gradients to the embeddings, of both sides, are reversed: the regressors raise these squares, the parts lower them.

    Source: Milbich et al., DiVA, ECCV 2020; sizes and weights as in the code
    (Confusezius/ECCV2020_DiVA_MultiFeature_DML e5713049, criteria/adversarial_separation.py). There, and in the ooDML
    study's code, the regressors' weights do not decay.
    """

    def __init__(self, weight: float, embedding_size: int, *, hidden_size: int = 512) -> None:
        super().__init__(weight)
        check_at_least(1, hidden_size=hidden_size)
        size = check_parts(embedding_size)
        self.regressors = nn.ModuleDict()
        for part in PARTS[1:]:
            layers = nn.Linear(size, hidden_size), nn.ReLU(), nn.Linear(hidden_size, size)
            self.regressors[part] = nn.Sequential(*layers)

    def forward(self, output: ModelOutput, labels: Tensor, dml_loss: DmlLoss) -> Tensor:
        parts = unit_parts(output.embedding)
        parts = {name: 2 * part.detach() - part for name, part in parts.items()}  # its value, with minus its gradient
        target = parts[PARTS[0]]
        squares = [(target * normalize(regress(parts[name]))).square() for name, regress in self.regressors.items()]
        return -torch.stack([each.mean() for each in squares]).sum()


class SelfSimilarity(Regularizer, Counters):
    """Tell each image, by one part of its embedding, from earlier images: the key of its second view is the positive.

    With unit queries q (of the batch), keys k (of second views, by the momentum encoder) and a queue of earlier keys m:

        mean_i -log (exp(q_i k_i / T) / (exp(q_i k_i / T) + sum_j exp(w_ij q_i m_j / T)))

    Weights w are constant shares of v_ij = 1 / q(d_ij) (``log_inverse_density``, d from ``nearest`` on, 0 beyond
    ``farthest``): of a column's sum, over the batch ("of_batch", as the public codes' experiments computed), or of a
    row's, over the queue ("of_queue", what the first one's README calls fixed).

    The queue is empty at first, grows with each batch after the loss is taken, and then loses its oldest keys. The
    public code fills it before the first step with embeddings by the initial network.

    Source: Milbich et al., DiVA, ECCV 2020; Confusezius/ECCV2020_DiVA_MultiFeature_DML e5713049,
    criteria/fast_moco.py, and its README on ``--diva_fixed``; CompVis/Characterizing_Generalization_in_DML 0c70f0ec.
    """

    requires = ("keys",)
    queue: Tensor

    def __init__(
        self,
        weight: float,
        embedding_size: int,
        *,
        queue_size: int = 3360,
        key_momentum: float = 0.9,
        temperature: float = 0.01,
        nearest: float = 0.5,
        farthest: float = 1.4,
        shares: Literal["of_batch", "of_queue"] = "of_batch",
    ) -> None:
        super().__init__(weight)
        check_at_least(1, queue_size=queue_size)
        check_positive(temperature=temperature)
        if not 0 <= key_momentum <= 1:
            raise ConfigError(f"key_momentum: got {key_momentum}, expected a number in [0, 1].")
        if not (0 < nearest <= 2 and 0 < farthest <= 2):
            raise ConfigError(f"nearest and farthest: got {nearest} and {farthest}, expected distances in (0, 2].")
        self.key_momentum = key_momentum
        self.temperature = temperature
        self.nearest = nearest
        self.farthest = farthest
        self.shares = shares
        self.register_buffer("queue", torch.zeros(queue_size, check_parts(embedding_size)))
        self.register_count("filled")

    def forward(self, output: ModelOutput, labels: Tensor, dml_loss: DmlLoss) -> Tensor:
        queries = unit_parts(output.embedding)["self_similarity"]
        keys = unit_parts(output.side["keys"].detach().to(queries.dtype))["self_similarity"]
        filled = self.count_of("filled")
        earlier = self.queue[len(self.queue) - filled :].to(queries.dtype)  # [F, D / 4]
        negative = queries @ earlier.T  # [B, F]
        logits = torch.cat([(queries * keys).sum(1, keepdim=True), self._weights(negative.detach()) * negative], dim=1)
        if self.training:
            self.queue = torch.cat([self.queue, keys.to(self.queue.dtype)])[-len(self.queue) :]
            self.set_count("filled", min(filled + len(keys), len(self.queue)))
        return cross_entropy(logits / self.temperature, torch.zeros_like(labels))

    def _weights(self, cosines: Tensor) -> Tensor:
        """w [B, F] of the cosines of queries and earlier keys."""
        if not cosines.shape[1]:
            return cosines
        distances = (2 - 2 * cosines).clamp(min=0).sqrt().clamp(min=self.nearest)
        # A near key's weight is up to exp(92) times that of others, which are no normal float32 then: logarithms are.
        weights = log_inverse_density(distances, self.queue.shape[1])
        largest = weights.max() if self.shares == "of_batch" else weights.amax(1, keepdim=True)
        weights = (weights - largest).masked_fill(distances > self.farthest, _LOG_SMALLEST).clamp(min=_LOG_SMALLEST)
        return weights.softmax(0 if self.shares == "of_batch" else 1)
