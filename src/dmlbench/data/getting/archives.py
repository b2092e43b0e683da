"""Extracts archives of data sets: completely or not at all, and never into a folder of another origin."""

import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dmlbench.data.getting.disk import Progress, locked, no_progress, storage_error
from dmlbench.data.getting.unpack import unpack
from dmlbench.types import DataError

MARKER = ".prepared-by-dmlbench.json"

Stage = Callable[[str], AbstractContextManager[Progress]]
"""Announces a piece of long work in words and returns what to report its progress in bytes to."""

logger = logging.getLogger(__name__)


def silent(text: str) -> AbstractContextManager[Progress]:
    """A ``Stage`` that nobody watches."""
    return nullcontext(no_progress)


@dataclass(frozen=True)
class Part:
    """One file that a data set's folder is made of.

    Attributes:
        path: the file.
        is_archive: whether it is unpacked; else it is copied into the folder as it is.
        md5: its hexadecimal md5.
    """

    path: Path
    md5: str
    is_archive: bool = True


def extract(
    parts: Sequence[Part],
    into: str | Path,
    *,
    password: str | None = None,
    notes: Mapping[str, str] | None = None,
    check: Callable[[Path], None] = lambda folder: None,
    stage: Stage = silent,
) -> None:
    """Make the folder ``into`` of archives and single files.

    Everything goes into a hidden folder next to it, which takes its name only when all parts are in: after an error, a
    full disk or a kill there is no ``into``. The next call removes what a killed process left. The marker file
    ``.prepared-by-dmlbench.json`` inside records what the folder was made of.

    Args:
        parts: what the folder is made of, in order.
        into: the folder; its parent is made when it is missing.
        password: of encrypted zip archives.
        notes: further entries of the marker.
        check: called with the filled folder before it takes its name; what it raises ends the extraction.
        stage: notified of each part, for progress bars.

    Raises:
        DataError: ``into`` exists and was not made of these parts by this function, another process is making it, an
            archive is damaged, dangerous or encrypted, or the disk is full or not writable.
    """
    into = Path(os.path.abspath(into))
    described = [{"name": part.path.name, "size": part.path.stat().st_size, "md5": part.md5} for part in parts]
    if _is_made(into, described):
        return
    prefix = f".{into.name}.partial-"
    partial = into.parent / f"{prefix}{os.getpid()}"
    try:
        into.parent.mkdir(parents=True, exist_ok=True)
        with locked(into, doing=f"making '{into}'"):
            if _is_made(into, described):  # by another process meanwhile
                return
            for stale in [entry for entry in into.parent.iterdir() if entry.name.startswith(prefix)]:
                logger.warning("removing %s, which an interrupted run left", stale)
                shutil.rmtree(stale)  # its process is dead: we hold the lock
            try:
                partial.mkdir()
                for part in parts:
                    with stage(f"{'extracting' if part.is_archive else 'copying'} {part.path.name}") as progress:
                        if part.is_archive:
                            unpack(part.path, partial, password=password, progress=progress)
                        else:
                            shutil.copyfile(part.path, partial / part.path.name)
                check(partial)
                sizes = [path.stat().st_size for path in partial.rglob("*") if path.is_file()]
                marker = {"parts": described, "files": len(sizes), "bytes": sum(sizes)}
                marker |= {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **(notes or {})}
                (partial / MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")
                os.rename(partial, into)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise storage_error(error, into.parent, doing=f"make '{into}'") from error


def read_marker(folder: str | Path) -> dict[str, Any] | None:
    """What ``extract`` recorded about a folder, or None if it did not make it."""
    try:
        content = json.loads((Path(folder) / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and "parts" in content else None


def _is_made(into: Path, described: list[dict[str, Any]]) -> bool:
    """Whether ``into`` exists and was made of these parts; an error if it is something else."""
    if not os.path.lexists(into):
        return False
    marker = read_marker(into)
    if marker is None:
        raise DataError(
            f"'{into}' exists and was not made by dmlbench, so it stays as it is; move it away, or set paths.data_dir "
            "to another folder"
        )
    if marker["parts"] != described:
        names = ", ".join(str(part["name"]) for part in marker["parts"])
        raise DataError(
            f"'{into}' was made of other files ({names}, see {MARKER} inside); remove that folder and start again"
        )
    return True
