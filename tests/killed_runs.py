"""Runs that end between two steps, as if killed."""

import itertools
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
