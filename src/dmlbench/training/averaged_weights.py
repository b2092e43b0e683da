"""Exponential moving averages (EMA) of a model's weights."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from dmlbench.models.net import MetricModel


class MovingAverage:
    """Average a = decay a + (1 - decay) w of a model's parameters w, which it starts from.

    Buffers (running statistics of batch norm, counters, edges) are the model's own. Prototypes that a pooling starts
    from embeddings are copied until they have started.
    """

    def __init__(self, model: MetricModel, decay: float) -> None:
        assert isinstance(model, nn.Module)
        self._average = get_ema_multi_avg_fn(decay)
        self._parameters = dict(model.named_parameters())
        self._weights = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        self._observer = model.observer
        self._copied = self._not_started()

    @torch.no_grad()
    def update(self) -> None:
        """Move towards the model's weights, after a step of the optimizer."""
        self._average(list(self._weights.values()), list(self._parameters.values()), 0)
        for name in self._copied:
            self._weights[name].copy_(self._parameters[name])
        self._copied = self._not_started()

    def _not_started(self) -> list[str]:
        """Names of the parameters of a pooling whose prototypes have not started."""
        if getattr(self._observer, "started", True):
            return []
        members = set(map(id, self._observer.parameters()))
        return [name for name, parameter in self._parameters.items() if id(parameter) in members]

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self._weights)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume after an update; the model has been restored before."""
        for name, weight in self._weights.items():
            weight.copy_(state[name])
        self._copied = self._not_started()


class AveragedWeights(MovingAverage):
    """The average that a training scores and saves; its first update copies the weights.

    Equals ``torch.optim.swa_utils.AveragedModel``, whose counter makes every update wait for the device.
    """

    def __init__(self, model: MetricModel, decay: float) -> None:
        super().__init__(model, decay)
        self._copied = list(self._parameters)

    @contextlib.contextmanager
    def in_model(self) -> Iterator[None]:
        """Put the average into the model within the block."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, weight in self._weights.items():
            trained = self._parameters[name].clone()
            self._parameters[name].copy_(weight)
            weight.copy_(trained)
