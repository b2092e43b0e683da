"""Run directories: states, results, patterns, removal, and locks on folders that machines share."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from killed_runs import other_process

from dmlbench.config import read_config
from dmlbench.results import store
from dmlbench.results.store import LOCK, SILENT_S, is_locked, locked
from dmlbench.runtime import file_sha256, write_json
from dmlbench.types import RunError, RunInUse

WHOLE = {"config_id": "a", "metrics": {"test": {"p_at_1": 0.5}, "val": {"p_at_1": 1}}}


def _run(root, name: str = "glyphs/mlrc/a-b-c-12345678/fold0_rep1"):
    path = root / name
    store.make_directory(path)
    return path


def test_state_of_a_run_follows_its_files(tmp_path) -> None:
    path = _run(tmp_path)
    assert store.run_state(path) == "interrupted"
    (path / store.ERROR).write_text("boom")
    assert store.run_state(path) == "failed"
    with store.locked(path):
        assert store.run_state(path) == "running"
    (path / store.CONFIG).write_text("fit: {}\n")
    store.write_result(path, WHOLE)
    assert store.run_state(path) == "done"
    bound = {"schema": store.RESULT_SCHEMA, "config_file_sha256": file_sha256(path / store.CONFIG)}
    assert store.read_result(path) == bound | WHOLE
    with pytest.raises(RunError, match=r"result\.json: got NaN or infinity"):
        store.write_result(path, WHOLE | {"metrics": {"test": {"p_at_1": float("nan")}}})
    assert store.read_result(path)["metrics"] == WHOLE["metrics"]


def test_lock_of_a_living_process_refuses_a_second_one_and_goes_with_it(tmp_path) -> None:
    path = _run(tmp_path)
    with other_process(store.locked(path)) as process:
        assert store.is_locked(path)
        with pytest.raises(RunError, match=f"in use by process {process.pid}"), store.locked(path):
            pass
    assert not store.is_locked(path)
    (path / ".last.ckpt.x.tmp").write_text("half")
    with store.locked(path):
        assert not (path / ".last.ckpt.x.tmp").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "damaged"),
        ("[1]", "holds a list instead of names and values"),
        ("[" * 100_000, "nested too deeply"),
        ('{"schema": 1, "metrics": {"test": {"p_at_1": 0.5}}}', "its checksum is missing"),
        ('{"metrics": {"test": {"p_at_1": NaN}}}', "NaN, expected finite numbers"),
        ('{"metrics": {"test": {"p_at_1": 1e999}}}', "1e999"),
    ],
)
def test_unusable_result_is_refused(tmp_path, content: str, message: str) -> None:
    path = _run(tmp_path)
    (path / store.RESULT).write_text(content)
    with pytest.raises(RunError, match=message):
        store.read_result(path)
    write_json(path / store.RESULT, {"schema": 99})
    with pytest.raises(RunError, match="got schema 99, expected 1"):
        store.read_result(path)


def test_directory_that_cannot_be_made_is_refused_with_the_remedy(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"paths\.output_dir"):
        store.make_directory(tmp_path / "file" / "run")


def test_patterns_find_runs_by_whole_path_or_its_beginning(tmp_path, monkeypatch) -> None:
    names = ["glyphs/mlrc/a-gap-1/fold0_rep0", "glyphs/mlrc/a-gsp-2/fold0_rep0", "cub/hpo/a-gap-1/fold0_rep2"]
    for name in names:
        _run(tmp_path, name)
    (tmp_path / "tables").mkdir()
    found = {pattern: len(store.find_runs(tmp_path, pattern)) for pattern in ("**", "glyphs/*", "glyphs", "*gsp*", "x")}
    assert found == {"**": 3, "glyphs/*": 2, "glyphs": 2, "*gsp*": 1, "x": 0}
    assert (
        len(store.find_runs(tmp_path, f"{tmp_path}/")) == len(store.find_runs(tmp_path, str(tmp_path))) == found["**"]
    )
    monkeypatch.chdir(tmp_path / "glyphs")
    assert len(store.find_runs(tmp_path, "**")) == 3 and len(store.find_runs(tmp_path, "glyphs")) == 2
    monkeypatch.chdir(tmp_path.parent)
    assert len(store.find_runs(tmp_path, f"{tmp_path.name}/glyphs")) == 2  # as a shell completes it
    run = store.find_runs(tmp_path, "cub")[0]
    assert (run.dataset, run.protocol, run.config, run.fold, run.repeat) == ("cub", "hpo", "a-gap-1", 0, 2)


def test_removing_the_last_run_removes_its_config_but_never_a_running_one(tmp_path) -> None:
    path = _run(tmp_path)
    with store.locked(path), pytest.raises(RunError, match="is running"):
        store.remove_run(path)
    store.remove_run(path)
    assert not path.parent.exists()


def test_a_killed_removal_leaves_no_summary_without_runs(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _run(tmp_path)
    (path.parent / "aggregate.json").touch()

    def killed(folder: Path) -> None:
        raise SystemExit

    monkeypatch.setattr(store.shutil, "rmtree", killed)
    with pytest.raises(SystemExit):
        store.remove_run(path)
    assert list(path.parent.iterdir()) == [path]
    monkeypatch.undo()
    store.remove_run(path)
    assert not path.parent.exists()


@pytest.mark.slow
def test_a_worker_that_outlives_its_killed_process_does_not_hold_the_lock(tmp_path) -> None:
    holder = (
        "import os, signal, sys, time\nfrom pathlib import Path\nfrom dmlbench.results.store import locked\n"
        f"with locked(Path({str(tmp_path)!r})):\n"
        "    if os.fork() == 0:\n        print('forked', flush=True)\n        time.sleep(60)\n        os._exit(0)\n"
        "    time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", holder], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "forked\n"
        assert store.is_locked(tmp_path)
        process.kill()
        process.wait()
        assert not store.is_locked(tmp_path)
    finally:
        os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("changed", ["fit: {max_steps: 3}\n", "fit: {}\n# a remark\n"])
def test_a_config_that_is_not_the_one_of_the_result_is_refused(tmp_path, changed: str) -> None:
    path = _run(tmp_path)
    (path / store.CONFIG).write_text("fit: {}\n")
    assert read_config(path / store.CONFIG) == {"fit": {}}  # of an unfinished run
    store.write_result(path, WHOLE)
    assert read_config(path / store.CONFIG) == {"fit": {}}
    (path / store.CONFIG).write_text(changed)
    with pytest.raises(RunError, match=r"config\.yaml is not the file that result\.json names"):
        read_config(path / store.CONFIG)


def _left_by(folder: Path, holder: str, silent_s: float) -> None:
    """A lock that nobody on this machine holds, last touched some time ago."""
    (folder / LOCK).write_text(holder)
    then = time.time() - silent_s
    os.utime(folder / LOCK, (then, then))


def test_a_lock_of_another_machine_is_stale_when_it_is_silent(tmp_path: Path) -> None:
    _left_by(tmp_path, "12 on elsewhere", SILENT_S - 30)
    assert is_locked(tmp_path)
    with (
        pytest.raises(RunInUse, match=r"in use by process 12 on elsewhere.*try again after 90 seconds"),
        locked(tmp_path),
    ):
        pass
    _left_by(tmp_path, "12 on elsewhere", SILENT_S + 1)
    assert not is_locked(tmp_path)
    with locked(tmp_path):
        assert (tmp_path / LOCK).read_text() == f"{os.getpid()} on {os.uname().nodename}"
    assert not (tmp_path / LOCK).exists()


def test_a_lock_from_a_fast_clock_is_watched_for_heartbeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "BEAT_S", 0.05)
    a_day = 86400
    _left_by(tmp_path, "12 on elsewhere", -a_day)
    with locked(tmp_path):
        assert (tmp_path / LOCK).read_text() == f"{os.getpid()} on {os.uname().nodename}"

    _left_by(tmp_path, "12 on elsewhere", -a_day)
    monkeypatch.setattr(time, "sleep", lambda _: _left_by(tmp_path, "12 on elsewhere", -a_day - 1))  # it beats
    with pytest.raises(RunInUse, match="in use by process 12 on elsewhere"), locked(tmp_path):
        pass


def test_a_lock_that_a_killed_process_of_this_machine_left_is_stale_at_once(tmp_path: Path) -> None:
    for holder in (f"12 on {os.uname().nodename}", "", "half"):
        _left_by(tmp_path, holder, 0)
        assert not is_locked(tmp_path)
        with locked(tmp_path):
            pass


def test_a_holder_touches_its_lock_and_stops_when_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "BEAT_S", 0.01)
    with locked(tmp_path):
        os.utime(tmp_path / LOCK, (1, 1))
        deadline = time.monotonic() + 10
        while (tmp_path / LOCK).stat().st_mtime < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert time.time() - (tmp_path / LOCK).stat().st_mtime < 10
    assert not (tmp_path / LOCK).exists()


def test_a_file_system_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(RunError, match="has no locks"), locked(tmp_path):
        pass
