"""Whatever opens files that others have put somewhere: a pipe is refused instead of waited for, and so is a socket."""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PIL import Image

from dmlbench.config import load_config
from dmlbench.data.getting.disk import file_digest
from dmlbench.data.getting.download import fetch
from dmlbench.data.image_table import file_sizes
from dmlbench.data.images.array_cache import cached_array
from dmlbench.data.images.pixels import read_image
from dmlbench.data.readers.cars196 import _read as read_annotations
from dmlbench.data.readers.folder import folder
from dmlbench.data.readers.layouts import file_stamp
from dmlbench.data.readers.lists import read_text
from dmlbench.evaluation.embeddings.embed import load_distance, load_embeddings
from dmlbench.evaluation.embeddings.files import read_embeddings
from dmlbench.models.weights import read_weights
from dmlbench.results import store
from dmlbench.results.rules import stored_collections
from dmlbench.runtime import read_json
from dmlbench.types import DataError, DmlbenchError, not_a_file


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
    "image": read_image,
    "list": read_text,
    "annotations": lambda path: read_annotations(path, "annotations"),
    "stamp": file_stamp,
    "archive": file_digest,
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


def test_a_pipe_in_a_run_or_cell_is_refused(tmp_path: Path) -> None:
    for name in (store.LOCK, store.EMBEDDINGS, "collections.csv"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(DmlbenchError, match=r"run\.lock is a pipe, not a file; remove it"):
        store.is_locked(tmp_path)
    with pytest.raises(DmlbenchError, match=r"run\.lock is a pipe"), store.locked(tmp_path):
        pass
    with pytest.raises(DmlbenchError, match=r"embeddings\.safetensors is a pipe"):
        store.hashes_of(tmp_path)
    assert stored_collections(tmp_path, {"n_collections": 1}) is None


def test_a_pipe_in_the_place_of_a_cached_array_or_download_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    make = {"key": {"version": 1}, "build": lambda: pytest.fail("it was built")}
    os.mkfifo(tmp_path / f"x-{_digest_of_key()}.npy")
    with pytest.raises(DataError, match="is a pipe, not a cached file; move it away"):
        cached_array(tmp_path, "x", **make)  # type: ignore[arg-type]
    os.mkfifo(tmp_path / "x.npy.part")
    with pytest.raises(DataError, match=r"x\.npy\.part' is a pipe, not a file"):
        fetch("http://127.0.0.1:9/x", path, md5="0" * 32)


def _digest_of_key() -> str:
    import hashlib

    return hashlib.sha256(b'{"version":1}').hexdigest()[:16]


def test_a_folder_of_images_with_a_pipe_or_a_link_to_itself_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (4, 4)).save(tmp_path / name / "0.png")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert len(folder(tmp_path)) == 2  # neither a file nor a folder
    (tmp_path / "b/1.png").symlink_to("1.png")
    with pytest.raises(DataError, match=r"lacks 1 of 3 images under .*: b/1\.png"):
        folder(tmp_path)
    (tmp_path / "b/1.png").unlink()
    os.mkfifo(tmp_path / "b/1.png")
    with pytest.raises(DataError, match=r"has a pipe among its images, '.*b/1\.png'; replace it or remove it"):
        folder(tmp_path)
    with pytest.raises(DataError, match="has a pipe among"):
        file_sizes(tmp_path, ["b/1.png"], name="x")
    os.mkfifo(tmp_path / "list.csv")
    with pytest.raises(DataError, match=r"list\.csv' is a pipe, not a file"):
        folder(tmp_path, csv="list.csv")
    with pytest.raises(DataError, match=r"list\.csv' is a pipe, not a file"):
        folder(tmp_path, train_classes="list.csv")
    (tmp_path / "itself").symlink_to("itself")
    with pytest.raises(DataError, match="cannot be read"):
        file_stamp(tmp_path / "itself")
    with pytest.raises(DataError, match="itself' cannot be read"):
        read_text(tmp_path / "itself")
