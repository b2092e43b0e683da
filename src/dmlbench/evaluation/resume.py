"""A search by distance that outlives an interruption: scores of finished queries, and candidates of those to come."""

import io
import logging
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dmlbench.evaluation.search.halves import HalvesState, Waiting
from dmlbench.runtime import atomic_write

_SAVE_SECONDS = 30.0

logger = logging.getLogger(__name__)


class ResumableScores:
    """Scores [Q] by name, NaN until known, and how far the search is, in memory and, if asked for, in a file.

    Attributes:
        per_query: the scores; whoever computes the next queries writes them.
        state: of the search.
    """

    def __init__(self, path: Path | None, names: Sequence[str], num_queries: int, *, fingerprint: str) -> None:
        """
        Args:
            path: file of an interrupted search, which is continued if it has this fingerprint; None keeps nothing.
            names: of the scores.
            num_queries: Q.
            fingerprint: of all that the scores and the order of work depend on.
        """
        self.per_query = {name: np.full(num_queries, np.nan) for name in names}
        self.state = HalvesState()
        self._path = path
        self._fingerprint = fingerprint
        self._saved = time.monotonic()
        if path is not None and path.exists():
            self._load(path)

    def advance(self) -> None:
        """More scores are known, and the state is that behind them; every half a minute they are made safe."""
        if time.monotonic() - self._saved >= _SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        """Make what is known survive a kill."""
        if self._path is None:
            return
        waiting = self.state.waiting
        arrays: dict[str, NDArray] = {
            "fingerprint": np.array(self._fingerprint),
            "done": np.array(self.state.done),
            "scores": np.array([*self.per_query.values()]),
            "counts": np.array([len(block) for block in waiting], dtype=np.int64),
            "rows": _joined([part for block in waiting for part in block.rows], np.int64),
            "keys": _joined([part for block in waiting for part in block.keys], np.uint64),
        }
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)  # type: ignore[arg-type]  # its signature takes names for options
        atomic_write(self._path, buffer.getvalue())
        self._saved = time.monotonic()

    def _load(self, path: Path) -> None:
        try:
            with np.load(path, allow_pickle=False) as held:
                found = {name: held[name] for name in ("fingerprint", "done", "scores", "counts", "rows", "keys")}
        except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
            logger.warning("%s is damaged (%s); starting anew", path, error)
            return
        if str(found["fingerprint"]) != self._fingerprint:
            logger.info("%s is of other embeddings or scores; starting anew", path)
            return
        for values, held in zip(self.per_query.values(), found["scores"], strict=True):
            values[...] = held
        ends = np.cumsum(found["counts"])[:-1]
        parts = zip(np.split(found["rows"], ends), np.split(found["keys"], ends), strict=True)
        waiting = [Waiting([rows], [keys]) for rows, keys in parts] if len(found["counts"]) else []
        self.state = HalvesState(int(found["done"]), waiting)
        logger.info("continuing the search by distance that %s holds", path)


def _joined(parts: list[NDArray], dtype: type) -> NDArray:
    return np.concatenate(parts) if parts else np.empty(0, dtype=dtype)
