"""Locks of run directories on folders that machines share."""

import errno
import fcntl
import os
import time
from pathlib import Path

import pytest

from dmlbench.results import locks
from dmlbench.results.locks import LOCK, SILENT_S, is_locked, locked
from dmlbench.types import RunError, RunInUse


def _left_by(folder: Path, holder: str, silent_s: float) -> None:
    """A lock that nobody on this machine holds, last touched some time ago."""
    (folder / LOCK).write_text(holder)
    then = time.time() - silent_s
    os.utime(folder / LOCK, (then, then))


def test_a_lock_of_another_machine_is_stale_when_it_is_silent(tmp_path: Path) -> None:
    _left_by(tmp_path, "12 on elsewhere", SILENT_S - 30)
    assert is_locked(tmp_path)
    with pytest.raises(RunInUse, match=r"in use by process 12 on elsewhere.*free after 90 seconds"), locked(tmp_path):
        pass
    _left_by(tmp_path, "12 on elsewhere", SILENT_S + 1)
    assert not is_locked(tmp_path)
    with locked(tmp_path):
        assert (tmp_path / LOCK).read_text() == f"{os.getpid()} on {os.uname().nodename}"
    assert not (tmp_path / LOCK).exists()


def test_a_lock_from_a_fast_clock_is_watched_for_heartbeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "BEAT_S", 0.05)
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
    monkeypatch.setattr(locks, "BEAT_S", 0.01)
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
