"""Where pixels come from: files decoded on request, a cache of resized images, or arrays held in memory."""

from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from dmlbench.data.images.pixels import Kernel, read_image, short_side_resized
from dmlbench.types import DataError, ImageTable


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
