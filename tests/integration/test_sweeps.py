"""Sweeps that share a grid, in real processes; and what they say of the jobs that failed."""

import gc
import logging
import os
import re
import textwrap
import weakref
from pathlib import Path

import pytest
from forked import Process
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf

from dmlbench.cli.errors import Failure, guarded
from dmlbench.cli.hydra_command import raise_failures, sweep_jobs
from dmlbench.cli.main import main
from dmlbench.cli.preflight import warn_of_jobs
from dmlbench.cli.progress import Progress
from dmlbench.config import compose, composing
from dmlbench.results.store import RESULT, find_runs, locked
from dmlbench.types import ConfigError, RunError

TINY = (
    "dataset=glyphs", "dataset.table.num_classes=8", "dataset.table.images_per_class=5", "dataset.table.image_size=24",
    "transform.train.padding=2", "fit.keep=none", "device=cpu", "head.out_features=8", "sampler.classes_per_batch=2",
    "sampler.images_per_class=2", "fit.max_steps=2", "fit.validate_every=2", "num_workers=0",
)  # fmt: skip
GRID = ("train", "-m", *TINY, "fold=0,1")


def start(folder: Path, *arguments: str, **environment: str) -> Process:
    places = {"DMLBENCH_CACHE": str(folder / "cache"), "DMLBENCH_OUTPUT": str(folder / "out")}
    environment = {**os.environ, **places, **environment}
    return Process(arguments, folder=folder, environment=environment)


@pytest.mark.slow
def test_two_sweeps_share_a_grid_and_each_skips_the_runs_that_the_other_has(tmp_path: Path) -> None:
    both = [start(tmp_path, *GRID) for _ in range(2)]
    ended = [process.wait(timeout=120) for process in both]
    assert [code for code, _, _ in ended] == [0, 0], ended
    trained = [line for _, _, error in ended for line in error.splitlines() if "training images of" in line]
    assert len(trained) == len({line.split(" on ")[0].split()[-1] for line in trained}) == 2
    runs = find_runs(tmp_path / "out")
    assert [run.state for run in runs] == ["done"] * 2

    for run in runs:
        (run.path / RESULT).unlink()
    with locked(runs[0].path):
        code, _, error = start(tmp_path, *GRID).wait(timeout=120)
    assert code == 0, error
    assert error.count("skipped: ") == 1
    assert f"skipped: {runs[0].path.relative_to(tmp_path)}" in error or f"skipped: {runs[0].path}" in error
    assert [(run.path / RESULT).exists() for run in runs] == [False, True]


# Fake commands of SLURM: sbatch starts the jobs of an array on this machine; sacct reports no state.
FAKE_SLURM = {
    "sbatch": """
        last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\)%.*/\\1/p' "$1")
        cp "$1" submitted.sh
        export SLURM_ARRAY_JOB_ID=7 SLURM_NTASKS=1 SLURM_JOB_NUM_NODES=1 SLURM_NODEID=0 SLURM_PROCID=0 \\
               SLURM_LOCALID=0 SLURM_JOB_NODELIST=localhost
        for ((i = 0; i <= last; i++)); do
            SLURM_JOB_ID=$((7 + i)) SLURM_ARRAY_TASK_ID=$i timeout 200 bash "$1" > job_$i.log 2>&1 &
        done
        echo "Submitted batch job 7"
    """,
    "srun": """
        [ "$1 $2 $4" = "--unbuffered --output --error" ] || exit 1
        exec "${@:6}"
    """,
    "sacct": "echo 'JobID|State|NodeList'",
}


@pytest.mark.slow
def test_a_sweep_on_slurm_submits_an_array_and_waits_for_its_runs(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="extra sweeps")
    for name, script in FAKE_SLURM.items():
        place = tmp_path / "bin" / name
        place.parent.mkdir(exist_ok=True)
        place.write_text(f"#!/bin/bash\n{textwrap.dedent(script)}")
        place.chmod(0o755)
    resources = ("partition=gpu", "gpus_per_node=1", "cpus_per_task=8", "mem_gb=32", "timeout_min=720")  # docs/speed.md
    launcher = ("hydra/launcher=submitit_slurm", *(f"hydra.launcher.{each}" for each in resources))
    process = start(tmp_path, *GRID, *launcher, PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    code, _, error = process.wait(timeout=240)
    assert code == 0, error + "".join(log.read_text() for log in tmp_path.glob("job_*.log"))
    options = set(re.findall("^#SBATCH --(.*)$", (tmp_path / "submitted.sh").read_text(), flags=re.MULTILINE))
    assert options >= {"array=0-1%2", "partition=gpu", "gpus-per-node=1", "cpus-per-task=8", "mem=32GB", "time=720"}
    assert [run.state for run in find_runs(tmp_path / "out")] == ["done"] * 2


@pytest.mark.slow
def test_the_last_line_names_every_config_that_failed_and_the_others_are_done(tmp_path: Path) -> None:
    process = start(tmp_path, "train", "-m", *TINY, "optim.lr=1e30,1e-3", "fold=0")
    code, _, error = process.wait(timeout=120)
    assert code == 1
    lines = error.splitlines()
    assert lines[-1] == (
        "dmlbench: error: 1 of 2 runs failed: optim.lr=1e+30. Start the same command again to repeat only these."
    )
    assert lines[-2].startswith("dmlbench: optim.lr=1e+30: training stopped at step")
    assert "Traceback" not in error
    assert sorted(run.state for run in find_runs(tmp_path / "out")) == ["done", "failed"]


def _ended(**errors: Exception | None) -> list[JobReturn]:
    jobs = []
    for name, error in errors.items():
        jobs.append(JobReturn(overrides=["x=1", f"loss={name}"], status=JobStatus.COMPLETED))
        jobs[-1].return_value = None if error is None else Failure.of(error)
    return jobs


def test_every_failed_job_is_named_by_its_own_overrides(capsys) -> None:
    jobs = _ended(a=None, b=RunError("it broke"), c=ValueError("a defect"))
    assert guarded(lambda: raise_failures(jobs)) == 1
    error = capsys.readouterr().err
    assert "dmlbench: loss=b: it broke\n" in error
    assert "ValueError: a defect" in error
    assert "2 of 3 runs failed: loss=b; loss=c." in error.splitlines()[-1]
    assert guarded(lambda: raise_failures(_ended(a=ConfigError("too small")))) == 2
    raise_failures(_ended(a=None))


def test_a_failure_keeps_nothing_of_the_run_in_memory() -> None:
    models = weakref.WeakSet[Process]()

    def run() -> None:
        model = Process.__new__(Process)
        models.add(model)
        raise RunError("it broke")

    try:
        run()
    except RunError as error:
        failure = Failure.of(error)
    gc.collect()
    assert failure.message == "it broke"
    assert not models


@pytest.mark.slow
def test_a_dry_run_of_a_sweep_lists_states_and_checks_what_is_there(tmp_path: Path, command, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DMLBENCH_OUTPUT", "out")
    monkeypatch.setenv("DMLBENCH_CACHE", str(tmp_path / "cache"))
    command("train", *TINY)
    out = command("train", "-m", *TINY, "pooling=gap,gmp", "fold=0,1", "--dry-run")
    gap, gmp, total, to_run, *times = out.splitlines()
    assert gap.startswith("pooling=gap  glyphs/mlrc/resnet20_small-gap-") and gap.endswith("  1 done, 1 missing")
    assert gmp.startswith("pooling=gmp  ") and gmp.endswith("  2 missing")
    assert total == "2 configs, 4 runs: 1 done, 3 missing"
    assert to_run.startswith("to run here: 3, about ")
    means = {"mean of complete runs)", "mean of complete runs of this kind)"}
    assert {line.rpartition(" (")[2] for line in times} == means
    assert {line.partition(":")[0].rpartition(" ")[2] for line in times} == {"(pooling=gap)", "(pooling=gmp)"}
    assert len(find_runs("out")) == 1
    missing = ("dataset=cub200", "paths.data_dir=nowhere", "backbone=resnet50", "backbone.weights_file=gone.pth")
    error = command("train", *missing, "--dry-run", code=1)
    assert "1 of 1 runs cannot start: " in error and "nowhere" in error and "weights file 'gone.pth' does not " in error
    error = command("train", "-m", *TINY, "protocol=conventional", "feature_cache=none,maps", "--dry-run", code=1)
    assert "1 config cannot be run: backbone.frozen_until: got null, expected a stage or all" in error
    error = command(
        "train", "-m", *TINY, "protocol=conventional", "sampler.classes_per_batch=2,99", "--dry-run", code=1
    )
    assert "1 of 2 runs cannot start: " in error and "got 99, expected at most" in error
    without_device = command("train", *TINY, "protocol=conventional", "device=cuda:99", "--dry-run")
    assert "1 run, time unknown: device: got " in without_device  # it may be there when the run starts
    error = command("train", "-m", *TINY, "fold=0,9", "--dry-run", code=1)
    reason = "fold: got 9, expected 0 to 3, the folds of the protocol."
    assert error.splitlines()[-1] == f"dmlbench: error: 1 config cannot be run: {reason}"
    protocols = command("train", "-m", *TINY, "protocol=mlrc,conventional", "fold=0,3", "--dry-run")
    assert "2 configs, 3 runs: " in protocols and "not planned" not in protocols  # fold 3 is one of mlrc's alone
    error = command("train", *TINY, "protocol=two_stage", "protocol.stage=2", "--dry-run", code=1)
    assert "run stage 1 first: out/glyphs/two_stage/" in error


def test_a_sweep_says_which_of_its_jobs_will_fail_before_the_first_starts(capsys) -> None:
    with composing():
        warn_of_jobs([[*TINY, f"fold={fold}", loss] for fold in (0, 9) for loss in ("loss=triplet", "+loss.x=1")])
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("dmlbench: fold=0 +loss.x=1 and 1 more will fail: loss.x is not an argument of ")
    assert second == "dmlbench: fold=9 loss=triplet will fail: fold: got 9, expected 0 to 3, the folds of the protocol."


def test_a_dry_run_says_which_jobs_will_fail_and_times_each_number_of_steps(tmp_path: Path, capsys) -> None:
    places = (f"paths.output_dir={tmp_path}/out", f"paths.cache_dir={tmp_path}/cache")
    jobs = (*TINY, *places, "protocol=mlrc,conventional", "fold=0,3", "repeat=0", "repeat=1", "fit.max_steps=2,3,4,5")
    with pytest.raises(SystemExit):
        main(["train", "-m", *jobs, "--dry-run"])
    out, error = capsys.readouterr()
    assert "8 configs, 12 runs: 12 missing" in out
    assert "protocol=conventional fold=3" in error and "will fail: fold: got 3, expected 0 to 0" in error
    assert sum("timing " in line for line in error.splitlines()) == 6  # of eight kinds


def test_overrides_of_a_sweep_keep_their_interpolations() -> None:
    with composing():
        jobs = sweep_jobs(["fit.max_steps=${epochs:4}", "fold=0,1"])
    settings = [OmegaConf.to_container(compose("train", job), resolve=False) for job in jobs]
    assert [(each["fit"]["max_steps"], each["fold"]) for each in settings] == [("${epochs:4}", 0), ("${epochs:4}", 1)]


def test_a_misspelt_option_ends_a_sweep_with_one_message(command) -> None:
    (error,) = command("train", "-m", *TINY, "pooling=gap,gpa", code=2).splitlines()
    assert error.startswith("dmlbench: error: pooling=gpa is unknown: did you mean 'gap'?")


def test_a_sweep_whose_jobs_all_fail_the_check_starts_none(tmp_path: Path, command, monkeypatch) -> None:
    monkeypatch.setenv("DMLBENCH_OUTPUT", str(tmp_path / "out"))
    error = command("train", "-m", *TINY, "fold=7", "repeat=0,1", code=2)
    expected = "all 2 runs would fail: fold: got 7, expected 0 to 3, the folds of the protocol."
    assert error == f"dmlbench: error: {expected}\n"
    assert not (tmp_path / "out").exists()


def test_each_run_of_a_sweep_starts_with_its_position_and_the_remaining_time(monkeypatch, caplog) -> None:
    caplog.set_level(logging.INFO, "dmlbench")
    now = 1000.0
    monkeypatch.setattr("time.time", lambda: now)
    progress = Progress(["a", "b", "c", "d"], started=now)
    progress.log_start(0)
    progress.skipped += 1  # complete
    now += 5
    progress.log_start(1)
    now += 600
    progress.log_start(2)
    assert [record.message for record in caplog.records] == [
        "run 1 of 4: a", "run 2 of 4: b (5 s elapsed)", "run 3 of 4: c (10 min elapsed, about 20 min remaining)",
    ]  # fmt: skip
