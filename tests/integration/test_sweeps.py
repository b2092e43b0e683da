"""Sweeps that share a grid, in real processes; and what they say of the jobs that failed."""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from forked import Process
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig

from dmlbench.cli import train
from dmlbench.cli.errors import guarded
from dmlbench.cli.main import main
from dmlbench.cli.sweeps import SharingLauncher
from dmlbench.results.store import RESULT, find_runs, locked
from dmlbench.types import ConfigError, RunError, RunInUse

TINY = (
    "dataset=glyphs", "dataset.table.num_classes=8", "dataset.table.images_per_class=5", "dataset.table.image_size=24",
    "transform.train.padding=2", "fit.keep=none", "device=cpu", "head.out_features=8", "sampler.classes_per_batch=2",
    "sampler.images_per_class=2", "fit.max_steps=2", "fit.validate_every=2", "num_workers=0",
)  # fmt: skip
GRID = ("train", "-m", *TINY, "fold=0,1")


def start(folder: Path, *arguments: str) -> Process:
    environment = {**os.environ, "DMLBENCH_CACHE": str(folder / "cache"), "DMLBENCH_OUTPUT": str(folder / "out")}
    return Process(arguments, folder=folder, environment=environment)


@pytest.mark.slow
def test_two_sweeps_share_a_grid_and_a_third_takes_over_what_another_process_leaves(tmp_path: Path) -> None:
    both = [start(tmp_path, *GRID) for _ in range(2)]
    ended = [process.wait(timeout=120) for process in both]
    assert [code for code, _, _ in ended] == [0, 0], ended
    trained = [line for _, _, error in ended for line in error.splitlines() if "training images of" in line]
    assert len(trained) == len({line.split(" on ")[0].split()[-1] for line in trained}) == 2
    runs = find_runs(tmp_path / "out")
    assert [run.state for run in runs] == ["done"] * 2

    (runs[0].path / RESULT).unlink()
    with locked(runs[0].path):
        process = start(tmp_path, *GRID)
        deadline = time.monotonic() + 60
        while "waiting for runs of other processes" not in process.output() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not (runs[0].path / RESULT).exists()
        assert not process.has_ended()
    code, out, error = process.wait(timeout=60)
    assert code == 0, error
    assert f"waiting for runs of other processes: {runs[0].path}" in out
    assert "left for the end of this sweep" in error
    assert (runs[0].path / RESULT).exists()


@pytest.mark.slow
def test_the_last_line_names_every_cell_that_failed_and_the_others_are_done(tmp_path: Path) -> None:
    process = start(tmp_path, "train", "-m", *TINY, "optim.lr=1e30,1e-3", "fold=0")
    code, _, error = process.wait(timeout=120)
    assert code == 1
    lines = error.splitlines()
    assert lines[-1] == (
        "dmlbench: error: 1 of 2 runs failed: optim.lr=1e+30; start the same command again to run these alone"
    )
    assert lines[-2].startswith("dmlbench: optim.lr=1e+30: training stopped at step")
    assert "Traceback" not in error
    assert sorted(run.state for run in find_runs(tmp_path / "out")) == ["done", "failed"]


class Scripted:
    """A launcher whose jobs end as a script says, one entry an attempt."""

    def __init__(self, **script: list[Exception | None]) -> None:
        self.script = script

    def launch(self, jobs, first: int) -> list[JobReturn]:
        results = []
        for job in jobs:
            error = self.script[job[-1].partition("=")[2]].pop(0)
            status = JobStatus.COMPLETED if error is None else JobStatus.FAILED
            result = JobReturn(status=status)
            result.return_value = error
            results.append(result)
        return results


def test_a_sweep_comes_back_to_runs_in_use_until_they_are_done_and_names_what_failed(tmp_path: Path, capsys) -> None:
    in_use = RunInUse("in use", tmp_path)
    inner = Scripted(a=[None], b=[in_use, in_use, None], c=[RunError("it broke")], d=[in_use, ValueError("a defect")])
    launcher = SharingLauncher(inner)
    assert len(launcher.launch([["x=1", f"loss={name}"] for name in "abcd"], 0)) == 1
    assert guarded(launcher.finish) == 1
    error = capsys.readouterr().err
    assert "dmlbench: loss=c: it broke\n" in error
    assert "ValueError: a defect" in error and "Traceback" in error
    assert "2 of 4 runs failed: loss=c; loss=d;" in error.splitlines()[-1]
    assert inner.script == {"a": [], "b": [], "c": [], "d": []}


def test_runs_in_use_are_come_back_to_only_while_there_is_time_for_them(tmp_path: Path, caplog) -> None:
    in_use = RunInUse("in use", tmp_path / "run")
    launcher = SharingLauncher(Scripted(a=[in_use, None], b=[in_use, in_use]))
    launcher.launch([["loss=a"], ["loss=b"]], 0)
    asked: list[str] = []

    def may_begin(job: Sequence[str]) -> bool:
        asked.append(job[0])
        return asked.count("loss=b") < 2

    with caplog.at_level(logging.INFO):
        launcher.wait(may_begin)
    assert f"left, as there is no time to wait for them: {tmp_path / 'run'}" in caplog.text
    assert (launcher.in_use, launcher.failures) == ([], [])
    assert asked == ["loss=a", "loss=b", "loss=b"]


def test_a_sweep_of_bad_configurations_ends_as_one_of_them_does(capsys) -> None:
    launcher = SharingLauncher(Scripted(a=[ConfigError("too small")]))
    launcher.launch([["fold=a"]], 0)
    assert guarded(launcher.finish) == 2
    assert "1 of 1 runs failed: fold=a" in capsys.readouterr().err


def test_a_job_is_composed_once_before_the_first_begins(tmp_path: Path, monkeypatch) -> None:
    composed: list[list[str]] = []
    load = ConfigLoaderImpl.load_configuration

    def counted(loader: ConfigLoaderImpl, *arguments: Any, overrides: list[str], **named: Any) -> DictConfig:
        composed.append([override for override in overrides if override.startswith("fold=")])
        return load(loader, *arguments, overrides=overrides, **named)

    monkeypatch.setattr(ConfigLoaderImpl, "load_configuration", counted)
    began = []
    monkeypatch.setattr(train, "task", lambda cfg: began.append((cfg.fold, len(composed))))
    with pytest.raises(SystemExit) as done:
        main(["train", "-m", "fold=0,3", f"paths.output_dir={tmp_path}"])
    assert done.value.code == 0
    assert composed[-2:] == [["fold=0"], ["fold=3"]]
    assert began == [(0, len(composed)), (3, len(composed))]


@pytest.mark.slow
def test_a_launcher_with_processes_of_its_own_names_what_failed_as_well(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="extra sweeps")
    environment = {**os.environ, "DMLBENCH_CACHE": str(tmp_path / "cache"), "DMLBENCH_OUTPUT": str(tmp_path / "out")}
    jobs = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "optim.lr=1e30,1e-3", "fold=0")
    done = subprocess.run(
        [sys.executable, "-m", "dmlbench", "train", "-m", *TINY, *jobs],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "1 of 2 runs failed: optim.lr=1e+30" in done.stderr.splitlines()[-1]
    assert sorted(run.state for run in find_runs(tmp_path / "out")) == ["done", "failed"]
