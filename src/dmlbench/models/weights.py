"""Weights files: safe formats only; names and shapes must agree with the model."""

import logging
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from dmlbench.runtime import reason_of
from dmlbench.types import ConfigError

logger = logging.getLogger(__name__)


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Read a ``.safetensors`` file or a PyTorch checkpoint (any other suffix) without executing anything in it.

    Unwraps ``state_dict`` and ``model``, ``DataParallel``'s prefix ``module.``, and the backbone of a run's checkpoint
    or of an exported model.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"weights file '{path}' does not exist. Correct backbone.weights_file, or set backbone.weights_file=null "
            "and backbone.pretrained=false."
        )
    try:
        if path.suffix == ".safetensors":
            content: object = load_file(path, device="cpu")
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file makes torch raise almost anything
        raise ConfigError(
            f"weights file '{path}' cannot be read as plain tensors ({type(error).__name__}: "
            f"{reason_of(error):.120}). It may be truncated or contain Python objects, which are never executed. Save "
            "its state_dict again."
        ) from error
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    if isinstance(content, Mapping) and isinstance(content.get("model"), Mapping):
        of_run = {key: value for key, value in content["model"].items() if str(key).startswith("backbone.")}
        content = of_run if of_run or "objective" in content else content["model"]
    if not isinstance(content, Mapping) or not content or not all(isinstance(v, Tensor) for v in content.values()):
        raise ConfigError(
            f"weights file '{path}' contains no named tensors, expected a state_dict or {{'state_dict': ...}}."
        )
    weights = {str(key): value for key, value in content.items()}
    if all(key.startswith("module.") for key in weights):
        weights = {key.removeprefix("module."): value for key, value in weights.items()}
    backbone = {key.removeprefix("backbone."): value for key, value in weights.items() if key.startswith("backbone.")}
    return backbone or weights


def load_weights(
    module: nn.Module, path: str | Path, *, ignore: Sequence[str] = (), names: Mapping[str, str] | None = None
) -> None:
    """Copy the weights of a file into a module; every name and shape has to agree.

    ``num_batches_tracked`` may be missing, as in files written before PyTorch 0.4.1.

    Args:
        ignore: prefixes of names in the file that the module does without, such as a classifier's.
        names: the file's name of every tensor of the module; None: the same.
    """
    weights = read_weights(path)
    if all(key.startswith(("model.", "layers.")) for key in weights):  # a run's backbone holds the module by this name
        weights, names = {key.partition(".")[2]: value for key, value in weights.items()}, None
    adapted: dict[str, Tensor] = {}
    for own_key, own in module.state_dict().items():
        key = own_key if names is None else names[own_key]
        found = weights.pop(key, own if key.endswith("num_batches_tracked") else None)
        if found is None:
            raise _wrong_file(module, path, f"'{key}' {tuple(own.shape)} is missing from the file")
        if found.shape == (1, *own.shape):  # as old converters wrote batch norm
            found = found[0]
        if found.shape != own.shape:
            shapes = f"{tuple(found.shape)} in the file and {tuple(own.shape)} in the model"
            raise _wrong_file(module, path, f"'{key}' has shape {shapes}")
        adapted[own_key] = found
    for key, other in weights.items():
        if not key.startswith(tuple(ignore)):
            raise _wrong_file(module, path, f"'{key}' {tuple(other.shape)} is unknown to the model")
    module.load_state_dict(adapted)
    _say_once(f"loaded {len(adapted)} tensors from {path}")


@cache
def _say_once(text: str) -> None:
    """Log a line once per process; a sweep loads the same file for each run."""
    logger.info(text)


def _wrong_file(module: nn.Module, path: str | Path, difference: str) -> ConfigError:
    return ConfigError(
        f"weights file '{path}' does not fit {type(module).__name__}: {difference} (the first difference). "
        "Set backbone.weights_file to a file of this backbone."
    )
