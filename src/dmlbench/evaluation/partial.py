"""Scores of many collections that outlive an interruption."""

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Sequence
from math import prod
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from dmlbench.evaluation.collections.models import ModelDistances as Distances
from dmlbench.evaluation.collections.models import ModelEmbeddings as Members
from dmlbench.runtime import atomic_write
from dmlbench.types import RunError

_FORMAT = 1  # raise it when scores of the same members change
_SAVE_SECONDS = 30.0
_VALUES, _PROGRESS = "per_query.npy", "progress.json"

logger = logging.getLogger(__name__)


class PartialScores:
    """Scores [collections, names, Q], NaN until known, in memory or in a folder's file.

    Attributes:
        values: the scores; whoever computes the next queries writes them.
        done: how many of the queries that have a score are known, in their order.
    """

    def __init__(self, values: NDArray[np.float64], *, done: int, fingerprint: str, folder: Path | None) -> None:
        self.values = values
        self.done = done
        self._fingerprint = fingerprint
        self._folder = folder
        self._saved = time.monotonic()

    @classmethod
    def of(
        cls,
        folder: Path | None,
        shape: tuple[int, ...],
        members: Members,
        galleries: Members | None,
        *,
        names: Sequence[str],
        distances: Distances | None,
    ) -> "PartialScores":
        """What ``folder`` holds of these members' scores, or a fresh start.

        Raises:
            RunError: the folder cannot be made, or its disk has no room for the scores.
        """
        if folder is None:
            return cls(np.full(shape, np.nan), done=0, fingerprint="", folder=None)
        fingerprint = fingerprint_of(members, galleries, names, distances)
        values = folder / _VALUES
        if (folder / _PROGRESS).exists():
            done = _known(folder, fingerprint, shape)
            if done is not None:
                logger.info("continuing after %d queries of %s", done, folder)
                mapped = np.lib.format.open_memmap(values, mode="r+")
                return cls(mapped, done=done, fingerprint=fingerprint, folder=folder)
            (folder / _PROGRESS).unlink()
        _make_room(folder, shape)
        fresh = np.lib.format.open_memmap(values, mode="w+", dtype=np.float64, shape=shape)
        for scores in fresh:
            scores[...] = np.nan
        return cls(fresh, done=0, fingerprint=fingerprint, folder=folder)

    def advance(self, count: int) -> None:
        """The scores of ``count`` more queries are known; every half a minute they are made safe."""
        self.done += count
        if time.monotonic() - self._saved >= _SAVE_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Make what is known survive a kill: first the scores, then how many of them count."""
        if self._folder is not None:
            assert isinstance(self.values, np.memmap)  # ``of`` mapped it
            self.values.flush()
            state = {"fingerprint": self._fingerprint, "done": self.done}
            atomic_write(self._folder / _PROGRESS, json.dumps(state).encode())
        self._saved = time.monotonic()


def _make_room(folder: Path, shape: tuple[int, ...]) -> None:
    """Create ``folder`` on a disk that can take the scores: a mapped file that runs out of room kills the process."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _VALUES).unlink(missing_ok=True)
    except OSError as error:
        raise RunError(f"cannot keep partial scores in {folder}: {error.strerror}; choose a writable folder") from error
    needed, free = 8 * prod(shape), shutil.disk_usage(folder).free
    if needed > free:
        raise RunError(
            f"the scores of {shape[0]} rankings take {needed} bytes, and the disk of {folder} has {free} left; "
            "make room, or aggregate fewer folds or repeats"
        )


def _known(folder: Path, fingerprint: str, shape: tuple[int, ...]) -> int | None:
    """How many queries the files in ``folder`` know of these members; None, with a line in the log, for no use."""
    try:
        held = json.loads((folder / _PROGRESS).read_text(encoding="utf-8"))
        if held["fingerprint"] != fingerprint:
            logger.info("%s is of other embeddings or scores; starting anew", folder)
            return None
        done = int(held["done"])
        found = np.load(folder / _VALUES, mmap_mode="r")  # "r+" would fill up a truncated file with zeros
        if found.shape != shape or not 0 <= done <= shape[-1]:
            raise ValueError(f"{done} queries of scores {found.shape} instead of {shape}")
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s is damaged (%s); starting anew", folder, error)
        return None
    return done


def forget(folder: Path) -> None:
    """Remove the partial scores in ``folder``, and the folder if nothing else is in it."""
    for path in (folder / _PROGRESS, folder / _VALUES, *folder.glob(f".{_PROGRESS}.*.tmp")):  # and of a killed write
        path.unlink(missing_ok=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def fingerprint_of(
    members: Members, galleries: Members | None, names: Sequence[str], distances: Distances | None
) -> str:
    """Hash of all that the scores depend on."""
    digest = hashlib.sha256(f"{_FORMAT} {list(names)} {[len(fold) for fold in members]}".encode())
    for group in (members, galleries or []):
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
