"""Making a data set ready: from archives that lie there, from a link, or a message that says what is missing."""

import hashlib
import io
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from filelock import FileLock

from dmlbench.data.getting.archives import MARKER, read_marker
from dmlbench.data.getting.catalog import SOURCES, Archive, Source
from dmlbench.data.getting.prepare import prepare
from dmlbench.types import DataError

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
    with tarfile.open(folder / name, "w:gz") as out:
        for member, content in files.items():
            info = tarfile.TarInfo(member)
            info.size = len(content)
            out.addfile(info, io.BytesIO(content))
    return folder / name


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name[0] != ".")


def source_of(archive: Path, *, url: str | None = None) -> Source:
    """The birds, published as this archive."""
    published = Archive(
        "CUB_200_2011.tgz", md5=hashlib.md5(archive.read_bytes()).hexdigest(), urls=(url,) if url else ()
    )
    return replace(SOURCES["cub200"], alternatives=((published,),))


@pytest.fixture
def link(tmp_path: Path) -> Iterator[str]:
    """Link of the archive on a server of this machine."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            pass

    birds(tmp_path / "server")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=tmp_path / "server"))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/CUB_200_2011.tgz"
    server.shutdown()
    server.server_close()
    thread.join()


def test_an_archive_in_the_data_folder_is_extracted_and_found(tmp_path: Path) -> None:
    archive = birds(tmp_path / "data")
    made = prepare(source_of(archive), tmp_path / "data", download=False)
    assert made.folder == tmp_path / "data" / "cub200" / "CUB_200_2011"
    assert not made.was_there
    again = prepare(source_of(archive), tmp_path / "data", download=False)
    assert (again.folder, again.was_there) == (made.folder, True)


def test_an_archive_in_the_folder_of_the_data_set_is_extracted_inside_it(tmp_path: Path) -> None:
    archive = birds(tmp_path / "data" / "cub200")
    made = prepare(source_of(archive), tmp_path / "data")
    assert made.folder == tmp_path / "data" / "cub200" / "cub200" / "CUB_200_2011"
    assert archive.exists()


def test_an_archive_from_elsewhere_may_have_another_name(tmp_path: Path) -> None:
    archive = birds(tmp_path / "downloads", "archive (1).tar.gz")
    source = source_of(archive)
    made = prepare(source, tmp_path / "new" / "data", given=[archive])
    assert made.folder.is_relative_to(tmp_path / "new" / "data" / "cub200")
    marker = read_marker(tmp_path / "new" / "data" / "cub200")
    assert marker is not None
    assert "accepted_other_checksum" not in marker


def test_another_checksum_is_an_error_unless_accepted_and_then_recorded(tmp_path: Path) -> None:
    archive = birds(tmp_path / "data")
    source = source_of(archive)
    birds(tmp_path / "data", files={**BIRDS, "attributes.txt": b"other"})
    found = hashlib.md5(archive.read_bytes()).hexdigest()
    published = source.archives[0].md5
    with pytest.raises(
        DataError, match=rf"has md5 {found} \(\d+ bytes\), but the published CUB_200_2011.tgz has {published}"
    ):
        prepare(source, tmp_path / "data", download=False)
    assert visible(tmp_path / "data") == ["CUB_200_2011.tgz"]
    prepare(source, tmp_path / "data", download=False, accept_other_checksum=True)
    marker = read_marker(tmp_path / "data" / "cub200")
    assert marker is not None
    assert marker["accepted_other_checksum"] == "CUB_200_2011.tgz"


def test_an_archive_of_something_else_leaves_nothing(tmp_path: Path) -> None:
    archive = birds(tmp_path / "data", files={"flowers/1.jpg": b"1"})
    with pytest.raises(DataError, match=r"CUB_200_2011\.tgz' holds no layout of CUB-200-2011 that is known"):
        prepare(source_of(archive), tmp_path / "data")
    assert visible(tmp_path / "data") == ["CUB_200_2011.tgz"]


@pytest.mark.parametrize(
    ("name", "there", "given", "message"),
    [
        ("cars196", [], [], r"nor is car_ims\.tgz, cars_annos\.mat; the publisher's links are dead"),
        ("cars196", ["cars_annos.mat"], [], r"nor is car_ims\.tgz; cars_annos\.mat is there"),
        ("cars196", ["cars_train.tgz"], [], r"nor is cars_test\.tgz, car_devkit\.tgz, cars_test_annos_withlabels\.mat"),
        ("cub200", [], ["nothing.tgz"], r"nothing\.tgz' is no file; correct archives"),
        ("cub200", ["CUB_200_2011.tgz", "cub200/mine.txt"], [], r"has md5 \w+ \(4 bytes\), but the published"),
        ("omniglot", ["foo.zip"], ["foo.zip"], "must have its published name"),
        (
            "omniglot",
            ["omniglot/images_background.zip"],
            [],
            r"nor is images_evaluation\.zip; images_background",
        ),
        (
            "omniglot",
            ["omniglot/images_background.zip", "omniglot/images_evaluation.zip"],
            [],
            r"images_background\.zip' has md5 \w+ \(4 bytes\), .* download it again",
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
    source = source_of(tmp_path / "server" / "CUB_200_2011.tgz", url=link)
    lines: list[str] = []
    with pytest.raises(DataError, match=r"nor is CUB_200_2011\.tgz"):
        prepare(source, tmp_path / "data", download=False)
    made = prepare(source, tmp_path / "data", report=lines.append)
    assert made.folder == tmp_path / "data" / "cub200" / "CUB_200_2011"
    assert lines == ["checksum of CUB_200_2011.tgz", "extracting CUB_200_2011.tgz"]
    assert visible(tmp_path / "data") == ["CUB_200_2011.tgz", "cub200"]


def test_links_are_tried_in_turn_and_a_wrong_file_is_no_archive(
    tmp_path: Path, link: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dmlbench.data.getting.prepare._RETRIES", 0)
    source = source_of(tmp_path / "server" / "CUB_200_2011.tgz", url=link)
    gone = link.replace("CUB", "gone")
    archive = replace(source.archives[0], urls=(gone, link))
    assert not prepare(replace(source, alternatives=((archive,),)), tmp_path / "data").was_there
    for other in (replace(archive, urls=(gone,)), replace(archive, urls=(link,), md5="0" * 32)):
        with pytest.raises(DataError, match=r"cannot download CUB_200_2011\.tgz .* or get CUB_200_2011"):
            prepare(replace(source, alternatives=((other,),)), tmp_path / "other")
        assert visible(tmp_path / "other") == []


def test_a_data_set_is_prepared_by_one_process_at_a_time(tmp_path: Path) -> None:
    source = source_of(birds(tmp_path))
    with FileLock(tmp_path / ".cub200.lock"), pytest.raises(DataError, match="another process prepares"):
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
