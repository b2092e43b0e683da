"""Scores of single queries that outlive an interruption: of a search by distance, and of many collections."""

import functools
import hashlib
import io
import logging
import shutil
import time
import zipfile
import zlib
from collections.abc import Sequence
from math import prod
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from dmlbench.evaluation.embeddings.sets import ModelDistances, ModelEmbeddings
from dmlbench.evaluation.search.scan import ScanState, Waiting
from dmlbench.runtime import atomic_write
from dmlbench.types import IntArray, RunError

_FORMAT = 3  # raise it when scores of the same embeddings change, or the files
_SAVE_SECONDS = 30.0
_VALUES, _PROGRESS = "per_query.npy", "progress.npz"
_HELD = ("fingerprint", "done", "queries", "checksum", "counts", "rows", "keys")

logger = logging.getLogger(__name__)


class PartialScores:
    """Scores, NaN until known, and how far their computation is, in memory or in a folder's files.

    Attributes:
        values: the scores [.., Q]; whoever computes the next queries writes them.
        state: how far the computation is; whoever computes keeps it up to date.
    """

    def __init__(self, folder: Path | None, shape: tuple[int, ...], *, fingerprint: str) -> None:
        """
        Args:
            folder: what is known is kept there, and continued if it has this fingerprint; None keeps it in memory.
            shape: of the scores.
            fingerprint: of all that the scores and the order of work depend on.

        Raises:
            RunError: the folder cannot be made, or its disk has no room for the scores.
        """
        self._folder, self._fingerprint = folder, fingerprint
        self._saved = time.monotonic()
        self._done = np.zeros(shape[-1], dtype=bool)  # queries whose scores are known
        self.state = ScanState()
        if folder is None:
            self.values: NDArray[np.float64] = np.full(shape, np.nan)
            return
        known = _known(folder, fingerprint, shape) if (folder / _PROGRESS).exists() else None
        if known is not None:
            logger.info("continuing with what %s holds", folder)
            self.state, self._done = known
            self.values = np.lib.format.open_memmap(folder / _VALUES, mode="r+")
            return
        _make_room(folder, shape)
        self.values = np.lib.format.open_memmap(folder / _VALUES, mode="w+", dtype=np.float64, shape=shape)
        for scores in self.values:
            scores[...] = np.nan

    def advance(self, queries: IntArray) -> None:
        """The scores of ``queries`` are known, and the state behind them; each half a minute both are made safe."""
        self._done[queries] = True
        if time.monotonic() - self._saved >= _SAVE_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Make what is known survive a kill: first the scores, then how many of them count."""
        if self._folder is not None:
            assert isinstance(self.values, np.memmap)  # it was mapped at the beginning
            self.values.flush()
            waiting = self.state.waiting
            arrays: dict[str, NDArray] = {
                "fingerprint": np.array(self._fingerprint),
                "done": np.array(self.state.done),
                "queries": np.flatnonzero(self._done),
                "checksum": np.array(_checksum(self.values, self._done)),
                "counts": np.array([len(block) for block in waiting], dtype=np.int64),
                "rows": _joined([part for block in waiting for part in block.rows], np.int64),
                "keys": _joined([part for block in waiting for part in block.keys], np.uint64),
            }
            buffer = io.BytesIO()
            np.savez(buffer, **arrays)  # type: ignore[arg-type]  # its signature takes names for options
            atomic_write(self._folder / _PROGRESS, buffer.getvalue())
        self._saved = time.monotonic()


def _checksum(values: NDArray[np.float64], done: NDArray[np.bool_]) -> int:
    """CRC-32 of the scores of the queries that are known; others may be written at any time."""
    return functools.reduce(lambda crc, scores: zlib.crc32(scores[done].data, crc), values.reshape(-1, len(done)), 0)


def _joined(parts: list[NDArray], dtype: type) -> NDArray:
    return np.concatenate(parts) if parts else np.empty(0, dtype=dtype)


def _make_room(folder: Path, shape: tuple[int, ...]) -> None:
    """Create ``folder`` on a disk that can take the scores: a mapped file that runs out of room kills the process."""
    try:
        if zipfile.is_zipfile(folder):
            logger.info("%s was left by an earlier version; starting again", folder)
            folder.unlink()
        folder.mkdir(parents=True, exist_ok=True)
        for name in (_PROGRESS, _VALUES):
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise RunError(f"cannot keep partial scores in {folder}: {error.strerror}; choose a writable folder") from error
    needed, free = 8 * prod(shape), shutil.disk_usage(folder).free
    if needed > free:
        raise RunError(
            f"the scores of {prod(shape[:-1])} rankings take {needed} bytes, and the disk of {folder} has {free} left; "
            "make room, or aggregate fewer folds or repeats"
        )


def _known(folder: Path, fingerprint: str, shape: tuple[int, ...]) -> tuple[ScanState, NDArray[np.bool_]] | None:
    """How far the files in ``folder`` are with these scores, and the queries [Q] that have theirs.

    None, with a line in the log, where that is useless.
    """
    try:
        with np.load(folder / _PROGRESS, allow_pickle=False) as file:
            held = {name: file[name] for name in _HELD}
        if str(held["fingerprint"]) != fingerprint:
            logger.info("%s is of other embeddings or scores; starting again", folder)
            return None
        done = int(held["done"])
        found = np.load(folder / _VALUES, mmap_mode="r")  # "r+" would fill up a truncated file with zeros
        if found.shape != shape or not 0 <= done <= shape[-1]:
            raise ValueError(f"{done} queries of scores {found.shape} instead of {shape}")
        known = np.zeros(shape[-1], dtype=bool)
        known[held["queries"]] = True
        if _checksum(found, known) != held["checksum"]:
            raise ValueError("scores that are not those that were written")
    except (OSError, EOFError, ValueError, LookupError, TypeError, zipfile.BadZipFile) as error:
        logger.warning("%s is damaged (%s); starting again", folder, error)
        return None
    ends = np.cumsum(held["counts"])[:-1]
    parts = zip(np.split(held["rows"], ends), np.split(held["keys"], ends), strict=True)
    return ScanState(done, [Waiting([rows], [keys]) for rows, keys in parts] if len(held["counts"]) else []), known


def forget(folder: Path) -> None:
    """Remove the partial scores in ``folder``, and the folder if nothing else is in it."""
    for path in (folder / _PROGRESS, folder / _VALUES, *folder.glob(f".{_PROGRESS}.*.tmp")):  # and of a killed write
        path.unlink(missing_ok=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def fingerprint_of(
    embeddings: ModelEmbeddings,
    galleries: ModelEmbeddings | None,
    names: Sequence[str],
    distances: ModelDistances | None,
) -> str:
    """Hash of all that the scores depend on."""
    digest = hashlib.sha256(f"{_FORMAT} {list(names)} {[len(fold) for fold in embeddings]}".encode())
    for group in (embeddings, galleries or []):
        for part in (part for fold in group for part in fold):
            for tensor in (part.rows, part.labels, part.ids):
                array = tensor.detach().to("cpu").contiguous()
                digest.update(f"{tuple(array.shape)} {array.dtype}".encode())
                digest.update(array.view(torch.uint8).numpy().data if array.numel() else b"")
    for distance in (distance for fold in distances or [] for distance in fold):
        digest.update(repr(distance).encode())
        settings = vars(distance).items() if distance is not None else ()  # few distances print theirs
        digest.update(repr(sorted((k, v) for k, v in settings if isinstance(v, bool | int | float | str))).encode())
        for name, tensor in distance.state_dict().items() if distance is not None else ():
            digest.update(name.encode() + tensor.detach().cpu().numpy().tobytes())
    return digest.hexdigest()
