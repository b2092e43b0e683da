"""The image cache: every image of a data set, decoded and resized once, in one file that all processes map.

The file: magic, header length (8 bytes, little endian), a JSON header, an index [N] in the order of the sorted names
(``_ENTRY``), its CRC-32, then each image's pixels [H, W, 3] uint8, anywhere. A process checks an image when it first
reads it (0.2 ms).
"""

import hashlib
import json
import logging
import mmap
import os
import threading
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray
from tqdm import tqdm

from dmlbench.data.images.sources import Kernel, for_each, read_image, short_side_resized
from dmlbench.runtime import available_cores, whole_file
from dmlbench.types import DataError, ImageTable, IntArray, require_file

VERSION = 4  # increment it whenever the layout or the pixels change
_MAGIC = b"dmlbench-images\n"
_ENTRY = np.dtype([("offset", "<i8"), ("height", "<i4"), ("width", "<i4"), ("checksum", "<u4")])
_RELEASE_EVERY = 2**26  # bytes read between releases of the mapped pages
_REMEDY = "Free some space, choose another paths.cache_dir, or set image_cache=false."

Index = NDArray[Any]
"""[N] ``_ENTRY`` of each image."""

logger = logging.getLogger(__name__)


class CachedImages:
    """Images of a table from its memory-mapped cache file; row r is image ``position[r]``."""

    def __init__(self, path: Path, index: Index, position: IntArray) -> None:
        self.path = path
        self._index = index
        self._position = position
        self._map: mmap.mmap | None = None
        self._unreleased = 0
        self._checked = np.zeros(len(position), dtype=np.bool_)

    def read(self, row: int) -> NDArray[np.uint8]:
        """[H, W, 3] as a read-only view into the file."""
        if self._map is None:
            with open(self.path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        k = self._position[row]
        offset, height, width, checksum = self._index[k].tolist()
        size = 3 * height * width
        self._unreleased += size
        if self._unreleased > _RELEASE_EVERY and hasattr(self._map, "madvise"):
            # Pages that were read count as memory of this process until released; the system still caches them.
            self._map.madvise(mmap.MADV_DONTNEED)
            self._unreleased = size
        pixels = np.frombuffer(self._map, dtype=np.uint8, count=size, offset=offset)
        if not self._checked[k]:
            if zlib.crc32(pixels.data) != checksum:
                raise DataError(f"the image cache '{self.path}' is damaged. Remove it to build it again.")
            self._checked[k] = True
        return pixels.reshape(height, width, 3)

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
    stamp = stamp_of(table)
    size = "whole" if short_side is None else f"short{short_side}"
    path = Path(cache_dir) / f"{table.name}-{size}-{kernel}-{table.fingerprint[:12]}-{stamp[:12]}.images"
    order = np.argsort(table.paths, kind="stable")
    position = np.empty(len(order), dtype=np.int64)
    position[order] = np.arange(len(order))
    header = {"version": VERSION, "fingerprint": table.fingerprint, "stamp": stamp, "count": len(table)}
    header |= {"short_side": short_side, "kernel": kernel}
    try:
        index = _read_index(path, header)
        if index is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with build_lock(path, check):
                index = _read_index(path, header)  # another process may have built it meanwhile
                if index is None:
                    if path.exists():
                        logger.warning("the image cache %s is damaged or outdated; building it again", path)
                    names = [os.path.join(table.root, name) for name in table.paths[order].tolist()]
                    threads = num_threads or available_cores()
                    logger.info("building the image cache of %s once: %d images in %s", table.name, len(table), path)
                    title = f"{table.name}: image cache"
                    with tqdm(total=len(table), desc=title, disable=not progress, leave=False) as bar:
                        index = _build(path, header, names, num_threads=threads, watch=bar.update, check=check)
    except OSError as error:
        raise DataError(f"cannot build the image cache '{path}' ({error.strerror or error}). {_REMEDY}") from error
    return CachedImages(path, index, position)


def stamp_of(table: ImageTable) -> str:
    """Digest of the images' names and modification times: an image that was edited is decoded again."""
    digest = hashlib.sha256()
    folder = os.path.join(table.root, "")
    for name in np.sort(table.paths).tolist():
        try:
            digest.update(f"{name}\t{os.stat(folder + name).st_mtime_ns}\n".encode())
        except OSError as error:
            raise DataError(f"image '{folder + name}' cannot be found ({error.strerror}). Put it back.") from error
    return digest.hexdigest()


def _head(header: dict[str, Any]) -> bytes:
    text = json.dumps(header, sort_keys=True).encode()
    return _MAGIC + len(text).to_bytes(8, "little") + text


def _encoded(index: Index) -> bytes:
    """The index and its checksum."""
    content = index.tobytes()
    return content + zlib.crc32(content).to_bytes(4, "little")


def _read_index(path: Path, header: dict[str, Any]) -> Index | None:
    """The index of a complete cache file with this header, if there is one."""
    require_file(path)
    try:
        with open(path, "rb") as file:
            expected = _head(header)
            if file.read(len(expected)) != expected:
                return None
            encoded = file.read(_ENTRY.itemsize * header["count"] + 4)
            if zlib.crc32(encoded[:-4]).to_bytes(4, "little") != encoded[-4:]:
                return None
            index = np.frombuffer(encoded[:-4], dtype=_ENTRY)
            end = (index["offset"] + 3 * index["height"].astype(np.int64) * index["width"]).max(initial=0)
            return index if len(index) == header["count"] and end == os.fstat(file.fileno()).st_size else None
    except FileNotFoundError:
        return None


def build_lock(path: Path, check: Callable[[], None]) -> AbstractContextManager[Any]:
    lock = FileLock(path.with_suffix(".lock"))
    is_told = False
    while True:
        try:
            return lock.acquire(timeout=0.2)
        except Timeout:
            if not is_told:
                logger.info("another process is building %s (it holds %s); waiting for it", path, lock.lock_file)
            is_told = True
            check()


def _build(
    path: Path, header: dict[str, Any], names: Sequence[str], *, num_threads: int, watch: Callable[[int], object],
    check: Callable[[], None],
) -> Index:  # fmt: skip
    index = np.zeros(len(names), dtype=_ENTRY)
    head = _head(header)
    lock = threading.Lock()
    with whole_file(path) as file:
        file.seek(len(head) + len(_encoded(index)))

        def store(k: int) -> None:
            resized = short_side_resized(read_image(names[k]), header["short_side"], header["kernel"])
            image = np.ascontiguousarray(resized)
            checksum = zlib.crc32(image.data)
            with lock:
                index[k] = (file.tell(), *image.shape[:2], checksum)
                file.write(image.data)

        for_each(store, len(names), num_threads=num_threads, watch=watch, check=check)
        file.seek(0)
        file.write(head + _encoded(index))
    return index
