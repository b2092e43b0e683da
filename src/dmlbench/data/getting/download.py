"""Downloads a file completely and verified, or not at all; an interrupted download resumes where it stopped."""

import http.client
import logging
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import IO

from dmlbench.data.getting.disk import Progress, file_digest, locked, no_progress, require_space, storage_error
from dmlbench.types import ConfigError, DataError, not_a_file

_BLOCK = 1 << 18
_SCHEMES = ("http", "https", "ftp")
_TRANSIENT = (408, 425, 429, 500, 502, 503, 504)
_LONGEST_PAUSE_S = 30.0

logger = logging.getLogger(__name__)


class _DroppedError(Exception):
    """The connection ended early; to be tried again."""


def fetch(
    url: str,
    path: str | Path,
    *,
    md5: str,
    size: int | None = None,
    elsewhere: str = "look for another link",
    timeout_s: float = 30.0,
    attempts: int = 5,
    pause_s: float = 1.0,
    progress: Progress = no_progress,
) -> Path:
    """Download ``url`` to ``path``, through the temporary file ``<path>.part``.

    A dropped connection is resumed at the byte where it ended, also by a later call or from another link: the checksum
    of the complete file shows whether the pieces fit. If they do not, or if the server cannot resume (FTP never does
    here), the download starts over.

    Args:
        url: http, https or ftp.
        path: the file; its folder is made when it is missing. An existing file is left alone if it is right.
        md5: hexadecimal digest of the complete file.
        size: bytes of the complete file, or None if unknown.
        elsewhere: where else to get the data; ends messages about dead links.
        timeout_s: seconds without a byte after which a connection counts as dropped.
        attempts: consecutive drops without a byte in between, after which the download fails.
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
    part = path.with_name(f"{path.name}.part")

    def receive() -> bool:
        """Fill the part to its end; True when several connections filled it."""
        failures = 0
        with open(part, "ab") as file:
            resumed = file.tell() > 0
            while True:
                before = file.seek(0, os.SEEK_END)
                try:
                    _read_on(url, file, size, elsewhere, timeout_s, progress)
                    file.flush()
                    os.fsync(file.fileno())
                    return resumed
                except _DroppedError as error:
                    after = file.seek(0, os.SEEK_END)
                    resumed = resumed or after > 0
                    failures = 1 if after > before else failures + 1
                    if failures >= attempts:
                        raise DataError(
                            f"cannot download {url} ({error}), tried {failures} times; what has arrived is kept, so "
                            f"start again later, or {elsewhere}"
                        ) from error
                    pause = min(pause_s * 2 ** (failures - 1), _LONGEST_PAUSE_S)
                    logger.warning("%s: %s; trying again in %.0f s", url, error, pause)
                    time.sleep(pause)

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path, doing=f"downloading '{path}'"):
            if path.exists():
                if fault := _fault(path, md5, size):
                    raise DataError(f"'{path}' exists already, but {fault}; move it away and start again")
                return path
            if what := not_a_file(part):
                raise DataError(f"'{part}' is {what}, not a file; move it away")
            try:
                resumed = receive()
                if (fault := _fault(part, md5, size)) and resumed:
                    logger.warning("what was resumed from %s is damaged (%s); downloading it again", part, fault)
                    part.unlink()
                    receive()
                    fault = _fault(part, md5, size)
                if fault:
                    part.unlink()
                    raise DataError(f"what {url} sent is not the file that was published: {fault}; {elsewhere}")
                os.replace(part, path)
            finally:
                if part.exists() and part.stat().st_size == 0:  # nothing to resume
                    part.unlink()
    except OSError as error:
        raise storage_error(error, path.parent, doing=f"download {url}") from error
    return path


def _fault(path: Path, md5: str, size: int | None) -> str:
    found = path.stat().st_size
    if size is not None and found != size:
        return f"it has {found} bytes, expected {size}"
    if (digest := file_digest(path)) == md5.lower():
        return ""
    with open(path, "rb") as file:
        page = " (it begins like a web page)" if file.read(64).lstrip()[:1] == b"<" else ""
    return f"its md5 is {digest}, expected {md5}{page}"


def _read_on(url: str, file: IO[bytes], size: int | None, elsewhere: str, timeout_s: float, progress: Progress) -> None:
    """Append what the file still lacks, or start over if the server cannot resume."""
    done = file.tell()
    headers = {"User-Agent": "dmlbench", "Accept-Encoding": "identity"} | ({"Range": f"bytes={done}-"} if done else {})
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=timeout_s)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE and done:
            return  # nothing follows: the checksum shows whether that is all
        if error.code in _TRANSIENT:
            raise _DroppedError(f"the server says {error.code} {error.reason}") from error
        raise DataError(f"the link {url} is dead (the server says {error.code} {error.reason}); {elsewhere}") from error
    except (OSError, http.client.HTTPException) as error:
        raise _DroppedError(str(getattr(error, "reason", "") or error) or type(error).__name__) from error
    with response:
        if done and getattr(response, "status", None) != http.client.PARTIAL_CONTENT:
            logger.warning("%s cannot be resumed; starting over", url)
            file.truncate(0)
            done = file.seek(0)
        length = response.headers.get("Content-Length") or ""
        total = done + int(length) if length.isdigit() else None
        if size is not None and total is not None and total != size:
            raise DataError(f"{url} has {total} bytes, not the {size} of the published file; {elsewhere}")
        if total is not None:
            require_space(Path(file.name).parent, total - done, what=f"what is left of {url}" if done else url)
        while True:
            try:
                block = response.read(_BLOCK)
            except (OSError, http.client.HTTPException) as error:
                raise _DroppedError(str(error) or type(error).__name__) from error
            if not block:
                break
            file.write(block)
            done += len(block)
            progress(done, total)
    if total is not None and done < total:
        raise _DroppedError(f"the connection ended at byte {done} of {total}")
