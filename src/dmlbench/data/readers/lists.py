"""Text lists of benchmarks: columns separated by blanks; errors name file and line."""

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dmlbench.types import DataError, IntArray

_REMEDY = "correct it or put the original file there"


@dataclass(frozen=True)
class TextList:
    """A list: ``columns`` by name [N], and the number of each row's line in the file [N], from 1."""

    file: Path
    columns: dict[str, list[str]]
    lines: list[int]

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, column: str) -> list[str]:
        return self.columns[column]

    def fault(self, row: int, text: str) -> DataError:
        """An error that names the line of a row."""
        return DataError(f"line {self.lines[row]} of '{self.file}' {text}")

    def numbers(self, column: str) -> IntArray:
        """[N] values of a column of ids, which count from 1."""
        numbers = self._converted(column, int, "a whole number").astype(np.int64)
        if len(numbers) and numbers.min() < 1:
            row = int(np.argmax(numbers < 1))
            raise self.fault(row, f"has the {column} {numbers[row]}, but published ids count from 1; {_REMEDY}")
        return numbers

    def decimals(self, column: str) -> NDArray[np.float64]:
        return self._converted(column, float, "a number").astype(np.float64)

    def _converted(self, column: str, convert: Callable[[str], Any], expected: str) -> NDArray[Any]:
        values: list[Any] = []
        for row, text in enumerate(self[column]):
            try:
                values.append(convert(text))
            except ValueError:
                values.append(np.nan)
            if not abs(values[-1]) < 2**63:
                raise self.fault(row, f"has the {column} '{text[:40]}', expected {expected}; {_REMEDY}")
        return np.array(values)

    def check_once(self, column: str) -> None:
        """Raise if a column names something twice."""
        first: dict[str, int] = {}
        for row, (line, value) in enumerate(zip(self.lines, self[column], strict=True)):
            if first.setdefault(value, line) != line:
                raise self.fault(row, f"repeats the {column} {value} of line {first[value]}; {_REMEDY}")

    def check_known(self, column: str, known: Container[str], where: str) -> None:
        """Raise if a column has values that are not among the ``known`` ones in ``where``."""
        for row, value in enumerate(self[column]):
            if value not in known:
                raise self.fault(row, f"has the {column} {value}, which is not in {where}; {_REMEDY}")

    def boxes(self, name: str, edges: Sequence[NDArray[np.float64]], names: Iterable[str]) -> NDArray[np.float64]:
        """Boxes [N, 4] of ``names``, NaN where the list has none, from four ``edges`` [M] of its rows."""
        self.check_once(name)
        by_name = dict(zip(self[name], np.stack(edges, axis=1), strict=True))
        return np.stack([by_name.get(one, np.full(4, np.nan)) for one in names])


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
    lines = [(number, line.strip()) for number, line in enumerate(read_text(file).split("\n"), start=1) if line.strip()]

    def pop(is_right: Callable[[str], bool], expected: str) -> str:
        number, line = lines.pop(0) if lines else (1, "")
        if not is_right(line):
            raise DataError(f"line {number} of '{file}' is '{line[:80]}', expected {expected}; {_REMEDY}")
        return line

    count = int(pop(str.isdecimal, "the number of rows")) if has_count else None
    if has_header:
        pop(lambda line: line.split() == list(columns), f"the header '{' '.join(columns)}'")
    if not lines:
        raise DataError(f"'{file}' lists nothing; put the original file there")
    rows = [[value.strip() for value in line.split(separator)] for _, line in lines]
    for (number, _), row in zip(lines, rows, strict=True):
        if len(row) != len(columns):
            wanted = f"{len(columns)} ({' '.join(columns)})"
            raise DataError(f"line {number} of '{file}' has {len(row)} columns, expected {wanted}; {_REMEDY}")
    if count is not None and count != len(rows):
        raise DataError(f"'{file}' has {len(rows):,} rows, expected the {count:,} of its line 1; {_REMEDY}")
    by_column = {column: list(values) for column, values in zip(columns, zip(*rows, strict=True), strict=True)}
    return TextList(file, by_column, [number for number, _ in lines])


def read_text(file: Path, *, remedy: str = "put the original file there") -> str:
    """Text in UTF-8, its line ends as \\n and without a byte order mark."""
    content = read_file(file, remedy=remedy)
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise DataError(f"line {line} of '{file}' is not UTF-8 text; save the list as UTF-8") from error


def read_file(file: Path, *, remedy: str = "put the original file there") -> bytes:
    if not file.is_file():  # opening a pipe would wait without end
        raise DataError(f"'{file}' is missing or not a file; {remedy}")
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(f"'{file}' cannot be read ({error.strerror}); make it a readable file") from error
