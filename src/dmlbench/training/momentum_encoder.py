"""Momentum encoder: an exponential moving average (EMA) of a network's weights."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dmlbench.models.net import MetricModel


class MomentumEncoder:
    """Embed by weights c = momentum c + (1 - momentum) w that follow the model's w.

    Buffers (running statistics of batch norm, prototypes) are the model's own. It embeds in evaluation mode.

    Source: He et al., Momentum Contrast for Unsupervised Visual Representation Learning, CVPR 2020, section 3.2.
    """

    def __init__(self, model: MetricModel, momentum: float) -> None:
        assert isinstance(model, nn.Module)
        self._model = model
        self._momentum = momentum
        self._weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Embed images [B, 3, H, W] as [B, D]."""
        modes = [(module, module.training) for module in self._model.modules()]
        self._model.eval()
        try:
            embedding: Tensor = functional_call(self._model, self._weights, (images,)).embedding
        finally:
            for module, training in modes:
                module.training = training
        return embedding

    @torch.no_grad()
    def update(self) -> None:
        """Move towards the model's weights."""
        weights = dict(self._model.named_parameters())
        torch._foreach_lerp_(list(self._weights.values()), [weights[x] for x in self._weights], 1 - self._momentum)

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self._weights)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, weight in self._weights.items():
            weight.copy_(state[name])
