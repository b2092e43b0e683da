"""Archives of data sets: taken whole, or rejected with nothing left in place."""

import io
import json
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pooch
import pytest

from dmlbench.data.getting.archives import MARKER, Part, extract, read_marker
from dmlbench.types import DataError

FILES = {"set/list.txt": b"1 a.jpg\n", "set/images/ä.jpg": bytes(range(256)) * 20, "set/images/b.jpg": b"", "c": b"c"}


def zip_of(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as out:
        for name, content in files.items():
            out.writestr(name, content)
    return path


def tar_of(path: Path, files: dict[str, bytes], mode: str = "w", extra: tuple[tarfile.TarInfo, ...] = ()) -> Path:
    with tarfile.open(path, mode) as out:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            out.addfile(info, io.BytesIO(content))
        for info in extra:
            out.addfile(info)
    return path


def special(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def content_of(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != MARKER
    }


def part(path: Path, *, is_archive: bool = True) -> Part:
    return Part(path, pooch.file_hash(str(path), alg="md5"), is_archive)


def check_rejected(archive: Path, match: str) -> None:
    """The archive is an error, and nothing is written outside or left."""
    into = archive.parent / "data" / "set"
    into.parent.mkdir(exist_ok=True)
    before = sorted(archive.parent.rglob("*"))
    with pytest.raises(DataError, match=match):
        extract([part(archive)], into)
    assert sorted(archive.parent.rglob("*")) == before


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: zip_of(folder / "a.zip", FILES | {"__MACOSX/set/._list.txt": b"x"}),
        lambda folder: tar_of(folder / "a.tar", FILES),
        lambda folder: tar_of(folder / "misnamed.zip", FILES, "w:gz"),
        lambda folder: tar_of(folder / "a.tar.xz", FILES, "w:xz"),
    ],
)
def test_archives_and_files_make_one_folder_once(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    archive = make(tmp_path)
    (tmp_path / "annos.mat").write_bytes(b"mat")
    (tmp_path / ".set.partial").mkdir()  # of a killed process
    parts = [part(archive), part(tmp_path / "annos.mat", is_archive=False)]
    extract(parts, tmp_path / "set", notes={"why": "test"})
    assert content_of(tmp_path / "set") == {**FILES, "annos.mat": b"mat"}
    assert not (tmp_path / ".set.partial").exists()
    marker = read_marker(tmp_path / "set")
    assert marker is not None
    assert marker["parts"][0] == {"name": archive.name, "size": archive.stat().st_size, "md5": parts[0].md5}
    assert marker["why"] == "test"
    before = (tmp_path / "set" / MARKER).stat().st_mtime_ns
    extract(parts, tmp_path / "set")
    assert (tmp_path / "set" / MARKER).stat().st_mtime_ns == before


@pytest.mark.parametrize("name", ["../evil", "a/../../evil", "/tmp/dmlbench_evil"])
def test_names_never_leave_the_folder(tmp_path: Path, name: str) -> None:
    check_rejected(zip_of(tmp_path / "a.zip", {"good": b"1", name: b"2"}), "is unsafe")
    archive = tar_of(tmp_path / "a.tar", {"good": b"1", name: b"2"})
    if name.startswith("/"):  # taken below the folder
        extract([part(archive)], tmp_path / "set")
        assert (tmp_path / "set" / name[1:]).exists()
    else:
        check_rejected(archive, "is unsafe")
    assert not Path("/tmp/dmlbench_evil").exists()


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_links_never_leave_the_folder(tmp_path: Path, kind: bytes) -> None:
    check_rejected(tar_of(tmp_path / "a.tar", {"x": b"1"}, extra=(special("l", "a/../../..", kind),)), "is unsafe")


@pytest.mark.parametrize("kept", [0.0, 0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("kind", ["zip", "tar", "gz", "xz", "bz2"])
def test_a_truncated_archive_is_rejected(tmp_path: Path, kind: str, kept: float) -> None:
    files = {f"{k}.jpg": bytes([k]) * 600 for k in range(6)}
    archive = tmp_path / f"a.{kind}"
    whole = zip_of(archive, files) if kind == "zip" else tar_of(archive, files, "w" if kind == "tar" else f"w:{kind}")
    content = whole.read_bytes()
    end = content.rstrip(b"\0") if kind == "tar" else content  # a tar ends in blocks of zeros, of which two are needed
    archive.write_bytes(content[: int(len(end) * kept)])
    check_rejected(archive, "cannot unpack")


def test_a_tar_cut_between_two_members_is_rejected(tmp_path: Path) -> None:
    archive = tar_of(tmp_path / "a.tar", {"a": bytes(512), "b": bytes(512)})
    archive.write_bytes(archive.read_bytes()[:1024])
    check_rejected(archive, "truncated")


def test_an_encrypted_zip_asks_for_its_password(tmp_path: Path) -> None:
    content = bytearray(zip_of(tmp_path / "a.zip", {"a": b"1"}).read_bytes())
    for magic, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        content[content.index(magic) + flags] |= 1
    (tmp_path / "a.zip").write_bytes(content)
    check_rejected(tmp_path / "a.zip", r"encrypted.*give password=<word>")
    (tmp_path / "data" / "set").parent.mkdir(exist_ok=True)
    with pytest.raises(DataError, match="cannot unpack"):
        extract([part(tmp_path / "a.zip")], tmp_path / "data" / "set", password="wrong")


def test_a_folder_that_was_not_made_from_the_archive_stays(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "mine.txt").write_text("mine")
    first = part(zip_of(tmp_path / "a.zip", FILES))
    with pytest.raises(DataError, match="was not made by dmlbench; move it away"):
        extract([first], tmp_path / "set")
    assert content_of(tmp_path / "set") == {"mine.txt": b"mine"}
    extract([first], tmp_path / "other")
    with pytest.raises(DataError, match=r"was made from other files \(a\.zip\)"):
        extract([part(zip_of(tmp_path / "b.zip", {"x": b"1"}))], tmp_path / "other")
    assert content_of(tmp_path / "other") == FILES
    (tmp_path / "set" / MARKER).write_text(json.dumps([1]))
    assert read_marker(tmp_path / "set") is None


def test_an_interruption_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(folder: Path) -> None:
        assert content_of(folder) == FILES
        raise KeyboardInterrupt

    archive = zip_of(tmp_path / "a.zip", FILES)
    with pytest.raises(KeyboardInterrupt):
        extract([part(archive)], tmp_path / "set", check=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["a.zip"]
