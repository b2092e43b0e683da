"""Parquet and Arrow files, and data sets of the Hugging Face Hub, as data sets."""

import io
import json
import multiprocessing
import re
import socket
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dmlbench.components import component
from dmlbench.config import compose
from dmlbench.data.images.sources import read_image
from dmlbench.data.readers import hugging_face as reader
from dmlbench.data.readers.hugging_face import hugging_face
from dmlbench.types import ConfigError, DataError, ImageTable

pytest.importorskip("datasets", reason="extra hf")
pa = pytest.importorskip("pyarrow", reason="comes with datasets")
pq = pytest.importorskip("pyarrow.parquet")

CLASSES = ["cat", "AC/DC", "../up", "été"]
STRUCT = pa.struct({"bytes": pa.binary(), "path": pa.string()})


@pytest.fixture(autouse=True)
def without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any connection fails the test, also one whose error is swallowed."""

    def connect(*args: Any) -> None:
        pytest.fail(f"a connection is opened: {args}")  # BaseException

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", connect)


def encoded(value: int, format: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (5, 4), (value, 0, 0)).save(buffer, format)
    return buffer.getvalue()


def features(**label: Any) -> dict[bytes, bytes]:
    """Metadata of the schema, as the Hub writes it."""
    columns = {"image": {"_type": "Image"}, "label": label}
    return {b"huggingface": json.dumps({"info": {"features": columns}}).encode()}


def write(
    file: Path, labels: list[Any], *, first: int = 0, names: list[str] | None = CLASSES, images: Any = None
) -> list[bytes]:
    """A file with one image a label; the images' bytes."""
    content = [encoded(first + i, "JPEG" if i % 2 else "PNG") for i in range(len(labels))]
    if images is None:
        images = pa.array([{"bytes": each, "path": f"{i}.png"} for i, each in enumerate(content)], STRUCT)
    table = pa.table({"image": images, "id": list(range(len(labels))), "label": labels})
    if names is not None:
        table = table.replace_schema_metadata(features(_type="ClassLabel", names=names))
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".parquet":
        pq.write_table(table, file, row_group_size=3)
    else:
        with pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    return content


def images_of(table: ImageTable) -> Counter[tuple[str, str, bytes]]:
    """Class, role and bytes of each image."""
    rows = zip(table.paths, table.labels, table.role, strict=True)
    return Counter((table.class_names[c], str(role), (Path(table.root) / path).read_bytes()) for path, c, role in rows)


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_images_of_a_file_keep_their_bytes_and_class_names(tmp_path: Path, suffix: str) -> None:
    labels = [0, 1, 2, 3, 3, 1, 0]
    content = write(tmp_path / f"mine{suffix}", labels)
    table = hugging_face(tmp_path / f"mine{suffix}", cache_dir=tmp_path / "cache", name="mine")
    assert table.name == "mine"
    assert table.class_names == tuple(sorted(CLASSES))
    halves = dict(zip(sorted(CLASSES), ["train", "train", "test", "test"], strict=True))
    assert images_of(table) == Counter(
        (CLASSES[label], halves[CLASSES[label]], each) for label, each in zip(labels, content, strict=True)
    )
    assert table.layout == f"train of {tmp_path / f'mine{suffix}'}"
    root = Path(table.root)
    assert root.is_relative_to(tmp_path / "cache")
    assert sorted(path.relative_to(root).parts[0] for path in root.rglob("*.*")) == ["images.csv"] + ["train"] * 7
    assert {path.suffix for path in root.rglob("*.*")} == {".csv", ".png", ".jpeg"}
    assert read_image(root / table.paths[0]).size == (5, 4)
    assert sorted(path.name for path in (tmp_path / "cache" / "hugging_face").iterdir()) == [
        root.name,
        f"{root.name}.lock",
    ]


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (["b", "a", " c"], ("a", "b", "c")),
        ([10, 9, 2], ("2", "9", "10")),
        (pa.array(["b", "a"]).dictionary_encode(), ("a", "b")),
        ([True, False], ("False", "True")),
    ],
)
def test_labels_without_names_are_text(tmp_path: Path, labels: Any, classes: tuple[str, ...]) -> None:
    write(tmp_path / "a.parquet", labels, names=None)
    assert hugging_face(tmp_path / "a.parquet", cache_dir=tmp_path).class_names == classes


@pytest.mark.parametrize("kind", ["bytes", "pixels", "grey", "one channel", "fixed"])
def test_bytes_stay_and_pixels_become_png(tmp_path: Path, kind: str) -> None:
    from datasets import Array3D, Dataset, Features, Value

    shape = {"grey": (4, 5), "one channel": (4, 5, 1)}.get(kind, (4, 5, 3))
    pixels = np.random.default_rng(0).integers(0, 256, (2, *shape), dtype=np.uint8)
    images: Any = [encoded(0), encoded(1)] if kind == "bytes" else pixels.tolist()
    if kind == "fixed":
        known = Features({"image": Array3D(shape, "uint8"), "label": Value("int64")})
        Dataset.from_dict({"image": pixels, "label": [0, 1]}, features=known).to_parquet(tmp_path / "a.parquet")
    else:
        write(tmp_path / "a.parquet", [0, 1], names=None, images=images)
    table = hugging_face(tmp_path / "a.parquet", cache_dir=tmp_path)
    for row, path in enumerate(table.paths):
        if kind == "bytes":
            assert (Path(table.root) / path).read_bytes() == images[row]
        else:
            stored = np.asarray(Image.open(Path(table.root) / path))
            np.testing.assert_array_equal(stored.reshape(shape), pixels[row])


@pytest.mark.parametrize(
    ("parts", "roles"),
    [
        ({"train.parquet": [0, 1], "test.parquet": [2, 3, 3]}, {"train": "train", "test": "test"}),
        (
            {"train/0.parquet": [0, 1], "query/0.parquet": [2, 3], "gallery/0.parquet": [2, 2, 3]},
            {"train": "train", "query": "query", "gallery": "gallery"},
        ),
        (
            {
                "data/train-00000-of-00002.parquet": [0],
                "data/train-00001-of-00002.parquet": [1],
                "data/test-0.parquet": [2, 3],
            },
            {"train": "train", "test": "test"},
        ),
    ],
)
def test_splits_with_different_classes_are_the_roles(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, parts: dict[str, list[int]], roles: dict[str, str]
) -> None:
    expected: Counter[tuple[str, str, bytes]] = Counter()
    for k, (name, labels) in enumerate(parts.items()):
        role = roles[re.findall("train|test|query|gallery", name)[0]]
        content = write(tmp_path / "hf" / name, labels, first=10 * k)
        expected.update((CLASSES[label], role, each) for label, each in zip(labels, content, strict=True))
    (tmp_path / "hf" / "README.md").write_text("---\nconfigs:\n- data_files: https://example.com/a.parquet\n---\n")
    table = hugging_face(tmp_path / "hf", cache_dir=tmp_path / "cache")
    assert images_of(table) == expected
    assert "merged" not in caplog.text


@pytest.mark.parametrize("second", [[0, 1, 2, 3], [0, 3]])
def test_splits_that_share_classes_are_merged_with_a_notice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, second: list[int]
) -> None:
    first = [0, 1, 2, 3]
    content = write(tmp_path / "hf" / "train.parquet", first) + write(tmp_path / "hf" / "val.parquet", second, first=9)
    halves = dict(zip(sorted(CLASSES), ["train", "train", "test", "test"], strict=True))
    for _ in range(2):  # written, and found again
        caplog.clear()
        table = hugging_face(tmp_path / "hf", cache_dir=tmp_path / "cache", name="mine")
        notices = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert notices == ["data set 'mine': the images of train and val are merged by class"]
        assert table.layout.endswith("hf, merged by class")
        assert images_of(table) == Counter(
            (CLASSES[label], halves[CLASSES[label]], each) for label, each in zip(first + second, content, strict=True)
        )


def test_splits_can_be_chosen(tmp_path: Path) -> None:
    for k, split in enumerate(["train", "validation", "test"]):
        write(tmp_path / "hf" / f"{split}.parquet", [f"{split}{i}" for i in range(2)], first=10 * k, names=None)
    with pytest.raises(DataError, match="got test, train, validation with different classes, expected train and test"):
        hugging_face(tmp_path / "hf", cache_dir=tmp_path)
    table = hugging_face(tmp_path / "hf", cache_dir=tmp_path, split=["train", "test"])
    assert {(table.class_names[c], role) for c, role in zip(table.labels, table.role, strict=True)} == {
        (f"{split}{i}", split) for split in ("train", "test") for i in range(2)
    }
    assert hugging_face(tmp_path / "hf", cache_dir=tmp_path, split="validation").class_names == (
        "validation0",
        "validation1",
    )


def test_a_saved_data_set_is_read_without_results_of_map(tmp_path: Path) -> None:
    from datasets import ClassLabel, Dataset, DatasetDict, Features
    from datasets import Image as ImageFeature

    known = Features({"image": ImageFeature(), "label": ClassLabel(names=CLASSES)})
    parts = {"train": ([0, 1], [encoded(0), encoded(1)]), "test": ([2, 3], [encoded(2), encoded(3)])}
    rows = {
        split: Dataset.from_dict({"image": [{"bytes": b} for b in images], "label": labels}, features=known)
        for split, (labels, images) in parts.items()
    }
    DatasetDict(rows).save_to_disk(tmp_path / "hf")
    saved = next((tmp_path / "hf" / "test").glob("data-*.arrow"))
    saved.with_name("cache-0123.arrow").write_bytes(saved.read_bytes())
    table = hugging_face(tmp_path / "hf", cache_dir=tmp_path)
    assert images_of(table) == Counter(
        (CLASSES[label], split, image) for split, (labels, images) in parts.items()
        for label, image in zip(labels, images, strict=True)
    )  # fmt: skip


def test_images_are_written_once_for_each_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, cache = tmp_path / "hf" / "a.parquet", tmp_path / "cache"
    write(file, [0, 1])
    table = hugging_face(file, cache_dir=cache)
    kept = Path(table.root)
    before = {path: path.stat().st_mtime_ns for path in kept.rglob("*")}
    file.rename(file.with_name("b.parquet"))
    with monkeypatch.context() as patch:
        patch.setattr(reader, "_write", None)
        again = hugging_face(tmp_path / "hf", cache_dir=cache, name="other")
    assert (again.root, again.fingerprint) == (table.root, table.fingerprint)
    assert {path: path.stat().st_mtime_ns for path in kept.rglob("*")} == before
    write(file.with_name("b.parquet"), [0, 1], first=1)  # images of the same sizes
    other = hugging_face(tmp_path / "hf", cache_dir=cache)
    assert other.root != table.root
    assert other.fingerprint != table.fingerprint
    assert kept.is_dir()


def _read(path: Path, cache: Path) -> None:
    hugging_face(path, cache_dir=cache)


def test_an_interrupted_or_simultaneous_call_leaves_one_whole_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a.parquet", [0, 1, 2, 3] * 5)

    def stop(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(reader.csv, "writer", stop)
        with pytest.raises(KeyboardInterrupt):
            hugging_face(tmp_path / "a.parquet", cache_dir=tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache" / "hugging_face").iterdir()] == [".lock"]
    fork = multiprocessing.get_context("fork")
    both = [fork.Process(target=_read, args=(tmp_path / "a.parquet", tmp_path / "cache")) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
        assert process.exitcode == 0
    assert len(hugging_face(tmp_path / "a.parquet", cache_dir=tmp_path / "cache")) == 20
    assert len(list((tmp_path / "cache" / "hugging_face").iterdir())) == 2


@pytest.mark.parametrize(
    ("images", "labels", "options", "message"),
    [
        (None, [0], {"image_column": "img"}, "image_column: got 'img', expected one of image, id, label"),
        (None, [0], {"label_column": "class"}, "label_column: got 'class', expected one of image, id, label"),
        (None, [0], {"split": ["train", "val"]}, "split: got val, expected train"),
        (None, [0.5], {}, "label_column: got 'label' of Value.*float.*, expected class labels, integers or text"),
        (None, [[1]], {}, "label_column: got 'label' of List"),
        (None, [], {}, "got no rows, expected images"),
        (None, ["a", None], {}, "row 1 of split train: got no label"),
        (None, ["a", " "], {}, "row 1 of split train: got no label"),
        ([b"no image"], ["a"], {}, "row 0 of split train: got no readable image in column image"),
        ([None], ["a"], {}, "got no readable image"),
        (["/etc/hostname"], ["a"], {}, "got no readable image"),
        ([3], ["a"], {}, "got no readable image"),
        ([[[0, 256]]], ["a"], {}, "got no readable image"),
        ([[[0.5, 0.25]]], ["a"], {}, "got no readable image"),
        (None, [0], {"revision": "main"}, "subset, revision: got a value for the local '.*', expected null"),
    ],
)
def test_mistakes_end_in_one_line(
    tmp_path: Path, images: Any, labels: list[Any], options: dict[str, Any], message: str
) -> None:
    labels = labels or pa.array([], pa.int64())
    write(tmp_path / "a.parquet", labels, names=None, images=images)
    with pytest.raises((ConfigError, DataError), match=message) as info:
        hugging_face(tmp_path / "a.parquet", cache_dir=tmp_path / "cache", **options)
    assert "\n" not in str(info.value)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_dir() and path.name != "hugging_face"]


@pytest.mark.parametrize("label", [-1, 4])
def test_a_label_without_a_name_is_an_error(tmp_path: Path, label: int) -> None:
    write(tmp_path / "a.parquet", [0, label])
    with pytest.raises(DataError, match=r"row 1 of split train: got no label, expected one\. Choose labeled splits"):
        hugging_face(tmp_path / "a.parquet", cache_dir=tmp_path)


def test_a_path_in_a_row_is_not_followed(tmp_path: Path) -> None:
    Image.new("L", (5, 4)).save(tmp_path / "private.png")
    images = pa.array([{"bytes": None, "path": str(tmp_path / "private.png")}], STRUCT)
    write(tmp_path / "a.parquet", [0], images=images)
    with pytest.raises(DataError, match="got no readable image"):
        hugging_face(tmp_path / "a.parquet", cache_dir=tmp_path / "cache")


@pytest.mark.parametrize(
    "name", ["missing.parquet", "folder/missing.parquet", "./owner/name", "plain", "/a/b", "empty"]
)
def test_a_local_path_without_data_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.csv").touch()
    with pytest.raises(DataError, match=f"dataset.table.path: got '{name}', expected"):
        hugging_face(name, cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("size", [0, 20, -40])
@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_damaged_file_is_an_error(tmp_path: Path, suffix: str, size: int) -> None:
    file = tmp_path / f"a{suffix}"
    write(file, [0, 1])
    file.write_bytes(file.read_bytes()[:size] if size else b"")
    with pytest.raises(DataError, match=r"cannot read '.*' \(.*\)\. Correct path") as info:
        hugging_face(file, cache_dir=tmp_path / "cache")
    assert "\n" not in str(info.value)


class Hub:
    """Stands in for the Hub: the commit of each revision, and a data set of Parquet files and a downloaded image."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.folder, self.calls, self.commit = folder, [], "a" * 40
        monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", self.dataset_info)
        monkeypatch.setattr("datasets.load_dataset", self.load_dataset)

    def dataset_info(self, path: str, *, revision: str | None, timeout: float) -> Any:
        self.calls.append(("info", path, revision))
        return type("Info", (), {"sha": self.commit})

    def load_dataset(self, path: str, subset: str | None, *, revision: str, cache_dir: str) -> Any:
        from datasets import DatasetDict

        self.calls.append(("load", path, subset, revision))
        files = {split: str(self.folder / f"{split}.parquet") for split in ("train", "test")}
        return DatasetDict.from_parquet(files, cache_dir=cache_dir)


def test_a_data_set_of_the_hub_is_loaded_once_for_each_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = write(tmp_path / "train.parquet", [0, 1]) + write(tmp_path / "test.parquet", [2, 3], first=5)
    hub = Hub(monkeypatch, tmp_path)
    roles = ["train", "train", "test", "test"]
    expected = Counter((CLASSES[i], role, each) for i, (role, each) in enumerate(zip(roles, content, strict=True)))
    options: dict[str, Any] = {"cache_dir": tmp_path / "cache", "subset": "small"}
    table = hugging_face("owner/name", **options)
    assert images_of(table) == expected
    assert table.layout == "test and train of owner/name"
    assert hugging_face("owner/name", revision="v1", **options).root == table.root
    assert hub.calls == [
        ("info", "owner/name", None),
        ("load", "owner/name", "small", "a" * 40),
        ("info", "owner/name", "v1"),
    ]
    hub.calls.clear()
    assert hugging_face("owner/name", revision="a" * 40, **options).root == table.root
    assert hub.calls == []
    assert hugging_face("owner/name", revision="b" * 40, **options).root != table.root
    assert hub.calls == [("load", "owner/name", "small", "b" * 40)]
    assert not list((tmp_path / "cache").rglob("scratch"))


def test_images_of_folders_of_the_hub_are_read_from_the_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datasets import ClassLabel, Dataset, Features
    from datasets import Image as ImageFeature

    def load_dataset(path: str, subset: str | None, *, revision: str, cache_dir: str) -> Any:
        images = [Path(cache_dir) / f"{i}.png" for i in range(2)]
        Path(cache_dir).mkdir()
        for i, image in enumerate(images):
            image.write_bytes(encoded(i))
        known = Features({"image": ImageFeature(), "label": ClassLabel(names=CLASSES)})
        return {"train": Dataset.from_dict({"image": list(map(str, images)), "label": [0, 1]}, features=known)}

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    table = hugging_face("owner/name", cache_dir=tmp_path, revision="a" * 40)
    found = {(name, content) for name, _, content in images_of(table)}
    assert found == {(CLASSES[0], encoded(0)), (CLASSES[1], encoded(1))}


def test_without_a_connection_the_hub_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("no route\nto the host")

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", fail)
    with pytest.raises(
        DataError, match=r"cannot read 'owner/name' \(ConnectionError: no route\)\. .*check the connection"
    ):
        hugging_face("owner/name", cache_dir=tmp_path)


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"got hf, expected the package datasets.*pip install '\.\[hf\]'"):
        hugging_face("owner/name", cache_dir=tmp_path)


def test_the_option_reads_a_file(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", [0, 1, 2, 3, 3])
    cfg = compose(
        "train",
        [
            "dataset=hf",
            "dataset.name=mine",
            f"dataset.table.path={tmp_path / 'a.parquet'}",
            f"paths.cache_dir={tmp_path}",
        ],
    )
    table = component(cfg.dataset.table)
    assert (table.name, len(table), table.num_classes) == ("mine", 5, 4)
