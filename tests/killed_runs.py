"""Runs that end between two steps, as if killed, and processes that are killed."""

import contextlib
import itertools
import multiprocessing
import time
from collections.abc import Iterator
from typing import Any

import pytest
from omegaconf import DictConfig

from dmlbench import build as build_module
from dmlbench import runner as run_module


class Killed(Exception):
    """Stands for a kill between two steps."""


def killed_after(steps: int, monkeypatch: pytest.MonkeyPatch, cfg: DictConfig) -> None:
    """A run that ends after so many steps, as if killed."""
    build = build_module.build_train_batches

    def dying(*arguments: Any, **options: Any) -> Any:
        batches = build(*arguments, **options)
        following, count = type(batches).__next__, itertools.count(1)

        class Dying(type(batches)):  # type: ignore[misc]
            def __next__(self) -> Any:
                if next(count) > steps:
                    raise Killed
                return following(self)

        batches.__class__ = Dying
        return batches

    with monkeypatch.context() as patch:
        patch.setattr(build_module, "build_train_batches", dying)
        with pytest.raises(Killed):
            run_module.run(cfg)


@contextlib.contextmanager
def other_process(context: contextlib.AbstractContextManager[Any]) -> Iterator[multiprocessing.process.BaseProcess]:
    """A forked process that enters ``context`` and is killed at the end of the block."""
    fork = multiprocessing.get_context("fork")
    entered = fork.Event()

    def stay() -> None:
        with context:
            entered.set()
            time.sleep(60)

    process = fork.Process(target=stay)
    process.start()
    try:
        assert entered.wait(30)
        yield process
    finally:
        process.kill()
        process.join()
