"""The image cache: what it gives is what decoding gives, it appears whole or not at all, and it holds no memory."""

import errno
import logging
import os
import pickle
import threading
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dmlbench.data.image_table import Listing, table_of
from dmlbench.data.images import image_cache
from dmlbench.data.images.image_cache import cached_images
from dmlbench.data.images.sources import DecodedImages
from dmlbench.types import DataError, ImageTable, RunError

NAMES = ("cmyk.jpg", "deep.png", "grey.png", "palette.gif", "small.png", "tall.jpg", "turned.jpg", "wide.jpg")


@pytest.fixture
def table(tmp_path: Path) -> ImageTable:
    root = tmp_path / "images"
    root.mkdir()
    random = np.random.default_rng(0)

    def noise(height: int, width: int, *channels: int) -> np.ndarray:
        return random.integers(0, 255, (height, width, *channels), dtype=np.uint8)

    Image.fromarray(noise(40, 61, 3)).save(root / "wide.jpg")
    Image.fromarray(noise(90, 33, 3)).save(root / "tall.jpg")
    Image.fromarray(noise(50, 40)).save(root / "grey.png")
    Image.fromarray(noise(48, 40, 3)).convert("P").save(root / "palette.gif")
    Image.fromarray(noise(44, 52, 4), mode="CMYK").save(root / "cmyk.jpg")
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(noise(40, 70, 3)).save(root / "turned.jpg", exif=exif)
    Image.fromarray(noise(9, 11, 3)).save(root / "small.png")
    Image.fromarray(noise(40, 41).astype(np.uint16) * 256).save(root / "deep.png")
    return pictures(root)


def pictures(root: Path) -> ImageTable:
    labels = np.arange(len(NAMES)) % 2
    return table_of(Listing(root, NAMES, labels, "ab", np.full(len(NAMES), "train"), name="pictures"))


def files_in(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.suffix != ".lock") if folder.exists() else []


@pytest.mark.parametrize("kernel", ["pillow", "torch"])
@pytest.mark.parametrize("short_side", [32, None])
def test_every_kind_of_image_comes_out_as_it_decodes(table: ImageTable, tmp_path, short_side, kernel) -> None:
    cached = cached_images(table, tmp_path / "cache", short_side=short_side, kernel=kernel, num_threads=3)
    decoded = DecodedImages(table, short_side=short_side, kernel=kernel)
    for row in range(len(table)):
        image = cached.read(row)
        np.testing.assert_array_equal(image, decoded.read(row))
        assert not image.flags.writeable
        if short_side:
            assert min(image.shape[:2]) == short_side
    assert cached.read(NAMES.index("turned.jpg")).shape[0] > cached.read(NAMES.index("turned.jpg")).shape[1]
    assert cached.path.stat().st_size == max(offset + 3 * h * w for offset, h, w, _ in cached._index.tolist())


def test_it_is_built_once_and_needs_no_image_afterwards(table: ImageTable, tmp_path, monkeypatch) -> None:
    first = cached_images(table, tmp_path / "cache", short_side=32)
    expected = [first.read(row).copy() for row in range(len(table))]
    monkeypatch.setattr(image_cache, "read_image", lambda name: pytest.fail(f"{name} was decoded again"))
    again = cached_images(table, tmp_path / "cache", short_side=32)
    for name in NAMES:
        (Path(table.root) / name).unlink()
    for row in range(len(table)):
        np.testing.assert_array_equal(again.read(row), expected[row])
    assert len(files_in(tmp_path / "cache")) == 1


def test_an_image_that_was_edited_is_decoded_again(table: ImageTable, tmp_path: Path) -> None:
    before = cached_images(table, tmp_path / "cache", short_side=32)
    row = table.paths.tolist().index("wide.jpg")
    file = Path(table.root) / "wide.jpg"
    content, status = file.read_bytes(), file.stat()
    Image.new("RGB", Image.open(file).size, (0, 255, 0)).save(file)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    after = cached_images(table, tmp_path / "cache", short_side=32)  # the same table: a fingerprint does not tell
    assert after.path != before.path
    assert after.read(row)[5, 5, 1] > 250
    file.write_bytes(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert cached_images(table, tmp_path / "cache", short_side=32).path == before.path


def test_tables_of_another_row_order_share_it(table: ImageTable, tmp_path: Path) -> None:
    first = cached_images(table, tmp_path / "cache", short_side=32)
    order = [5, 2, 7, 0, 1, 6, 3, 4]
    other = cached_images(replace(table, paths=table.paths[order]), tmp_path / "cache", short_side=32)
    assert other.path == first.path
    for row, original in enumerate(order):
        np.testing.assert_array_equal(other.read(row), first.read(original))


def test_changed_data_another_size_and_another_kernel_get_files_of_their_own(table: ImageTable, tmp_path) -> None:
    cache = tmp_path / "cache"
    paths = {cached_images(table, cache, short_side=32).path, cached_images(table, cache, short_side=16).path}
    paths.add(cached_images(table, cache, short_side=32, kernel="torch").path)
    Image.new("RGB", (50, 60), "red").save(Path(table.root) / "small.png")
    changed = pictures(Path(table.root))
    cached = cached_images(changed, cache, short_side=32)
    paths.add(cached.path)
    assert len(paths) == 4
    assert (cached.read(NAMES.index("small.png")) == [255, 0, 0]).all()


SPOILED: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda content: content[:-1],
    "of other data": lambda content: content.replace(b'"fingerprint": "', b'"fingerprint": "0', 1),
    "older": lambda content: content.replace(b'"version": 4', b'"version": 3', 1),
    "garbage": lambda content: b"\xff" * 100,
    "empty": lambda content: b"",
}


@pytest.mark.parametrize("way", SPOILED)
def test_a_wrong_file_is_reported_and_built_again(table: ImageTable, tmp_path: Path, caplog: Any, way: str) -> None:
    first = cached_images(table, tmp_path / "cache", short_side=32)
    whole = first.path.read_bytes()
    first.read(0)  # maps the whole file
    first.path.unlink()
    first.path.write_bytes(SPOILED[way](whole))
    with caplog.at_level(logging.WARNING):
        again = cached_images(table, tmp_path / "cache", short_side=32)
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "building it again" in record.message
    for row in range(len(table)):
        np.testing.assert_array_equal(again.read(row), first.read(row))


def test_damaged_pixels_are_an_error_that_names_the_file(table: ImageTable, tmp_path: Path) -> None:
    cached = cached_images(table, tmp_path / "cache", short_side=32)
    content = bytearray(cached.path.read_bytes())
    content[int(cached._index["offset"][cached._position[2]]) + 5] ^= 1
    cached.path.write_bytes(content)
    cached.read(1)
    with pytest.raises(DataError, match=rf"the image cache '{cached.path}' is damaged\. Remove it"):
        cached.read(2)


def test_a_pipe_in_place_of_the_file_is_named_instead_of_waited_for(table: ImageTable, tmp_path: Path) -> None:
    path = cached_images(table, tmp_path, short_side=32).path
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(RunError, match=f"{path} is a pipe, not a file. Remove it"):
        cached_images(table, tmp_path, short_side=32)


def test_an_unreadable_image_is_named_and_nothing_is_left(table: ImageTable, tmp_path: Path) -> None:
    image = Path(table.root) / "wide.jpg"
    image.write_bytes(image.read_bytes()[:-500])  # the header is whole, the pixels are not
    with pytest.raises(DataError, match=r"wide\.jpg.*truncated"):
        cached_images(table, tmp_path / "cache", short_side=32)
    assert files_in(tmp_path / "cache") == []


def test_a_disk_that_fills_leaves_nothing(table: ImageTable, tmp_path: Path, monkeypatch: Any) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(image_cache, "short_side_resized", full)
    with pytest.raises(DataError, match=r"No space left.*cache_dir.*image_cache=false"):
        cached_images(table, tmp_path / "cache", short_side=32)
    assert files_in(tmp_path / "cache") == []


def test_of_several_that_ask_at_once_one_builds(table: ImageTable, tmp_path: Path, monkeypatch: Any) -> None:
    decoded: list[str] = []
    read_image = image_cache.read_image

    def counting(name: str) -> Image.Image:
        decoded.append(name)
        return read_image(name)

    monkeypatch.setattr(image_cache, "read_image", counting)
    results: list[bytes] = []

    def ask() -> None:
        results.append(cached_images(table, tmp_path / "cache", short_side=32).read(0).tobytes())

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert len(set(results)) == 1
    assert len(decoded) == len(table)


def test_a_copy_in_another_process_opens_the_file_itself(table: ImageTable, tmp_path: Path) -> None:
    cached = cached_images(table, tmp_path / "cache", short_side=32)
    image = cached.read(3)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(cached)).read(3), image)


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="measures memory through /proc")
def test_reading_much_more_than_memory_may_hold_keeps_little_resident(tmp_path: Path, monkeypatch: Any) -> None:
    count, side = 500, 400  # 240 MB, none of it on disk
    size = 3 * side * side
    index = np.zeros(count, dtype=image_cache._ENTRY)
    index["offset"] = size * np.arange(count)
    index["height"] = index["width"] = side
    index["checksum"] = zlib.crc32(bytes(size))
    path = tmp_path / "sparse.images"
    path.touch()
    os.truncate(path, size * count)
    cached = image_cache.CachedImages(path, index, np.arange(count))
    monkeypatch.setattr(image_cache, "_RELEASE_EVERY", 2**24)
    cached.read(0)
    before = resident_bytes()
    peak = 0
    for row in range(count):
        assert not cached.read(row).any()
        peak = max(peak, resident_bytes())
    assert peak - before < 60e6
