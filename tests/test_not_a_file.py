"""Whatever opens files that others have put somewhere: a pipe is refused instead of waited for, and so is a socket."""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dmlbench.config import load_config
from dmlbench.evaluation.embeddings.embed import load_distance, load_embeddings
from dmlbench.evaluation.embeddings.files import read_embeddings
from dmlbench.models.weights import read_weights
from dmlbench.results import store
from dmlbench.results.rules import stored_collections
from dmlbench.runtime import read_json
from dmlbench.types import DmlbenchError, not_a_file


@pytest.fixture(autouse=True)
def never_waits() -> Iterator[None]:
    def late(*_: object) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 20)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


READERS: dict[str, Callable[[Path], object]] = {
    "configuration": load_config,
    "embeddings of a run": load_embeddings,
    "distance": lambda path: load_distance(path, None),  # type: ignore[arg-type]
    "weights": read_weights,
}


@pytest.mark.parametrize("reader", READERS)
def test_a_pipe_is_refused_by_its_name(reader: str, pipe: Path) -> None:
    with pytest.raises(DmlbenchError, match=r"pipe'? (is|are) a pipe, not a file"):
        READERS[reader](pipe)


def test_what_is_no_file_is_called_by_its_kind(tmp_path: Path, pipe: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("file", "link", "loop", "missing", "a\0b"):
        assert not_a_file(tmp_path / name) == ""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        kinds = {path: not_a_file(path) for path in (tmp_path, pipe, tmp_path / "socket", Path("/dev/zero"))}
    assert list(kinds.values()) == ["a folder", "a pipe", "a socket", "a device"]


def test_embeddings_and_json_are_refused(tmp_path: Path, pipe: Path) -> None:
    os.mkfifo(tmp_path / "x.npz")
    with pytest.raises(DmlbenchError, match=r"x\.npz is a pipe, not a file"):
        read_embeddings(tmp_path / "x.npz")
    with pytest.raises(ValueError, match="it is a pipe, not a file"):
        read_json(pipe)


def test_a_pipe_in_a_run_or_config_is_refused(tmp_path: Path) -> None:
    for name in (store.LOCK, store.EMBEDDINGS, "collections.csv"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(DmlbenchError, match=r"run\.lock is a pipe, not a file; remove it"):
        store.is_locked(tmp_path)
    with pytest.raises(DmlbenchError, match=r"run\.lock is a pipe"), store.locked(tmp_path):
        pass
    with pytest.raises(DmlbenchError, match=r"embeddings\.safetensors is a pipe"):
        store.hashes_of(tmp_path)
    assert stored_collections(tmp_path, {"n_collections": 1}) is None
