"""Scores of many collections that outlive an interruption."""

import hashlib
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from dmlbench.evaluation.members import Distances, Members
from dmlbench.runtime import atomic_write

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
        """What ``folder`` holds of these members' scores, or a fresh start."""
        if folder is None:
            return cls(np.full(shape, np.nan), done=0, fingerprint="", folder=None)
        fingerprint = fingerprint_of(members, galleries, names, distances)
        values, progress = folder / _VALUES, folder / _PROGRESS
        if progress.exists():
            held = json.loads(progress.read_text(encoding="utf-8"))
            if held["fingerprint"] == fingerprint:
                logger.info("continuing after %d queries of %s", held["done"], folder)
                mapped = np.lib.format.open_memmap(values, mode="r+")
                return cls(mapped, done=held["done"], fingerprint=fingerprint, folder=folder)
            logger.info("%s is of other embeddings or scores; starting anew", folder)
            progress.unlink()
        folder.mkdir(parents=True, exist_ok=True)
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


def forget(folder: Path) -> None:
    """Remove the partial scores in ``folder``, and the folder if nothing else is in it."""
    for name in (_PROGRESS, _VALUES):
        (folder / name).unlink(missing_ok=True)
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
