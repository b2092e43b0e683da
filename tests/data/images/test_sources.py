"""Reading one image: every mode becomes upright RGB, and what cannot be read is named."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dmlbench.data.images.sources import read_image
from dmlbench.types import DataError


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "CMYK", "I;16", "LA"])
def test_every_mode_is_read_as_rgb(tmp_path: Path, mode: str) -> None:
    if mode == "I;16":
        image = Image.fromarray(np.full((4, 6), 200 * 256, dtype=np.uint16))
    else:
        image = Image.new("RGB", (6, 4), (200, 200, 200))
        image = image.quantize(4) if mode == "P" else image.convert(mode)
    file = tmp_path / ("image.tif" if mode == "CMYK" else "image.png")
    image.save(file)
    read = read_image(file)
    assert (read.mode, read.size) == ("RGB", (6, 4))
    value = np.asarray(read)[0, 0, 0]
    assert value == 255 if mode == "1" else abs(int(value) - 200) <= 2


@pytest.mark.parametrize("suffix", ["tiff", "jpg", "png", "webp"])
@pytest.mark.parametrize(("orientation", "size"), [(1, (6, 4)), (3, (6, 4)), (6, (4, 6)), (8, (4, 6))])
def test_exif_rotation_is_applied(tmp_path: Path, suffix: str, orientation: int, size: tuple[int, int]) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.new("RGB", (6, 4)).save(tmp_path / f"turned.{suffix}", exif=exif)
    assert read_image(tmp_path / f"turned.{suffix}").size == size


@pytest.mark.parametrize("content", [b"", b"no image at all", None, "a pipe"])
def test_an_unreadable_image_is_named(tmp_path: Path, content: bytes | str | None) -> None:
    file = tmp_path / "broken.jpg"
    if content == "a pipe":
        os.mkfifo(file)
    elif isinstance(content, bytes):
        file.write_bytes(content)
    with pytest.raises(DataError, match=r"broken\.jpg"):
        read_image(file)


@pytest.mark.parametrize(
    ("pixel", "message"),
    [
        (np.float32(1), "floating-point"),
        (np.int32(65536), r"has values from 0 to 65536, expected 0 to 65535\. Convert it to 8 or 16 bits"),
        (np.int32(-1), "has values from -1 to 0"),
    ],
)
def test_pixels_beyond_16_bits_are_refused(tmp_path: Path, pixel: np.generic, message: str) -> None:
    file = tmp_path / "image.tif"
    pixels = np.zeros((4, 4), dtype=pixel.dtype)
    pixels[0, 0] = pixel
    Image.fromarray(pixels).save(file)
    with pytest.raises(DataError, match=message):
        read_image(file)
