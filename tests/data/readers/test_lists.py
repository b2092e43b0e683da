"""Text lists with columns."""

from pathlib import Path

import pytest

from dmlbench.data.readers.lists import TextList, read_list
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
        ("1 a\n\n2\n", False, "line 3 of '.*' has 1 columns, expected 2 \\(id path\\)"),
        ("", False, "lists nothing"),
        (b"1 a\n2 \xe9.jpg\n", False, "line 2 of '.*' is not UTF-8 text; save the list as UTF-8"),
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
        (("1", "x"), "line 2 of '.*' has the id 'x', expected a whole number"),
        (("1", "1.5"), "line 2 of '.*' has the id '1.5', expected a whole number"),
        (("1", "9" * 30), "line 2 of '.*' has the id '9{30}', expected a whole number"),
        (("0", "1"), "line 1 of '.*' has the id '0', expected a whole number from 1"),
        (("5", "5"), "line 2 of '.*' has the id '5', expected each once"),
    ],
)
def test_ids_at_fault_are_named_with_their_line(tmp_path: Path, ids: tuple[str, str], message: str) -> None:
    rows = read(tmp_path, "".join(f"{i} a\n" for i in ids))
    with pytest.raises(DataError, match=message):
        rows.numbers("id")
        rows.check_unique("id")
