"""The feature cache: what the frozen part of a network makes of every image, in one file that all processes map.

The file: magic, header length (8 bytes, little endian), a JSON header, CRC-32s [R] of the records as uint32, and from
the next multiple of 64 bytes the records [R, F]. Record i < N is image i as evaluation sees it; record N + k V + v is
view v of the k-th image with random views. A process checks a record when it first reads it.
"""

import json
import logging
import mmap
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from dmlbench.data.images.image_cache import build_lock
from dmlbench.runtime import derive_seed
from dmlbench.types import ConfigError, DataError, IntArray, check_at_least, check_choice

CacheDtype = Literal["float16", "bfloat16", "float32"]
Level = Literal["maps", "pooled"]

_VERSION = 1  # increment it whenever the layout or the records change
_MAGIC = b"dmlbench-features\n"
_ALIGNMENT = 64
_SIMULATED = 256  # different records of a simulated cache
_STORED_AS = {"float16": np.float16, "bfloat16": np.uint16, "float32": np.float32}
_REMEDY = "Free some space, choose another paths.cache_dir or fewer feature_cache.views, or set feature_cache=none."

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FeatureCacheSettings:
    """What a feature cache stores.

    Attributes:
        level: "maps" of the frozen part, or "pooled" features, for poolings without parameters.
        views: random views of each training image.
        seed: of the random views.
        dtype: of the stored numbers.
    """

    level: Level = "maps"
    views: int = 8
    seed: int = 0
    dtype: CacheDtype = "float16"

    def __post_init__(self) -> None:
        check_choice("feature_cache.level", self.level, get_args(Level))
        check_choice("feature_cache.dtype", self.dtype, get_args(CacheDtype))
        check_at_least(1, **{"feature_cache.views": self.views})

    def check_frozen(self, frozen_until: str | None) -> None:
        """Raise ConfigError unless the part of the backbone whose output is cached is frozen."""
        if frozen_until is None or (self.level == "pooled" and frozen_until != "all"):
            expected = "all" if self.level == "pooled" else "a stage or all"
            raise ConfigError(
                f"backbone.frozen_until: got {frozen_until or 'null'}, expected {expected} with "
                f"feature_cache.level={self.level}. Set backbone.frozen_until=all or feature_cache=none."
            )


class FeatureCache:
    """Records of images by table row, from a complete file.

    Args:
        path: of the file.
        num_images: N.
        view_rows: [K] table rows with random views.
        settings: of the cache.
        record_size: F.
        content: what the records depend on, as JSON.
    """

    def __init__(
        self, path: Path, num_images: int, view_rows: IntArray, settings: FeatureCacheSettings, record_size: int,
        content: dict[str, Any],
    ) -> None:  # fmt: skip
        self.path, self.settings, self.record_size = path, settings, record_size
        self.num_records = num_images + len(view_rows) * settings.views
        header = json.dumps({"version": _VERSION, "records": self.num_records, **content}, sort_keys=True).encode()
        self.head = _MAGIC + len(header).to_bytes(8, "little") + header
        self.start = _aligned(len(self.head) + 4 * self.num_records)
        self.record_bytes = record_size * np.dtype(_STORED_AS[settings.dtype]).itemsize
        self.total_bytes = self.start + self.num_records * self.record_bytes
        self._num_images = num_images
        self._view_rows = view_rows
        self._place = np.full(num_images, -1, dtype=np.int64)
        self._place[view_rows] = np.arange(len(view_rows))
        self._records: NDArray[Any] | _Repeated | None = None
        self._checksums = np.zeros(0, dtype=np.uint32)
        self._checked = np.zeros(self.num_records, dtype=np.bool_)

    def source_of(self, positions: IntArray) -> tuple[IntArray, list[int]]:
        """Table rows of records, and the seeds of their transforms."""
        views = positions - self._num_images
        count = self.settings.views
        rows = np.where(views < 0, positions, self._view_rows[np.maximum(views, 0) // count])
        seeds = [
            derive_seed(self.settings.seed, "view", row, view % count) if view >= 0 else 0
            for row, view in zip(rows.tolist(), views.tolist(), strict=True)
        ]
        return rows, seeds

    def read(self, rows: IntArray, views: IntArray | None) -> Tensor:
        """Records [B, F, 1, 1] of table rows, as evaluation sees them or of random views [B]."""
        return self._at(rows if views is None else self._num_images + self._place[rows] * self.settings.views + views)

    def records(self, positions: IntArray, batch_size: int) -> Iterator[Tensor]:
        """Records [b, F, 1, 1] of the given positions in order, in parts."""
        for first in range(0, len(positions), batch_size):
            yield self._at(positions[first : first + batch_size])

    def simulate(self) -> None:
        """Read random records, without a file: for timing steps."""
        values = torch.rand(_SIMULATED, self.record_size, generator=torch.Generator().manual_seed(0))
        self._records = _Repeated(_as_stored(values, self.settings.dtype, "simulated records"))
        self._checked[:] = True

    def is_complete(self) -> bool:
        """Whether the file is there, of this content."""
        if not self.path.is_file() or self.path.stat().st_size != self.total_bytes:
            return False
        with open(self.path, "rb") as file:
            return file.read(len(self.head)) == self.head

    def _at(self, places: IntArray) -> Tensor:
        if self._records is None:
            self._open()
        assert self._records is not None
        for place in places[~self._checked[places]].tolist():
            if _checksum(self._records[place].data) != self._checksums[place]:
                raise DataError(f"the feature cache '{self.path}' is damaged. Remove it to build it again.")
        self._checked[places] = True
        records = torch.from_numpy(self._records[places])
        if self.settings.dtype == "bfloat16":
            records = records.view(torch.bfloat16)
        return records[:, :, None, None]

    def _open(self) -> None:
        with open(self.path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._checksums = np.frombuffer(mapped, np.uint32, self.num_records, len(self.head)).copy()
        dtype = _STORED_AS[self.settings.dtype]
        flat = np.frombuffer(mapped, dtype, self.num_records * self.record_size, self.start)
        self._records = flat.reshape(self.num_records, self.record_size)


class _Repeated:
    """A few records in place of all."""

    def __init__(self, rows: NDArray[Any]) -> None:
        self.rows = rows

    def __getitem__(self, places: IntArray) -> NDArray[Any]:
        return self.rows[places % len(self.rows)]


@dataclass(frozen=True)
class FeatureView:
    """Records as batches read them: of evaluation, or of random views, each chosen by the image's seed."""

    cache: FeatureCache
    random: bool

    def read(self, rows: IntArray, seeds: list[int]) -> Tensor:
        """Records [B, F, 1, 1] of table rows [B]."""
        views = np.array([seed % self.cache.settings.views for seed in seeds]) if self.random else None
        return self.cache.read(rows, views)


def complete_cache(
    cache: FeatureCache,
    records: Callable[[IntArray], Iterator[Tensor]],
    *,
    progress: bool,
    check: Callable[[], None],
    name: str,
) -> None:
    """Build the file of a cache unless it is there; an interrupted build resumes, other processes wait.

    Args:
        records: records [b, F, 1, 1] of the given positions in order, in parts.
        check: called before and during the build; its exceptions end it, and the next start resumes.
        name: of the data set, for messages.
    """
    if cache.is_complete():
        return
    check()
    part = _part_of(cache)
    try:
        cache.path.parent.mkdir(parents=True, exist_ok=True)
        with build_lock(cache.path, check):
            if not cache.is_complete():
                _build(part, cache, records, progress=progress, check=check, name=name)
                os.replace(part, cache.path)
    except OSError as error:
        raise DataError(f"feature cache '{cache.path}': {error.strerror or error}. {_REMEDY}") from error


def _part_of(cache: FeatureCache) -> Path:
    return cache.path.with_suffix(".part")


def require_space(cache: FeatureCache, name: str) -> None:
    """Raise DataError if the disk is too small for what is missing of a cache."""
    folder, part = next(parent for parent in cache.path.parents if parent.is_dir()), _part_of(cache)
    stored = part.stat().st_blocks * 512 if part.exists() else 0
    if (free := shutil.disk_usage(folder).free + stored) < cache.total_bytes:
        raise DataError(
            f"the feature cache of '{name}' takes {cache.total_bytes / 1e9:.2f} GB, '{cache.path.parent}' has "
            f"{free / 1e9:.2f} GB free. {_REMEDY}"
        )


def _build(
    path: Path, cache: FeatureCache, records: Callable[[IntArray], Iterator[Tensor]], *, progress: bool,
    check: Callable[[], None], name: str,
) -> None:  # fmt: skip
    head, start, total, size = cache.head, cache.start, cache.total_bytes, cache.record_bytes
    require_space(cache, name)
    with open(path, "r+b" if path.exists() else "w+b") as file:
        if file.read(len(head)) != head:
            os.truncate(file.fileno(), 0)
            os.pwrite(file.fileno(), head, 0)
        os.truncate(file.fileno(), total)
        checksums = np.frombuffer(os.pread(file.fileno(), 4 * cache.num_records, len(head)), np.uint32)
        written = np.flatnonzero(checksums).tolist()
        whole = [i for i in written if _checksum(os.pread(file.fileno(), size, start + i * size)) == checksums[i]]
        todo = np.setdiff1d(np.arange(cache.num_records), np.array(whole, dtype=np.int64))
        logger.info(
            "building the feature cache of %s: %d of %d records, %.2f GB in %s", name, len(todo), cache.num_records,
            total / 1e9, cache.path,
        )  # fmt: skip
        done, told = 0, False
        first, began = 0, 0.0  # the first block may wait for the image cache
        with tqdm(total=len(todo), desc=f"{name}: features", unit="view", disable=not progress, leave=False) as bar:
            for block in records(todo):
                values = _as_stored(block, cache.settings.dtype, name)
                for place, record in zip(todo[done : done + len(values)].tolist(), values, strict=True):
                    os.pwrite(file.fileno(), record.data, start + place * size)
                    os.pwrite(file.fileno(), _checksum(record.data).to_bytes(4, "little"), len(head) + 4 * place)
                done += len(values)
                bar.update(len(values))
                if not first:
                    first, began = done, time.monotonic()
                elif not told and (passed := time.monotonic() - began) > 5:
                    told, rate = True, (done - first) / passed
                    logger.info("%.0f views a second, %.0f minutes left", rate, (len(todo) - done) / rate / 60)
                check()
        os.fsync(file.fileno())


def _checksum(record: Any) -> int:
    return zlib.crc32(record) or 1  # 0 marks what is not written yet


def _as_stored(block: Tensor, dtype: CacheDtype, name: str) -> NDArray[Any]:
    converted = block.flatten(1).to(getattr(torch, dtype)).cpu().contiguous()
    if not bool(torch.isfinite(converted).all()):
        raise ConfigError(
            f"feature_cache.dtype: features of {name} are not finite in {dtype}. Set feature_cache.dtype=float32."
        )
    return np.asarray((converted.view(torch.uint16) if dtype == "bfloat16" else converted).numpy())


def _aligned(offset: int) -> int:
    return offset + -offset % _ALIGNMENT
