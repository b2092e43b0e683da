import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from killed_runs import other_process

from dmlbench import runtime
from dmlbench.config import read_config
from dmlbench.results import store
from dmlbench.training.checkpoint import load_checkpoint
from dmlbench.training.log import read_history
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


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_json_results_hold_finite_numbers_when_written_and_when_read(tmp_path, value: float) -> None:
    path = tmp_path / "scores.json"
    runtime.write_json(path, {"score": 0.5})
    with pytest.raises(RunError, match=r"scores\.json: got NaN or infinity"):
        runtime.write_json(path, {"scores": [{"score": value}]})
    assert runtime.read_json(path) == {"score": 0.5}
    assert list(tmp_path.iterdir()) == [path]
    path.write_text(json.dumps({"score": value}))
    with pytest.raises(ValueError, match="expected finite numbers"):
        runtime.read_json(path)


def test_a_changed_digit_in_a_json_file_is_noticed(tmp_path) -> None:
    path = tmp_path / "result.json"
    content = {"scores": {"p_at_1": 0.1234, "steps": 10**20, "ä": [None, True, 1e-300]}}
    runtime.write_json(path, content | {7: "a key that is no text", 10: (1, 2)})
    assert runtime.read_json(path) == content | {"7": "a key that is no text", "10": [1, 2]}
    text = path.read_text()
    path.write_text(json.dumps(json.loads(text), sort_keys=True))  # other blanks and another order
    assert runtime.read_json(path)["scores"] == content["scores"]
    path.write_text(text.replace("0.1234", "0.1334"))
    with pytest.raises(ValueError, match="its checksum is missing or does not match"):
        runtime.read_json(path)


def test_a_write_removes_what_a_killed_one_left_and_nothing_else(tmp_path) -> None:
    path = tmp_path / "table.md"
    killed = tmp_path / ".table.md.0badcafe.tmp"
    killed.write_bytes(b"half")
    others = {tmp_path / ".runs.csv.0badcafe.tmp", tmp_path / "table.md.tmp"}
    for other in others:
        other.write_bytes(b"not of this file")
    with runtime.whole_file(path) as living:
        living.write(b"first")
        (own,) = set(tmp_path.iterdir()) - others
        runtime.atomic_write(path, b"second")
        runtime.remove_leftovers(tmp_path)
        assert own.exists()  # it is still being written
        assert set(tmp_path.iterdir()) == {own, path, tmp_path / "table.md.tmp"}
    assert path.read_bytes() == b"first"
    runtime.remove_leftovers(tmp_path / "missing")


def test_a_folder_appears_whole_and_leftovers_of_killed_processes_go(tmp_path) -> None:
    @contextlib.contextmanager
    def unfinished_folder() -> Iterator[None]:
        with runtime.whole_folder(tmp_path / "x") as folder:
            (folder / "weights").write_text("secret")
            yield

    with other_process(unfinished_folder()):
        (left,) = tmp_path.iterdir()
        with runtime.whole_folder(tmp_path / "x") as folder:
            (folder / "a").write_text("whole")
        assert left.exists()  # somebody fills it
    shutil.rmtree(tmp_path / "x")
    with pytest.raises(ValueError), runtime.whole_folder(tmp_path / "x"):
        assert not left.exists()
        raise ValueError
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_taken_for_a_leftover_before_its_lock_is_not_used(tmp_path, monkeypatch) -> None:
    flock, removed = runtime.fcntl.flock, []

    def removed_once(descriptor: int, operation: int) -> None:
        if not removed:
            removed.extend(tmp_path.iterdir())
            removed[0].unlink()
        flock(descriptor, operation)

    monkeypatch.setattr(runtime.fcntl, "flock", removed_once)
    runtime.atomic_write(tmp_path / "x", b"whole")
    assert removed and (tmp_path / "x").read_bytes() == b"whole"


@pytest.mark.parametrize("name", ["gpu", "cuda:99", "cuda:00", "meta"])
def test_unknown_device_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        runtime.select_device(name)


@pytest.mark.parametrize(("name", "index"), [("auto", 0), ("cuda", 0), ("cuda:1", 1)])
def test_a_cuda_device_has_its_index_which_torch_needs_to_set_it(monkeypatch, name: str, index: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert runtime.select_device(name) == torch.device("cuda", index)


READERS: dict[str, Callable[[Path], object]] = {
    "config": read_config,
    "best.ckpt": load_checkpoint,
    "history.csv": read_history,
    store.LOCK: lambda path: store.is_locked(path.parent),
    store.EMBEDDINGS: lambda path: store.hashes_of(path.parent),
}
"""Readers that would wait for a pipe; others ask ``is_file`` first."""


@pytest.mark.parametrize("name", READERS)
def test_a_pipe_is_refused_by_its_name_instead_of_waited_for(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(RunError, match=rf"{name}.* is a pipe"):
        READERS[name](tmp_path / name)


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


@pytest.mark.slow
def test_each_process_takes_a_free_gpu_and_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    take = (
        "import tempfile, torch; from dmlbench import runtime; torch.cuda.device_count = lambda: 2; "
        "torch.cuda.get_device_properties = lambda number: None; "
        "print(runtime.select_device('free'), runtime.select_device('free'), flush=True); input()"
    )

    def start() -> subprocess.Popen[str]:
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen([sys.executable, "-c", take], text=True, **pipes)

    first = start()
    assert first.stdout.readline() == "cuda:0 cuda:0\n"
    second = start()
    assert second.stdout.readline() == "cuda:1 cuda:1\n"
    assert "other processes have all 2 GPUs. Start at most 2 at once." in start().communicate()[1]
    first.kill()
    first.communicate()
    third = start()
    assert third.stdout.readline() == "cuda:0 cuda:0\n"
    for process in (second, third):
        process.communicate("\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_free_where_there_is_none() -> None:
    with pytest.raises(ConfigError, match=r"torch sees no CUDA device\. Use device=cpu"):
        runtime.select_device("free")
