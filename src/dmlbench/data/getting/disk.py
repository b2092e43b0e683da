"""Disk operations that downloading, extracting and preparing data share: checksums, locks, readable errors."""

import contextlib
import errno
import hashlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from dmlbench.types import DataError, not_a_file

Progress = Callable[[int, int | None], None]
"""Called with the bytes done so far and, if known, the total."""

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
    if what := not_a_file(path):
        raise DataError(f"'{path}' is {what}, not a file; replace it")
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
def locked(path: str | Path, *, doing: str) -> Iterator[None]:
    """The exclusive right to make ``path``; the system releases it when the process ends.

    Args:
        path: what is being made. The lock is the hidden file ``.<name>.lock`` next to it, which is removed afterwards.
        doing: what the holder is doing, as in "making 'cub200'".

    Raises:
        DataError: another process has it.
    """
    path = Path(path)
    file = path.with_name(f".{path.name}.lock")
    lock = FileLock(file)
    try:
        lock.acquire(timeout=0.2)  # long enough for a second attempt, where the last holder removed the file just now
    except Timeout:
        raise DataError(
            f"another process is {doing} (it holds '{file}'); wait until it is done, then start again"
        ) from None
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
        lock.release()


def remove_stale_lock(path: str | Path) -> None:
    """Remove the lock that a killed process left next to ``path``; that of a living one stays."""
    path = Path(path)
    if path.with_name(f".{path.name}.lock").exists():
        with contextlib.suppress(DataError), locked(path, doing="removing a stale lock"):
            pass


def require_space(folder: Path, needed: int, *, what: str) -> None:
    """Refuse to write ``needed`` bytes of ``what`` if the disk of ``folder`` has less free.

    Raises:
        DataError: it has less.
    """
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DataError(
            f"{what} takes {needed / 1e9:.2f} GB, but '{folder}' has only {free / 1e9:.2f} GB free; free some space, "
            "or set paths.data_dir to a disk that has more"
        )


def storage_error(error: OSError, path: str | Path, *, doing: str) -> DataError:
    """An error that explains a failed write to the user.

    Args:
        error: of the system.
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
