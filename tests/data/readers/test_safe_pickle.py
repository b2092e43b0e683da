"""Pickles from elsewhere: plain values come through, code never runs, damage is one message."""

import collections
import io
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dmlbench.data.readers.safe_pickle import read_pickle
from dmlbench.types import DataError

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
    with pytest.raises(DataError, match="outside of itself"):
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
        (b"\x80\x04" + b"]" * 300_000 + b"a" * 299_999 + b".", "more than 50 levels deep"),
        (b"\x80\x04]\x94" + b"".join(b"](h%ch%ce\x94" % (i, i) for i in range(40)) + b".", "more than 1,000,000"),
    ],
)
def test_damaged_and_endless_pickles_are_one_message(content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=rf"{message}.*put the original file there"):
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
