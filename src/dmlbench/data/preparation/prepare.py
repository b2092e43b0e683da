"""Prepares a data set: finds or downloads its archives, verifies them, and extracts them completely or not at all."""

import ftplib
import json
import logging
import lzma
import os
import shutil
import struct
import sys
import tarfile
import time
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pooch
from filelock import FileLock, Timeout

from dmlbench.data.image_table import leaves_root
from dmlbench.data.readers.layouts import Archive, DataFolder
from dmlbench.runtime import whole_file
from dmlbench.types import DataError

MARKER = ".prepared-by-dmlbench.json"

_RETRIES = 3
_SINGLE_FILES = (".mat", ".txt")  # everything else is an archive
_DAMAGED = (
    zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, struct.error, EOFError, LookupError, ValueError,
    RuntimeError, OverflowError, OSError,
)  # fmt: skip

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """A data set that its reader finds; ``was_there``: nothing had to be done."""

    folder: Path
    layout: str
    was_there: bool


def prepare(
    source: DataFolder,
    root: str | Path,
    *,
    given: Sequence[str | Path] = (),
    password: str | None = None,
    download: bool = True,
    accept_other_checksum: bool = False,
    report: Callable[[str], None] = lambda text: None,
) -> Prepared:
    """Extract the archives found in ``root``, or download them, so that the data set is found below ``root``.

    Args:
        root: the folder of all data sets.
        given: the archives, in any folder and under any name. If empty, the published names are looked for in ``root``
            and its sub-folder of the data set.
        accept_other_checksum: take archives that differ from the published ones; the folder's marker file records it.
        report: called with a line before each piece of work.
    """
    root = Path(os.path.abspath(root))
    place = root / source.name
    found = source.found(root)
    if found is not None and not _is_partial(source, found[0]):
        if source.is_read_packed:
            packed = [path for archive in source.archives if (path := found[0] / archive.name).is_file()]
            _checked(source, packed, accept_other_checksum, report)
        return Prepared(found[0], found[1].description, was_there=True)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f".{source.name}.lock", timeout=0):
            folder = found[0] if found else place
            files = _gather(source, root, folder, [Path(path) for path in given], download)
            checksums, other = _checked(source, files, accept_other_checksum, report)
            if source.is_read_packed:
                for path in files:
                    _copy(path, folder / path.name, report)
            else:
                extract(
                    checksums, _free_place(place, files), password=password, report=report,
                    notes={"accepted_other_checksum": ", ".join(other)} if other else {},
                    check=lambda folder: _check_layout(source, folder, files),
                )  # fmt: skip
    except Timeout:
        raise DataError(f"another process is preparing '{place}'. Start again when it has finished.") from None
    except OSError as error:
        raise DataError(
            f"cannot prepare '{place}' ({error}). Free some space, or set paths.data_dir to a writable folder."
        ) from error
    folder, layout = source.find(root)
    return Prepared(folder, layout.description, was_there=False)


def _is_partial(source: DataFolder, folder: Path) -> bool:
    present = [
        (folder / archive.name).is_file() or (folder / archive.name.split(".")[0]).is_dir()
        for archive in source.alternatives[0]
    ]
    return source.is_read_packed and any(present) and not all(present)


def _gather(source: DataFolder, root: Path, place: Path, given: Sequence[Path], download: bool) -> list[Path]:
    """The files to use: given, found, or downloaded."""
    for path in given:
        if not path.is_file():
            raise DataError(f"archives: got '{path}', expected a file. Correct its path.")
    names = [archive.name for archive in source.archives]
    if other := [path for path in given if path.name not in names]:
        if source.is_read_packed:
            raise DataError(
                f"archives: got '{other[0]}', expected a published name, one of {', '.join(names)}. Rename it."
            )
        return list(given)
    files = {name: folder / name for name in names for folder in (place, root) if (folder / name).is_file()}
    files |= {path.name: path for path in given}

    def rank(alternative: Sequence[Archive]) -> tuple[bool, bool]:
        needed = {archive.name for archive in alternative}
        return needed <= set(files) and {path.name for path in given} <= needed, not needed.isdisjoint(files)

    wanted = max(source.alternatives, key=rank)  # a complete one, else one with a part that is there
    missing = [archive for archive in wanted if archive.name not in files]
    if missing and not (download and all(map(source.links, missing))):
        there = f"found {', '.join(a.name for a in wanted if a.name in files)}, " if files else ""
        raise DataError(
            f"{source.title} is not in '{root}': {there}missing {', '.join(a.name for a in missing)}. By hand: "
            f"{source.by_hand}. Put the files in '{root}' and start again, or pass their paths with archives=<file>."
        )
    for archive in missing:
        files[archive.name] = _download(source, archive, place if source.is_read_packed else root)
    return [files[archive.name] for archive in wanted]


def _download(source: DataFolder, archive: Archive, folder: Path) -> Path:
    """Download and verify an archive from the first of its links that works."""
    for url in source.links(archive):
        downloader = pooch.HTTPDownloader if url.startswith("http") else pooch.FTPDownloader
        files = pooch.create(
            path=folder, base_url="", registry={archive.name: f"md5:{archive.md5}"}, urls={archive.name: url},
            retry_if_failed=_RETRIES,
        )  # fmt: skip
        try:
            return Path(
                files.fetch(archive.name, downloader=downloader(progressbar=sys.stderr.isatty(), chunk_size=1 << 20))
            )
        except (ValueError, OSError, EOFError, ftplib.Error) as error:
            failure = error
    raise DataError(f"cannot download {archive.name} ({failure}). Try again later, or {source.by_hand}.") from failure


def _checked(
    source: DataFolder, files: Sequence[Path], accept_other_checksum: bool, report: Callable[[str], None]
) -> tuple[dict[Path, str], list[str]]:
    """The files with their MD5, and the names of those that are accepted with another than the published one."""
    by_name = {archive.name: archive for archive in source.archives}
    published = {archive.md5 for archive in source.archives if archive.md5 is not None}
    checksums, other = {}, []
    for path in files:
        name = path.name
        report(f"checksum of {name}")
        checksums[path] = md5 = pooch.file_hash(str(path), alg="md5")
        if md5 in published or not published or (name in by_name and by_name[name].md5 is None):
            continue
        if not accept_other_checksum:
            expected = " or ".join(
                f"{archive.md5} of {archive.name}" + (f" ({archive.size} bytes)" if archive.size else "")
                for archive in ([by_name[name]] if name in by_name else source.alternatives[0])
            )
            raise DataError(
                f"'{path}': got MD5 {md5} ({path.stat().st_size} bytes), expected the published {expected}. Download "
                "it again, or accept it with accept_other_checksum=true."
            )
        logger.warning("the MD5 of %s, %s, differs from the published one; accepted as requested", path, md5)
        other.append(name)
    return checksums, other


def _free_place(place: Path, files: Sequence[Path]) -> Path:
    """The folder to make: the usual one, or one inside it when the user made that for the archives."""
    is_own = place.is_dir() and not place.is_symlink() and read_marker(place) is None
    return place / place.name if is_own and set(place.iterdir()) - {place / place.name} <= set(files) else place


def _check_layout(source: DataFolder, folder: Path, files: Sequence[Path]) -> None:
    if source.found(folder) is None:
        names = ", ".join(f"'{path}'" for path in files)
        raise DataError(
            f"{names}: got no known layout of {source.title}, expected {source.expected}. Extract it by hand and set "
            "dataset.table.root to the extracted folder."
        )


def _copy(path: Path, to: Path, report: Callable[[str], None]) -> None:
    if to.exists():
        if to.samefile(path):
            return
        raise DataError(f"'{to}' exists. Move it away and start again.")
    to.parent.mkdir(parents=True, exist_ok=True)
    report(f"copying {path.name}")
    with path.open("rb") as source, whole_file(to) as copy:
        shutil.copyfileobj(source, copy, 1 << 20)


def extract(
    checksums: Mapping[Path, str],
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
        checksums: MD5 of each file.
        notes: further entries of the record of parts (``MARKER``) in the folder.
        check: called with the complete folder before it gets its name.
    """
    described = [{"name": path.name, "size": path.stat().st_size, "md5": md5} for path, md5 in checksums.items()]
    if os.path.lexists(into):
        marker = read_marker(into)
        if marker is None:
            raise DataError(
                f"'{into}' exists and was not made by dmlbench. Move it away, or set paths.data_dir to another folder."
            )
        if marker["parts"] != described:
            names = ", ".join(str(part["name"]) for part in marker["parts"])
            raise DataError(f"'{into}' was made from other files ({names}). Remove the folder and start again.")
        return
    partial = into.with_name(f".{into.name}.partial")
    if partial.exists():
        logger.warning("removing %s, left by an interrupted process", partial)
        shutil.rmtree(partial)
    try:
        partial.mkdir()
        for path in checksums:
            is_archive = path.suffix not in _SINGLE_FILES
            report(f"{'extracting' if is_archive else 'copying'} {path.name}")
            if is_archive:
                _unpack(path, partial, password)
            else:
                shutil.copyfile(path, partial / path.name)
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


def _unpack(archive: Path, folder: Path, password: str | None) -> None:
    """Write the files of a zip or (compressed) tar archive below a folder."""
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as content:
                members = [member for member in content.namelist() if not member.startswith("__MACOSX/")]
                if unsafe := [member for member in members if leaves_root(member)]:
                    raise DataError(
                        f"'{archive}' is unsafe ('{unsafe[0]}' is outside of the folder). Get it from its publisher."
                    )
                content.extractall(folder, members, password.encode() if password else None)
            return
        with tarfile.open(archive, tarinfo=_Header) as tar:
            tar.extractall(folder, filter="data")
            assert tar.fileobj is not None
            while tar.fileobj.read(1 << 20):  # reaches the checksum of the compression
                pass
    except tarfile.FilterError as error:
        raise DataError(f"'{archive}' is unsafe ({error}). Get it from its publisher.") from error
    except _DAMAGED as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the disk; bad data of gzip and bz2 have none
            raise
        asks_for_password = isinstance(error, RuntimeError) and "password" in str(error)
        remedy = "Pass password=<word>." if asks_for_password else "Download it again, or extract it by hand."
        raise DataError(f"cannot unpack '{archive}' ({error}). {remedy}") from error


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
