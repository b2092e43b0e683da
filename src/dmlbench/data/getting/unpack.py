"""Reads the members of zip and tar archives that nobody vouches for, and writes them below one folder only.

No name leaves the folder, no link or device is ever made, and sizes are limited by what is written, not only by what
the archive claims. Links inside a tar archive become copies of the files that they point to.
"""

import bz2
import gzip
import lzma
import os
import posixpath
import re
import shutil
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from dmlbench.data.getting.files import Progress, no_progress, storage_error
from dmlbench.types import DataError

MAX_BYTES = 10**9
MAX_RATIO = 20  # photographs hardly shrink: the data sets here unpack to at most twice their size
MAX_MEMBERS = 2_000_000

_BLOCK = 1 << 20
_LONGEST_HEADER = 1 << 24  # bytes of one tar header; longer ones would be held in memory
_TAR_BLOCK = 512
_ENCRYPTED = 0x1
_ALGORITHM_AES = 99
_DRIVE = re.compile(r"^[A-Za-z]:[/\\]")
_DAMAGED = (
    zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, struct.error, ValueError,
    KeyError, OverflowError,
)  # fmt: skip
_AGAIN = "download or copy it again"


@dataclass
class Unpacked:
    """What was written: number of files and bytes."""

    files: int = 0
    bytes: int = 0


@dataclass
class _Writer:
    """Writes members below ``folder`` and counts them against the limits."""

    archive: Path
    folder: Path
    max_bytes: int
    max_members: int
    done: Unpacked
    _members: int = 0
    _made: set[str] = field(default_factory=set)

    def admit(self, size: int) -> None:
        """Count one more member that claims ``size`` bytes."""
        self._members += 1
        self._check(self._members, self.done.bytes + size)

    def make_folder(self, name: str) -> None:
        if name and name not in self._made:
            with self._writing(name):
                os.makedirs(self.folder / name, exist_ok=True)
            self._made.add(name)

    def write(self, name: str, stream: IO[bytes]) -> None:
        self.make_folder(posixpath.dirname(name))
        with self._writing(name):
            out = open(self.folder / name, "wb")  # noqa: SIM115 - closed below; reading must not be taken for writing
        with out:
            while block := stream.read(_BLOCK):
                self.done.bytes += len(block)
                self._check(self._members, self.done.bytes)
                with self._writing(name):
                    out.write(block)
            with self._writing(name):
                out.flush()
        self.done.files += 1

    def copy(self, name: str, source: str) -> bool:
        """Write ``name`` with the contents of the member ``source``; False where that is no file written before."""
        if not (self.folder / source).is_file():
            return False
        with open(self.folder / source, "rb") as stream:
            self.write(name, stream)
        return True

    @contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        try:
            yield
        except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
            raise DataError(
                f"'{self.archive}' has both a file and a folder of one name ('{name}'); extract it by hand"
            ) from error
        except OSError as error:
            raise storage_error(error, self.folder.parent, doing=f"extract '{self.archive}'") from error

    def _check(self, members: int, size: int) -> None:
        if members > self.max_members or size > self.max_bytes:
            raise DataError(
                f"'{self.archive}' holds more than {self.max_bytes / 1e9:.1f} GB or {self.max_members} files "
                f"({self.archive.stat().st_size / 1e6:.1f} MB packed), which no data set here does; if you trust it, "
                "extract it by hand"
            )


def unpack(
    archive: str | Path,
    folder: str | Path,
    *,
    password: str | None = None,
    max_bytes: int = MAX_BYTES,
    max_members: int = MAX_MEMBERS,
    progress: Progress = no_progress,
) -> Unpacked:
    """Write the files of a zip, tar, tar.gz, tar.xz or tar.bz2 archive below a folder; the kind is told by content.

    Args:
        archive: the file.
        folder: an existing folder of the caller's own; left half-filled where this raises.
        password: of an encrypted zip.
        max_bytes: limit of the unpacked size in bytes, or 20 times the archive's size where that is more.
        max_members: limit of the number of members.
        progress: called with the archive's bytes read so far, and its size.

    Raises:
        DataError: the archive is damaged, truncated, encrypted, too large when unpacked, or holds names or links that
            leave the folder, links that lead nowhere, or devices; or the folder cannot be written.
    """
    archive, folder = Path(archive), Path(folder)
    try:
        with open(archive, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            magic = file.read(_TAR_BLOCK)
            file.seek(0)
            done = Unpacked()
            writer = _Writer(archive, folder, max(max_bytes, MAX_RATIO * size), max_members, done)
            if magic.startswith(b"PK"):
                _unpack_zip(file, writer, size=size, password=password, progress=progress)
            else:
                _unpack_tar(file, writer, size=size, magic=magic, progress=progress)
    except RecursionError as error:  # tarfile follows chains of headers by calling itself
        raise DataError(f"'{archive}' is damaged (endless headers); {_AGAIN}") from error
    except NotImplementedError as error:  # a method or version that zipfile does not know
        raise DataError(
            f"'{archive}' is packed in a way that Python cannot read ({error}); {_AGAIN}, or extract it by hand"
        ) from error
    except _DAMAGED as error:
        doubt = ", or the password is wrong" if password is not None else ""
        raise DataError(f"archive '{archive}' is damaged or incomplete ({error}){doubt}; {_AGAIN}") from error
    except OSError as error:
        if error.errno is None:  # gzip and bz2 report bad data so
            raise DataError(f"archive '{archive}' is damaged or incomplete ({error}); {_AGAIN}") from error
        raise DataError(f"cannot read '{archive}' ({error.strerror}); check the path and its permissions") from error
    if done.files == 0:
        raise DataError(f"archive '{archive}' holds no files; {_AGAIN}")
    return done


def _safe_name(name: str, archive: Path) -> str:
    """A member's name relative to the folder, with forward slashes; empty for the folder itself."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith(("/", "\\")) or _DRIVE.match(name) or ".." in parts or "\0" in name:
        raise DataError(
            f"'{archive}' holds the name '{name}', which leads out of the folder; it was not made with good intent: "
            "get the archive from its publisher"
        )
    return "/".join(parts)


# ---- zip


def _unpack_zip(file: IO[bytes], writer: _Writer, *, size: int, password: str | None, progress: Progress) -> None:
    with zipfile.ZipFile(file) as content:
        members = content.infolist()
        _check_zip(members, writer, password)
        _check_space(writer, sum(member.file_size for member in members))
        secret = None if password is None else password.encode()
        read = 0
        for member in members:
            name = _safe_name(member.filename.replace("\\", "/"), writer.archive)
            writer.admit(member.file_size)
            if member.is_dir():
                writer.make_folder(name)
            elif not name.startswith("__MACOSX/"):  # what macOS adds about its own files
                with _open_member(content, member, secret, writer.archive) as stream:
                    writer.write(name, stream)
            read += member.compress_size
            progress(min(read, size), size)
    progress(size, size)


def _check_zip(members: list[zipfile.ZipInfo], writer: _Writer, password: str | None) -> None:
    """What the directory at the archive's end tells before anything is written."""
    archive = writer.archive
    claimed = sum(member.file_size for member in members)
    if claimed > writer.max_bytes or len(members) > writer.max_members:
        raise DataError(
            f"'{archive}' claims {len(members)} files of {claimed / 1e9:.1f} GB, more than {writer.max_members} or "
            f"{writer.max_bytes / 1e9:.1f} GB; if you trust it, extract it by hand"
        )
    for member in members:
        _safe_name(member.filename.replace("\\", "/"), archive)
        kind = stat.S_IFMT(member.external_attr >> 16)
        if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise DataError(f"'{archive}' holds '{member.filename}', a link or device; extract it by hand")
        if member.compress_type == _ALGORITHM_AES:
            raise DataError(
                f"'{archive}' is encrypted by AES, which Python cannot read; extract it by hand, for instance with "
                "'7z x', into a folder below your data folder"
            )
        if member.flag_bits & _ENCRYPTED and password is None:
            raise DataError(
                f"'{archive}' is encrypted; give the password that its publisher sent you (--password), or extract it "
                "by hand into a folder below your data folder"
            )


@contextmanager
def _open_member(
    content: zipfile.ZipFile, member: zipfile.ZipInfo, password: bytes | None, archive: Path
) -> Iterator[IO[bytes]]:
    try:
        stream = content.open(member, pwd=password)
    except NotImplementedError:  # a RuntimeError too
        raise
    except RuntimeError as error:
        raise DataError(f"'{archive}' does not open with this password ({error}); correct it") from error
    with stream:
        yield stream


# ---- tar


class _Decompressed:
    """The stream inside a tar file's compression; remembers the last header block, which ends a whole archive."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.last = b""

    def read(self, size: int = -1) -> bytes:
        if size < 0 or size > _LONGEST_HEADER:
            raise tarfile.ReadError(f"a header of {size} bytes")
        self.last = self._stream.read(size)
        return self.last

    def seek(self, offset: int) -> int:
        return int(self._stream.seek(offset))

    def tell(self) -> int:
        return int(self._stream.tell())


def _unpack_tar(file: IO[bytes], writer: _Writer, *, size: int, magic: bytes, progress: Progress) -> None:
    archive = writer.archive
    if magic.startswith(b"\x1f\x8b"):
        stream: Any = gzip.GzipFile(fileobj=file)
    elif magic.startswith(b"BZh"):
        stream = bz2.BZ2File(file)
    elif magic.startswith(b"\xfd7zXZ\0"):
        stream = lzma.LZMAFile(file)  # noqa: SIM115 - the file below it is closed by the caller
    elif len(magic) < _TAR_BLOCK or not _is_tar_header(magic):
        page = "; it begins like a web page, not like data" if magic.lstrip()[:1] == b"<" else ""
        raise DataError(f"'{archive}' is no zip, tar, tar.gz, tar.xz or tar.bz2 archive{page}; {_AGAIN}")
    else:
        stream = file
    _check_space(writer, size)
    source = _Decompressed(stream)
    links: list[tuple[str, str]] = []
    with tarfile.open(fileobj=source, mode="r:") as content:  # type: ignore[call-overload]  # it only reads and seeks
        while (member := content.next()) is not None:
            name = _safe_name(member.name, archive)
            writer.admit(member.size if member.isreg() else 0)
            if member.isdir():
                writer.make_folder(name)
            elif member.issym() or member.islnk():
                start = posixpath.dirname(name) if member.issym() else ""
                links.append((name, _link_target(member.linkname, start, name, archive)))
            elif member.isreg():
                inner = content.extractfile(member)
                assert inner is not None
                with inner:
                    writer.write(name, inner)
            else:
                raise DataError(f"'{archive}' holds '{member.name}', a device or pipe; extract it by hand")
            progress(min(file.tell(), size), size)
            content.members = []  # else every header stays in memory
    if source.last != bytes(_TAR_BLOCK):
        raise tarfile.ReadError("it ends in the middle")
    while source.read(_BLOCK):  # reaches the checksum of the compression
        pass
    _copy_links(links, writer)
    progress(size, size)


def _is_tar_header(block: bytes) -> bool:
    try:
        tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return False
    return True


def _link_target(target: str, start: str, name: str, archive: Path) -> str:
    joined = posixpath.normpath(posixpath.join(start, target))
    if target.startswith("/") or joined == ".." or joined.startswith(("../", "/")):
        raise DataError(
            f"'{archive}' holds the link '{name}' to '{target}', which leads out of the folder; it was not made with "
            "good intent: get the archive from its publisher"
        )
    return joined


def _copy_links(links: list[tuple[str, str]], writer: _Writer) -> None:
    """Links become copies; those that point at other links wait for them."""
    while links:
        left = [(name, target) for name, target in links if not writer.copy(name, target)]
        if len(left) == len(links):
            raise DataError(
                f"'{writer.archive}' holds the link '{left[0][0]}' to '{left[0][1]}', which is no file in it; extract "
                "it by hand"
            )
        links = left


def _check_space(writer: _Writer, needed: int) -> None:
    free = shutil.disk_usage(writer.folder).free
    if needed > free:
        raise DataError(
            f"'{writer.archive}' takes {needed / 1e9:.2f} GB unpacked, but '{writer.folder.parent}' has only "
            f"{free / 1e9:.2f} GB free; free some space, or set paths.data_dir to a disk that has more"
        )
