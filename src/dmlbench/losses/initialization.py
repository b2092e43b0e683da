"""Initial values of trainable class vectors (proxies, centers, rows of a classifier)."""

import math

import torch
from torch import Tensor, nn

from dmlbench.types import ConfigError

SCHEMES = ("he_normal", "kaiming_uniform_a5", "normal")


@torch.no_grad()
def init_class_vectors(vectors: Tensor, init: str, init_std: float | None = None, *, class_dim: int = 0) -> None:
    """Fill ``vectors`` [C, ..., D], or [D, C] with ``class_dim=1``, in place.

    ``he_normal``: N(0, 2 / C), He et al. 2015 with a fan of C; ``kaiming_uniform_a5``: uniform in +-1 / sqrt(D), the
    default of ``torch.nn.Linear`` (a = sqrt(5)); ``normal``: N(0, init_std^2).
    """
    num_classes, size = vectors.shape[class_dim], vectors.shape[class_dim - 1]
    if init not in SCHEMES:
        raise ConfigError(f"init: got '{init}', expected one of {', '.join(SCHEMES)}.")
    if init == "normal":
        if init_std is None or not 0 < init_std < math.inf:
            raise ConfigError(f"init_std: got {init_std}, expected a positive number for init=normal.")
        nn.init.normal_(vectors, std=init_std)
    elif init_std is not None:
        raise ConfigError(f"init_std: got {init_std}, expected null for init={init}. Set init=normal to use it.")
    elif init == "he_normal":
        nn.init.normal_(vectors, std=math.sqrt(2 / num_classes))
    else:
        bound = 1 / math.sqrt(size)
        nn.init.uniform_(vectors, -bound, bound)
