"""Reading one image: every mode becomes upright RGB, and what cannot be read is named."""

import os
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

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


def test_exif_tags_of_the_wrong_type_do_no_harm(tmp_path: Path) -> None:
    turned = struct.pack("<HHII", 0x0112, 3, 1, 6)
    unit = struct.pack("<HHI4s", 0x0128, 2, 2, b"x")  # ResolutionUnit, a number, as text
    exif = b"Exif\0\0II*\0" + struct.pack("<IH", 8, 2) + turned + unit + bytes(4)
    Image.new("RGB", (6, 4)).save(tmp_path / "turned.jpg", exif=exif)
    assert read_image(tmp_path / "turned.jpg").size == (4, 6)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_is_undone_as_pillow_does(tmp_path: Path, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = np.random.default_rng(0).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "turned.png", exif=exif)
    with Image.open(tmp_path / "turned.png") as file:
        assert np.array_equal(read_image(tmp_path / "turned.png"), ImageOps.exif_transpose(file))


@pytest.mark.parametrize("content", [b"", b"no image at all", None, "a pipe"])
def test_an_unreadable_image_is_named(tmp_path: Path, content: bytes | str | None) -> None:
    file = tmp_path / "broken.jpg"
    if content == "a pipe":
        os.mkfifo(file)
    elif isinstance(content, bytes):
        file.write_bytes(content)
    with pytest.raises(DataError, match=r"broken\.jpg"):
        read_image(file)


@pytest.mark.parametrize(("size", "refused"), [((1, 100), False), ((1, 101), True), ((303, 3), True)])
def test_too_thin_images_are_refused(tmp_path: Path, size: tuple[int, int], refused: bool) -> None:
    file = tmp_path / "thin.png"
    Image.new("RGB", size).save(file)
    if not refused:
        assert read_image(file).size == size
        return
    with pytest.raises(DataError, match=rf"thin\.png' has {size[0]} x {size[1]} pixels, expected at most 100 times"):
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
