"""Downloads from a server on this machine that drops connections, changes files and sends the wrong ones."""

import errno
import hashlib
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from filelock import FileLock

from dmlbench.data.getting import download
from dmlbench.data.getting.download import fetch
from dmlbench.types import ConfigError, DataError

CONTENT = bytes(range(256)) * 4000
MD5 = hashlib.md5(CONTENT).hexdigest()


@dataclass
class Behavior:
    """What the server does; ``requests`` logs the Range header of each request."""

    content: bytes = CONTENT
    etag: str | None = '"one"'
    ranges: bool = True
    drop_after: list[int] = field(default_factory=list)  # bytes of the first answers, then whole ones
    status: list[int] = field(default_factory=list)  # of the first answers, then as it should be
    requests: list[str | None] = field(default_factory=list)
    url: str = ""


@pytest.fixture
def server() -> Iterator[Behavior]:
    behavior = Behavior()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            asked = self.headers.get("Range")
            behavior.requests.append(asked)
            if behavior.status and (status := behavior.status.pop(0)) != 200:
                self.send_error(status)
                return
            total = len(behavior.content)
            valid = self.headers.get("If-Range") in (None, behavior.etag)
            start = int(asked.split("=")[1].rstrip("-")) if asked and behavior.ranges and valid else 0
            if start >= total:
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{total}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
            if behavior.etag:
                self.send_header("ETag", behavior.etag)
            self.send_header("Content-Length", str(total - start))
            self.end_headers()
            body = behavior.content[start:]
            if behavior.drop_after:
                body = body[: behavior.drop_after.pop(0)]
                self.close_connection = True
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    instance = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=instance.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    behavior.url = f"http://127.0.0.1:{instance.server_address[1]}/data.zip"
    yield behavior
    instance.shutdown()
    instance.server_close()
    thread.join()


@pytest.fixture
def get(tmp_path: Path, server: Behavior) -> Callable[..., Path]:
    def get(**options: object) -> Path:
        settings = {"md5": MD5, "pause_s": 0.0, "timeout_s": 5.0, **options}
        return fetch(server.url, tmp_path / "new" / "data.zip", **settings)

    return get


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "new").iterdir())


def test_a_file_arrives_whole_and_alone(get, server: Behavior, tmp_path: Path) -> None:
    seen: list[tuple[int, int | None]] = []
    assert get(progress=lambda done, total: seen.append((done, total)), size=len(CONTENT)).read_bytes() == CONTENT
    assert names(tmp_path) == ["data.zip"]
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    get()
    assert server.requests == [None]  # the second call asked for nothing


def test_dropped_connections_are_taken_up_where_they_ended(get, server: Behavior) -> None:
    server.drop_after = [1000, 2000, 0]
    assert get().read_bytes() == CONTENT
    assert server.requests == [None, "bytes=1000-", "bytes=3000-", "bytes=3000-"]


def test_a_later_call_goes_on_where_the_first_ended(get, server: Behavior, tmp_path: Path) -> None:
    server.drop_after = [5000]
    with pytest.raises(DataError, match=r"ended at byte 5000 of 1024000\), tried 1 times; what has arrived is kept"):
        get(attempts=1)
    assert names(tmp_path) == ["data.zip.part"]
    assert get().read_bytes() == CONTENT
    assert server.requests == [None, "bytes=5000-"]
    assert names(tmp_path) == ["data.zip"]


@pytest.mark.parametrize("etag", ['"one"', None, 'W/"weak"'])
def test_a_server_that_ignores_ranges_is_read_from_the_start(get, server: Behavior, etag: str | None) -> None:
    server.etag, server.ranges, server.drop_after = etag, False, [7000]
    assert get().read_bytes() == CONTENT
    assert server.requests == [None, "bytes=7000-"]


def test_a_file_that_changed_on_the_server_is_read_from_the_start(get, server: Behavior) -> None:
    server.drop_after = [1000]
    with pytest.raises(DataError):
        get(attempts=1)
    server.content, server.etag = CONTENT[::-1], '"two"'
    assert get(md5=hashlib.md5(CONTENT[::-1]).hexdigest()).read_bytes() == CONTENT[::-1]


def test_a_file_that_grew_on_the_server_is_taken_if_its_checksum_is_right(get, server: Behavior) -> None:
    server.etag, server.drop_after = None, [1000]
    with pytest.raises(DataError):
        get(attempts=1)
    server.content = CONTENT + b"more"
    assert get(md5=hashlib.md5(server.content).hexdigest()).read_bytes() == server.content
    assert server.requests == [None, "bytes=1000-"]


def test_a_resumed_file_with_a_wrong_checksum_gets_one_fresh_try(get, server: Behavior, tmp_path: Path) -> None:
    server.drop_after = [1000]
    with pytest.raises(DataError):
        get(attempts=1)
    (tmp_path / "new" / "data.zip.part").write_bytes(b"x" * 1000)  # damaged on disk
    assert get().read_bytes() == CONTENT
    assert server.requests == [None, "bytes=1000-", None]


def test_a_complete_part_file_needs_no_more_bytes(get, server: Behavior, tmp_path: Path) -> None:
    server.drop_after = [1000]
    with pytest.raises(DataError):
        get(attempts=1)
    (tmp_path / "new" / "data.zip.part").write_bytes(CONTENT)
    assert get().read_bytes() == CONTENT
    (tmp_path / "new" / "data.zip").unlink()
    server.drop_after = [1000]
    with pytest.raises(DataError):
        get(attempts=1)
    (tmp_path / "new" / "data.zip.part").write_bytes(CONTENT + b"too long")
    assert get().read_bytes() == CONTENT


def test_the_wrong_file_is_refused_and_leaves_nothing(get, server: Behavior, tmp_path: Path) -> None:
    server.content = b"<html>moved</html>"
    with pytest.raises(DataError, match=r"not the file that was published: its md5 is .*\(it begins like a web page\)"):
        get()
    assert names(tmp_path) == []
    assert server.requests == [None]
    with pytest.raises(DataError, match="has 18 bytes, not the 5 of the published file"):
        get(size=5)


def test_a_dead_link_is_one_message_that_says_where_else(get, server: Behavior, tmp_path: Path) -> None:
    server.status = [404]
    with pytest.raises(DataError, match=r"is dead \(the server says 404 Not Found\); get it from the moon") as caught:
        get(elsewhere="get it from the moon")
    assert "\n" not in str(caught.value)
    assert len(server.requests) == 1
    assert names(tmp_path) == []


def test_a_busy_server_is_asked_again(get, server: Behavior) -> None:
    server.status = [503, 429, 200]
    assert get().read_bytes() == CONTENT


def test_a_server_that_stays_busy_is_given_up(get, server: Behavior) -> None:
    server.status = [503] * 3
    with pytest.raises(DataError, match=r"503 Service Unavailable\), tried 3 times.*or look elsewhere"):
        get(attempts=3, elsewhere="look elsewhere")
    assert len(server.requests) == 3


def test_nobody_at_the_other_end_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot download http://127\.0\.0\.1:9/x .*tried 2 times"):
        fetch("http://127.0.0.1:9/x", tmp_path / "x", md5=MD5, attempts=2, pause_s=0.0)


def test_a_link_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="use http, https, ftp"):
        fetch("file:///etc/passwd", tmp_path / "x", md5=MD5)


def test_a_wrong_file_that_lies_there_is_not_overwritten(get, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "data.zip").write_bytes(b"mine")
    with pytest.raises(DataError, match=r"exists already, but its md5 is .* move it away"):
        get()
    assert (tmp_path / "new" / "data.zip").read_bytes() == b"mine"


def test_two_downloads_at_once_are_one(get, server: Behavior, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    with (
        FileLock(tmp_path / "new" / ".data.zip.lock"),
        pytest.raises(DataError, match="another process is downloading"),
    ):
        get()
    assert get().read_bytes() == CONTENT


def test_a_full_disk_is_one_message(get, monkeypatch: pytest.MonkeyPatch, server: Behavior, tmp_path: Path) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=9))
        with pytest.raises(DataError, match="GB free; free some space"):
            get()
    with monkeypatch.context() as patch:
        patch.setattr(download.os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        with pytest.raises(DataError, match="the disk is full; free some space"):
            get()
    assert not (tmp_path / "new" / "data.zip").exists()
    assert get().read_bytes() == CONTENT


def test_a_read_only_folder_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(DataError, match="it may not be written; make it writable"):
        fetch("http://127.0.0.1:9/x", tmp_path / "new" / "x", md5=MD5)
