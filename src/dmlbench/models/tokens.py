"""timm's networks of patches: image sizes, and the map of their tokens."""

import math
from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from dmlbench.types import ConfigError


def _patch_embedding(model: nn.Module) -> Any:
    """timm's patch layer, or None for a network that has none or checks its input itself."""
    for name in ("patch_embed", "stem"):
        layer: Any = getattr(model, name, None)
        if hasattr(layer, "feat_ratio") and hasattr(layer, "strict_img_size") and layer.img_size is not None:
            return layer
    return None


def _multiples(size: Sequence[int], patch: Sequence[int], *, up: bool) -> tuple[int, int]:
    """Nearest height and width in whole patches, at least one."""
    rounded = math.ceil if up else math.floor
    height, width = (max(1, rounded(s / p)) * p for s, p in zip(size, patch, strict=True))
    return height, width


def _in_words(size: Sequence[int]) -> str:
    return f"{size[0]} x {size[1]}"


def fit_images(images: Tensor, *, name: str, model: nn.Module, pad: bool) -> Tensor:
    """Images [B, 3, H, W] of the network's one size where it has one, else of whole patches.

    ``pad`` fills the bottom and the right with zeros, the mean color of normalized images.
    """
    embedding = _patch_embedding(model)
    if embedding is None:
        return images
    size = (images.shape[2], images.shape[3])
    if embedding.strict_img_size:
        expected = tuple(embedding.img_size)
        if size != expected:
            raise ConfigError(
                f"backbone '{name}': got images of {_in_words(size)} pixels, expected {_in_words(expected)}. Crop to "
                f"{_in_words(expected)}, or set backbone.image_size to the crop size."
            )
        return images
    patch = tuple(embedding.feat_ratio(as_scalar=False))
    if size[0] % patch[0] == 0 and size[1] % patch[1] == 0:
        return images
    larger = _multiples(size, patch, up=True)
    if pad:
        return F.pad(images, (0, larger[1] - size[1], 0, larger[0] - size[0]))
    raise ConfigError(
        f"backbone '{name}': got images of {_in_words(size)} pixels, expected a multiple of its patch size "
        f"{_in_words(patch)}. Crop to {_in_words(_multiples(size, patch, up=False))} or {_in_words(larger)} in "
        "transform.train and transform.eval, or set backbone.pad_images=true."
    )


def set_image_size(model: Any, image_size: int | Sequence[int], *, name: str, pad: bool) -> None:
    """Resample position embeddings once to another image size."""
    size = (image_size, image_size) if isinstance(image_size, int) else tuple(int(side) for side in image_size)
    if len(size) != 2 or min(size) < 1:
        raise ConfigError(
            f"backbone.image_size: got {image_size}, expected a positive number of pixels, or [height, width]."
        )
    if not hasattr(model, "set_input_size"):
        raise ConfigError(
            f"backbone.image_size: got {image_size}, expected null, as timm's '{name}' has no such option."
        )
    embedding = _patch_embedding(model)
    if embedding is not None:
        patch = tuple(embedding.feat_ratio(as_scalar=False))
        larger = _multiples(size, patch, up=True)
        if larger != size and not pad:
            raise ConfigError(
                f"backbone.image_size: got {_in_words(size)}, expected a multiple of the patch size "
                f"{_in_words(patch)} of '{name}', such as {_in_words(_multiples(size, patch, up=False))} or "
                f"{_in_words(larger)}."
            )
        size = larger
    model.set_input_size(img_size=size)


def as_map(output: Any, *, name: str, model: Any, size: Sequence[int]) -> Tensor:
    """Features of timm as a map [B, C, h, w] of images of height and width ``size``.

    Tokens [B, prefix + h w, C] lose their prefix (class, distillation and register tokens) and are laid out by rows.
    """
    shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
    if isinstance(output, Tensor) and output.ndim == 4:
        return output.permute(0, 3, 1, 2) if getattr(model, "output_fmt", "NCHW") == "NHWC" else output
    if isinstance(output, Tensor) and output.ndim == 3:
        patches = output[:, getattr(model, "num_prefix_tokens", 0) or 0 :]  # [B, hw, C]
        for height, width in _grids(model, size):
            if patches.shape[1] == height * width:
                return patches.unflatten(1, (height, width)).permute(0, 3, 1, 2)
    raise ConfigError(
        f"backbone '{name}': got {shape} for images of {_in_words(size)} pixels, expected a map or tokens on a grid. "
        "Choose another timm model."
    )


def _grids(model: Any, size: Sequence[int]) -> list[tuple[int, int]]:
    """Height and width that the map may have: strided layers round up where they pad, and down where they do not."""
    levels = getattr(model, "feature_info", None)
    if not levels:
        return []
    reduction = levels[-1]["reduction"]
    return [(rounded(size[0] / reduction), rounded(size[1] / reduction)) for rounded in (math.floor, math.ceil)]
