"""Models of the Hugging Face hub in timm's format: ``hf_hub:owner/model``, with ``@revision`` behind it to pin one."""

import contextlib
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any
from unittest.mock import patch

from torch import nn

from dmlbench.runtime import reason_of
from dmlbench.types import ConfigError

_PREFIX = re.compile("hf[_-]hub:")
_KEPT = ("mean", "std", "input_size", "num_classes", "classifier", "first_conv")


def hub_id(name: str) -> str | None:
    """``owner/model`` of ``hf_hub:owner/model`` or ``hf-hub:owner/model``; None for timm's own names.

    Raises:
        ConfigError: no owner or no model follows the prefix.
    """
    found = _PREFIX.match(name)
    if found is None:
        return None
    identifier = name[found.end() :]
    if not re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", identifier):
        raise ConfigError(f"backbone.name: got {name}, expected hf_hub:owner/model. Copy it from the model's page.")
    return identifier


def read_hub_config(name: str) -> dict[str, Any]:
    """The ``config.json`` of ``hf_hub:owner/model``: architecture, timm's arguments, and facts of the weights.

    Raises:
        ConfigError: it cannot be downloaded and is not in the Hugging Face cache, or is not in timm's format.
    """
    from timm.models import load_model_config_from_hf

    identifier = str(hub_id(name))
    try:
        pretrained_cfg, architecture, arguments = load_model_config_from_hf(identifier)
    except Exception as error:  # of the hub's client and its HTTP libraries
        raise _unavailable(name, "config.json", error) from error
    # With another name than timm's defaults, some versions of timm unpickle the file.
    pretrained_cfg.pop("hf_hub_filename", None)
    return {
        "hub_id": identifier,
        "architecture": architecture,
        "model_args": dict(arguments or {}),
        "pretrained_cfg": pretrained_cfg,
    }


def portable(config: Mapping[str, Any]) -> dict[str, Any]:
    """What ``create_from_hub`` needs without the weights, as plain values."""
    facts = {key: config["pretrained_cfg"][key] for key in _KEPT if key in config["pretrained_cfg"]}
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in facts.items()}
    return {**config, "pretrained_cfg": plain}


def create_from_hub(name: str, config: Mapping[str, Any], *, pretrained: bool) -> Any:
    """timm's model of a hub's ``config.json`` without its classifier.

    Weights are read from safetensors, or by ``torch.load(weights_only=True)``: nothing in them is executed.

    Raises:
        ConfigError: this timm cannot build it, or its weights cannot be downloaded or read.
    """
    import timm

    architecture, arguments = config["architecture"], config["model_args"]
    if not timm.is_model(architecture):
        raise ConfigError(
            f"backbone.name: got {name}, but timm {timm.__version__} has no architecture '{architecture}'. Update "
            "timm or choose another model."
        )
    if taken := sorted(inspect.signature(timm.create_model).parameters.keys() & arguments.keys()):
        raise ConfigError(
            f"backbone.name: got {name}, but its model_args set {taken[0]}, expected only arguments of "
            f"{architecture}. Choose another model."
        )
    options = {**arguments, "num_classes": 0, "pretrained_cfg": dict(config["pretrained_cfg"])}
    try:
        return create_any_size(architecture, pretrained=pretrained, **options)
    except Exception as error:
        raise _unavailable(name, "weights" if pretrained else "network", error) from error


def create_any_size(name: str, **options: Any) -> Any:
    """timm's model, one that takes images of any size where it has the choice.

    Raises:
        ValueError: a file of weights lacks tensors of the network, which timm lets pass without a classifier.
    """
    import timm

    with _complete_weights():
        try:
            return timm.create_model(name, **{"dynamic_img_size": True, **options})
        except TypeError as error:
            if "dynamic_img_size" not in str(error):
                raise
            options.pop("dynamic_img_size", None)
            return timm.create_model(name, **options)


@contextlib.contextmanager
def _complete_weights() -> Iterator[None]:
    load = nn.Module.load_state_dict

    def checked(module: nn.Module, *args: Any, **options: Any) -> Any:
        found = load(module, *args, **options)
        if lost := found.missing_keys:
            raise ValueError(f"the file lacks {len(lost)} tensors of the network, such as {lost[0]}")
        return found

    with patch.object(nn.Module, "load_state_dict", checked):
        yield


def _unavailable(name: str, what: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"backbone.name: got {name}, whose {what} cannot be loaded ({reason_of(error):.200}). Run once on a connected "
        "machine and copy its Hugging Face cache (HF_HOME), or choose another model."
    )
