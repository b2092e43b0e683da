"""Crops, shifts and flips, each decided by the image's own seed, whichever process reads the image.

``CropTransform`` cuts images of any size one by one; ``ShiftTransform`` shifts a batch of equal size on the device.
"""

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dmlbench.data.images.sources import Kernel, resized
from dmlbench.device_copies import to_device
from dmlbench.types import ConfigError, IntArray, check_at_least, check_choice

PaddingMode = Literal["reflect", "edge", "constant"]

_ATTEMPTS = 10  # torchvision's RandomResizedCrop gives up after as many and takes the middle
_SPLITMIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


@dataclass(frozen=True)
class Cut:
    """Boxes [B, 4] (top, left, height, width in pixels of the resized images), and which results [B] to mirror."""

    boxes: IntArray
    flip: NDArray[np.bool_]


@dataclass(frozen=True)
class CropTransform:
    """Short side to ``resize``, then a box of the image, resized to ``crop`` x ``crop``, then perhaps a mirror image.

    Attributes:
        resize: short side before cropping; None keeps the size.
        scale: range of the box's share of the image's area; None takes the middle ``crop`` x ``crop`` pixels.
        ratio: range of the box's width over height.
        flip: probability of mirroring.
        kernel: bilinear with antialiasing: "pillow" equals torchvision on PIL images to the bit; "torch" is
            torchvision's for uint8 tensors, several times faster and at most one grey level away.
        augment: a further transform of each crop, uint8 [3, crop, crop], of the same size and type, before mirroring.
    """

    crop: int
    resize: int | None
    scale: tuple[float, float] | None = None
    ratio: tuple[float, float] | None = None
    flip: float = 0.0
    kernel: Kernel = "pillow"
    augment: Callable[[Tensor], Tensor] | None = None
    works_on: ClassVar[Literal["image"]] = "image"

    def __post_init__(self) -> None:
        check_at_least(1, crop=self.crop, resize=1 if self.resize is None else self.resize)
        _check_flip(self.flip)
        check_choice("kernel", self.kernel, get_args(Kernel))

    @property
    def is_random(self) -> bool:
        return self.scale is not None or self.flip > 0 or self.augment is not None

    def plan(self, sizes: IntArray, seeds: Sequence[int]) -> Cut:
        """Boxes for images of the sizes [B, 2] (height, width, after resizing), each decided by its seed alone."""
        sizes = np.asarray(sizes, dtype=np.int64)
        if self.scale is None or self.ratio is None:
            top, left = np.rint((sizes - self.crop) / 2).astype(np.int64).T
            side = np.full(len(sizes), self.crop)
            boxes = np.stack([top, left, side, side], axis=1)
        else:
            boxes = _random_boxes(sizes, _uniforms(seeds, 4 * _ATTEMPTS), self.scale, self.ratio)
        flip = np.zeros(len(sizes), dtype=bool)
        if self.flip > 0:
            flip = _uniforms(seeds, 1, skip=4 * _ATTEMPTS)[:, 0] < self.flip
        return Cut(boxes, flip)

    def cut(self, image: NDArray[np.uint8], box: Sequence[int]) -> NDArray[np.uint8]:
        """The box (top, left, height, width) of an image [H, W, 3], as [crop, crop, 3]."""
        top, left, height, width = (int(x) for x in box)
        part = image[top : top + height, left : left + width]
        return part if (height, width) == (self.crop, self.crop) else resized(part, self.crop, self.crop, self.kernel)

    def augmented(self, images: Tensor, seeds: Sequence[int]) -> Tensor:
        """Crops [B, 3, crop, crop] after ``augment``, whose random numbers each image's seed decides."""
        if self.augment is None:
            return images
        found = []
        with _forked_generators():
            for image, seed in zip(images, seeds, strict=True):
                torch.default_generator.manual_seed(seed)  # not those of GPUs
                random.seed(seed)
                np.random.seed(seed % 2**32)  # noqa: NPY002 - what transforms of others draw from
                out = self.augment(image)
                if not isinstance(out, Tensor) or (out.dtype, out.shape) != (image.dtype, image.shape):
                    got = f"{out.dtype} {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
                    raise ConfigError(
                        f"augment: got {got}, expected uint8 {tuple(image.shape)}. Choose a transform that keeps type "
                        "and size."
                    )
                found.append(out)
        return torch.stack(found)


@contextlib.contextmanager
def _forked_generators() -> Iterator[None]:
    """Leave the global generators of torch, Python and numpy as they were."""
    states = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002


@dataclass(frozen=True)
class ShiftTransform:
    """Images of one size, shifted by up to ``padding`` pixels along both axes, then mirrored with probability ``flip``.

    ``padding_mode`` fills the border: "reflect" with the mirrored image, "edge" its border pixels, "constant" black.
    """

    padding: int = 0
    padding_mode: PaddingMode = "reflect"
    flip: float = 0.0
    works_on: ClassVar[Literal["batch"]] = "batch"

    def __post_init__(self) -> None:
        check_at_least(0, padding=self.padding)
        check_choice("padding_mode", self.padding_mode, get_args(PaddingMode))
        _check_flip(self.flip)

    @property
    def is_random(self) -> bool:
        return self.padding > 0 or self.flip > 0

    def __call__(self, pixels: Tensor, rows: Tensor, seeds: Sequence[int]) -> Tensor:
        """The images ``rows`` [B] of ``pixels`` [N, H, W] or [N, H, W, 3], moved: [B, 3, H, W] on their device."""
        height, width = pixels.shape[1:3]
        device = pixels.device
        rows = to_device(rows, device)
        if not self.is_random:
            images = pixels[rows]
        else:
            if self.padding >= min(height, width):
                raise ConfigError(
                    f"padding: got {self.padding}, expected less than the image size, {height} x {width}. Lower it."
                )
            # Seeds are well mixed 63-bit numbers: their two halves are the two draws.
            halves = torch.tensor([[s >> 32, s & 0xFFFFFFFF] for s in seeds], dtype=torch.int64)
            top, left = (halves % (2 * self.padding + 1) - self.padding).unbind(1)
            y = top[:, None] + torch.arange(height)  # [B, H] the row that each pixel comes from
            x = left[:, None] + torch.arange(width)
            if self.flip > 0:
                mirrored = torch.from_numpy(_uniforms(seeds, 1)[:, 0] < self.flip)
                x = torch.where(mirrored[:, None], x.flip(1), x)
            at_y, at_x = y.clamp(0, height - 1), x.clamp(0, width - 1)
            if self.padding_mode == "reflect":
                at_y, at_x = 2 * at_y - y, 2 * at_x - x
            images = pixels[rows[:, None, None], to_device(at_y, device)[:, :, None], to_device(at_x, device)[:, None]]
            if self.padding_mode == "constant":
                seen = to_device((at_y == y)[:, :, None] & (at_x == x)[:, None], device)
                images = images * (seen if images.ndim == 3 else seen[..., None])
        images = images[:, None] if images.ndim == 3 else images.permute(0, 3, 1, 2)
        return images.expand(-1, 3, -1, -1).contiguous()


Transform = CropTransform | ShiftTransform


def random_resized_crop(
    *,
    crop: int,
    resize: int | None,
    scale: tuple[float, float],
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    flip: float = 0.5,
    kernel: Kernel = "pillow",
    augment: Callable[[Tensor], Tensor] | None = None,
) -> CropTransform:
    """Training images: a box as torchvision's ``RandomResizedCrop`` draws it, resized to ``crop``, a random flip.

    Area is uniform, shape log-uniform, position uniform; after ten boxes that do not fit, the middle (Szegedy et al.,
    "Going Deeper with Convolutions", CVPR 2015). Arguments are those of ``CropTransform``.
    """
    if not 0 < scale[0] <= scale[1] <= 1:
        raise ConfigError(f"scale: got ({scale[0]}, {scale[1]}), expected ascending numbers in (0, 1].")
    if not 0 < ratio[0] <= ratio[1]:
        raise ConfigError(f"ratio: got ({ratio[0]}, {ratio[1]}), expected ascending positive numbers.")
    return CropTransform(crop, resize, (scale[0], scale[1]), (ratio[0], ratio[1]), flip, kernel, augment)


def center_crop(*, crop: int, resize: int, kernel: Kernel = "pillow") -> CropTransform:
    """Evaluation images: short side to ``resize``, the middle ``crop`` x ``crop`` pixels."""
    if crop > resize:
        raise ConfigError(f"crop: got {crop}, expected at most {resize}, the value of resize. Lower crop.")
    return CropTransform(crop, resize, kernel=kernel)


def random_shift(*, padding: int, padding_mode: PaddingMode = "reflect", flip: float = 0.0) -> ShiftTransform:
    """Training images of equal size: shifted by up to ``padding`` pixels, perhaps mirrored."""
    return ShiftTransform(padding, padding_mode, flip)


def identity() -> ShiftTransform:
    """Images of equal size as they are."""
    return ShiftTransform()


def _random_boxes(
    sizes: IntArray, draws: NDArray[np.float64], scale: tuple[float, float], ratio: tuple[float, float]
) -> IntArray:
    """[B, 4] boxes in images of the sizes [B, 2] from B x 4 ``_ATTEMPTS`` numbers in [0, 1)."""
    draws = draws.reshape(len(sizes), _ATTEMPTS, 4)
    image_height, image_width = sizes[:, :1], sizes[:, 1:]  # [B, 1]
    area = image_height * image_width * (scale[0] + draws[..., 0] * (scale[1] - scale[0]))  # [B, attempts]
    low, high = np.log(ratio[0]), np.log(ratio[1])
    shape = np.exp(low + draws[..., 1] * (high - low))
    width = np.rint(np.sqrt(area * shape)).astype(np.int64)
    height = np.rint(np.sqrt(area / shape)).astype(np.int64)
    fits = (width > 0) & (width <= image_width) & (height > 0) & (height <= image_height)
    row, first = np.arange(len(sizes)), fits.argmax(axis=1)
    width, height = width[row, first], height[row, first]
    top = (draws[row, first, 2] * (sizes[:, 0] - height + 1)).astype(np.int64)
    left = (draws[row, first, 3] * (sizes[:, 1] - width + 1)).astype(np.int64)
    boxes = np.stack([top, left, height, width], axis=1)
    for b in np.flatnonzero(~fits.any(axis=1)):  # the largest box in the middle whose shape is allowed
        high, wide = whole = sizes[b].tolist()
        if wide / high < ratio[0]:
            high = min(high, max(1, round(wide / ratio[0])))
        elif wide / high > ratio[1]:
            wide = min(wide, max(1, round(high * ratio[1])))
        boxes[b] = (whole[0] - high) // 2, (whole[1] - wide) // 2, high, wide
    return boxes


def _uniforms(seeds: Sequence[int], count: int, *, skip: int = 0) -> NDArray[np.float64]:
    """[B, count] numbers in [0, 1), each row from its seed alone: draws ``skip`` to ``skip + count`` of SplitMix64.

    Source: G. Steele, D. Lea, C. Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014.
    """
    weyl, first, second = (np.uint64(constant) for constant in _SPLITMIX)
    with np.errstate(over="ignore"):  # wraps modulo 2^64 on purpose
        steps = np.arange(skip + 1, skip + count + 1, dtype=np.uint64) * weyl
        z = np.array(seeds, dtype=np.uint64)[:, None] + steps
        z = (z ^ (z >> np.uint64(30))) * first
        z = (z ^ (z >> np.uint64(27))) * second
        z ^= z >> np.uint64(31)
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _check_flip(flip: float) -> None:
    if not 0 <= flip <= 1:
        raise ConfigError(f"flip: got {flip}, expected a number in [0, 1].")
