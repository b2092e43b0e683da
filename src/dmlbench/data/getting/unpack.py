"""Unpacks zip and tar archives of unknown origin; nothing is written outside of one folder.

Python's ``zipfile`` and ``tarfile`` (with its data filter) keep names inside the folder and write no more bytes than
headers announce. In addition, the announced sizes are limited, no links are made on disk (those inside a tar archive
become copies of their targets), and an archive that ends early is refused.
"""

import lzma
import os
import shutil
import stat
import struct
import tarfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import IO, Self

from dmlbench.data.getting.disk import Progress, no_progress, require_space, storage_error
from dmlbench.types import DataError

MAX_BYTES = 10**9
MAX_RATIO = 20  # photographs hardly compress: the data sets here unpack to at most twice their size
MAX_MEMBERS = 2_000_000

_BLOCK = 1 << 20
_LONGEST_HEADER = 1 << 24  # bytes of a tar archive's long names and extended headers, which are held in memory
_ENCRYPTED = 0x1
_ALGORITHM_AES = 99
_DAMAGED = (
    zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, struct.error, ValueError,
    KeyError, OverflowError,
)  # fmt: skip
_AGAIN = "download or copy it again"


@dataclass
class _Limits:
    """Counts what an archive announces against what it may hold."""

    archive: Path
    max_bytes: int
    members: int = 0
    bytes: int = 0

    def admit(self, size: int) -> None:
        """Count one more member of ``size`` bytes."""
        self.members, self.bytes = self.members + 1, self.bytes + size
        if self.members > MAX_MEMBERS or self.bytes > self.max_bytes:
            raise DataError(
                f"'{self.archive}' holds more than {self.max_bytes / 1e9:.1f} GB or {MAX_MEMBERS} files "
                f"({self.archive.stat().st_size / 1e6:.1f} MB packed), which no data set here does; if you trust it, "
                "extract it by hand"
            )


def unpack(
    archive: str | Path, folder: str | Path, *, password: str | None = None, progress: Progress = no_progress
) -> None:
    """Write the files of a zip, tar, tar.gz, tar.xz or tar.bz2 archive below a folder, whatever its name.

    Args:
        archive: the file. It may unpack to ``MAX_BYTES`` or ``MAX_RATIO`` times its size, whichever is larger.
        folder: an existing folder of the caller's own; left half-filled where this raises.
        password: of an encrypted zip.
        progress: called with the archive's bytes read so far, and its size.

    Raises:
        DataError: the archive is damaged, truncated, encrypted, too large when unpacked, or holds names or links that
            leave the folder, links that lead nowhere, or devices; or the folder cannot be written.
    """
    archive, folder = Path(archive), Path(folder)
    try:
        with open(archive, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            limits = _Limits(archive, max(MAX_BYTES, MAX_RATIO * size))
            is_zip = file.read(2) == b"PK"
            file.seek(0)
            if is_zip:
                files = _unpack_zip(file, folder, limits, password, progress)
            else:
                files = _unpack_tar(file, folder, limits, size, progress)
            progress(size, size)
    except RecursionError as error:  # tarfile follows chains of headers by calling itself
        raise DataError(f"'{archive}' is damaged (endless headers); {_AGAIN}") from error
    except NotImplementedError as error:  # a method or version that zipfile does not know
        raise DataError(
            f"'{archive}' is packed in a way that Python cannot read ({error}); {_AGAIN}, or extract it by hand"
        ) from error
    except RuntimeError as error:
        raise DataError(f"'{archive}' does not open with this password ({error}); correct it") from error
    except _DAMAGED as error:
        doubt = ", or the password is wrong" if password is not None else ""
        raise DataError(f"archive '{archive}' is damaged or incomplete ({error}){doubt}; {_AGAIN}") from error
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        raise DataError(
            f"'{archive}' has both a file and a folder of one name ('{error.filename}'); extract it by hand"
        ) from error
    except OSError as error:
        if error.errno is None:  # gzip and bz2 report bad data this way
            raise DataError(f"archive '{archive}' is damaged or incomplete ({error}); {_AGAIN}") from error
        raise storage_error(error, folder.parent, doing=f"extract '{archive}'") from error
    if files == 0:
        raise DataError(f"archive '{archive}' holds no files; {_AGAIN}")


def _unpack_zip(file: IO[bytes], folder: Path, limits: _Limits, password: str | None, progress: Progress) -> int:
    """The number of files written."""
    archive, files, read = limits.archive, 0, 0
    with zipfile.ZipFile(file) as content:
        members = content.infolist()
        for member in members:
            member.filename = member.filename.replace("\\", "/")
            limits.admit(member.file_size)
            _check_zip_member(member, archive, password)
        require_space(folder.parent, limits.bytes, what=f"'{archive}', unpacked,")
        for member in members:
            if not member.filename.startswith("__MACOSX/"):  # metadata that macOS adds
                content.extract(member, folder, None if password is None else password.encode())
                files += not member.is_dir()
            read += member.compress_size
            progress(read, archive.stat().st_size)
    return files


def _check_zip_member(member: zipfile.ZipInfo, archive: Path, password: str | None) -> None:
    path = PureWindowsPath(member.filename)  # knows drives and both slashes
    if path.anchor or ".." in path.parts:
        raise _leads_out(archive, member.filename)
    if stat.S_IFMT(member.external_attr >> 16) not in (0, stat.S_IFREG, stat.S_IFDIR):
        raise DataError(f"'{archive}' holds '{member.filename}', a link or device; extract it by hand")
    if member.compress_type == _ALGORITHM_AES:
        raise DataError(
            f"'{archive}' is encrypted by AES, which Python cannot read; extract it by hand, for instance with "
            "'7z x', into a folder below your data folder"
        )
    if member.flag_bits & _ENCRYPTED and password is None:
        raise DataError(
            f"'{archive}' is encrypted; give the password that its publisher sent you (password=<word>), or extract it "
            "by hand into a folder below your data folder"
        )


class _Header(tarfile.TarInfo):
    """One header of a tar archive; ``tarfile`` itself takes a damaged or missing one for the archive's end."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        try:
            header = super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if buf == bytes(tarfile.BLOCKSIZE):
                raise  # the zeros that end a complete archive
            raise tarfile.ReadError("it ends in the middle") from error
        if not header.isfile() and header.size > _LONGEST_HEADER:
            raise tarfile.ReadError(f"a header of {header.size} bytes")
        return header


def _unpack_tar(file: IO[bytes], folder: Path, limits: _Limits, size: int, progress: Progress) -> int:
    """The number of files written."""
    archive, files = limits.archive, 0
    try:
        content = tarfile.open(fileobj=file, mode="r:*", tarinfo=_Header)  # noqa: SIM115 - closed below
    except tarfile.ReadError as error:
        file.seek(0)
        page = "; it begins like a web page, not like data" if file.read(64).lstrip()[:1] == b"<" else ""
        raise DataError(f"'{archive}' is no zip, tar, tar.gz, tar.xz or tar.bz2 archive{page}; {_AGAIN}") from error
    require_space(folder.parent, size, what=f"'{archive}', unpacked,")
    links: list[tuple[Path, Path]] = []
    with content:
        while (member := content.next()) is not None:
            content.members = []  # type: ignore[attr-defined]  # else every header stays in memory
            try:
                member = tarfile.data_filter(member, str(folder))
            except tarfile.SpecialFileError as error:
                raise DataError(f"'{archive}' holds '{member.name}', a device or pipe; extract it by hand") from error
            except tarfile.FilterError as error:
                raise _leads_out(archive, member.name) from error
            limits.admit(member.size)
            if member.issym() or member.islnk():
                start = os.path.dirname(member.name) if member.issym() else ""
                links.append((folder / member.name, folder / os.path.normpath(os.path.join(start, member.linkname))))
            else:
                content.extract(member, folder, set_attrs=False, filter="data")
                files += member.isfile()
            progress(min(file.tell(), size), size)
        assert content.fileobj is not None
        while content.fileobj.read(_BLOCK):  # reaches the checksum of the compression
            pass
    while links:  # those that point at other links wait for them
        left = []
        for link, target in links:
            if target.is_file():
                limits.admit(target.stat().st_size)
                link.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(target, link)
                files += 1
            else:
                left.append((link, target))
        if len(left) == len(links):
            link, target = (path.relative_to(folder) for path in left[0])
            raise DataError(
                f"'{archive}' holds the link '{link}' to '{target}', which is no file in it; extract it by hand"
            )
        links = left
    return files


def _leads_out(archive: Path, name: str) -> DataError:
    return DataError(
        f"'{archive}' holds '{name}', which leads out of the folder; such a name is malicious: get the archive from "
        "its publisher"
    )
