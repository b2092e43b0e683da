"""Files from elsewhere, read strictly: text, lists of columns, and pickles without executing code.

Columns are separated by blanks; errors name file and line. Pickles hold containers, numbers, text and numpy arrays.
"""

import io
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dmlbench.external_files import check_bounds
from dmlbench.types import DataError, IntArray

# Reading a pickle calls what it names. These build plain values; numpy renamed its modules between versions.
_NUMPY_CORE = ("numpy.core.multiarray", "numpy._core.multiarray")
_ALLOWED = {
    *((module, name) for module in _NUMPY_CORE for name in ("_reconstruct", "scalar")),
    *((module, "_frombuffer") for module in ("numpy.core.numeric", "numpy._core.numeric")),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),  # how Python 2's byte strings travel in protocol 2
    ("collections", "OrderedDict"),
    *(
        (module, name)
        for module in ("builtins", "__builtin__")
        for name in ("set", "frozenset", "bytes", "bytearray", "complex")
    ),
}
ORIGINAL_FILE = "Replace it with the original file"
"""Remedy in messages about a file that was changed or damaged."""

_MAX_TUPLES = 10_000
"""A tuple of tuples of tuples is hashed by recursion, which can overflow the stack."""


@dataclass(frozen=True)
class TextList:
    """The columns of a list as text, by the numbers of their lines."""

    file: Path
    rows: pd.DataFrame

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, column: str) -> list[str]:
        return list(self.rows[column])

    def check(self, column: str, is_right: Any, expected: str) -> None:
        """Raise for the first row of a column where ``is_right`` [N] is false."""
        wrong = self.rows[column][~np.asarray(is_right, dtype=bool)]
        for line, value in wrong.items():
            raise DataError(
                f"line {line} of '{self.file}': got the {column} '{value[:40]}', expected {expected}. Correct it or "
                "restore the original file."
            )

    def numbers(self, column: str) -> IntArray:
        """[N] values of a column of ids, which count from 1."""
        values = pd.to_numeric(self.rows[column], errors="coerce").to_numpy(np.float64)
        self.check(column, (values >= 1) & (values < 2**53) & (values % 1 == 0), "a whole number of at least 1")
        return values.astype(np.int64)

    def decimals(self, columns: Sequence[str]) -> NDArray[np.float64]:
        """[N, len(columns)] finite numbers."""
        values = self.rows[list(columns)].apply(pd.to_numeric, errors="coerce").to_numpy(np.float64)
        for number, column in enumerate(columns):
            self.check(column, np.isfinite(values[:, number]), "a number")
        return values

    def check_unique(self, column: str) -> None:
        self.check(column, ~self.rows[column].duplicated(), "each value once")

    def check_known(self, column: str, known: Iterable[str], where: str) -> None:
        self.check(column, self.rows[column].isin(list(known)), f"one of {where}")

    def boxes(self, name: str, edges: NDArray[np.float64], names: Sequence[str]) -> NDArray[np.float64]:
        """Boxes [N, 4] of ``names``, NaN where the list has none, from ``edges`` [M, 4] of its rows."""
        self.check_unique(name)
        return pd.DataFrame(edges, index=self[name]).reindex(list(names)).to_numpy()


def read_list(
    file: Path,
    columns: Sequence[str],
    *,
    has_count: bool = False,
    has_header: bool = False,
    separator: str | None = None,
) -> TextList:
    """A list in UTF-8; byte order marks, line ends, padding and blank lines do not matter.

    Args:
        has_count: whether the first line is the number of rows.
        has_header: whether the next line names the columns.
        separator: of the columns; None for any blanks.
    """
    lines = enumerate(read_text(file).split("\n"), start=1)
    rows = {number: line.strip().split(separator) for number, line in lines if line.strip()}
    head = [rows.pop(number) for number in list(rows)[: has_count + has_header]]
    expected_head = [[str(len(rows))]] * has_count + [list(columns)] * has_header
    if head != expected_head:
        raise DataError(f"'{file}' begins with {head}, expected {expected_head}. {ORIGINAL_FILE}.")
    if not rows:
        raise DataError(f"'{file}' has no entries. {ORIGINAL_FILE}.")
    for number, row in rows.items():
        if len(row) != len(columns):
            wanted = f"{len(columns)} ({' '.join(columns)})"
            raise DataError(f"line {number} of '{file}': got {len(row)} columns, expected {wanted}. Correct it.")
    return TextList(file, pd.DataFrame(list(rows.values()), index=list(rows), columns=list(columns)))


def read_text(file: Path, *, remedy: str = "Put the original file there") -> str:
    """Text in UTF-8, its line ends as \\n and without a byte order mark."""
    content = read_file(file, remedy=remedy)
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise DataError(f"line {line} of '{file}' is not UTF-8 text. Save the list as UTF-8.") from error


def read_file(file: Path, *, remedy: str = "Put the original file there") -> bytes:
    if not file.is_file():  # opening a pipe would wait without end
        raise DataError(f"'{file}' is missing or not a file. {remedy}.")
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(f"'{file}' cannot be read ({error.strerror}). Make it readable.") from error


def _counted(build: Callable[[Any], None]) -> Callable[[Any], None]:
    def load(self: Any) -> None:
        self.tuples += 1
        if self.tuples > _MAX_TUPLES:
            raise pickle.UnpicklingError(f"it has more than {_MAX_TUPLES:,} tuples")
        build(self)

    return load


class _Unpickler(pickle._Unpickler):  # the one in Python, whose operations can be counted
    tuples = 0
    dispatch = dict(pickle._Unpickler.dispatch)  # noqa: RUF012
    for _code in (pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.FROZENSET):
        dispatch[_code[0]] = _counted(dispatch[_code[0]])

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not plain data")
        return super().find_class(module, name)

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to external objects")


def read_pickle(content: bytes, *, name: str, encoding: str = "ASCII") -> Any:
    """The value in a pickle of the file ``name``; Python 2's numpy arrays need the encoding "latin1"."""
    try:
        value = _Unpickler(io.BytesIO(content), encoding=encoding).load()
        check_bounds(value)
        return value
    # A pickle is a program: a damaged one may raise any error.
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"'{name}' is not a safe pickle: {reason}. {ORIGINAL_FILE}.") from error
