"""Lists are read line by line; pickles give plain values, run no code, and damage is one message."""

import collections
import io
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dmlbench.data.readers.files import TextList, read_list, read_pickle
from dmlbench.types import DataError


def read(tmp_path: Path, content: str | bytes, *, has_count: bool = False, has_header: bool = False) -> TextList:
    file = tmp_path / "list.txt"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_list(file, ("id", "path"), has_count=has_count, has_header=has_header)


@pytest.mark.parametrize(
    "content",
    [
        "1 a/x.jpg\n2 b/é.jpg\n",
        "1 a/x.jpg\n2 b/é.jpg",
        "\ufeff1 a/x.jpg\r\n2 b/é.jpg\r\n",
        "1 a/x.jpg\r2 b/é.jpg\r",
        "  1\ta/x.jpg   \n\n2      b/é.jpg\n\n",
    ],
)
def test_byte_order_marks_line_ends_padding_and_blank_lines_do_not_matter(tmp_path: Path, content: str) -> None:
    rows = read(tmp_path, content)
    assert rows.numbers("id").tolist() == [1, 2]
    assert rows["path"] == ["a/x.jpg", "b/é.jpg"]


def test_count_and_header_are_read_and_lines_keep_their_numbers(tmp_path: Path) -> None:
    rows = read(tmp_path, "2\nid path\n\n7 a\n8 b\n", has_count=True, has_header=True)
    assert rows["path"] == ["a", "b"]
    assert rows.rows.index.tolist() == [4, 5]


@pytest.mark.parametrize(
    ("content", "has_head", "message"),
    [
        ("1 a\n\n2\n", False, "line 3 of '.*': got 1 columns, expected 2 \\(id path\\)"),
        ("", False, "has no entries"),
        (b"1 a\n2 \xe9.jpg\n", False, r"line 2 of '.*' is not UTF-8 text\. Save the list as UTF-8"),
        ("1 a\n2 b\n".encode("utf-16"), False, "line 1 of '.*' is not UTF-8"),
        ("1\n1 a\n", True, r"begins with \[\['1'\], \['1', 'a'\]\], expected .*'id', 'path'"),
        ("3\nid path\n1 a\n2 b\n", True, r"begins with \[\['3'\].*, expected \[\['2'\]"),
        ("", True, "begins with"),
    ],
)
def test_a_malformed_list_is_named_with_its_line(
    tmp_path: Path, content: str | bytes, has_head: bool, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        read(tmp_path, content, has_count=has_head, has_header=has_head)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (("1", "x"), "line 2 of '.*': got the id 'x', expected a whole number"),
        (("1", "1.5"), "line 2 of '.*': got the id '1.5', expected a whole number"),
        (("1", "9" * 30), "line 2 of '.*': got the id '9{30}', expected a whole number"),
        (("0", "1"), "line 1 of '.*': got the id '0', expected a whole number of at least 1"),
        (("5", "5"), "line 2 of '.*': got the id '5', expected each value once"),
    ],
)
def test_ids_at_fault_are_named_with_their_line(tmp_path: Path, ids: tuple[str, str], message: str) -> None:
    rows = read(tmp_path, "".join(f"{i} a\n" for i in ids))
    with pytest.raises(DataError, match=message):
        rows.numbers("id")
        rows.check_unique("id")


PLAIN: list[Any] = [
    {"a": [1, 2.5, None, True, "ü", b"\xff"], 3: (4, {5}, frozenset([6]), complex(1, 2))},
    collections.OrderedDict(x=1),
]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_values_and_arrays_come_through_in_every_protocol(protocol: int) -> None:
    for value in PLAIN:
        assert read_pickle(pickle.dumps(value, protocol), name="x") == value
    for array in (np.arange(6, dtype=np.uint8).reshape(2, 3), np.float32(2.5), np.array(["a", "bc"])):
        got = read_pickle(pickle.dumps(array, protocol), name="x")
        np.testing.assert_array_equal(got, array)
        assert got.dtype == array.dtype


def test_python_2_strings_are_decoded_as_asked() -> None:
    old = b"(dp0\nS'data'\np1\nS'\\xe9'\np2\ns."  # protocol 0, as Python 2 wrote it
    assert read_pickle(old, name="x", encoding="latin1") == {"data": "é"}
    assert read_pickle(old, name="x", encoding="bytes") == {b"data": b"\xe9"}


class _Runs:
    """Its pickle calls a function when it is read."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_nothing_is_executed(tmp_path: Path, protocol: int) -> None:
    mark = tmp_path / "mark"
    nested = np.empty(1, dtype=object)
    nested[0] = _Runs(os.mkdir, str(mark))
    for value, named in (
        (_Runs(os.mkdir, str(mark)), "mkdir"),
        (_Runs(eval, f"__import__('os').mkdir({str(mark)!r})"), "eval"),
        (_Runs(getattr, "text", "upper"), "getattr"),
        ({"deep": [({1: _Runs(os.mkdir, str(mark))},)]}, "mkdir"),
        (nested, "mkdir"),
        (Path(mark), "path|Path"),
        (print, "print"),
        (np.load, "load"),
    ):
        with pytest.raises(DataError, match=rf"evil\.pkl.*asks for .*({named}).*not plain data"):
            read_pickle(pickle.dumps(value, protocol), name="evil.pkl")
        assert not mark.exists()


def test_references_to_outside_are_refused() -> None:
    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return "storage" if value == 7 else None

    buffer = io.BytesIO()
    Pickler(buffer).dump([7])
    with pytest.raises(DataError, match="it refers to external objects"):
        read_pickle(buffer.getvalue(), name="x")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "damaged"),
        (b"no pickle", "damaged"),
        (b"\x80\x09.", "damaged"),
        (pickle.dumps({"data": np.arange(1000)})[:-1], "damaged"),
        (pickle.dumps({"data": np.arange(1000)})[:100], "damaged"),
        (b"\x80\x04)" + b"\x85" * 300_000 + b".", "more than 10,000 tuples"),
        (b"\x80\x04" + b"]" * 20_000 + b"a" * 19_999 + b".", "more than 50 levels deep"),
        (b"\x80\x04]\x94" + b"".join(b"](h%ch%ce\x94" % (i, i) for i in range(40)) + b".", "more than 1,000,000"),
    ],
)
def test_damaged_and_endless_pickles_are_one_message(content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=rf"{message}.*Replace it with the original file"):
        read_pickle(content, name="damaged")


@pytest.mark.data
def test_the_official_splits_of_oodml_are_plain_data(shared_dir: Path) -> None:
    file = shared_dir / "data" / "oodml_splits" / "cars196_splits.pkl"
    splits = read_pickle(file.read_bytes(), name=str(file), encoding="latin1")
    assert len(splits) == 8
    for split in splits.values():
        assert {"train", "test", "fid", "test_episodes"} <= set(split)
        assert not set(split["train"]) & set(split["test"])
        assert float(split["fid"]) > 0
