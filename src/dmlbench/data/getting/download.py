"""Downloads a file whole and checked, or not at all; an interrupted download goes on where it ended."""

import http.client
import json
import logging
import os
import re
import shutil
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from dmlbench.data.getting.files import Progress, file_digest, locked_file, no_progress, storage_error
from dmlbench.types import ConfigError, DataError

_BLOCK = 1 << 18
_SCHEMES = ("http", "https", "ftp")
_TRANSIENT = (408, 425, 429, 500, 502, 503, 504)
_RANGE = re.compile(r"^bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)$")
_LONGEST_PAUSE_S = 30.0

logger = logging.getLogger(__name__)


class _DroppedError(Exception):
    """The connection ended early; to be tried again."""


@dataclass(frozen=True)
class _Known:
    """What the server said of the file that a ``.part`` file is the beginning of."""

    url: str = ""
    validator: str = ""
    total: int | None = None


def fetch(
    url: str,
    path: str | Path,
    *,
    md5: str | None = None,
    sha256: str | None = None,
    size: int | None = None,
    elsewhere: str = "",
    timeout_s: float = 30.0,
    attempts: int = 5,
    pause_s: float = 1.0,
    progress: Progress = no_progress,
) -> Path:
    """Download ``url`` to ``path``, by way of ``<path>.part``.

    A connection that drops is taken up again at the byte where it ended, also by a later call. Where the server cannot
    do that (FTP never does here) or its file has changed, the download starts over.

    Args:
        url: http, https or ftp.
        path: the file; its folder is made when it is missing. A file that lies there and is right is left as it is.
        md5: hexadecimal digest that the whole file must have, or None.
        sha256: likewise.
        size: bytes that the file must have, or None.
        elsewhere: where else the data may come from, the end of messages about dead links.
        timeout_s: seconds without a byte after which a connection counts as dropped.
        attempts: drops in a row, without a byte in between, after which it is given up.
        pause_s: seconds before the second attempt; doubles with each one.
        progress: called with the bytes that have arrived, and the size where the server tells it.

    Returns:
        ``path``.

    Raises:
        ConfigError: the link is of another kind.
        DataError: the link is dead, the server cannot be reached, the file is not the expected one, another process is
            downloading it, or the disk is full or not writable.
    """
    path = Path(path)
    if urllib.parse.urlsplit(url).scheme not in _SCHEMES:
        raise ConfigError(f"'{url}' is no link that can be downloaded; use {', '.join(_SCHEMES)}")
    expected = [(name, value) for name, value in (("md5", md5), ("sha256", sha256)) if value is not None]
    if path.exists():
        if fault := _fault(path, expected, size):
            raise DataError(f"'{path}' lies there already, but {fault}; move it away and start again")
        return path
    part = path.with_name(f"{path.name}.part")
    source = _Source(url, size, bool(expected), elsewhere, timeout_s, attempts, pause_s, progress)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked_file(part, doing=f"downloading '{part}'") as file:
            if path.exists():  # another process was faster
                part.unlink()
                return path
            try:
                resumed = source.receive(file, part)
            except DataError:
                if os.fstat(file.fileno()).st_size == 0:  # nothing to go on with
                    _note(part).unlink(missing_ok=True)
                    part.unlink()
                raise
            fault = _fault(part, expected, size)
            if fault and resumed:
                logger.warning("what was resumed from %s is damaged (%s); downloading it anew", part, fault)
                file.truncate(0)
                source.receive(file, part)
                fault = _fault(part, expected, size)
            if fault:
                _note(part).unlink(missing_ok=True)
                part.unlink(missing_ok=True)
                raise DataError(
                    f"what {url} sent is not the file that was published: {fault}; {elsewhere or 'try again'}"
                )
            os.fsync(file.fileno())
            os.replace(part, path)
            _note(part).unlink(missing_ok=True)
    except OSError as error:
        raise storage_error(error, path.parent, doing=f"download {url}") from error
    return path


def _fault(path: Path, expected: list[tuple[str, str]], size: int | None) -> str:
    found = path.stat().st_size
    if size is not None and found != size:
        return f"it has {found} bytes, expected {size}"
    for algorithm, value in expected:
        digest = file_digest(path, algorithm)
        if digest != value.lower():
            with open(path, "rb") as file:
                page = " (it begins like a web page)" if file.read(64).lstrip()[:1] == b"<" else ""
            return f"its {algorithm} is {digest}, expected {value}{page}"
    return ""


@dataclass(frozen=True)
class _Source:
    """One link and how patient to be with it."""

    url: str
    size: int | None
    has_checksum: bool
    elsewhere: str
    timeout_s: float
    attempts: int
    pause_s: float
    progress: Progress

    def receive(self, file: IO[bytes], part: Path) -> bool:
        """Fill ``file`` to its end; True when it was put together from several connections."""
        known = _read_note(part)
        kept = file.seek(0, os.SEEK_END)
        if kept and (known.url != self.url or not (known.validator or self.has_checksum)):
            file.truncate(0)  # nothing would tell whether the rest belongs to it
            kept = 0
        resumed = kept > 0
        failures = 0
        while True:
            before = file.seek(0, os.SEEK_END)
            try:
                if self._continue(file, part, before):
                    return resumed
                resumed = False
            except _DroppedError as error:
                after = file.seek(0, os.SEEK_END)
                arrived, resumed = after > before, resumed or after > 0
                failures = 1 if arrived else failures + 1
                if failures >= self.attempts:
                    raise DataError(
                        f"cannot download {self.url} ({error}), tried {failures} times; what has arrived is kept, so "
                        f"start again later{', or ' + self.elsewhere if self.elsewhere else ''}"
                    ) from error
                pause = min(self.pause_s * 2 ** (failures - 1), _LONGEST_PAUSE_S)
                logger.warning("%s: %s; trying again in %.0f s", self.url, error, pause)
                time.sleep(pause)

    def _continue(self, file: IO[bytes], part: Path, offset: int) -> bool:
        """Read on from ``offset``; False when the beginning proved useless and was dropped."""
        known = _read_note(part)
        try:
            response = self._open(offset, known)
        except urllib.error.HTTPError as error:
            with error:
                return self._refused(error, file, offset)
        except (OSError, http.client.HTTPException) as error:
            raise _DroppedError(str(getattr(error, "reason", "") or error) or type(error).__name__) from error
        with response:
            headers = response.headers
            validator = _validator(headers)
            total = int(headers["Content-Length"]) if (headers.get("Content-Length") or "").isdigit() else None
            if getattr(response, "status", None) == http.client.PARTIAL_CONTENT:
                found = _RANGE.match(headers.get("Content-Range") or "")
                total = int(found[3]) if found and found[3] != "*" else None
                is_other = known.total is not None and total != known.total
                if not found or found[1] != str(offset) or is_other or validator != known.validator:
                    logger.warning("%s has changed since the download began; starting over", self.url)
                    file.truncate(0)
                    return False
            elif offset:
                logger.warning("%s cannot be resumed; starting over", self.url)
                file.truncate(0)
            if self.size is not None and total is not None and total != self.size:
                raise DataError(
                    f"{self.url} has {total} bytes, not the {self.size} of the published file; "
                    f"{self.elsewhere or 'look for another link'}"
                )
            _write_note(part, _Known(self.url, validator, total))
            self._copy(response, file, part, total)
        return True

    def _open(self, offset: int, known: _Known) -> Any:
        headers = {"User-Agent": "dmlbench", "Accept-Encoding": "identity"}
        if offset:
            headers["Range"] = f"bytes={offset}-"
            if known.validator:
                headers["If-Range"] = known.validator
        return urllib.request.urlopen(urllib.request.Request(self.url, headers=headers), timeout=self.timeout_s)

    def _refused(self, error: urllib.error.HTTPError, file: IO[bytes], offset: int) -> bool:
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE and offset:
            found = _RANGE.match(error.headers.get("Content-Range") or "")
            if found and found[3] == str(offset):
                return True  # all of it had arrived
            file.truncate(0)
            return False
        if error.code in _TRANSIENT:
            raise _DroppedError(f"the server says {error.code} {error.reason}")
        raise DataError(
            f"the link {self.url} is dead (the server says {error.code} {error.reason}); "
            f"{self.elsewhere or 'look for another one'}"
        ) from error

    def _copy(self, response: Any, file: IO[bytes], part: Path, total: int | None) -> None:
        done = file.seek(0, os.SEEK_END)
        if total is not None and shutil.disk_usage(part.parent).free < total - done:
            raise DataError(
                f"{self.url} takes {total / 1e9:.2f} GB, more than is free in '{part.parent}'; free some space, or set "
                "paths.data_dir to a disk that has more"
            )
        while True:
            try:
                block = response.read(_BLOCK)
            except (OSError, http.client.HTTPException) as error:
                raise _DroppedError(str(error) or type(error).__name__) from error
            if not block:
                break
            view = memoryview(block)
            while view:  # an unbuffered file may take less than it is given
                view = view[file.write(view) :]
            done += len(block)
            self.progress(done, total)
        if total is not None and done < total:
            raise _DroppedError(f"the connection ended at byte {done} of {total}")


def _validator(headers: Any) -> str:
    """What tells one version of the server's file from another; weak tags cannot."""
    tag = headers.get("ETag") or ""
    return tag if tag and not tag.startswith("W/") else headers.get("Last-Modified") or ""


def _note(part: Path) -> Path:
    return part.with_name(f"{part.name}.json")


def _read_note(part: Path) -> _Known:
    try:
        content = json.loads(_note(part).read_text(encoding="utf-8"))
        return _Known(str(content["url"]), str(content["validator"]), content["total"])
    except (OSError, ValueError, KeyError, TypeError):
        return _Known()


def _write_note(part: Path, known: _Known) -> None:
    _note(part).write_text(json.dumps(known.__dict__), encoding="utf-8")
