"""The lock that downloads and extractions share."""

import os
from pathlib import Path

import pytest
from filelock import FileLock

from dmlbench.data.getting.disk import locked, remove_stale_lock
from dmlbench.types import DataError


def test_one_holder_at_a_time_and_nothing_is_left(tmp_path: Path) -> None:
    with locked(tmp_path / "set", doing="testing"):
        with (
            pytest.raises(DataError, match=r"another process is testing \(it holds '.*\.set\.lock'\); wait until"),
            locked(tmp_path / "set", doing="testing"),
        ):
            pass
        with locked(tmp_path / "other", doing="testing"):
            pass
    assert list(tmp_path.iterdir()) == []
    with locked(tmp_path / "set", doing="testing"):
        pass


def test_a_lock_whose_holder_was_killed_is_free_at_once(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        FileLock(tmp_path / ".set.lock").acquire()
        os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    assert (tmp_path / ".set.lock").exists()
    with locked(tmp_path / "set", doing="testing"):
        pass


def test_a_lock_file_that_its_holder_removed_is_not_taken_for_the_lock(tmp_path: Path) -> None:
    file = tmp_path / ".set.lock"
    late = FileLock(file)
    with locked(tmp_path / "set", doing="testing"):
        pass
    with late, locked(tmp_path / "other", doing="testing"):
        assert os.fstat(late._context.lock_file_fd).st_ino == os.stat(file).st_ino


def test_the_lock_of_a_killed_process_is_removed_and_that_of_a_living_one_stays(tmp_path: Path) -> None:
    lock = tmp_path / ".set.lock"
    lock.touch()
    remove_stale_lock(tmp_path / "set")
    assert not lock.exists()
    with locked(tmp_path / "set", doing="testing"):
        remove_stale_lock(tmp_path / "set")
        assert lock.exists()
