"""Where pixels come from: files decoded on request, arrays in memory, or images that are passed from Python."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor

from dmlbench.data.images.pixels import Kernel, as_rgb, read_image, short_side_resized
from dmlbench.types import DataError, ImageTable

Given = str | Path | Image.Image | NDArray[np.uint8] | Tensor


class ImageSource(Protocol):
    """Images of a table by row."""

    def read(self, row: int) -> NDArray[np.uint8]:
        """[H, W, 3] RGB; may be a read-only view."""
        ...


class DecodedImages:
    """Reads, decodes and resizes an image on each request; array data sets are only resized."""

    def __init__(self, table: ImageTable, *, short_side: int | None, kernel: Kernel = "pillow") -> None:
        self._table, self._short_side, self._kernel = table, short_side, kernel

    def read(self, row: int) -> NDArray[np.uint8]:
        """[H, W, 3] with the requested short side."""
        if self._table.pixels is None:
            image = read_image(Path(self._table.root) / str(self._table.paths[row]))
        else:
            image = Image.fromarray(np.asarray(self._table.pixels[row])).convert("RGB")
        return short_side_resized(image, self._short_side, self._kernel)


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
        given = self._images[row]
        if isinstance(given, str | Path):
            image = read_image(Path(given).expanduser())
        elif isinstance(given, Image.Image):
            try:
                image = as_rgb(ImageOps.exif_transpose(given))
            except DataError as error:
                raise DataError(f"image {self.names[row]} {error}") from None
        else:
            pixels = given.detach().cpu().permute(1, 2, 0).numpy() if isinstance(given, Tensor) else given
            image = Image.fromarray(np.ascontiguousarray(pixels)).convert("RGB")
        return short_side_resized(image, self._short_side, self._kernel)


def _listed(images: Any) -> Sequence[Any]:
    is_one = isinstance(images, str | Path | Image.Image)
    if isinstance(images, np.ndarray):
        is_one = images.ndim == 2 or (images.ndim == 3 and images.shape[2] == 3)
    elif isinstance(images, Tensor):
        is_one = images.ndim == 3
    if not is_one and not isinstance(images, Iterable):
        raise DataError(f"images are a {type(images).__name__}; give paths, Pillow images, arrays or tensors")
    return [images] if is_one else list(images)


def _check(name: str, image: Any) -> None:
    what = type(image).__name__
    if isinstance(image, np.ndarray | Tensor):
        is_color = image.ndim == 3 and image.shape[2 if isinstance(image, np.ndarray) else 0] == 3
        fits = is_color or (image.ndim == 2 and isinstance(image, np.ndarray))
        if fits and 0 not in image.shape and image.dtype in (np.uint8, torch.uint8):
            return
        what = f"{what} of {image.dtype} {tuple(image.shape)}"
    elif isinstance(image, str | Path | Image.Image):
        return
    raise DataError(
        f"image {name} is a {what}; give a path, a Pillow image, an array [H, W, 3] or [H, W], or a tensor [3, H, W], "
        "of uint8"
    )


def pixel_tensor(table: ImageTable, images: ImageSource, device: torch.device) -> Tensor:
    """All images of a table as one tensor [N, H, W] (grey) or [N, H, W, 3] on the device."""
    if table.pixels is not None:
        return torch.from_numpy(np.array(table.pixels)).to(device)
    first = images.read(0)
    pixels = np.empty((len(table), *first.shape), dtype=np.uint8)
    for row in range(len(table)):
        image = images.read(row)
        if image.shape != first.shape:
            raise DataError(
                f"images of '{table.name}' differ in size ('{table.paths[0]}' is {first.shape[1]} x {first.shape[0]}, "
                f"'{table.paths[row]}' is {image.shape[1]} x {image.shape[0]}), but the transform takes batches; "
                "use one that crops, such as transform=mlrc"
            )
        pixels[row] = image
    return torch.from_numpy(pixels).to(device)
