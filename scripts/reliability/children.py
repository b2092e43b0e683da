"""``dmlbench`` in children forked from one process that has imported the libraries, watched at every file operation.

A child counts what it does to files: opening one to write, renaming, removing, making folders, writing at a position
and syncing. At a chosen operation it is killed as the system kills, before the operation takes place; where data are
being written, half of them may have reached the disk by then.
"""

import importlib
import mmap
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

IMPORTED_BEFORE = (
    *(
        "dmlbench.cli.main",
        "dmlbench.cli.train",
        "dmlbench.runner",
        "dmlbench.apps.embeddings",
        "dmlbench.apps.compare_configs",
    ),
    *(
        "dmlbench.apps.report.page",
        "dmlbench.apps.explain",
        "dmlbench.data.preparation.prepare",
        "torch._dynamo",
    ),
    *("pytorch_metric_learning.losses", "pytorch_metric_learning.miners", "matplotlib.pyplot"),
)
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_EVENTS = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate"}


@dataclass(frozen=True)
class Ended:
    """A child that has ended.

    Attributes:
        code: exit code; negative: the signal that ended it; None: it did not end in time and was killed.
        text: what it wrote to standard output and error output.
        seconds: how long it ran.
        operations: the file operations that it began, by name.
    """

    code: int | None
    text: str
    seconds: float
    operations: tuple[str, ...]


def import_libraries() -> None:
    """Import what the commands need, so that a child starts at once; no threads, which a fork would not keep."""
    torch.set_num_threads(1)
    for name in IMPORTED_BEFORE:
        importlib.import_module(name)


def run(
    arguments: tuple[str, ...],
    folder: Path,
    log: Path,
    *,
    environment: Mapping[str, str] | None = None,
    kill_at: int | None = None,
    torn: bool = False,
    kill_after: float | None = None,
    limit_s: float = 120,
    memory: int | None = None,
) -> Ended:
    """``dmlbench arguments`` in ``folder``.

    Args:
        log: a file outside of ``folder`` for what the child writes and does.
        kill_at: number of the file operation, from 0, at which the child is killed.
        torn: the half of what that operation was to write, or to sync, has reached the disk.
        kill_after: seconds after which it is killed.
        limit_s: seconds after which it counts as hanging.
        memory: bytes that it may take beyond those it starts with.
    """
    log.write_bytes(b"")
    done = mmap.mmap(-1, 2**16)  # shared with the child: the names of its operations
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        if memory is not None:
            most = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + memory
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
        _execute(arguments, folder, log, dict(environment or {}), _watch(folder, done, kill_at, torn))
    code: int | None = None
    deadline = started + (limit_s if kill_after is None else kill_after)
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            break
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            code = -signal.SIGKILL if kill_after is not None else None
            break
        time.sleep(0.002)
    names = done[:].rstrip(b"\0").decode().split("\n")[:-1]
    done.close()
    return Ended(code, log.read_text(errors="replace"), time.monotonic() - started, tuple(names))


def _watch(folder: Path, done: mmap.mmap, kill_at: int | None, torn: bool) -> Callable[[], None]:
    """What a child calls to have its file operations below ``folder`` counted, and to be killed at one of them."""
    top = str(folder) + os.sep
    process = 0
    count = 0

    def is_inside(path: Any) -> bool:
        return isinstance(path, str | bytes | os.PathLike) and os.path.abspath(os.fsdecode(path)).startswith(top)

    def began(name: str, half: Callable[[], Any] | None = None) -> None:
        nonlocal count
        if os.getpid() != process:
            return
        if count == kill_at:
            if torn and half is not None:
                half()
            os.kill(process, signal.SIGKILL)
        count += 1
        done.write(f"{name}\n".encode())

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and arguments[2] is not None and arguments[2] & _WRITING and is_inside(arguments[0]):
            began("open")
        elif event in _EVENTS and is_inside(arguments[0]):
            began(event.removeprefix("os."))

    def start() -> None:
        nonlocal process
        process = os.getpid()
        sync, write_at = os.fsync, os.pwrite

        def fsync(handle: int) -> None:
            began("sync", lambda: os.ftruncate(handle, os.fstat(handle).st_size // 2))
            sync(handle)

        def pwrite(handle: int, data: Any, offset: int) -> int:
            began("pwrite", lambda: write_at(handle, memoryview(data)[: len(data) // 2], offset))
            return write_at(handle, data, offset)

        os.fsync, os.pwrite = fsync, pwrite  # type: ignore[assignment]
        sys.addaudithook(hook)

    return start


def _execute(
    arguments: tuple[str, ...], folder: Path, log: Path, environment: Mapping[str, str], watch: Callable[[], None]
) -> None:
    code = 1
    try:
        from dmlbench.cli.main import main

        handle = os.open(log, os.O_WRONLY | os.O_APPEND)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(folder)
        cores = sorted(os.sched_getaffinity(0))  # one, so that images stand in a cache in the order of their names
        os.sched_setaffinity(0, {cores[os.getpid() % len(cores)]})
        os.environ.update(environment)
        torch.set_num_threads(1)
        sys.argv = ["dmlbench", *arguments]
        watch()
        main(arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
