"""The objective of a training step: a loss, its miner, and regularizers."""

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from pytorch_metric_learning import losses
from pytorch_metric_learning.losses.generic_pair_loss import GenericPairLoss
from pytorch_metric_learning.losses.mixins import WeightRegularizerMixin
from torch import Tensor, nn

from dmlbench.losses.base import BatchLabels
from dmlbench.losses.metrix import Metrix
from dmlbench.losses.miners import SwitchedNegatives
from dmlbench.losses.regularizer import Regularizer
from dmlbench.losses.xbm import CrossBatchMemory
from dmlbench.types import ConfigError, IntArray, ModelOutput, check_choice

logger = logging.getLogger(__name__)


class Objective(nn.Module):
    """Run a PML loss and regularizers on a model's output, in float32.

    With regularizers r_i of weights w_i the value is (1 - sum w_i) dml + sum w_i r_i ("convex") or dml + sum w_i r_i
    ("add"). A regularizer whose side outputs are absent (a pooling's prototypes have not started) is left out, its
    weight too.
    """

    regularizers: Mapping[str, Regularizer]
    key_momentum: float | None  # of the momentum encoder that makes the side output "keys", where one is required

    def __init__(
        self,
        loss: nn.Module,
        miner: Callable[[Tensor, Tensor], tuple[Tensor, ...]] | None = None,
        regularizers: Mapping[str, Regularizer] | None = None,
        *,
        mixing: Literal["convex", "add"] = "convex",
        finish: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        check_choice("regularizer.mixing", str(mixing), ("convex", "add"))
        regularizers = regularizers or {}
        for name, module in regularizers.items():
            if not isinstance(module, Regularizer):
                raise ConfigError(f"regularizer.{name}: got {type(module).__name__}, expected a Regularizer.")
            if name in ("loss", "dml") or not name.isidentifier() or hasattr(nn.ModuleDict, name):
                raise ConfigError(
                    f"regularizer: got the name '{name}', expected a Python identifier that is not reserved. Rename it."
                )
        plain = plain_loss(loss)
        _check_signature(plain)
        if isinstance(plain, losses.CrossBatchMemory):  # checkpoints lack its pointer
            raise ConfigError("loss: got PML's CrossBatchMemory, which cannot resume. Set loss=xbm.")
        if isinstance(plain, losses.DynamicSoftMarginLoss):  # its histogram is for checkpoints, too
            plain.register_buffer("hist_", plain.__dict__.pop("hist_"))
        if miner is not None and compares_with_classes(plain):
            raise ConfigError(f"{type(plain).__name__} compares images with class vectors, not pairs. Set miner=null.")
        looks_pairs_up_in_a_matrix = isinstance(plain, GenericPairLoss) and plain.loss_method == plain.mat_based_loss
        if isinstance(miner, SwitchedNegatives) and looks_pairs_up_in_a_matrix:
            raise ConfigError(
                f"{type(plain).__name__} does not support negative pairs within a class, which {type(miner).__name__} "
                "returns. Use a triplet loss, such as margin_oodml, or another miner."
            )
        self.loss = loss
        self.miner = miner
        self.regularizers = nn.ModuleDict(dict(regularizers))  # type: ignore[assignment]
        self.mixing = mixing
        self.finish = finish
        total = sum(regularizer.weight for regularizer in regularizers.values())
        if mixing == "convex" and total >= 1:
            raise ConfigError(
                f"regularizers' weights: got a sum of {total:g}, expected below 1. Lower the weights or set "
                "regularizer.mixing=add."
            )
        momenta = {r.key_momentum for r in regularizers.values() if r.key_momentum is not None}
        if len(momenta) > 1:
            raise ConfigError(f"key_momentum: got {sorted(momenta)}, expected one value for all regularizers.")
        self.key_momentum = next(iter(momenta), None)
        self._active: set[str] = set()

    @property
    def requires(self) -> dict[str, tuple[str, ...]]:
        """Side outputs that each regularizer reads."""
        return {name: regularizer.requires for name, regularizer in self.regularizers.items()}

    @property
    def started(self) -> bool:
        """Whether the memory takes part in the loss; true for losses without a memory."""
        return not isinstance(self.loss, CrossBatchMemory) or self.loss.is_active

    def forward(self, output: ModelOutput, labels: Tensor, *, step: int) -> dict[str, Tensor]:
        """Value of every part and of the whole ("loss", what is differentiated); labels [B] are on the host."""
        device = output.embedding.device.type
        if not torch.is_autocast_enabled(device):  # to leave it where it is off costs as much as a small operation
            return self._parts(output, BatchLabels.of(labels, output.embedding.device), step)
        # Distances near zero and sums over thousands of pairs do not survive bf16.
        with torch.autocast(device, enabled=False):
            return self._parts(output, BatchLabels.of(labels, output.embedding.device), step)

    def _parts(self, output: ModelOutput, labels: BatchLabels, step: int) -> dict[str, Tensor]:
        embeddings, loss = output.embedding.float(), self.loss
        if isinstance(loss, CrossBatchMemory) and self.training:
            loss.observe(embeddings, labels.on_device, step=step)
        dml = self._with_miner(loss, embeddings, labels)
        if not isinstance(dml, Tensor) or dml.dim() or dml.requires_grad < embeddings.requires_grad:
            raise ConfigError(_not_a_loss(type(plain_loss(loss)).__name__, dml))
        if not self.regularizers:
            return {"loss": dml, "dml": dml}
        parts = {"dml": dml}
        share, extra = 1.0, []
        for name, regularizer in self.regularizers.items():
            regularizer.step = step
            if all(side in output.side for side in regularizer.requires):
                given = ModelOutput(embeddings, output.side)
                parts[name] = regularizer(given, labels.wanted_by(regularizer), self._plain_loss)
                extra.append(regularizer.weight * parts[name])
                share -= regularizer.weight if self.mixing == "convex" else 0.0
            else:  # a gradient of zero: decay and Adam act on its parameters, as in the GSP study's code
                extra += [0.0 * parameter.sum() for parameter in regularizer.parameters()]
        for name in sorted(parts.keys() - {"dml", *self._active}):
            logger.info("step %d: regularizer '%s' is now active", step, name)
        self._active = {*parts}
        return {"loss": share * dml + sum(extra) if extra else dml, **parts}

    def _plain_loss(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """The loss with its miner, without a memory or mixtures, on projected vectors that a regularizer made."""
        embeddings = embeddings if self.finish is None else self.finish(embeddings)
        return self._with_miner(plain_loss(self.loss), embeddings, BatchLabels.of(labels, embeddings.device))

    def _with_miner(self, loss: nn.Module, embeddings: Tensor, labels: BatchLabels) -> Tensor:
        indices_tuple = None if self.miner is None else self.miner(embeddings, labels.wanted_by(self.miner))
        return loss(embeddings, labels.wanted_by(loss), indices_tuple)

    def check_labels(self, labels: Tensor | IntArray) -> None:
        """Check before the first step that loss and regularizers have parameters for all labels [N] of a run."""
        low, high = (int(x) for x in (labels.min(), labels.max()))
        known = {"loss": _num_classes(self.loss)}
        known |= {f"regularizer.{name}": regularizer.num_classes for name, regularizer in self.regularizers.items()}
        for key, number in known.items():
            if number is not None and (low < 0 or high >= number):
                raise ConfigError(
                    f"{key}.num_classes: got {number}, but labels are {low} to {high}. Set it to "
                    "${runtime.num_classes}."
                )
            if number is not None and number > high + 1:
                logger.warning(
                    "%s.num_classes: got %d, but labels are %d to %d, so %d have no image. Set it to "
                    "${runtime.num_classes}.", key, number, low, high, number - high - 1,
                )  # fmt: skip


def _check_signature(loss: nn.Module) -> None:
    signature = inspect.signature(loss.forward)
    try:
        signature.bind(None, None, None)
    except TypeError:
        raise ConfigError(
            f"{type(loss).__name__}.forward: got {signature}, expected (embeddings, labels, indices_tuple=None)."
        ) from None


def _not_a_loss(name: str, value: Any) -> str:
    """Return the error message for a loss that does not return a scalar with a gradient."""
    if not isinstance(value, Tensor):
        return f"{name}: returned {type(value).__name__}, expected a scalar tensor."
    if value.dim():
        return f"{name}: returned a tensor of shape {list(value.shape)}, expected a scalar. Return its mean."
    return f"{name}: returned a value without gradient. Compute it from the embeddings, without detach() and item()."


def plain_loss(loss: nn.Module) -> nn.Module:
    """The loss that a memory or mixtures are added to."""
    return loss.loss if isinstance(loss, CrossBatchMemory | Metrix) else loss


def compares_with_classes(loss: nn.Module) -> bool:
    """Whether a loss compares images with trained vectors of the classes (proxies, centers, a weight matrix)."""
    return isinstance(loss, WeightRegularizerMixin) or getattr(loss, "has_proxies", False)


def _num_classes(loss: nn.Module) -> int | None:
    """How many classes a loss has vectors or boundaries for; None where it knows of none."""
    inner = plain_loss(loss)
    proxies = getattr(inner, "proxies", None)
    if proxies is not None:  # PML's losses do not all keep the number itself
        return len(proxies)
    if isinstance(inner, losses.NormalizedSoftmaxLoss):
        return int(inner.W.shape[1])
    beta = getattr(inner, "beta", None)
    if isinstance(beta, Tensor) and beta.numel() > 1:  # boundaries of PML's MarginLoss
        return beta.numel()
    number = getattr(inner, "num_classes", None)
    return None if number is None else int(number)
