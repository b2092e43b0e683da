"""Locks of run directories: ``flock`` plus a heartbeat, for file systems that do not share locks between machines."""

import contextlib
import errno
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from dmlbench.runtime import is_open_at, remove_leftovers
from dmlbench.types import RunError, RunInUse, require_file

LOCK = "run.lock"
BEAT_S, SILENT_S = 15.0, 90.0
"""Seconds between heartbeats, and until another machine's lock is stale; clocks may differ by what is between."""
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextlib.contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Hold the run directory for this process.

    Raises:
        RunInUse: another process holds it.
    """
    require_file(run_dir / LOCK)
    try:
        file = (run_dir / LOCK).open("a+")
    except OSError as error:
        raise RunError(
            f"cannot write to the run directory {run_dir}: {error.strerror}; choose a writable folder with "
            "paths.output_dir=..."
        ) from error
    with file, _kept_from_children(file.fileno()):
        try:
            _lock(file.fileno())
        except BlockingIOError as error:
            file.seek(0)
            raise RunInUse(
                f"{run_dir} is in use by process {file.read().strip() or 'unknown'}; wait for it, stop it, or choose "
                "another paths.output_dir"
            ) from error
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                raise
            raise RunError(
                f"the file system of {run_dir} has no locks ({error.strerror}); choose another paths.output_dir"
            ) from error
        if not is_open_at(run_dir / LOCK, file.fileno()):
            raise RunInUse(f"{run_dir} was released by another process just now; start the command again", run_dir)
        if (elsewhere := _living_elsewhere(file)) and not _is_silent(file):
            raise RunInUse(
                f"{run_dir} is in use by process {elsewhere}, which was there a moment ago; if it was killed, "
                f"the run is free after {SILENT_S:.0f} seconds"
            )
        file.truncate(0)
        file.write(f"{os.getpid()} on {os.uname().nodename}")
        file.flush()
        remove_leftovers(run_dir)
        try:
            with _beating(file.fileno()):
                yield
        finally:
            (run_dir / LOCK).unlink(missing_ok=True)


def _living_elsewhere(file: IO[str]) -> str:
    """Process and machine that a lock names, if another machine's heartbeat is recent; else ""."""
    file.seek(0)
    holder = file.read().strip()
    machine = holder.partition(" on ")[2]
    silent = time.time() - os.fstat(file.fileno()).st_mtime
    return holder if machine and machine != os.uname().nodename and silent < SILENT_S else ""


def _is_silent(file: IO[str]) -> bool:
    """Whether a lock whose time lies in the future, by a clock that is ahead, misses two heartbeats."""
    before = os.fstat(file.fileno()).st_mtime
    if before < time.time() + SILENT_S:
        return False
    time.sleep(2 * BEAT_S)
    return os.fstat(file.fileno()).st_mtime == before


@contextlib.contextmanager
def _beating(descriptor: int) -> Iterator[None]:
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(BEAT_S):
            with contextlib.suppress(OSError):
                os.utime(descriptor)

    thread = threading.Thread(target=beat, name="lock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


_held: set[int] = set()


@contextlib.contextmanager
def _kept_from_children(descriptor: int) -> Iterator[None]:
    """Close the lock in forked workers, which may outlive this process."""
    _held.add(descriptor)
    try:
        yield
    finally:
        _held.discard(descriptor)


def _let_go() -> None:
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)


def _lock(descriptor: int) -> None:
    """Take the lock; once more after a moment, because `dmlbench status` touches it to see whether it is held."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        time.sleep(0.2)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_locked(run_dir: Path) -> bool:
    """Whether a living process holds the run directory."""
    require_file(run_dir / LOCK)
    try:
        with (run_dir / LOCK).open("r") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return bool(_living_elsewhere(file))
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
