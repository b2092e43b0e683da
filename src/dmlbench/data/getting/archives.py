"""Extracts archives of data sets: completely or not at all, and never outside of their folder."""

import json
import logging
import lzma
import os
import shutil
import struct
import tarfile
import time
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from dmlbench.data.image_table import leaves_root
from dmlbench.types import DataError

MARKER = ".prepared-by-dmlbench.json"

_DAMAGED = (
    zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, struct.error, EOFError, LookupError, ValueError,
    RuntimeError, OverflowError,
)  # fmt: skip

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Part:
    """A file to unpack (``is_archive``) or to copy into a data set's folder, with its MD5."""

    path: Path
    md5: str
    is_archive: bool = True


def extract(
    parts: Sequence[Part],
    into: Path,
    *,
    password: str | None = None,
    notes: Mapping[str, str] | None = None,
    check: Callable[[Path], None] = lambda folder: None,
    report: Callable[[str], None] = lambda text: None,
) -> None:
    """Make the folder ``into`` from archives and single files, by way of a hidden folder that is renamed when complete.

    The caller holds a lock.

    Args:
        notes: further entries of the record of parts (``MARKER``) in the folder.
        check: called with the complete folder before it gets its name.
        report: called with a line before each part.
    """
    described = [{"name": part.path.name, "size": part.path.stat().st_size, "md5": part.md5} for part in parts]
    if os.path.lexists(into):
        _check_made_of(into, described)
        return
    partial = into.with_name(f".{into.name}.partial")
    if partial.exists():
        logger.warning("removing %s, which an interrupted process left", partial)
        shutil.rmtree(partial)
    try:
        partial.mkdir()
        for part in parts:
            report(f"{'extracting' if part.is_archive else 'copying'} {part.path.name}")
            if part.is_archive:
                unpack(part.path, partial, password=password)
            else:
                shutil.copyfile(part.path, partial / part.path.name)
        check(partial)
        record = {"parts": described, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **(notes or {})}
        (partial / MARKER).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        os.rename(partial, into)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def read_marker(folder: Path) -> dict[str, Any] | None:
    """The record of ``extract`` in a folder, if there is one."""
    try:
        content = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and "parts" in content else None


def _check_made_of(into: Path, described: list[dict[str, Any]]) -> None:
    marker = read_marker(into)
    if marker is None:
        raise DataError(
            f"'{into}' exists and was not made by dmlbench; move it away, or set paths.data_dir to another folder"
        )
    if marker["parts"] != described:
        names = ", ".join(str(part["name"]) for part in marker["parts"])
        raise DataError(f"'{into}' was made from other files ({names}); remove that folder and start again")


def unpack(archive: Path, folder: Path, *, password: str | None = None) -> None:
    """Write the files of a zip or (compressed) tar archive below a folder."""
    try:
        if zipfile.is_zipfile(archive):
            _unpack_zip(archive, folder, password)
        else:
            _unpack_tar(archive, folder)
    except tarfile.FilterError as error:
        raise DataError(f"'{archive}' is unsafe ({error}); get it from its publisher") from error
    except _DAMAGED as error:
        asks_for_password = isinstance(error, RuntimeError) and "password" in str(error)
        remedy = "give password=<word>" if asks_for_password else "download it again, or extract it by hand"
        raise DataError(f"cannot unpack '{archive}' ({error}); {remedy}") from error
    except OSError as error:
        if error.errno is None:  # bad data of gzip and bz2
            raise DataError(f"cannot unpack '{archive}' ({error}); download it again") from error
        raise


def _unpack_zip(archive: Path, folder: Path, password: str | None) -> None:
    with zipfile.ZipFile(archive) as content:
        members = [member for member in content.namelist() if not member.startswith("__MACOSX/")]
        if unsafe := [member for member in members if leaves_root(member)]:
            raise DataError(f"'{archive}' is unsafe ('{unsafe[0]}' leaves the folder); get it from its publisher")
        content.extractall(folder, members, password.encode() if password else None)


def _unpack_tar(archive: Path, folder: Path) -> None:
    with tarfile.open(archive, tarinfo=_Header) as content:
        content.extractall(folder, filter="data")
        assert content.fileobj is not None
        while content.fileobj.read(1 << 20):  # reaches the checksum of the compression
            pass


class _Header(tarfile.TarInfo):
    """A header of a tar archive. ``tarfile`` takes a missing or damaged one for the end of the archive."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if buf == bytes(tarfile.BLOCKSIZE):
                raise  # the zeros at the end of a complete archive
            raise tarfile.ReadError("it is truncated") from error
