"""Making a data set ready: from archives or a link, whole, or rejected with nothing left in place."""

import hashlib
import io
import json
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pooch
import pytest
from filelock import FileLock

from dmlbench.data.preparation.catalog import SOURCES
from dmlbench.data.preparation.prepare import MARKER, extract, prepare, read_marker
from dmlbench.data.readers.layouts import Archive, DataFolder
from dmlbench.types import DataError

FILES = {"set/list.txt": b"1 a.jpg\n", "set/images/ä.jpg": bytes(range(256)) * 20, "set/images/b.jpg": b"", "c": b"c"}


def zip_of(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as out:
        for name, content in files.items():
            out.writestr(name, content)
    return path


def tar_of(path: Path, files: dict[str, bytes], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as out:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            out.addfile(info, io.BytesIO(content))
    return path


def content_of(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != MARKER
    }


def hashed(*paths: Path) -> dict[Path, str]:
    return {path: pooch.file_hash(str(path), alg="md5") for path in paths}


def check_rejected(archive: Path, match: str) -> None:
    """The archive is an error, and nothing is written outside or left."""
    into = archive.parent / "data" / "set"
    into.parent.mkdir(exist_ok=True)
    before = sorted(archive.parent.rglob("*"))
    with pytest.raises(DataError, match=match):
        extract(hashed(archive), into)
    assert sorted(archive.parent.rglob("*")) == before


BIRDS = {
    "CUB_200_2011/images.txt": b"1 001.A/a.jpg\n2 101.B/b.jpg\n",
    "CUB_200_2011/image_class_labels.txt": b"1 1\n2 101\n",
    "CUB_200_2011/classes.txt": b"1 001.A\n101 101.B\n",
    "CUB_200_2011/images/001.A/a.jpg": b"a",
    "CUB_200_2011/images/101.B/b.jpg": b"b",
    "attributes.txt": b"",
}


def birds(folder: Path, name: str = "CUB_200_2011.tgz", files: dict[str, bytes] = BIRDS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return tar_of(folder / name, files, "w:gz")


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name[0] != ".")


def source_of(archive: Path, *mirrors: str) -> DataFolder:
    """The birds, published as this archive."""
    published = Archive("CUB_200_2011.tgz", hashlib.md5(archive.read_bytes()).hexdigest())
    return replace(SOURCES["cub200"], alternatives=((published,),), mirrors=mirrors)


@pytest.fixture
def link(tmp_path: Path) -> Iterator[str]:
    """A server of this machine that has the archive."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            pass

    birds(tmp_path / "server")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=tmp_path / "server"))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize(
    ("archive", "made_in"),
    [
        ("data/CUB_200_2011.tgz", "data/cub200"),
        ("data/cub200/CUB_200_2011.tgz", "data/cub200/cub200"),
        ("downloads/archive (1).tar.gz", "data/cub200"),
    ],
)
def test_an_archive_is_extracted_and_found_wherever_it_was(tmp_path: Path, archive: str, made_in: str) -> None:
    file = birds((tmp_path / archive).parent, Path(archive).name)
    given = [file] if archive.startswith("downloads") else []
    made = prepare(source_of(file), tmp_path / "data", given=given, download=False)
    assert (made.folder, made.was_there) == (tmp_path / made_in / "CUB_200_2011", False)
    assert file.exists()
    marker = read_marker(tmp_path / made_in)
    assert marker is not None and "accepted_other_checksum" not in marker
    again = prepare(source_of(file), tmp_path / "data", download=False)
    assert (again.folder, again.was_there) == (made.folder, True)


def test_another_checksum_is_an_error_unless_accepted_and_then_recorded(tmp_path: Path) -> None:
    archive = birds(tmp_path / "data", files={"flowers/1.jpg": b"1"})
    with pytest.raises(DataError, match=r"CUB_200_2011\.tgz': got no known layout of CUB-200-2011, expected"):
        prepare(source_of(archive), tmp_path / "data")
    source, published = source_of(archive), hashlib.md5(archive.read_bytes()).hexdigest()
    birds(tmp_path / "data")
    found = hashlib.md5(archive.read_bytes()).hexdigest()
    message = rf"got MD5 {found} \(\d+ bytes\), expected the published {published} of CUB_200_2011\.tgz"
    with pytest.raises(DataError, match=message):
        prepare(source, tmp_path / "data", download=False)
    assert visible(tmp_path / "data") == ["CUB_200_2011.tgz"]
    prepare(source, tmp_path / "data", download=False, accept_other_checksum=True)
    marker = read_marker(tmp_path / "data" / "cub200")
    assert marker is not None and marker["accepted_other_checksum"] == "CUB_200_2011.tgz"


@pytest.mark.parametrize(
    ("name", "there", "given", "message"),
    [
        ("cars196", [], [], r": missing car_ims\.tgz, cars_annos\.mat\. By hand: the publisher's links are dead"),
        ("cars196", ["cars_annos.mat"], [], r": found cars_annos\.mat, missing car_ims\.tgz\."),
        (
            "cars196",
            ["cars_train.tgz"],
            [],
            r"missing cars_test\.tgz, car_devkit\.tgz, cars_test_annos_withlabels\.mat",
        ),
        ("cub200", [], ["nothing.tgz"], r"archives: got '.*nothing\.tgz', expected a file"),
        ("cub200", ["CUB_200_2011.tgz", "cub200/mine.txt"], [], r"got MD5 \w+ \(4 bytes\), expected the published"),
        ("omniglot", ["foo.zip"], ["foo.zip"], r"foo\.zip', expected a published name"),
        (
            "omniglot",
            ["omniglot/images_background.zip"],
            [],
            r"found images_background\.zip, missing images_evaluation\.zip",
        ),
        (
            "omniglot",
            ["omniglot/images_background.zip", "omniglot/images_evaluation.zip"],
            [],
            r"images_background\.zip': got MD5 \w+ \(4 bytes\), .* Download it again",
        ),
    ],
)
def test_what_is_missing_or_wrong_is_named(
    tmp_path: Path, name: str, there: list[str], given: list[str], message: str
) -> None:
    for file in there:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes(b"half")
    with pytest.raises(DataError, match=message):
        prepare(SOURCES[name], tmp_path, given=[tmp_path / file for file in given], download=False)
    assert all((tmp_path / file).read_bytes() == b"half" for file in there)


def test_several_files_make_one_folder(tmp_path: Path) -> None:
    birds(tmp_path, "img.zip", {"img/WOMEN/Dresses/id_00000001/a.jpg": b"a"})
    lines = [b"1", b"image_name item_id evaluation_status", b"img/WOMEN/Dresses/id_00000001/a.jpg id_00000001 train"]
    (tmp_path / "list_eval_partition.txt").write_bytes(b"\n".join(lines))
    made = prepare(SOURCES["inshop"], tmp_path)
    assert sorted(path.name for path in made.folder.iterdir()) == [MARKER, "img", "list_eval_partition.txt"]


def test_a_missing_archive_is_downloaded_and_extracted(tmp_path: Path, link: str) -> None:
    source = source_of(tmp_path / "server" / "CUB_200_2011.tgz", link)
    lines: list[str] = []
    with pytest.raises(DataError, match=r"missing CUB_200_2011\.tgz"):
        prepare(source, tmp_path / "data", download=False)
    made = prepare(source, tmp_path / "data", report=lines.append)
    assert made.folder == tmp_path / "data" / "cub200" / "CUB_200_2011"
    assert lines == ["checksum of CUB_200_2011.tgz", "extracting CUB_200_2011.tgz"]
    assert visible(tmp_path / "data") == ["CUB_200_2011.tgz", "cub200"]


def test_links_are_tried_in_turn_and_a_wrong_file_is_no_archive(
    tmp_path: Path, link: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dmlbench.data.preparation.prepare._RETRIES", 0)
    archive = tmp_path / "server" / "CUB_200_2011.tgz"
    gone = f"{link}gone/"
    assert not prepare(source_of(archive, gone, link), tmp_path / "data").was_there
    wrong = replace(source_of(archive, link), alternatives=((Archive(archive.name, "0" * 32),),))
    for other in (source_of(archive, gone), wrong):
        with pytest.raises(DataError, match=r"cannot download CUB_200_2011\.tgz .* or get CUB_200_2011"):
            prepare(other, tmp_path / "other")
        assert visible(tmp_path / "other") == []


def test_a_data_set_is_prepared_by_one_process_at_a_time(tmp_path: Path) -> None:
    source = source_of(birds(tmp_path))
    with FileLock(tmp_path / ".cub200.lock"), pytest.raises(DataError, match="another process is preparing"):
        prepare(source, tmp_path)
    assert not (tmp_path / "cub200").exists()
    assert not prepare(source, tmp_path).was_there


def test_archives_that_are_read_packed_are_copied_not_extracted(tmp_path: Path) -> None:
    archive = tmp_path / "images_background_small1.zip"  # published without a checksum
    with zipfile.ZipFile(archive, "w") as out:
        out.writestr("images_background/A/character01/1.png", b"")
    made = prepare(SOURCES["omniglot"], tmp_path / "data", given=[archive])
    assert made.folder == tmp_path / "data" / "omniglot"
    assert visible(made.folder) == ["images_background_small1.zip"]
    assert prepare(SOURCES["omniglot"], tmp_path / "data", download=False).was_there


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
    parts = hashed(archive, tmp_path / "annos.mat")
    extract(parts, tmp_path / "set", notes={"why": "test"})
    assert content_of(tmp_path / "set") == {**FILES, "annos.mat": b"mat"}
    assert not (tmp_path / ".set.partial").exists()
    marker = read_marker(tmp_path / "set")
    assert marker is not None
    assert marker["parts"][0] == {"name": archive.name, "size": archive.stat().st_size, "md5": parts[archive]}
    assert marker["why"] == "test"
    before = (tmp_path / "set" / MARKER).stat().st_mtime_ns
    extract(parts, tmp_path / "set")
    assert (tmp_path / "set" / MARKER).stat().st_mtime_ns == before


@pytest.mark.parametrize("name", ["../evil", "a/../../evil", "/tmp/dmlbench_evil"])
def test_names_never_leave_the_folder(tmp_path: Path, name: str) -> None:
    check_rejected(zip_of(tmp_path / "a.zip", {"good": b"1", name: b"2"}), "is unsafe")
    archive = tar_of(tmp_path / "a.tar", {"good": b"1", name: b"2"})
    if name.startswith("/"):  # taken below the folder
        extract(hashed(archive), tmp_path / "set")
        assert (tmp_path / "set" / name[1:]).exists()
    else:
        check_rejected(archive, "is unsafe")
    assert not Path("/tmp/dmlbench_evil").exists()


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_links_never_leave_the_folder(tmp_path: Path, kind: bytes) -> None:
    link = tarfile.TarInfo("link")
    link.type, link.linkname = kind, "a/../../.."
    with tarfile.open(tmp_path / "a.tar", "w") as out:
        out.addfile(link)
    check_rejected(tmp_path / "a.tar", "is unsafe")


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
    if kind == "tar":  # cut between two members
        archive.write_bytes(content[:1536])
        check_rejected(archive, "truncated")


def test_an_encrypted_zip_asks_for_its_password(tmp_path: Path) -> None:
    content = bytearray(zip_of(tmp_path / "a.zip", {"a": b"1"}).read_bytes())
    for magic, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        content[content.index(magic) + flags] |= 1
    (tmp_path / "a.zip").write_bytes(content)
    check_rejected(tmp_path / "a.zip", r"encrypted.*Pass password=<word>")


def test_a_folder_that_was_not_made_from_the_archive_stays(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "mine.txt").write_text("mine")
    first = hashed(zip_of(tmp_path / "a.zip", FILES))
    with pytest.raises(DataError, match=r"was not made by dmlbench\. Move it away"):
        extract(first, tmp_path / "set")
    assert content_of(tmp_path / "set") == {"mine.txt": b"mine"}
    extract(first, tmp_path / "other")
    with pytest.raises(DataError, match=r"was made from other files \(a\.zip\)"):
        extract(hashed(zip_of(tmp_path / "b.zip", {"x": b"1"})), tmp_path / "other")
    assert content_of(tmp_path / "other") == FILES
    (tmp_path / "set" / MARKER).write_text(json.dumps([1]))
    assert read_marker(tmp_path / "set") is None


def test_an_interruption_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(folder: Path) -> None:
        assert content_of(folder) == FILES
        raise KeyboardInterrupt

    archive = zip_of(tmp_path / "a.zip", FILES)
    with pytest.raises(KeyboardInterrupt):
        extract(hashed(archive), tmp_path / "set", check=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["a.zip"]
