import json
import os
import random

import numpy as np
import pytest
import torch

from dmlbench import runtime
from dmlbench.types import ConfigError, RunError


def test_derived_seed_is_a_frozen_function_of_its_parts() -> None:
    # Seeds of published results: these numbers must never change.
    assert runtime.derive_seed(0, 0, 0) == 3051931488724851722
    assert len({runtime.derive_seed(0, fold, repeat) for fold in range(4) for repeat in range(3)}) == 12
    assert runtime.derive_seed(1, 2) != runtime.derive_seed(12)
    assert 0 <= runtime.derive_seed("x") < 2**63


def test_restoring_the_random_state_repeats_every_generator() -> None:
    runtime.seed_everything(3)
    state = runtime.random_state()
    first = (random.random(), np.random.rand(), torch.rand(3))  # noqa: NPY002 - the one to restore
    runtime.restore_random_state(state)
    second = (random.random(), np.random.rand(), torch.rand(3))  # noqa: NPY002 - the one to restore
    assert first[:2] == second[:2]
    assert torch.equal(first[2], second[2])


def test_interrupted_atomic_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch) -> None:
    path = tmp_path / "result.json"
    runtime.atomic_write(path, b"old")

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        runtime.atomic_write(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_json_results_hold_finite_numbers_when_written_and_when_read(tmp_path, value: float) -> None:
    path = tmp_path / "scores.json"
    runtime.write_json(path, {"score": 0.5})
    with pytest.raises(RunError, match=r"scores\.json would hold NaN or infinity"):
        runtime.write_json(path, {"scores": [{"score": value}]})
    assert runtime.read_json(path) == {"score": 0.5}
    assert list(tmp_path.iterdir()) == [path]
    path.write_text(json.dumps({"score": value}))
    with pytest.raises(ValueError, match="which is no score"):
        runtime.read_json(path)


@pytest.mark.parametrize("name", ["gpu", "cuda:99", "meta"])
def test_unknown_device_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        runtime.select_device(name)
