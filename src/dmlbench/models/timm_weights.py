"""timm's published weights: local caches, and whether the server answers."""

import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, cast

import torch

from dmlbench.types import ConfigError

_PROBE_SECONDS = 5.0


def missing_weights(name: str, config: Any, reason: str) -> ConfigError:
    hub = f"https://huggingface.co/{config.hf_hub_id} (model.safetensors)" if config.hf_hub_id else ""
    sources = " or ".join(filter(None, (hub, str(config.url or ""))))
    return ConfigError(
        f"the pretrained weights '{name}' cannot be had: {reason}. Download {sources} on a connected machine and "
        "set weights_file=<path of the file>, or ask for pretrained=false"
    )


def cached_file(hub_id: str | None, url: str | None) -> Path | None:
    """The published weights in the caches that timm uses."""
    if hub_id:
        from huggingface_hub import try_to_load_from_cache

        for filename in ("model.safetensors", "pytorch_model.bin"):
            found = try_to_load_from_cache(hub_id, filename)
            if isinstance(found, str):
                return Path(found)
    if url:
        path = Path(torch.hub.get_dir()) / "checkpoints" / url.rsplit("/", 1)[-1]
        if path.is_file():
            return path
    return None


def reachable(hub_id: str | None, url: str | None) -> bool:
    """Ask the server once: timm's own client retries each of its files for half a minute."""
    if hub_id:
        from huggingface_hub import constants

        if constants.HF_HUB_OFFLINE:
            return False
    address = constants.ENDPOINT if hub_id else cast(str, url)
    try:
        urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=_PROBE_SECONDS).close()
    except urllib.error.HTTPError:
        return True  # the server answers, but not to HEAD
    except OSError:
        return False
    return True
