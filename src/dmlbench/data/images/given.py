"""Images passed from Python: files, Pillow images, arrays and tensors, one or many."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps

from dmlbench.data.images.pixels import Kernel, as_rgb, read_image, short_side_resized
from dmlbench.types import DataError

Given = str | Path | Image.Image | NDArray[np.uint8] | torch.Tensor


class GivenImages:
    """An ``ImageSource`` of one image or many, each read and resized on request.

    Args:
        images: paths, Pillow images, arrays [H, W, 3] or [H, W] and tensors [3, H, W] of uint8, or one array
            [N, H, W, 3] or [N, H, W], one tensor [N, 3, H, W].
        short_side: pixels to resize to; None keeps the sizes.
    """

    def __init__(
        self, images: Given | Iterable[Given], *, short_side: int | None = None, kernel: Kernel = "pillow"
    ) -> None:
        self._images = _listed(images)
        self._short_side, self._kernel = short_side, kernel
        self.names = [str(x) if isinstance(x, str | Path) else f"number {i}" for i, x in enumerate(self._images)]
        for name, image in zip(self.names, self._images, strict=True):
            _check(name, image)

    def __len__(self) -> int:
        return len(self._images)

    def read(self, row: int) -> NDArray[np.uint8]:
        """[H, W, 3] RGB with the requested short side."""
        return short_side_resized(self._opened(row), self._short_side, self._kernel)

    def _opened(self, row: int) -> Image.Image:
        image = self._images[row]
        if isinstance(image, str | Path):
            return read_image(Path(image).expanduser())
        if isinstance(image, Image.Image):
            try:
                return as_rgb(ImageOps.exif_transpose(image))
            except DataError as error:
                raise DataError(f"image {self.names[row]} {error}") from None
        if isinstance(image, torch.Tensor):
            image = image.detach().cpu().permute(1, 2, 0).numpy()
        return Image.fromarray(np.ascontiguousarray(image)).convert("RGB")


def _listed(images: Any) -> Sequence[Any]:
    if isinstance(images, str | Path | Image.Image):
        return [images]
    if isinstance(images, np.ndarray):
        is_one = images.ndim == 2 or (images.ndim == 3 and images.shape[2] == 3)
        return [images] if is_one else list(images)
    if isinstance(images, torch.Tensor):
        return [images] if images.ndim == 3 else list(images)
    if not isinstance(images, Iterable):
        raise DataError(f"images are a {type(images).__name__}; give paths, Pillow images, arrays or tensors")
    return list(images)


def _check(name: str, image: Any) -> None:
    if isinstance(image, str | Path | Image.Image):
        return
    what = type(image).__name__
    if isinstance(image, np.ndarray | torch.Tensor):
        is_array = isinstance(image, np.ndarray)
        fits = image.ndim == 2 or (image.ndim == 3 and image.shape[2] == 3) if is_array else image.ndim == 3
        fits = fits and (is_array or image.shape[0] == 3) and 0 not in image.shape
        if fits and image.dtype in (np.uint8, torch.uint8):
            return
        what = f"{what} of {image.dtype} {tuple(image.shape)}"
    raise DataError(
        f"image {name} is a {what}; give a path, a Pillow image, an array [H, W, 3] or [H, W], or a tensor [3, H, W], "
        "of uint8"
    )
