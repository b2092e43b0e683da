"""Extracts archives of data sets: whole or not at all, never over a folder that it did not make itself."""

import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dmlbench.data.getting.disk import Progress, file_digest, locked, no_progress, storage_error
from dmlbench.data.getting.unpack import Unpacked, unpack
from dmlbench.types import DataError

MARKER = ".prepared-by-dmlbench.json"

Stage = Callable[[str], AbstractContextManager[Progress]]
"""Announces a piece of long work in words and returns what its progress in bytes is reported to."""

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
        md5: its hexadecimal md5 where that is known already, else None.
    """

    path: Path
    is_archive: bool = True
    md5: str | None = None


@dataclass(frozen=True)
class Extraction:
    """A folder made of archives.

    Attributes:
        folder: where it lies.
        files: number of files written.
        bytes: their size.
        was_there: True when it had been made of the same files before, and nothing was done.
    """

    folder: Path
    files: int
    bytes: int
    was_there: bool


def extract(
    parts: Sequence[Part],
    into: str | Path,
    *,
    password: str | None = None,
    notes: Mapping[str, str] | None = None,
    check: Callable[[Path], None] = lambda folder: None,
    stage: Stage = silent,
) -> Extraction:
    """Make the folder ``into`` of archives and single files.

    Everything goes into a hidden folder next to it, which takes its name only when all parts are in: after an error, a
    full disk or a kill there is no ``into``. What a killed process left is removed by the next one. The marker file
    ``.prepared-by-dmlbench.json`` inside says what the folder was made of.

    Args:
        parts: what the folder is made of, in order.
        into: the folder; its parent is made when it is missing.
        password: of encrypted zip archives.
        notes: what else the marker should say.
        check: called with the filled folder before it takes its name; what it raises ends the extraction.
        stage: told of each part, for progress bars.

    Raises:
        DataError: ``into`` exists and was not made of these parts by this function, another process is making it, an
            archive is damaged, dangerous or encrypted, or the disk is full or not writable.
    """
    into = Path(os.path.abspath(into))
    known = []
    for part in parts:
        if part.md5 is None:
            with stage(f"checksum of {part.path.name}") as progress:
                part = replace(part, md5=file_digest(part.path, progress=progress))
        known.append(part)
    described = [_describe(part) for part in known]
    if (made := _made_before(into, described)) is not None:
        return made
    try:
        into.parent.mkdir(parents=True, exist_ok=True)
        with locked(into, doing=f"making '{into}'"):
            if (made := _made_before(into, described)) is not None:  # by another process meanwhile
                return made
            return _extract(known, into, password, described, notes or {}, check, stage)
    except OSError as error:
        raise storage_error(error, into.parent, doing=f"make '{into}'") from error


def read_marker(folder: str | Path) -> dict[str, Any] | None:
    """What ``extract`` wrote about a folder, or None where it did not make it."""
    try:
        content = json.loads((Path(folder) / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and "parts" in content else None


def _describe(part: Part) -> dict[str, Any]:
    return {"name": part.path.name, "size": part.path.stat().st_size, "md5": part.md5}


def _made_before(into: Path, described: list[dict[str, Any]]) -> Extraction | None:
    """The extraction that ``into`` is, None where it does not exist."""
    if not os.path.lexists(into):
        return None
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
    return Extraction(into, files=int(marker["files"]), bytes=int(marker["bytes"]), was_there=True)


def _extract(
    parts: Sequence[Part],
    into: Path,
    password: str | None,
    described: list[dict[str, Any]],
    notes: Mapping[str, str],
    check: Callable[[Path], None],
    stage: Stage,
) -> Extraction:
    pattern = f".{into.name}.partial-"
    for stale in [entry for entry in into.parent.iterdir() if entry.name.startswith(pattern)]:
        logger.warning("removing %s, which an interrupted run left", stale)  # it is dead: we hold the lock
        shutil.rmtree(stale)
    partial = into.parent / f"{pattern}{os.getpid()}"
    total = Unpacked()
    try:
        partial.mkdir()
        for part in parts:
            with stage(f"{'extracting' if part.is_archive else 'copying'} {part.path.name}") as progress:
                if part.is_archive:
                    done = unpack(part.path, partial, password=password, progress=progress)
                else:
                    shutil.copyfile(part.path, partial / part.path.name)
                    done = Unpacked(1, part.path.stat().st_size)
            total = Unpacked(total.files + done.files, total.bytes + done.bytes)
        check(partial)
        marker = {"parts": described, **asdict(total), "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **notes}
        (partial / MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")
        os.rename(partial, into)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Extraction(into, files=total.files, bytes=total.bytes, was_there=False)
