"""What happens to an image between the file and the batch: crops, flips and shifts, each from an explicit seed.

A transform works on one PIL image (``works_on == "image"``) or on a batch of equally sized images as one uint8 tensor
(``works_on == "batch"``). Normalization and channel order belong to the backbone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dmlbench.types import ConfigError

PaddingMode = Literal["reflect", "edge", "constant"]


@dataclass(frozen=True)
class ImageTransform:
    """PIL RGB image and seed -> uint8 tensor [3, H, W]; the seed alone decides what is random.

    Attributes:
        pipeline: image -> tensor; may draw from torch's global generator.
        is_random: whether it does; if not, the seed is not looked at.
    """

    pipeline: Callable[[Image.Image], Tensor]
    is_random: bool
    works_on: ClassVar[Literal["image"]] = "image"

    def __call__(self, image: Image.Image, seed: int) -> Tensor:
        if not self.is_random:
            return self.pipeline(image)
        # torchvision draws from the global generator, which belongs to the model: it is put back afterwards.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            return self.pipeline(image)


@dataclass(frozen=True)
class RandomShift:
    """Each image moved by up to ``padding`` pixels either way on both axes; what comes into view is padding."""

    padding: int
    padding_mode: PaddingMode
    is_random: ClassVar[bool] = True
    works_on: ClassVar[Literal["batch"]] = "batch"

    def __call__(self, images: Tensor, seeds: Sequence[int]) -> Tensor:
        """images [B, C, H, W] uint8 and B seeds -> [B, C, H, W]."""
        height, width = images.shape[-2:]
        if self.padding >= min(height, width):
            raise ConfigError(f"padding ({self.padding}) must be smaller than the images, {height} x {width}; lower it")
        pad = (self.padding, self.padding)
        padded = np.pad(images.numpy(), ((0, 0), (0, 0), pad, pad), mode=self.padding_mode)
        # Seeds are well mixed 63-bit numbers: their two halves are the two draws.
        steps = 2 * self.padding + 1
        shifted = np.empty(images.shape, dtype=np.uint8)
        for i, seed in enumerate(seeds):
            top, left = (seed >> 32) % steps, (seed & 0xFFFFFFFF) % steps
            shifted[i] = padded[i, :, top : top + height, left : left + width]
        return torch.from_numpy(shifted)


@dataclass(frozen=True)
class Identity:
    """A batch as it is."""

    is_random: ClassVar[bool] = False
    works_on: ClassVar[Literal["batch"]] = "batch"

    def __call__(self, images: Tensor, seeds: Sequence[int]) -> Tensor:
        return images


BatchTransform = RandomShift | Identity
Transform = ImageTransform | BatchTransform


def mlrc_train(
    *,
    resize: int | None = 256,
    crop: int = 227,
    scale: tuple[float, float] = (0.16, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    flip: float = 0.5,
) -> ImageTransform:
    """Training images of the reality check: short side to ``resize``, a random crop of random size, a random flip.

    Args:
        resize: pixels of the short side; None leaves it out, as the public code of GSP does in training.
        crop: side of the result in pixels.
        scale: share of the image's area that the crop covers, drawn uniformly.
        ratio: width over height of the crop, drawn log-uniformly.
        flip: probability of a horizontal flip.

    Raises:
        ConfigError: a value out of its range.

    Source: K. Musgrave, S. Belongie, S.-N. Lim, "A Metric Learning Reality Check", ECCV 2020, section 4.2 (resize 256,
        RandomResizedCrop 227 with scale 0.16 to 1 and ratio 3/4 to 4/3, flip 0.5).
    """
    from torchvision.transforms import v2  # takes seconds to import: only where images are files

    _check_side("crop", crop)
    if not 0 < scale[0] <= scale[1] <= 1:
        raise ConfigError(f"scale ({scale[0]}, {scale[1]}) must be ascending within (0, 1]")
    if not 0 < ratio[0] <= ratio[1]:
        raise ConfigError(f"ratio ({ratio[0]}, {ratio[1]}) must be ascending and above 0")
    if not 0 <= flip <= 1:
        raise ConfigError(f"flip ({flip}) must lie in [0, 1]")
    steps: list[torch.nn.Module] = []
    if resize is not None:
        _check_side("resize", resize)
        steps.append(v2.Resize(resize))
    steps += [
        v2.RandomResizedCrop(crop, scale=tuple(scale), ratio=tuple(ratio)),
        v2.RandomHorizontalFlip(flip),
        v2.PILToTensor(),
    ]
    return ImageTransform(v2.Compose(steps), is_random=True)


def mlrc_eval(*, resize: int = 256, crop: int = 227) -> ImageTransform:
    """Evaluation images of the reality check: short side to ``resize``, the middle ``crop`` x ``crop`` pixels.

    Raises:
        ConfigError: sides below 1, or a crop larger than the resized image.

    Source: K. Musgrave, S. Belongie, S.-N. Lim, "A Metric Learning Reality Check", ECCV 2020, section 4.2.
    """
    from torchvision.transforms import v2

    _check_side("resize", resize)
    _check_side("crop", crop)
    if crop > resize:
        raise ConfigError(f"crop ({crop}) exceeds resize ({resize}): the border would be black; lower crop")
    return ImageTransform(v2.Compose([v2.Resize(resize), v2.CenterCrop(crop), v2.PILToTensor()]), is_random=False)


def random_shift(*, padding: int, padding_mode: PaddingMode = "reflect") -> RandomShift:
    """Training images of array data sets: moved by up to ``padding`` pixels.

    Args:
        padding: pixels, 0 or more.
        padding_mode: "reflect" mirrors the image, "edge" repeats its border, "constant" is black.

    Raises:
        ConfigError: a negative padding or an unknown mode.
    """
    if padding < 0:
        raise ConfigError(f"padding ({padding}) must be at least 0")
    if padding_mode not in ("reflect", "edge", "constant"):
        raise ConfigError(f"padding_mode '{padding_mode}' is unknown; use reflect, edge or constant")
    return RandomShift(padding, padding_mode)


def identity() -> Identity:
    """Images of array data sets as they are."""
    return Identity()


def _check_side(name: str, pixels: int) -> None:
    if pixels < 1:
        raise ConfigError(f"{name} ({pixels}) must be at least 1 pixel")
