"""A copy of a network whose weights follow it slowly, for embeddings that hardly change from step to step."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dmlbench.models.head import MetricModel


class MomentumEncoder:
    """Weights c that move towards the model's w by ``follow``: c = momentum c + (1 - momentum) w.

    They start as the model's. What else a model has, running statistics of batch norm and prototypes that are buffers,
    is the model's own, so a pooling that starts during training starts here, too. It embeds in evaluation mode, where
    no image depends on others of its batch.

    Source: He et al., Momentum Contrast for Unsupervised Visual Representation Learning, CVPR 2020, section 3.2.
    """

    def __init__(self, model: MetricModel, momentum: float) -> None:
        assert isinstance(model, nn.Module)
        self._model = model
        self._momentum = momentum
        self._weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Embeddings [B, D] of images [B, 3, H, W]."""
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
        """One move towards the model's weights of now."""
        weights = dict(self._model.named_parameters())
        torch._foreach_lerp_(list(self._weights.values()), [weights[x] for x in self._weights], 1 - self._momentum)

    def state_dict(self) -> dict[str, Tensor]:
        """The weights by their names in the model."""
        return dict(self._weights)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from weights that ``state_dict`` gave.

        Raises:
            KeyError, RuntimeError: they are those of another model.
        """
        for name, weight in self._weights.items():
            weight.copy_(state[name])
