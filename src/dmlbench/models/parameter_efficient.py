"""Parameter-efficient fine-tuning of timm's ViTs: low-rank updates, deep visual prompts, or biases alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dmlbench.models.backbones import Backbone, TimmBackbone
from dmlbench.types import ConfigError, how_to_install


@dataclass(frozen=True)
class Tuning:
    """Which parameters of a pretrained backbone train. Subclasses implement ``_tune``.

    Attributes:
        name: of the method, in results and tables.
    """

    name: ClassVar[str]

    def apply(self, backbone: Backbone) -> None:
        """Freeze a backbone in place except what the method trains or adds.

        Raises:
            ConfigError: the backbone is no VisionTransformer of timm, or has frozen stages.
        """
        from timm.models import VisionTransformer  # here, as it takes a second or two to import

        if not isinstance(backbone, TimmBackbone) or not isinstance(backbone.model, VisionTransformer):
            network = type(getattr(backbone, "model", backbone)).__name__
            raise ConfigError(
                f"tuning: got {self.name} with a backbone of {network}, expected a VisionTransformer of timm. Choose "
                "one, such as backbone=vit_small, or set tuning=none."
            )
        if backbone.frozen_until is not None:
            raise ConfigError(
                f"tuning: got {self.name} with backbone.frozen_until={backbone.frozen_until}, expected null. Set "
                "backbone.frozen_until=null or tuning=none."
            )
        backbone.requires_grad_(False)
        self._tune(backbone.model)
        backbone.tuning = self.name
        backbone.train(backbone.training)

    def _tune(self, model: Any) -> None:
        raise NotImplementedError


@dataclass(frozen=True)
class Lora(Tuning):
    """Add a trained low-rank update to frozen linear layers: W x + (alpha / rank) B A x, by the library ``peft``.

    A is [rank, in], B is [out, rank] and starts at zero, hence at the output of the untouched network.

    Args:
        rank: at least 1.
        alpha: above 0.
        dropout: of x before A, in [0, 1).
        target_modules: names of linear layers, as the last part of timm's names: qkv, proj, fc1, fc2.

    Source: Hu et al., LoRA, ICLR 2022, equation 3.
    """

    name: ClassVar[str] = "lora"

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    target_modules: Sequence[str] = ("qkv",)

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"tuning.rank: got {self.rank}, expected at least 1.")
        if not self.alpha > 0:
            raise ConfigError(f"tuning.alpha: got {self.alpha}, expected a positive number.")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"tuning.dropout: got {self.dropout}, expected a number in [0, 1).")

    def _tune(self, model: Any) -> None:
        try:
            from peft import LoraConfig, inject_adapter_in_model
        except ImportError as error:
            raise ConfigError(
                f"tuning: got lora, but the package peft is not installed. {how_to_install('peft')}"
            ) from error
        layers = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
        known = {name.rpartition(".")[2] for name in layers}
        if not self.target_modules or not known.issuperset(self.target_modules):
            raise ConfigError(
                f"tuning.target_modules: got {list(self.target_modules)}, expected linear layers of this backbone: "
                f"{', '.join(sorted(known))}."
            )
        # By full names: the patch embedding's convolution is called proj, too.
        targets = [name for name in layers if name.rpartition(".")[2] in self.target_modules]
        options: Any = {"r": self.rank, "lora_alpha": self.alpha, "lora_dropout": self.dropout, "bias": "none"}
        inject_adapter_in_model(LoraConfig(target_modules=targets, **options), model)


class PromptedBlock(nn.Module):
    """A transformer block whose input tokens get trained prompts after the prefix tokens; its output is without them.

    Attributes:
        prompts: [N, C].
    """

    def __init__(self, block: nn.Module, num_prompts: int, *, width: int, bound: float, num_prefix_tokens: int) -> None:
        super().__init__()
        self.block = block
        self.prompts = nn.Parameter(torch.empty(num_prompts, width).uniform_(-bound, bound))
        self._prefix = num_prefix_tokens

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Tensor:
        """Tokens [B, P + L, C] to tokens [B, P + L, C]."""
        prompts = self.prompts.to(x.dtype).expand(x.shape[0], -1, -1)
        x = torch.cat([x[:, : self._prefix], prompts, x[:, self._prefix :]], dim=1)
        x = self.block(x, *args, **options)
        return torch.cat([x[:, : self._prefix], x[:, self._prefix + self.prompts.shape[0] :]], dim=1)


@dataclass(frozen=True)
class Prompts(Tuning):
    """Deep visual prompt tuning: each block gets trained tokens, which the next block's replace; all else is frozen.

    Prompts start uniform in [-b, b], b = sqrt(6 / (3 p^2 + C)) for patches of p x p pixels and width C.

    Args:
        num_prompts: tokens of every block, at least 1.

    Source: Jia et al., Visual Prompt Tuning, ECCV 2022, equations 6 and 7; initial values of KMnP/vpt,
        src/models/vit_prompt/vit.py.
    """

    name: ClassVar[str] = "prompts"

    num_prompts: int = 10

    def __post_init__(self) -> None:
        if self.num_prompts < 1:
            raise ConfigError(f"tuning.num_prompts: got {self.num_prompts}, expected at least 1.")

    def _tune(self, model: Any) -> None:
        bound = math.sqrt(6 / (3 * math.prod(model.patch_embed.patch_size) + model.embed_dim))
        shape = {"width": model.embed_dim, "bound": bound, "num_prefix_tokens": model.num_prefix_tokens}
        for i, block in enumerate(model.blocks):
            model.blocks[i] = PromptedBlock(block, self.num_prompts, **shape)


@dataclass(frozen=True)
class BitFit(Tuning):
    """Train the biases alone, those of normalization layers included.

    Source: Ben Zaken et al., BitFit, ACL 2022.
    """

    name: ClassVar[str] = "bitfit"

    def _tune(self, model: Any) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.rpartition(".")[2] == "bias")
