"""Files from elsewhere: bounded, no key twice, and one line for each error."""

from pathlib import Path

import pytest

from dmlbench import external_files
from dmlbench.external_files import Schema, load_json, load_yaml, read
from dmlbench.types import ConfigError


class Example(Schema):
    count: int
    names: list[str] | None = None
    weights: dict[str, float] | None = None


@pytest.mark.parametrize("name", ["x.yaml", "x.json"])
def test_a_file_becomes_its_schema(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"count": 3, "weights": {"a": 1}}')
    assert read(tmp_path / name, Example, ConfigError) == Example(count=3, weights={"a": 1.0})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("count: 1\nnames: []\ncount: 2", "'count' occurs twice, on lines 1 and 3"),
        ("count: 1\nweights: {a: 1, a: 2}", "'a' occurs twice, on lines 2 and 2"),
        ("count: 1\nnmes: []", "nmes is unknown: did you mean 'names'"),
        ("count: x", "count: got 'x', expected a valid integer"),
        ("count: true", "count: got True, expected a valid integer"),
        ("count: 1\nnames: [a, 3]", r"names\.1: got 3, expected a valid string"),
        ("count: 1\nweights: {a: .nan}", r"weights\.a: got nan, expected a finite number"),
        ("", "count is missing"),
        ("5", "got 5, expected an object"),
        ("[" * 100_000, "more than 50 levels deep"),
        ("- " * 60, "more than 50 levels deep"),
        ("a: &a [*a]", r"the alias \*a is inside or before its anchor &a"),
        ("count: 'x", "unexpected end of stream"),
        (b"\xff", "byte 0 is not UTF-8"),
        (b"\x00", "control characters are not allowed"),
    ],
)
def test_yaml_that_is_no_such_file_gives_one_line(tmp_path: Path, content: str | bytes, message: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=message) as error:
        read(path, Example, ConfigError, "Mend it.")
    assert str(error.value).startswith(f"{path}: ") and str(error.value).endswith(". Mend it.")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"a": 1, "a": 2}', "'a' occurs twice"),
        ("[" * 100_000, "nested too deeply"),
        ("[" * 60 + "]" * 60, "more than 50 levels deep"),
        ('{"a": Infinity}', "it holds Infinity"),
        ("{", "Expecting property name"),
    ],
)
def test_json_that_cannot_be_read_gives_one_line(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        load_json(tmp_path / "x.json")


def test_aliases_count_expanded(tmp_path: Path) -> None:
    lines = ["a0: &a0 [1, 1]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12))]
    (tmp_path / "x.yaml").write_text("\n".join(lines))
    with pytest.raises(ValueError, match="more than 1,000,000 values"):
        load_yaml(tmp_path / "x.yaml")


def test_large_files_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_files, "MAX_BYTES", 2**20)
    (tmp_path / "x.json").write_text(" " * (2**20 + 1))
    with pytest.raises(ValueError, match="more than 1 MiB"):
        load_json(tmp_path / "x.json")


def test_plain_values_have_omegaconfs_types(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("a: 1e-4\nb: 2020-01-01\nc: &c {d: 1}\ne: {<<: *c, f: 2}\n")
    assert load_yaml(tmp_path / "x.yaml") == {"a": 1e-4, "b": "2020-01-01", "c": {"d": 1}, "e": {"d": 1, "f": 2}}
