"""The command line in real processes that start at once: forked from a server that has imported the libraries before.

A process of its own, with its own working directory, environment, exit code and signals, is what the tests of
interruption need; importing torch again in each of a hundred processes (seven seconds of it) is not.
"""

import importlib.util
import multiprocessing
import os
import resource
import sys
import time
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

import torch

from dmlbench.cli.main import main

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_IMPORTED_BEFORE = [
    *(
        "dmlbench.runner",
        "dmlbench.apps.embeddings",
        "dmlbench.apps.compare_configs",
        "dmlbench.apps.report.page",
        "torch._dynamo",
    ),
    *("pytorch_metric_learning.losses", "pytorch_metric_learning.miners"),
]
assert all(map(importlib.util.find_spec, _IMPORTED_BEFORE))  # the server passes over what is missing
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(_IMPORTED_BEFORE)


class Process:
    """``dmlbench`` with ``arguments``, started in ``folder``; no file may grow beyond ``largest_file`` bytes."""

    def __init__(
        self, arguments: tuple[str, ...], *, folder: Path, environment: dict[str, str], largest_file: int | None = None
    ) -> None:
        number = time.monotonic_ns()
        self._files = [folder / f".{stream}-{number}" for stream in ("out", "error")]
        for file in self._files:
            file.touch()
        given = (arguments, folder, {**environment, **ONE_THREAD}, self._files, largest_file)
        self._process = _SERVER.Process(target=_execute, args=given)
        with mock.patch.dict(os.environ, ONE_THREAD):
            forkserver.ensure_running()
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def kill(self) -> None:
        """At once, whatever it does; nothing if it has ended."""
        self._process.kill()
        self._process.join(10)

    def terminate(self) -> None:
        self._process.terminate()

    def has_ended(self) -> bool:
        return not self._process.is_alive()

    def output(self) -> str:
        """What it has printed so far."""
        return "".join(file.read_text(errors="replace") for file in self._files)

    def wait(self, *, timeout: float = 300) -> tuple[int, str, str]:
        """Exit code (negative: a signal), output and error output."""
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            self.kill()
        out, error = (file.read_text(errors="replace") for file in self._files)
        assert code is not None, f"the command did not end within {timeout:.0f} s\n{out}\n{error}"
        return code, out, error


def _execute(
    arguments: tuple[str, ...], folder: Path, environment: dict[str, str], files: list[Path], largest_file: int | None
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
