"""Archives of data sets: taken whole, or refused with one message and nothing left in place."""

import errno
import gzip
import io
import json
import random
import stat
import subprocess
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from filelock import FileLock

from dmlbench.data.getting import unpack
from dmlbench.data.getting.archives import MARKER, Part, extract, read_marker
from dmlbench.data.getting.disk import file_digest
from dmlbench.types import DataError

FILES = {"set/list.txt": b"1 a.jpg\n", "set/images/a.jpg": bytes(range(256)) * 20, "set/images/b.jpg": b"", "c": b"c"}


def zip_of(path: Path, files: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", method) as out:
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


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
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
    return Part(path, file_digest(path), is_archive)


def extracted(parts: Sequence[Part], into: Path, **options: Any) -> Path:
    extract(parts, into, **options)
    return into


def refused(archive: Path, match: str, **options: str) -> None:
    """The archive is refused by one message, and its folder looks as before."""
    into = archive.parent / "data" / "set"
    outside = sorted(path for path in archive.parent.rglob("*") if path != into.parent)
    with pytest.raises(DataError, match=match) as caught:
        extract([part(archive)], into, **options)
    assert str(archive) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not into.exists()
    assert list(into.parent.iterdir()) == []
    assert sorted(path for path in archive.parent.rglob("*") if path != into.parent) == outside


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: zip_of(folder / "a.zip", FILES),
        lambda folder: tar_of(folder / "a.tar", FILES),
        lambda folder: tar_of(folder / "a.tgz", FILES, "w:gz"),
        lambda folder: tar_of(folder / "a.tar.xz", FILES, "w:xz"),
        lambda folder: tar_of(folder / "a.tar.bz2", FILES, "w:bz2"),
        lambda folder: tar_of(folder / "misnamed.zip", FILES, "w:gz"),
    ],
)
def test_every_kind_of_archive_gives_its_files(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    made = extracted([part(make(tmp_path))], tmp_path / "data" / "set")
    assert content_of(made) == FILES
    marker = read_marker(made)
    assert marker is not None
    assert (marker["files"], marker["bytes"]) == (4, sum(map(len, FILES.values())))
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["set"]


def test_the_marker_names_the_archive_and_a_second_call_does_nothing(tmp_path: Path) -> None:
    archive = zip_of(tmp_path / "a.zip", FILES)
    made = extracted([part(archive)], tmp_path / "set", notes={"why": "test"})
    marker = read_marker(made)
    assert marker is not None
    size, md5 = archive.stat().st_size, file_digest(archive)
    assert marker["parts"] == [{"name": "a.zip", "size": size, "md5": md5}]
    assert (marker["files"], marker["why"]) == (4, "test")
    before = (made / MARKER).stat().st_mtime_ns
    extract([part(archive)], tmp_path / "set")
    assert (made / MARKER).stat().st_mtime_ns == before


def test_several_parts_make_one_folder(tmp_path: Path) -> None:
    (tmp_path / "annos.mat").write_bytes(b"mat")
    parts = [part(tar_of(tmp_path / "a.tgz", FILES, "w:gz")), part(tmp_path / "annos.mat", is_archive=False)]
    made = extracted(parts, tmp_path / "set")
    assert content_of(made) == {**FILES, "annos.mat": b"mat"}


def test_progress_ends_at_the_size_of_the_archive(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for number, archive in enumerate((zip_of(tmp_path / "a", FILES), tar_of(tmp_path / "b", FILES, "w:gz"))):
        seen: list[tuple[int, int | None]] = []
        folder = tmp_path / "out" / str(number)
        folder.mkdir()
        unpack.unpack(archive, folder, progress=lambda done, total, seen=seen: seen.append((done, total)))
        assert seen[-1] == (archive.stat().st_size, archive.stat().st_size)
        assert [done for done, _ in seen] == sorted(done for done, _ in seen)


@pytest.mark.parametrize("name", ["../evil", "a/../../evil", "/tmp/evil", "C:/evil", "..\\evil", "a/.."])
def test_names_that_leave_the_folder_are_refused_in_zip(tmp_path: Path, name: str) -> None:
    refused(zip_of(tmp_path / "a.zip", {"good.txt": b"1", name: b"2"}), "leads out of the folder")


@pytest.mark.parametrize("name", ["../evil", "a/../../evil"])
@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_names_that_leave_the_folder_are_refused_in_tar(tmp_path: Path, name: str, mode: str) -> None:
    refused(tar_of(tmp_path / "a.tar", {"good.txt": b"1", name: b"2"}, mode), "leads out of the folder")


def test_an_absolute_name_in_tar_is_taken_below_the_folder(tmp_path: Path) -> None:
    made = extracted([part(tar_of(tmp_path / "a.tar", {"/dmlbench/evil": b"2"}))], tmp_path / "set")
    assert content_of(made) == {"dmlbench/evil": b"2"}
    assert not Path("/dmlbench").exists()


@pytest.mark.parametrize("target", ["..", "/tmp", "a/../../..", "../set-sibling"])
@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_links_that_leave_the_folder_are_refused(tmp_path: Path, target: str, kind: bytes) -> None:
    refused(tar_of(tmp_path / "a.tar", {"x": b"1"}, extra=(link("l", target, kind),)), "which leads out of the folder")


def test_a_file_behind_a_link_never_lands_where_the_link_points(tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    archive = tmp_path / "a.tar"
    with tarfile.open(archive, "w") as out:
        out.addfile(link("d", "sub"))  # harmless by itself, and again a link below it
        info = tarfile.TarInfo("d/evil")
        info.size = 4
        out.addfile(info, io.BytesIO(b"evil"))
        out.addfile(link("d/up", "../../victim"))
    refused(archive, "which leads out of the folder")
    assert list((tmp_path / "victim").iterdir()) == []


def test_links_within_a_tar_become_copies_also_through_other_links(tmp_path: Path) -> None:
    extra = (link("set/first", "second"), link("set/second", "list.txt"), link("hard", "set/list.txt", tarfile.LNKTYPE))
    made = extracted([part(tar_of(tmp_path / "a.tar", FILES, extra=extra))], tmp_path / "set")
    expected = FILES["set/list.txt"]
    assert content_of(made) == {**FILES, "set/first": expected, "set/second": expected, "hard": expected}
    assert not any(path.is_symlink() for path in made.rglob("*"))


def test_links_to_nothing_or_to_each_other_are_refused(tmp_path: Path) -> None:
    refused(tar_of(tmp_path / "a.tar", FILES, extra=(link("l", "absent"),)), "'l' to 'absent', which is no file in it")
    refused(tar_of(tmp_path / "b.tar", FILES, extra=(link("l", "m"), link("m", "l"))), "which is no file in it")


def test_devices_and_links_in_zip_are_refused(tmp_path: Path) -> None:
    refused(tar_of(tmp_path / "a.tar", FILES, extra=(link("pipe", "", tarfile.FIFOTYPE),)), "a device or pipe")
    refused(tar_of(tmp_path / "b.tar", FILES, extra=(link("null", "", tarfile.CHRTYPE),)), "a device or pipe")
    info = zipfile.ZipInfo("link")
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "c.zip", "w") as out:
        out.writestr(info, "/etc/passwd")
    refused(tmp_path / "c.zip", "a link or device")


def test_a_bomb_is_refused_by_what_its_headers_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpack, "MAX_BYTES", 10**6)
    monkeypatch.setattr(unpack, "MAX_MEMBERS", 10)
    bomb = zip_of(tmp_path / "a.zip", {"zeros": bytes(10**7)})
    assert bomb.stat().st_size * unpack.MAX_RATIO < 10**7
    refused(bomb, "holds more than 0.0 GB")
    refused(zip_of(tmp_path / "b.zip", {str(k): b"" for k in range(11)}), "or 10 files")
    refused(tar_of(tmp_path / "c.tgz", {"zeros": bytes(10**7)}, "w:gz"), "holds more than")
    refused(tar_of(tmp_path / "d.tar", {str(k): b"" for k in range(11)}), "or 10 files")


def test_a_bomb_is_refused_by_what_it_writes_where_its_headers_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpack, "MAX_BYTES", 10**6)
    # Hard links claim no bytes, but each becomes a copy.
    extra = tuple(link(str(k), "x", tarfile.LNKTYPE) for k in range(400))
    refused(tar_of(tmp_path / "a.tgz", {"x": bytes(10**4)}, "w:gz", extra), "holds more than")
    content = bytearray(zip_of(tmp_path / "b.zip", {"zeros": bytes(10**6)}).read_bytes())
    start = content.rindex(b"PK\x01\x02") + 24  # the directory's uncompressed size
    assert int.from_bytes(content[start : start + 4], "little") == 10**6
    content[start : start + 4] = (100).to_bytes(4, "little")
    (tmp_path / "b.zip").write_bytes(content)
    refused(tmp_path / "b.zip", "damaged")


def test_a_header_of_absurd_length_is_refused(tmp_path: Path) -> None:
    header = link("x", "", tarfile.XHDTYPE)
    header.size = 1 << 40
    (tmp_path / "a.tar").write_bytes(header.tobuf(tarfile.GNU_FORMAT) + bytes(4096))
    refused(tmp_path / "a.tar", "is no zip, tar")
    first = tar_of(tmp_path / "whole.tar", {"a": bytes(512)}).read_bytes()[:1024]
    (tmp_path / "b.tar").write_bytes(first + header.tobuf(tarfile.GNU_FORMAT) + bytes(4096))
    refused(tmp_path / "b.tar", "damaged.*a header of 1099511627776 bytes")


@pytest.mark.parametrize("kept", [0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("kind", ["zip", "tar", "gz", "xz", "bz2"])
def test_a_truncated_archive_is_refused(tmp_path: Path, kind: str, kept: float) -> None:
    noise = {f"{k}.jpg": random.Random(k).randbytes(3000) for k in range(6)}
    archive = tmp_path / f"a.{kind}"
    if kind == "zip":
        zip_of(archive, noise)
    else:
        tar_of(archive, noise, "w" if kind == "tar" else f"w:{kind}")
    content = archive.read_bytes()
    end = content.rstrip(b"\0") if kind == "tar" else content  # a tar ends in blocks of zeros, of which two are needed
    archive.write_bytes(content[: int(len(end) * kept)])
    refused(archive, "damaged or incomplete|is no zip")


def test_a_tar_cut_between_two_members_is_refused(tmp_path: Path) -> None:
    archive = tar_of(tmp_path / "a.tar", {"a": bytes(512), "b": bytes(512)})
    archive.write_bytes(archive.read_bytes()[:1024])
    refused(archive, "it ends in the middle")


@pytest.mark.parametrize("kind", ["zip", "gz", "xz", "bz2"])
def test_flipped_bits_never_pass(tmp_path: Path, kind: str) -> None:
    noise = {f"{k}.jpg": random.Random(k).randbytes(2000) for k in range(4)}
    whole = tmp_path / "whole"
    if kind == "zip":
        zip_of(whole, noise)
    else:
        tar_of(whole, noise, f"w:{kind}")
    content = whole.read_bytes()
    rng = random.Random(0)
    for trial in range(25):
        damaged = bytearray(content)
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        archive = tmp_path / f"{trial}.archive"
        archive.write_bytes(damaged)
        try:
            made = extracted([part(archive)], tmp_path / f"out{trial}")
        except DataError:
            assert not (tmp_path / f"out{trial}").exists()
        else:  # the flip hit a time or a name, which no checksum covers
            assert sorted(content_of(made).values()) == sorted(noise.values())


def test_a_zip_of_an_unknown_method_or_version_is_refused(tmp_path: Path) -> None:
    content = zip_of(tmp_path / "whole.zip", FILES).read_bytes()
    at = content.index(b"PK\x01\x02")
    for field, value in ((6, 255), (10, 9)):  # version needed; method 9 is Deflate64
        (tmp_path / "a.zip").write_bytes(content[: at + field] + bytes([value, 0]) + content[at + field + 2 :])
        refused(tmp_path / "a.zip", "in a way that Python cannot read")


def test_a_web_page_instead_of_an_archive_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(b"<!DOCTYPE html><html>" + b" " * 1000)
    refused(tmp_path / "a.zip", "is no zip.*like a web page")
    (tmp_path / "b.zip").write_bytes(b"")
    refused(tmp_path / "b.zip", "is no zip")


def test_an_archive_without_files_is_refused(tmp_path: Path) -> None:
    refused(tar_of(tmp_path / "a.tar", {}, extra=(link("folder", "", tarfile.DIRTYPE),)), "holds no files")


def test_an_encrypted_zip_asks_for_its_password(tmp_path: Path) -> None:
    content = b"an image" * 10
    archive = encrypted_zip(tmp_path / "a.zip", "img/a.jpg", content, b"secret")
    refused(archive, "is encrypted; give the password.*password=.*by hand")
    refused(archive, "does not open with this password|password is wrong", password="wrong")
    made = extracted([part(archive)], tmp_path / "set", password="secret")
    assert content_of(made) == {"img/a.jpg": content}


def encrypted_zip(path: Path, name: str, content: bytes, password: bytes) -> Path:
    """A zip with one stored member in PKWARE's old encryption, which Python reads but does not write (APPNOTE 6.1)."""
    table = []
    for k in range(256):
        value = k
        for _ in range(8):
            value = (value >> 1) ^ 0xEDB88320 if value & 1 else value >> 1
        table.append(value)
    keys = [0x12345678, 0x23456789, 0x34567890]

    def update(byte: int) -> None:
        keys[0] = (keys[0] >> 8) ^ table[(keys[0] ^ byte) & 0xFF]
        keys[1] = ((keys[1] + (keys[0] & 0xFF)) * 134775813 + 1) & 0xFFFFFFFF
        keys[2] = (keys[2] >> 8) ^ table[(keys[2] ^ (keys[1] >> 24)) & 0xFF]

    for byte in password:
        update(byte)
    crc = zlib.crc32(content)
    sealed = bytearray()
    for byte in bytes(11) + bytes([crc >> 24]) + content:
        two = keys[2] | 2
        sealed.append(byte ^ (((two * (two ^ 1)) >> 8) & 0xFF))
        update(byte)
    info = zipfile.ZipInfo(name)
    with zipfile.ZipFile(path, "w") as out:
        out.writestr(info, bytes(sealed))
    raw = bytearray(path.read_bytes())
    for magic, flags, numbers in ((b"PK\x03\x04", 6, 14), (b"PK\x01\x02", 8, 16)):
        at = raw.index(magic)
        raw[at + flags] |= 1
        raw[at + numbers : at + numbers + 4] = crc.to_bytes(4, "little")
        raw[at + numbers + 8 : at + numbers + 12] = len(content).to_bytes(4, "little")
    path.write_bytes(raw)
    return path


def test_a_folder_that_was_not_made_here_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "mine.txt").write_text("mine")
    archive = zip_of(tmp_path / "a.zip", FILES)
    with pytest.raises(DataError, match="was not made by dmlbench, so it stays as it is; move it away"):
        extracted([part(archive)], tmp_path / "set")
    assert content_of(tmp_path / "set") == {"mine.txt": b"mine"}
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match="was not made by dmlbench"):
        extracted([part(archive)], tmp_path / "link")


def test_a_folder_made_of_another_archive_stays(tmp_path: Path) -> None:
    extracted([part(zip_of(tmp_path / "a.zip", FILES))], tmp_path / "set")
    with pytest.raises(DataError, match=r"was made of other files \(a.zip"):
        extracted([part(zip_of(tmp_path / "b.zip", {"x": b"1"}))], tmp_path / "set")
    assert content_of(tmp_path / "set") == FILES


def test_what_a_kill_left_is_removed_by_the_next_run(tmp_path: Path) -> None:
    stale = tmp_path / ".set.partial-12345"
    (stale / "images").mkdir(parents=True)
    (stale / "images" / "half.jpg").write_bytes(b"half")
    other = tmp_path / ".set2.partial-12345"
    other.mkdir()
    made = extracted([part(zip_of(tmp_path / "a.zip", FILES))], tmp_path / "set")
    assert content_of(made) == FILES
    assert not stale.exists()
    assert other.exists()  # another data set's


def test_a_living_process_is_left_alone(tmp_path: Path) -> None:
    partial = tmp_path / ".set.partial-1"
    partial.mkdir()
    archive = zip_of(tmp_path / "a.zip", FILES)
    with FileLock(tmp_path / ".set.lock"):
        with pytest.raises(DataError, match="another process is making"):
            extracted([part(archive)], tmp_path / "set")
        assert partial.exists()
    assert content_of(extracted([part(archive)], tmp_path / "set")) == FILES


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **named: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    archives = zip_of(tmp_path / "a.zip", FILES), tar_of(tmp_path / "b.tgz", FILES, "w:gz")
    monkeypatch.setattr(zipfile.shutil, "copyfileobj", full)
    monkeypatch.setattr(tarfile, "copyfileobj", full)
    for archive in archives:
        refused(archive, "the disk is full; free some space")


def test_too_little_space_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpack.shutil, "disk_usage", lambda path: SimpleNamespace(free=9))
    refused(zip_of(tmp_path / "a.zip", FILES), "GB free; free some space")


def test_a_read_only_data_folder_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mkdir(self: Path, *arguments: object, **named: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    archive = zip_of(tmp_path / "a.zip", FILES)
    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.raises(DataError, match=r"it may not be written; make it writable, or set paths\.data_dir"):
        extracted([part(archive)], tmp_path / "data" / "set")


def test_an_interruption_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(folder: Path) -> None:
        assert content_of(folder) == FILES
        raise KeyboardInterrupt

    archive = zip_of(tmp_path / "a.zip", FILES)
    with pytest.raises(KeyboardInterrupt):
        extracted([part(archive)], tmp_path / "data" / "set", check=interrupt)
    assert list((tmp_path / "data").iterdir()) == []


def test_what_macos_adds_is_left_out(tmp_path: Path) -> None:
    archive = zip_of(tmp_path / "a.zip", {**FILES, "__MACOSX/set/._list.txt": b"x"})
    assert content_of(extracted([part(archive)], tmp_path / "set")) == FILES


def test_names_beyond_ascii_survive(tmp_path: Path) -> None:
    files = {"Bärenvögel/größe.jpg": b"1"}
    assert content_of(extracted([part(zip_of(tmp_path / "a.zip", files))], tmp_path / "1")) == files
    assert content_of(extracted([part(tar_of(tmp_path / "b.tar", files))], tmp_path / "2")) == files


def test_a_file_and_a_folder_of_one_name_are_refused(tmp_path: Path) -> None:
    refused(zip_of(tmp_path / "a.zip", {"a": b"1", "a/b": b"2"}), "both a file and a folder of one name")


def test_gnu_tar_made_by_the_system_is_read(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / ("long" * 40)).write_bytes(b"1")
    try:
        subprocess.run(["tar", "-czf", "a.tgz", "in"], cwd=tmp_path, check=True)
    except FileNotFoundError:
        pytest.skip("no tar on this machine")
    assert list(content_of(extracted([part(tmp_path / "a.tgz")], tmp_path / "set"))) == ["in/" + "long" * 40]


def test_a_marker_that_is_no_json_is_no_marker(tmp_path: Path) -> None:
    (tmp_path / MARKER).write_text("{")
    assert read_marker(tmp_path) is None
    (tmp_path / MARKER).write_text(json.dumps([1]))
    assert read_marker(tmp_path) is None


def test_garbage_after_a_gzip_member_is_refused(tmp_path: Path) -> None:
    archive = tar_of(tmp_path / "a.tgz", FILES, "w:gz")
    archive.write_bytes(archive.read_bytes() + gzip.compress(b"x")[:-3])
    refused(archive, "damaged")
