"""Momentum encoder: a network whose weights are a moving average of another's."""

import torch
from torch import Tensor
from torch.func import functional_call

from dmlbench.models.net import MetricModel
from dmlbench.training.averaged_weights import MovingAverage


class MomentumEncoder(MovingAverage):
    """Embed by weights c = momentum c + (1 - momentum) w that follow the model's w, in evaluation mode.

    Source: He et al., Momentum Contrast for Unsupervised Visual Representation Learning, CVPR 2020, section 3.2.
    """

    def __init__(self, model: MetricModel, momentum: float) -> None:
        super().__init__(model, momentum)
        self._model = model

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
