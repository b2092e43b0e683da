"""One image: read from its file, and resized."""

from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps

from dmlbench.types import DataError

Kernel = Literal["pillow", "torch"]


def read_image(path: str | Path) -> Image.Image:
    """One image file as 8-bit RGB, rotated according to its EXIF orientation.

    Grey, palette, CMYK and 16-bit grey images are converted (16 bits keep their high byte); transparency is dropped.
    """
    if not Path(path).is_file():  # opening a pipe would wait without end
        raise DataError(f"image '{path}' is missing or not a file; replace it or remove it from the data")
    try:
        with Image.open(path) as file:
            file.load()
            image = ImageOps.exif_transpose(file)
    except (OSError, SyntaxError, ValueError, EOFError, IndexError, Image.DecompressionBombError) as error:
        raise DataError(
            f"image '{path}' cannot be read ({error}); replace the file or remove it from the data"
        ) from error
    try:
        return as_rgb(image)
    except DataError as error:
        raise DataError(f"image '{path}' {error}") from None


def as_rgb(image: Image.Image) -> Image.Image:
    """8-bit RGB of an image of any mode, as ``read_image`` says."""
    if image.mode == "F":
        raise DataError("holds floating point pixels; convert it to 8 bits a channel")
    if image.mode.startswith("I"):
        # Pillow clips 16-bit grey to 255 when it converts, which would leave an all-white picture.
        pixels = np.asarray(image).astype(np.int64)
        if pixels.min() < 0 or pixels.max() > 65535:
            raise DataError(f"holds values from {pixels.min()} to {pixels.max()}; convert it to 8 or 16 bits a channel")
        image = Image.fromarray((pixels >> 8).astype(np.uint8))
    return image if image.mode == "RGB" else image.convert("RGB")


def short_side_resized(image: Image.Image, short_side: int | None, kernel: Kernel) -> NDArray[np.uint8]:
    """[H, W, 3] of an RGB image whose short side is ``short_side`` pixels, the long one in proportion, rounded down."""
    if short_side is None or min(image.size) == short_side:
        return np.asarray(image)
    long = short_side * max(image.size) // min(image.size)  # rounded as torchvision's Resize does
    width, height = (short_side, long) if image.width <= image.height else (long, short_side)
    if kernel == "pillow":
        return np.asarray(image.resize((width, height), Image.Resampling.BILINEAR))
    return resized(np.asarray(image), height, width, kernel)


def resized(image: NDArray[np.uint8], height: int, width: int, kernel: Kernel) -> NDArray[np.uint8]:
    """[height, width, 3] of an image [H, W, 3], bilinear with antialiasing."""
    image = np.ascontiguousarray(image)
    if kernel == "pillow":
        # Unlike fromarray, frombuffer neither copies nor guesses.
        source = Image.frombuffer("RGB", (image.shape[1], image.shape[0]), image, "raw", "RGB", 0, 1)
        return np.asarray(source.resize((width, height), Image.Resampling.BILINEAR))
    if not image.flags.writeable:
        image = image.copy()
    pixels = torch.from_numpy(image)[None].permute(0, 3, 1, 2)  # in this order torch recognizes channels-last
    result = torch.nn.functional.interpolate(pixels, size=(height, width), mode="bilinear", antialias=True)
    return result.permute(0, 2, 3, 1)[0].numpy()
