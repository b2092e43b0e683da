"""Reading the text lists of benchmarks: columns separated by blanks, every fault named by file and line."""

import contextlib
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dmlbench.data.image_table import leaves_root
from dmlbench.types import DataError, IntArray, not_a_file

_REMEDY = "correct it or put the original file there"


@dataclass(frozen=True)
class TextList:
    """The rows of a list.

    Attributes:
        file: its file.
        columns: names of its columns.
        rows: [N] values by row, one for each column.
        lines: [N] number of each row's line in the file, from 1.
    """

    file: Path
    columns: tuple[str, ...]
    rows: list[list[str]]
    lines: list[int]

    def __len__(self) -> int:
        return len(self.rows)

    def where(self, row: int) -> str:
        """The position of a row, for messages."""
        return f"line {self.lines[row]} of '{self.file}'"

    def texts(self, column: str) -> list[str]:
        """[N] values of a column."""
        index = self.columns.index(column)
        return [row[index] for row in self.rows]

    def paths(self, column: str) -> list[str]:
        """[N] values of a column that names files below the data set's folder.

        Raises:
            DataError: one points elsewhere.
        """
        values = self.texts(column)
        for row, path in enumerate(values):
            if leaves_root(path):
                raise DataError(
                    f"{self.where(row)} names '{path}', which lies outside of the data set's folder; {_REMEDY}"
                )
        return values

    def numbers(self, column: str) -> IntArray:
        """[N] values of a column of ids, which count from 1.

        Raises:
            DataError: one is no whole number, or below 1.
        """
        values = self.texts(column)
        try:
            numbers = np.array([int(value) for value in values], dtype=np.int64)
        except (ValueError, OverflowError):
            row = next(row for row, value in enumerate(values) if not _is_number(value))
            raise DataError(
                f"{self.where(row)} has the {column} '{values[row][:40]}', expected a whole number; {_REMEDY}"
            ) from None
        if len(numbers) and numbers.min() < 1:
            row = int(np.argmax(numbers < 1))
            raise DataError(
                f"{self.where(row)} has the {column} {numbers[row]}, but ids count from 1 in the published list; this "
                f"one seems to be renumbered from 0: {_REMEDY}"
            )
        return numbers

    def decimals(self, column: str) -> NDArray[np.float64]:
        """[N] values of a column of decimal numbers.

        Raises:
            DataError: one is no finite number.
        """
        numbers = np.full(len(self), np.nan)
        for row, value in enumerate(self.texts(column)):
            with contextlib.suppress(ValueError):
                numbers[row] = float(value)
            if not np.isfinite(numbers[row]):
                raise DataError(f"{self.where(row)} has the {column} '{value[:40]}', expected a number; {_REMEDY}")
        return numbers

    def check_once(self, column: str) -> None:
        """Refuse a column that names something twice.

        Raises:
            DataError: names the value and both lines.
        """
        first: dict[str, int] = {}
        for line, value in zip(self.lines, self.texts(column), strict=True):
            if first.setdefault(value, line) != line:
                raise DataError(
                    f"line {line} of '{self.file}' repeats the {column} {value} of line {first[value]}; {_REMEDY}"
                )

    def check_known(self, column: str, known: Container[str], where: str) -> None:
        """Refuse a column with values that another list does not have.

        Args:
            column: of this list.
            known: the values of the other list.
            where: its file's name, for the message.

        Raises:
            DataError: names the first such value and its line.
        """
        for row, value in enumerate(self.texts(column)):
            if value not in known:
                raise DataError(
                    f"{self.where(row)} has the {column} {value}, which is not in {where}; put the original lists there"
                )


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
        file: the list.
        columns: names of the columns; the header, if any, must match them.
        has_count: whether the first line is the number of rows.
        has_header: whether the next line names the columns.
        separator: of the columns; None for any blanks.

    Raises:
        DataError: the file is missing, is not UTF-8 or empty, has another header, another number of rows than its
            first line says, or a line with another number of columns.
    """
    text = read_text(file)
    lines = [(number, line.strip()) for number, line in enumerate(text.split("\n"), start=1)]
    lines = [(number, line) for number, line in lines if line]
    count = _pop_count(file, lines) if has_count else None
    if has_header:
        _pop_header(file, lines, columns)
    if not lines:
        raise DataError(f"'{file}' lists nothing; put the original file there")
    rows = [[value.strip() for value in line.split(separator)] if separator else line.split() for _, line in lines]
    for (number, _), row in zip(lines, rows, strict=True):
        if len(row) != len(columns):
            raise DataError(
                f"line {number} of '{file}' has {len(row)} columns, expected {len(columns)} ({' '.join(columns)}); "
                f"{_REMEDY}"
            )
    if count is not None and count != len(rows):
        raise DataError(
            f"'{file}' says in line 1 that it has {count:,} rows, but has {len(rows):,}; put the original file there, "
            "or correct line 1 if a subset is meant"
        )
    return TextList(file, tuple(columns), rows, [number for number, _ in lines])


def read_text(file: Path, *, remedy: str = "put the original file there") -> str:
    """Text in UTF-8, its line ends as \\n and without a byte order mark.

    Raises:
        DataError: the file is missing or unreadable, or is not UTF-8.
    """
    if what := not_a_file(file):
        raise DataError(f"the list '{file}' is {what}, not a file; {remedy}")
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        raise DataError(f"the list '{file}' is missing; {remedy}") from None
    except OSError as error:
        raise DataError(f"the list '{file}' cannot be read ({error.strerror}); make it a readable file") from error
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise DataError(f"line {line} of '{file}' is not UTF-8 text; save the list as UTF-8") from error


def _pop_count(file: Path, lines: list[tuple[int, str]]) -> int:
    number, line = lines.pop(0) if lines else (1, "")
    if not _is_number(line):
        raise DataError(
            f"line {number} of '{file}' is '{line[:80]}', expected the number of rows; put the original file there"
        )
    return int(line)


def _pop_header(file: Path, lines: list[tuple[int, str]], columns: Sequence[str]) -> None:
    number, line = lines.pop(0) if lines else (1, "")
    if line.split() != list(columns):
        raise DataError(
            f"line {number} of '{file}' is '{line[:80]}', expected the header '{' '.join(columns)}'; put the original "
            "file there"
        )


def _is_number(value: str) -> bool:
    digits = value.removeprefix("-")
    return digits.isascii() and digits.isdigit() and len(digits) < 19


def boxes_by_name(rows: TextList, name: str, edges: NDArray[np.float64], names: Iterable[str]) -> NDArray[np.float64]:
    """Boxes [N, 4] of ``names``, NaN where the list has none, from the ``edges`` [M, 4] of its rows."""
    rows.check_once(name)
    by_name = dict(zip(rows.texts(name), edges, strict=True))
    return np.stack([by_name.get(one, np.full(4, np.nan)) for one in names])
