"""Where pixels come from: files read and resized on request, arrays in memory, or images passed from Python."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import ExifTags, Image
from torch import Tensor

from dmlbench.data.published_images import UNREADABLE
from dmlbench.types import DataError, ImageTable

Kernel = Literal["pillow", "torch"]
Given = str | Path | Image.Image | NDArray[np.uint8] | Tensor

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # fmt: skip
"""What undoes each EXIF orientation."""
_CHANNELS = (1, 3, 4)  # of grey, RGB and RGBA pixels in memory
_MOST_ASPECT = 100  # long side over short side; what is thinner would be enlarged without bound
_SLICE = 16  # images that a thread reads before it looks whether to stop


def read_image(path: str | Path) -> Image.Image:
    """One image file as 8-bit RGB, rotated according to its EXIF orientation.

    Grey, palette, CMYK and 16-bit grey images are converted (16 bits keep their high byte); transparency is dropped.
    """
    if not Path(path).is_file():  # opening a pipe would wait without end
        raise DataError(f"image '{path}' is missing or not a file. Correct its path, or remove it from the data.")
    try:
        with Image.open(path) as file:
            file.load()
            image = _upright(file)
    except UNREADABLE as error:
        raise DataError(
            f"image '{path}' cannot be read ({error}). Replace the file, or remove it from the data; `dmlbench data "
            "verify` lists all such files."
        ) from error
    try:
        return as_rgb(image)
    except DataError as error:
        raise DataError(f"image '{path}' {error}") from None


def _upright(image: Image.Image) -> Image.Image:
    # Pillow's exif_transpose also writes the other tags again, which fails where one of them has the wrong type.
    turn = _TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    return image.copy() if turn is None else image.transpose(turn)  # outlives the file


def as_rgb(image: Image.Image) -> Image.Image:
    """8-bit RGB of an image of any mode, as ``read_image`` says."""
    if max(image.size) > _MOST_ASPECT * min(image.size):
        raise DataError(
            f"has {image.width} x {image.height} pixels, expected at most {_MOST_ASPECT} times as many along one side "
            "as along the other. Crop it."
        )
    if image.mode == "F":
        raise DataError("has floating-point pixels. Convert it to 8 bits per channel.")
    if image.mode.startswith("I"):
        # Pillow clips 16-bit grey to 255 when it converts, which would leave an all-white picture.
        pixels = np.asarray(image).astype(np.int64)
        if pixels.min() < 0 or pixels.max() > 65535:
            raise DataError(
                f"has values from {pixels.min()} to {pixels.max()}, expected 0 to 65535. Convert it to 8 or 16 bits "
                "per channel."
            )
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
        images: paths, Pillow images, arrays [H, W] or [H, W, C] and tensors [H, W] or [C, H, W] of uint8 with C = 1
            (grey), 3 (RGB) or 4 (RGBA), or one array [N, H, W] or [N, H, W, C], one tensor [N, C, H, W].
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
                image = as_rgb(_upright(given))
            except DataError as error:
                raise DataError(f"image {self.names[row]} {error}") from None
            except UNREADABLE as error:
                raise DataError(f"image {self.names[row]} cannot be read ({error}). Open it again.") from error
        else:
            if isinstance(given, Tensor):
                pixels = given.detach().cpu().numpy()
                pixels = pixels if pixels.ndim == 2 else np.moveaxis(pixels, 0, 2)
            else:
                pixels = given
            pixels = pixels[..., 0] if pixels.shape[2:] == (1,) else pixels
            image = Image.fromarray(np.ascontiguousarray(pixels)).convert("RGB")
        return short_side_resized(image, self._short_side, self._kernel)


def _listed(images: Any) -> Sequence[Any]:
    is_one = isinstance(images, str | Path | Image.Image)
    if isinstance(images, np.ndarray):
        is_one = images.ndim == 2 or (images.ndim == 3 and images.shape[2] in _CHANNELS)
    elif isinstance(images, Tensor):
        is_one = images.ndim in (2, 3)
    if not is_one and not isinstance(images, Iterable):
        raise DataError(f"images: got {type(images).__name__}, expected paths, Pillow images, arrays or tensors.")
    return [images] if is_one else list(images)


def _check(name: str, image: Any) -> None:
    what = type(image).__name__
    if isinstance(image, np.ndarray | Tensor):
        has_channels = image.ndim == 3 and image.shape[2 if isinstance(image, np.ndarray) else 0] in _CHANNELS
        if (has_channels or image.ndim == 2) and 0 not in image.shape and image.dtype in (np.uint8, torch.uint8):
            return
        what = f"{what} of {image.dtype} {tuple(image.shape)}"
    elif isinstance(image, str | Path | Image.Image):
        return
    raise DataError(
        f"image {name}: got a {what}, expected a path, a Pillow image, an array [H, W] or [H, W, C], or a tensor "
        "[H, W] or [C, H, W], of uint8 with C = 1, 3 or 4."
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
                f"images of '{table.name}': got {first.shape[1]} x {first.shape[0]} ('{table.paths[0]}') and "
                f"{image.shape[1]} x {image.shape[0]} ('{table.paths[row]}'), expected one size for this transform. "
                "Use one that crops, such as transform=mlrc."
            )
        pixels[row] = image
    return torch.from_numpy(pixels).to(device)


def for_each(
    work: Callable[[int], None],
    count: int,
    *,
    num_threads: int,
    watch: Callable[[int], object],
    check: Callable[[], None] = lambda: None,
) -> None:
    """Call ``work(0)`` to ``work(count - 1)`` in threads; an error, ``check`` or Ctrl-C stops them soon.

    Args:
        watch: called in this thread with the number of calls that just finished.
        check: called in this thread regularly; its exceptions stop the work.
    """

    def run(start: int) -> int:
        for k in range(start, min(start + _SLICE, count)):
            work(k)
        return min(_SLICE, count - start)

    with ThreadPoolExecutor(num_threads) as pool:
        try:
            for finished in pool.map(run, range(0, count, _SLICE)):
                watch(finished)
                check()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
