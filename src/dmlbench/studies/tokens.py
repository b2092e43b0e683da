"""Bags of trainable tokens: classes that are told by some of their tokens, while others are shared by all classes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pytorch_metric_learning.distances import LpDistance
from pytorch_metric_learning.losses import ContrastiveLoss
from torch import Tensor, nn

from dmlbench.evaluation.evaluate import evaluate
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.losses.objective import Objective
from dmlbench.models.net import MetricModel
from dmlbench.models.pooling.base import Pooled, Pooling
from dmlbench.runtime import generator
from dmlbench.training.fit import FitResult, FitSettings, fit
from dmlbench.types import Batch, EmbeddingSet, ModelOutput

NUM_CLASSES, TOKENS_OF_EACH, TOKENS_OF_A_BAG = 16, 4, 50
"""Classes, tokens of each class and of the background, and tokens of a sample (GSP, section 5.1 and supplement 2.1)."""
_NUM_TOKENS = (NUM_CLASSES + 1) * TOKENS_OF_EACH
_BACKGROUND = NUM_CLASSES * TOKENS_OF_EACH
"""First token of the background."""


def bags(
    per_class: int, rng: np.random.Generator, *, mixing_mean: float = 0.5, mixing_std: float = 0.1
) -> tuple[Tensor, Tensor]:
    """So many samples of every class.

    The share of a sample's tokens that are its class's is drawn from N(mixing_mean, mixing_std^2) and cut to [0, 1];
    tokens are drawn with replacement.

    Returns:
        numbers of tokens [16 per_class, 50] and labels [16 per_class].
    """
    labels = np.repeat(np.arange(NUM_CLASSES), per_class)
    shares = np.clip(rng.normal(mixing_mean, mixing_std, len(labels)), 0, 1)
    own = np.rint(shares * TOKENS_OF_A_BAG).astype(np.int64)  # [N] tokens of the class, which come first
    numbers = rng.integers(0, TOKENS_OF_EACH, (len(labels), TOKENS_OF_A_BAG))
    is_own = np.arange(TOKENS_OF_A_BAG) < own[:, None]
    first = np.where(is_own, labels[:, None] * TOKENS_OF_EACH, _BACKGROUND)
    return torch.from_numpy(numbers + first), torch.from_numpy(labels)


class TokenBatches:
    """An endless iterator over batches of new bags, each of which depends on the seed and its number."""

    def __init__(self, per_class: int, *, seed: int, mixing: Mapping[str, float]) -> None:
        self.per_class, self.seed, self.mixing, self.count = per_class, seed, mixing, 0

    def __next__(self) -> Batch:
        self.count += 1
        numbers, labels = bags(self.per_class, generator("tokens", self.seed, self.count), **self.mixing)
        return Batch(numbers, labels, torch.arange(len(labels)))

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class TokenModel(MetricModel):
    """Numbers of tokens [B, 50] to embeddings [B, D] by a pooling of the tokens' vectors, as if these were pixels."""

    pooling: Pooling

    def __init__(self, pooling: Pooling, size: int, *, limit: float) -> None:
        """
        Args:
            pooling: gets [B, D, 50, 1], and a projection that changes nothing.
            size: D.
            limit: the vectors start uniform in [-limit, limit].
        """
        super().__init__()
        self.tokens = nn.Parameter(torch.empty(_NUM_TOKENS, size).uniform_(-limit, limit))
        self.pooling = pooling
        self.project: Any = nn.Identity()
        self.distance = LpDistance(normalize_embeddings=False, p=2, power=1)
        self.embedding_size = size

    def forward(self, images: Tensor) -> ModelOutput:
        vectors = self.tokens[images]  # [B, 50, D]
        pooled: Pooled = self.pooling(vectors.transpose(1, 2)[..., None], self.project)
        return ModelOutput(pooled.embedding, pooled.side)

    @property
    def provides(self) -> tuple[str, ...]:
        return self.pooling.provides

    def parameter_groups(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        return {"backbone": [("tokens", self.tokens)], "pooling": list(self.pooling.named_parameters())}


@torch.no_grad()
def scores(model: TokenModel, numbers: Tensor, labels: Tensor) -> dict[str, float]:
    """P@1 and MAP@R of bags among each other, by Euclidean distance of the vectors as they are."""
    rows = model(numbers).embedding.float()
    found = EmbeddingSet(rows, labels, torch.arange(len(labels)))
    return evaluate(found, spec=EvaluationSpec(metrics=("p_at_1", "map_at_r")), distance=model.distance).scores


@torch.no_grad()
def weight_of_background(model: TokenModel, numbers: Tensor) -> float:
    """Mean share of the pooling's weights that falls on background tokens."""
    side = model(numbers).side
    weights = side["weights"].flatten(1) if "weights" in side else torch.full(numbers.shape, 1 / numbers.shape[1])
    return float((weights * (numbers >= _BACKGROUND)).sum(dim=1).mean())


def train(
    model: TokenModel, folder: Path, settings: FitSettings, *, lr: float, limit: float, per_class: int, margin: float,
    seed: int, mixing: Mapping[str, float], validation: tuple[Tensor, Tensor],
) -> FitResult:  # fmt: skip
    """Train tokens and pooling by the contrastive loss; the best weights are restored.

    Args:
        model: changed in place.
        folder: of checkpoints, from which an interrupted training continues.
        settings: length, patience and validation.
        lr: of Adam.
        limit: tokens are cut to [-limit, limit] after every step.
        per_class: samples of every class in a batch.
        margin: of negative pairs.
        seed: of the batches.
        mixing: arguments of ``bags``.
        validation: bags and labels, on which MAP@R is monitored.
    """
    objective = Objective(ContrastiveLoss(pos_margin=0.0, neg_margin=margin, distance=model.distance))
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)

    def cut(*_: Any) -> None:
        with torch.no_grad():
            model.tokens.clamp_(-limit, limit)

    def validate() -> Mapping[str, float]:
        model.eval()
        return scores(model, *validation)

    optimizer.register_step_post_hook(cut)
    batches = TokenBatches(per_class, seed=seed, mixing=mixing)
    folder.mkdir(parents=True, exist_ok=True)
    device = torch.device("cpu")
    return fit(model, objective, batches, validate, optimizer, settings, folder, device=device)
