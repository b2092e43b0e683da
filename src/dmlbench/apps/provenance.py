"""Provenance of runs: the weights that they started from, and their embedding size."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dmlbench.config import read_config
from dmlbench.runtime import cached_sha256

PUBLISHED = {"bn_inception": "52deb4733", "googlenet": "1378be20", "resnet50": "0676ba61"}
"""First digits of the SHA-256 of the papers' pretrained weights, by backbone."""
_OF_TIMM = {"resnet50": "resnet50.tv_in1k"}
"""The same weights in timm."""


@dataclass(frozen=True)
class Provenance:
    """Where runs come from."""

    other_weights: tuple[str, ...] = ()  # how their pretrained weights differ from the papers'
    embedding_size: int | None = None  # D of the compared embeddings; None if the runs do not say


def provenance_of(config_file: Path, backbone: str, hashes: Iterable[str | None]) -> Provenance:
    """The provenance of a config's runs, by the configuration of one and the SHA-256 of all runs' weights files."""
    config = read_config(config_file)
    head, said = config.get("head") or {}, config.get("runtime") or {}
    size = said.get("embedding_size")
    if "level_size" in head:  # what is compared is a level, or all of them one after the other
        size = head["level_size"] * (head["num_levels"] if head.get("inference") == "concat" else 1)
    family = next((name for name in PUBLISHED if backbone.startswith(name)), None)
    return Provenance(tuple(_other_weights(config.get("backbone") or {}, family, set(hashes))), size)


def _other_weights(node: Mapping[str, Any], family: str | None, hashes: set[str | None]) -> list[str]:
    file = node.get("weights_file")
    if file is not None:
        others = [
            f" (SHA-256 {digest[:12]})" if digest else ""
            for digest in sorted(hashes, key=str)
            if not (are_published(file, family) if digest is None else digest.startswith(_known(family)))
        ]
        return [f"OTHER WEIGHTS: {file}{other}" for other in others]
    if family is not None and not node.get("pretrained"):
        return ["OTHER WEIGHTS: random ones"]
    if family in _OF_TIMM and node.get("name") != _OF_TIMM[family]:
        return [f"OTHER WEIGHTS: {node.get('name')} of timm"]
    return []


def are_published(weights_file: str, family: str | None = None) -> bool:
    """Whether a weights file is one of the papers'; a file that is gone is known by its name."""
    path = Path(weights_file).expanduser()
    if not path.is_file():
        return path.stem.endswith(_known(family))
    return cached_sha256(path).startswith(_known(family))


def _known(family: str | None) -> tuple[str, ...]:
    return (PUBLISHED[family],) if family else tuple(PUBLISHED.values())
