"""Uniform prior: a discriminator pulls features towards a uniform distribution."""

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import softplus

from dmlbench.losses.regularizer import DmlLoss, Regularizer
from dmlbench.types import ConfigError, ModelOutput, check_at_least


class UniformPrior(Regularizer):
    """How surely a discriminator D takes features for features; D itself learns to.

    Features are cut into chunks c. With the logit D(.) of "drawn from the uniform distribution", the value is

        mean_c softplus(-D(c)),    D fixed,

    and in every ``discriminator_interval``-th batch D descends by its own objective, c fixed, with as many draws u:

        mean_u softplus(-D(u)) + mean_c softplus(D(c)),    u uniform in [-1, 1]

    Each goes to its own parameters, so one optimizer serves both. D's gradient has neither the regularizer's weight nor
    a share in the value.

    Source: Sinha et al., Uniform Priors for Data-Efficient Transfer, 2020; layers and numbers as in the ooDML study's
    code (CompVis/Characterizing_Generalization_in_DML 0c70f0ec, ood_main.py and parameters.py), where D has an
    optimizer of its own and is one step ahead.
    """

    requires = ("features",)

    def __init__(
        self,
        weight: float,
        feature_size: int,
        *,
        chunk_size: int = 128,
        hidden_size: int = 100,
        discriminator_interval: int = 10,
    ) -> None:
        super().__init__(weight)
        check_at_least(1, feature_size=feature_size, chunk_size=chunk_size, hidden_size=hidden_size)
        check_at_least(1, discriminator_interval=discriminator_interval)
        chunk_size = min(chunk_size, feature_size)
        if feature_size % chunk_size:
            raise ConfigError(f"chunk_size: got {chunk_size}, expected a divisor of the {feature_size} features.")
        self.chunk_size = chunk_size
        self.discriminator_interval = discriminator_interval
        self.discriminator = nn.Sequential(
            *(nn.Linear(chunk_size, hidden_size), nn.ReLU()),
            *(nn.Linear(hidden_size, hidden_size), nn.ReLU()),
            nn.Linear(hidden_size, 1),
        )

    def forward(self, output: ModelOutput, labels: Tensor, dml_loss: DmlLoss) -> Tensor:
        features = output.side["features"].to(output.embedding.dtype)
        chunks = features.reshape(-1, self.chunk_size)  # [B C / chunk_size, chunk_size]
        fixed = {name: parameter.detach() for name, parameter in self.discriminator.named_parameters()}
        value = softplus(-functional_call(self.discriminator, fixed, (chunks,))).mean()
        if not self.training or (self.step - 1) % self.discriminator_interval:
            return value
        drawn = 2 * torch.rand(chunks.shape, dtype=chunks.dtype, device=chunks.device) - 1
        own = softplus(-self.discriminator(drawn)).mean() + softplus(self.discriminator(chunks.detach())).mean()
        return value + (own - own.detach()) / self.weight
