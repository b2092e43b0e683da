"""The lock that downloads and extractions share."""

import fcntl
import os
from pathlib import Path
from typing import IO

import pytest

from dmlbench.data.getting.files import locked_file
from dmlbench.types import DataError


@pytest.mark.parametrize("successor", [True, False])
def test_a_file_that_its_holder_removed_before_we_locked_it_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, successor: bool
) -> None:
    path, lock, stale = tmp_path / "lock", fcntl.flock, []

    def late(file: IO[bytes], operation: int) -> None:
        if not stale:
            stale.append(os.stat(path).st_ino)
            path.rename(tmp_path / "done")
            if successor:
                path.touch()
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with locked_file(path, doing="testing") as file:
        assert os.fstat(file.fileno()).st_ino == os.stat(path).st_ino != stale[0]
        monkeypatch.undo()
        with pytest.raises(DataError, match="another process is testing"), locked_file(path, doing="testing"):
            pass
