"""The image cache: every image of a data set, decoded and resized once, in one file that all processes map.

The file: magic, header length (8 bytes, little endian), a JSON header, heights [N] and widths [N] as int32, CRC-32s [N]
of the images' pixels as uint32, the CRC-32 of these three, then each image's pixels [H, W, 3] uint8 in the order of the
sorted names. A process checks an image when it first reads it (0.2 ms), and decodes damaged ones again.
"""

import contextlib
import hashlib
import json
import logging
import mmap
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray
from PIL import ExifTags, Image, UnidentifiedImageError
from tqdm import tqdm

from dmlbench.data.images.pixels import Kernel, read_image, resized_size, short_side_resized
from dmlbench.data.images.sources import DecodedImages
from dmlbench.data.images.threads import for_each
from dmlbench.runtime import available_cores, whole_file
from dmlbench.types import DataError, ImageTable, IntArray

VERSION = 3  # increment it whenever the layout or the pixels change
_MAGIC = b"dmlbench-images\n"
_ALIGNMENT = 64
_RELEASE_EVERY = 2**26  # bytes read between releases of the mapped pages
_REMEDY = "free some space, choose another paths.cache_dir, or do without with image_cache=false"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Layout:
    """Each image in a cache: heights, widths and checksums [N], and byte offsets [N + 1] into the file."""

    heights: NDArray[np.int32]
    widths: NDArray[np.int32]
    checksums: NDArray[np.uint32]
    offsets: IntArray

    @classmethod
    def after(
        cls, head: int, heights: NDArray[np.int32], widths: NDArray[np.int32], checksums: NDArray[np.uint32]
    ) -> "_Layout":
        """The layout after ``head`` bytes of magic and JSON header."""
        start = head + _per_image(len(heights))
        sizes = heights.astype(np.int64) * widths * 3
        offsets = start + -start % _ALIGNMENT + np.concatenate([[0], np.cumsum(sizes)])
        return cls(heights, widths, checksums, offsets)

    def encoded(self) -> bytes:
        """Heights, widths, checksums, and the checksum of these."""
        parts = b"".join(part.tobytes() for part in (self.heights, self.widths, self.checksums))
        return parts + zlib.crc32(parts).to_bytes(4, "little")


def _per_image(count: int) -> int:
    """Bytes of what ``_Layout.encoded`` returns."""
    return 12 * count + 4


class CachedImages:
    """Images of a table from its memory-mapped cache file; row r is image ``position[r]``, decoded by ``decode``."""

    def __init__(
        self, path: Path, layout: _Layout, position: IntArray, decode: Callable[[int], NDArray[np.uint8]]
    ) -> None:
        self.path = path
        self._layout = layout
        self._position = position
        self._decode = decode
        self._map: mmap.mmap | None = None
        self._unreleased = 0
        self._checked = np.zeros(len(position), dtype=np.bool_)
        self._is_damaged = False

    def read(self, row: int) -> NDArray[np.uint8]:
        """[H, W, 3] as a read-only view into the file; damaged images are decoded again."""
        if self._map is None:
            with open(self.path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        k = self._position[row]
        height, width = int(self._layout.heights[k]), int(self._layout.widths[k])
        size = 3 * height * width
        self._unreleased += size
        if self._unreleased > _RELEASE_EVERY and hasattr(self._map, "madvise"):
            # Pages that were read count as memory of this process until released; the system still caches them.
            self._map.madvise(mmap.MADV_DONTNEED)
            self._unreleased = size
        pixels = np.frombuffer(self._map, dtype=np.uint8, count=size, offset=int(self._layout.offsets[k]))
        if not self._checked[k]:
            if zlib.crc32(pixels.data) != self._layout.checksums[k]:
                return self._decoded(row, k)
            self._checked[k] = True
        return pixels.reshape(height, width, 3)

    def _decoded(self, row: int, k: int) -> NDArray[np.uint8]:
        if not self._is_damaged:
            logger.warning(
                "%s is damaged; remove it to build it again. Damaged images are decoded meanwhile", self.path
            )
        self._is_damaged = True
        image = np.ascontiguousarray(self._decode(row))
        if zlib.crc32(image.data) != self._layout.checksums[k]:
            raise DataError(f"the image cache '{self.path}' is damaged, and image {row} has changed; remove the cache")
        image.flags.writeable = False
        return image

    def __getstate__(self) -> dict[str, Any]:
        # a worker that is not forked maps the file itself, and checks it
        return self.__dict__ | {"_map": None, "_checked": np.zeros_like(self._checked)}


def cached_images(
    table: ImageTable,
    cache_dir: str | Path,
    *,
    short_side: int | None,
    kernel: Kernel = "pillow",
    num_threads: int | None = None,
    progress: bool = False,
    check: Callable[[], None] = lambda: None,
) -> CachedImages:
    """The cache of a data set at one size; built if it is missing, damaged, outdated or of other data.

    If several processes call this at once, one builds and the others wait.

    Args:
        short_side: pixels of the images' short side; None keeps their sizes.
        num_threads: threads that decode; None takes all available cores.
        check: called regularly while building; its exceptions end the build.
    """
    stamp = _stamp(table)
    size = "whole" if short_side is None else f"short{short_side}"
    path = Path(cache_dir) / f"{table.name}-{size}-{kernel}-{table.fingerprint[:12]}-{stamp[:12]}.images"
    order = np.argsort(table.paths, kind="stable")
    position = np.empty(len(order), dtype=np.int64)
    position[order] = np.arange(len(order))
    header = {
        "version": VERSION,
        "fingerprint": table.fingerprint,
        "stamp": stamp,
        "count": len(table),
        "short_side": short_side,
        "kernel": kernel,
    }
    try:
        layout = _read_layout(path, header)
        if layout is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(path, check):
                layout = _read_layout(path, header)  # another process may have built it meanwhile
                if layout is None:
                    if path.exists():
                        logger.warning(
                            "the image cache %s is damaged, or of another version or data; building it again", path
                        )
                    names = [os.path.join(table.root, name) for name in table.paths[order].tolist()]
                    layout = _build(path, header, names, num_threads, progress, check, table.name)
    except OSError as error:
        raise DataError(f"cannot build the image cache '{path}' ({error.strerror or error}); {_REMEDY}") from error
    return CachedImages(path, layout, position, DecodedImages(table, short_side=short_side, kernel=kernel).read)


def _stamp(table: ImageTable) -> str:
    """Digest of the images' names and modification times: an image that was edited is decoded again."""
    digest = hashlib.sha256()
    folder = os.path.join(table.root, "")
    for name in np.sort(table.paths).tolist():
        try:
            digest.update(f"{name}\t{os.stat(folder + name).st_mtime_ns}\n".encode())
        except OSError as error:
            raise DataError(f"image '{folder + name}' cannot be found ({error.strerror}); put it back") from error
    return digest.hexdigest()


def _encode(header: dict[str, Any]) -> bytes:
    text = json.dumps(header, sort_keys=True).encode()
    return _MAGIC + len(text).to_bytes(8, "little") + text


def _read_layout(path: Path, header: dict[str, Any]) -> _Layout | None:
    """The layout of a complete cache file with this header, if there is one."""
    try:
        with open(path, "rb") as file:
            expected = _encode(header)
            if file.read(len(expected)) != expected:
                return None
            encoded = file.read(_per_image(header["count"]))
            if len(encoded) < _per_image(header["count"]):
                return None
            heights, widths, checksums = np.frombuffer(encoded[:-4], dtype=np.int32).reshape(3, -1)
            layout = _Layout.after(len(expected), heights, widths, checksums.view(np.uint32))
            whole = layout.encoded() == encoded and layout.offsets[-1] == os.fstat(file.fileno()).st_size
            return layout if whole else None
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def _locked(path: Path, check: Callable[[], None]) -> Iterator[None]:
    lock = FileLock(path.with_suffix(".lock"))
    announced = False
    while not lock.is_locked:
        try:
            lock.acquire(timeout=0.2)
        except Timeout:
            if not announced:
                logger.info("another process is building %s (it holds %s); waiting for it", path, lock.lock_file)
            announced = True
            check()
    try:
        yield
    finally:
        lock.release()


def _build(
    path: Path,
    header: dict[str, Any],
    names: Sequence[str],
    num_threads: int | None,
    progress: bool,
    check: Callable[[], None],
    data_set: str,
) -> _Layout:
    short_side, kernel = header["short_side"], header["kernel"]
    sizes = np.zeros((len(names), 2), dtype=np.int32)
    checksums = np.zeros(len(names), dtype=np.uint32)

    def each(work: Callable[[int], None], what: str) -> None:
        with tqdm(total=len(names), desc=f"{data_set}: {what}", unit="image", disable=not progress, leave=False) as bar:
            threads = num_threads or available_cores()
            for_each(work, len(names), num_threads=threads, watch=bar.update, check=check)

    def measure(k: int) -> None:
        sizes[k] = _size_on_disk(names[k], short_side)

    each(measure, "sizes")
    head = _encode(header)
    layout = _Layout.after(len(head), sizes[:, 0], sizes[:, 1], checksums)
    total = int(layout.offsets[-1])
    logger.info(
        "building the image cache of %s once: %d images, %.2f GB in %s", data_set, len(names), total / 1e9, path
    )
    if (free := shutil.disk_usage(path.parent).free) < total:
        raise DataError(
            f"the image cache of '{data_set}' takes {total / 1e9:.2f} GB, but '{path.parent}' has only "
            f"{free / 1e9:.2f} GB free; {_REMEDY}"
        )
    with whole_file(path) as file:

        def store(k: int) -> None:
            image = np.ascontiguousarray(short_side_resized(read_image(names[k]), short_side, kernel))
            if image.shape[:2] != tuple(sizes[k]):
                raise DataError(
                    f"image '{names[k]}' is {image.shape[1]} x {image.shape[0]}, but its header says "
                    f"{sizes[k, 1]} x {sizes[k, 0]}; save it again or remove it from the data"
                )
            checksums[k] = zlib.crc32(image.data)
            _write_all(file.fileno(), image, int(layout.offsets[k]))

        each(store, "image cache")
        _write_all(file.fileno(), head + layout.encoded(), 0)
    return layout


def _size_on_disk(name: str, short_side: int | None) -> tuple[int, int]:
    """Height and width of a cached image, from the file's header alone."""
    try:
        with Image.open(name) as image:
            width, height = image.size
            # 5 to 8 are quarter turns; Pillow's TIFF reader has already swapped the size.
            turned = image.format != "TIFF" and image.getexif().get(ExifTags.Base.Orientation) in (5, 6, 7, 8)
    except (OSError, UnidentifiedImageError, SyntaxError, ValueError, Image.DecompressionBombError):
        read_image(name)  # says what is wrong
        raise
    if turned:
        width, height = height, width
    width, height = resized_size(width, height, short_side)
    return height, width


def _write_all(handle: int, data: Any, offset: int) -> None:
    view = memoryview(data).cast("B")
    while len(view):
        written = os.pwrite(handle, view, offset)
        view, offset = view[written:], offset + written
