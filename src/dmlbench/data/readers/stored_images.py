"""Small images of a whole data set, in folders or in zip archives, read as one array."""

import hashlib
import io
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from dmlbench.data.readers.layouts import images_below, is_image
from dmlbench.types import DataError

_MOST_BYTES = 2**20  # of one small image
_DAMAGED = (OSError, EOFError, SyntaxError, ValueError, zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True)
class StoredImage:
    """The image file ``member`` of a folder or zip archive; ``stamp`` changes with its content."""

    place: Path
    member: str
    stamp: str


def images_by_path(place: Path, pattern: str) -> dict[str, StoredImage]:
    """The images below a folder or in a zip archive whose names end in ``pattern``, by that part of the name."""
    if place.is_dir():
        images = [StoredImage(place, path, file_stamp(place / path)) for path in images_below(place)]
    else:
        try:
            with zipfile.ZipFile(place) as archive:
                members = [member for member in archive.infolist() if is_image(member.filename.rsplit("/", 1)[-1])]
        except _DAMAGED as error:
            raise DataError(f"the archive '{place}' is damaged ({error}). Download it again.") from error
        for member in members:
            if member.file_size > _MOST_BYTES:
                raise DataError(
                    f"'{member.filename}' in '{place}': got {member.file_size:,} bytes, expected at most "
                    f"{_MOST_BYTES:,}. Get the original."
                )
        images = [StoredImage(place, member.filename, str(member.CRC)) for member in members]
    ending = re.compile(f"(?:^|/)({pattern})$")
    return {match[1]: image for image in images if (match := ending.search(image.member))}


def content_digest(images: Mapping[str, StoredImage]) -> str:
    """A digest of paths and stamps, for the key of a cache."""
    return hashlib.sha256("".join(f"{path}\t{image.stamp}\n" for path, image in images.items()).encode()).hexdigest()


def file_stamp(file: Path) -> str:
    """Size and time of a file, which change when it does."""
    if not file.is_file():
        raise DataError(f"'{file}' cannot be read: it is missing or not a file. Replace it.")
    status = file.stat()
    return f"{status.st_size} {status.st_mtime_ns}"


def decoded(
    images: Iterable[StoredImage], shape: tuple[int, ...], convert: Callable[[Image.Image], NDArray[np.uint8]]
) -> NDArray[np.uint8]:
    """[N, *shape] uint8: each image, converted."""
    images = list(images)
    pixels = np.empty((len(images), *shape), dtype=np.uint8)
    with ExitStack() as stack:
        places = {image.place for image in images}
        archives = {place: stack.enter_context(zipfile.ZipFile(place)) for place in places if place.is_file()}
        for row, image in enumerate(images):
            archive = archives.get(image.place)
            try:
                content = archive.read(image.member) if archive else (image.place / image.member).read_bytes()
                with Image.open(io.BytesIO(content)) as opened:
                    pixels[row] = convert(opened)
            except _DAMAGED as error:
                raise DataError(
                    f"'{image.member}' in '{image.place}' cannot be read ({error}). Get the original."
                ) from error
    return pixels
