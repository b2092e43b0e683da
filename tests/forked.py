"""The command line in real processes that start at once: forked from a server that has imported the libraries before.

A process of its own, with its own working directory, environment, exit code and signals, is what the tests of
interruption need; importing torch again in each of a hundred processes (seven seconds of it) is not.
"""

import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from dmlbench.cli.main import main

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    ["dmlbench.run", "dmlbench.apps.reevaluate", "dmlbench.apps.compare", "dmlbench.apps.report", "torch._dynamo",
     "pytorch_metric_learning.losses", "pytorch_metric_learning.miners"]
)  # fmt: skip


class Process:
    """``dmlbench`` with ``arguments``, started in ``folder``; no file may grow beyond ``largest_file`` bytes."""

    def __init__(
        self,
        arguments: tuple[str, ...],
        *,
        folder: Path,
        environment: Mapping[str, str],
        largest_file: int | None = None,
    ) -> None:
        number = time.monotonic_ns()
        self._files = [folder / f".{stream}-{number}" for stream in ("out", "error")]
        given = (arguments, folder, dict(environment), self._files, largest_file)
        self._process = _SERVER.Process(target=_execute, args=given)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()

    def terminate(self) -> None:
        self._process.terminate()

    def has_ended(self) -> bool:
        return not self._process.is_alive()

    def wait(self, *, timeout: float = 300) -> tuple[int, str, str]:
        """Exit code (negative: a signal), output and error output."""
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            self._process.kill()
            raise AssertionError(f"the command did not end within {timeout:.0f} s")
        out, error = (file.read_text(errors="replace") for file in self._files)
        return code, out, error


def _execute(
    arguments: tuple[str, ...],
    folder: Path,
    environment: dict[str, str],
    files: list[Path],
    largest_file: int | None,
) -> None:
    for file, stream in zip(files, (sys.stdout, sys.stderr), strict=True):
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(handle, stream.fileno())
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    torch.set_num_threads(1)
    sys.argv = ["dmlbench", *arguments]
    main(arguments)
