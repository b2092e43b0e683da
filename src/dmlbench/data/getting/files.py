"""Small things about files that downloading, extracting and preparing data share."""

import contextlib
import errno
import fcntl
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from dmlbench.runtime import is_open_at
from dmlbench.types import DataError

Progress = Callable[[int, int | None], None]
"""Called with the bytes done so far and, where it is known, the bytes in all."""

_READ_BYTES = 1 << 20


def no_progress(done: int, total: int | None) -> None:
    """A ``Progress`` that nobody watches."""


def file_digest(path: str | Path, algorithm: str = "md5", *, progress: Progress = no_progress) -> str:
    """Hexadecimal digest of a file's contents.

    Args:
        path: the file.
        algorithm: a name that ``hashlib`` knows; publishers of data sets print md5.
        progress: called after each block.

    Raises:
        DataError: the file cannot be read.
    """
    digest = hashlib.new(algorithm, usedforsecurity=False)
    try:
        with open(path, "rb") as file:
            total = Path(path).stat().st_size
            done = 0
            while block := file.read(_READ_BYTES):
                digest.update(block)
                done += len(block)
                progress(done, total)
    except OSError as error:
        raise DataError(
            f"cannot read '{path}' ({error.strerror or error}); check the path and its permissions"
        ) from error
    return digest.hexdigest()


@contextlib.contextmanager
def locked_file(path: str | Path, *, doing: str) -> Iterator[IO[bytes]]:
    """A file, open for appending, which no other process holds meanwhile; whoever holds it may remove or rename it.

    The system takes the lock back when the process ends, however that happens.

    Args:
        path: the file, made when it is missing.
        doing: what its holder does, as in "making 'cub200'".

    Raises:
        DataError: another process holds it.
    """
    while True:
        with open(path, "ab", buffering=0) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DataError(f"another process is {doing}; wait until it is done, then start again") from None
            if is_open_at(path, file.fileno()):  # else its last holder was done between our opening and locking it
                yield file
                return


def storage_error(error: OSError, path: str | Path, *, doing: str) -> DataError:
    """What a failed write means for a user.

    Args:
        error: what the system said.
        path: the file or folder that was written.
        doing: the action, as in "extract 'a.zip'".
    """
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        reason, remedy = "the disk is full", "free some space, or set paths.data_dir to a disk that has more"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        reason, remedy = "it may not be written", "make it writable, or set paths.data_dir to a folder of your own"
    else:
        reason, remedy = str(error.strerror or error), "set paths.data_dir to another folder, or look at the disk"
    return DataError(f"cannot {doing}: '{path}': {reason}; {remedy}")
