"""Read JSON and YAML files that somebody else may have written: bounded, no key twice, checked by a schema."""

import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf._utils import get_yaml_loader
from pydantic import BaseModel, ConfigDict, ValidationError

from dmlbench.types import closest, not_a_file

MAX_BYTES = 64 * 2**20
MAX_DEPTH = 50
MAX_VALUES = 1_000_000
_CONTAINERS = (dict, list, tuple, set, frozenset)


class Schema(BaseModel):
    """Base of schemas of external files: exact types, no unknown key."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


S = TypeVar("S", bound=BaseModel)


def load_json(path: Path) -> Any:
    """Read a JSON file; raises ValueError if it is too large or too deep, has a key twice, NaN or infinity."""
    text = _text(path)
    try:
        content = json.loads(text, parse_float=_finite, parse_constant=_finite, object_pairs_hook=_unique)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    check_bounds(content)
    return content


def load_yaml(path: Path) -> Any:
    """Read a YAML file, with OmegaConf's types of plain values (1e-4 is a number, a date a text).

    Raises ValueError if it is too large or too deep, or has a key twice.
    """
    text = _text(path)
    try:
        _check_events(text)
        return yaml.load(text, _YamlLoader)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split()).replace('in "<unicode string>", ', "at ")
        raise ValueError(reason) from error


def validated(content: Any, schema: type[S]) -> S:
    """``content`` as ``schema``; raises ValueError with the first value of another type or range, or wrong key."""
    try:
        return schema.model_validate_json(json.dumps(content))
    except ValidationError as error:
        raise ValueError(_first_error(error, schema, content)) from None
    except TypeError as error:
        raise ValueError(f"it holds a value that JSON does not support: {error}") from error


def check_bounds(content: Any) -> None:
    """Raise ValueError for containers of Python values that are too deep or too many."""
    level = [content] if isinstance(content, _CONTAINERS) else []
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for node in level:
            values = [*node, *node.values()] if isinstance(node, dict) else node
            inner += [value for value in values if isinstance(value, _CONTAINERS)]
            if len(inner) > MAX_VALUES:
                raise ValueError(f"it has more than {MAX_VALUES:,} values")
        if not (level := inner):
            return
    raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")


def read(path: Path, schema: type[S], error: type[Exception], remedy: str = "") -> S:
    """Read a YAML or JSON file of a schema; raises ``error`` with one line that names the file, value and remedy."""
    try:
        content = load_json(path) if path.suffix == ".json" else load_yaml(path)
        return validated({} if content is None else content, schema)
    except FileNotFoundError:
        raise error(f"{path} is missing. {remedy}".rstrip()) from None
    except ValueError as reason:
        raise error(f"{path}: {reason}. {remedy}".rstrip()) from reason


def _text(path: Path) -> str:
    if what := not_a_file(path):
        raise ValueError(f"it is {what}, not a file")
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from error
    if len(data) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES // 2**20} MiB")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from error


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"it holds {text}, expected finite numbers")
    return number


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"'{next(key for key in keys if keys.count(key) > 1)}' occurs twice")
    return content


def _check_events(text: str) -> None:
    """Bound depth and values, aliases expanded, before the recursive parts of PyYAML see the text."""
    count = 0
    sizes: dict[str | None, int] = {}
    started: list[tuple[str | None, int]] = []
    for event in yaml.parse(text, _YamlLoader):
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes:
                raise ValueError(f"the alias *{event.anchor} is inside or before its anchor &{event.anchor}")
            count += sizes[event.anchor]
        elif isinstance(event, yaml.CollectionStartEvent):
            started.append((event.anchor, count))
            count += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = started.pop()
            sizes[anchor] = count - before
        elif isinstance(event, yaml.ScalarEvent):
            sizes[event.anchor] = 1
            count += 1
        if len(started) > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
        if count > MAX_VALUES:
            raise ValueError(f"it has more than {MAX_VALUES:,} values")


class _YamlLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    yaml_implicit_resolvers = get_yaml_loader().yaml_implicit_resolvers

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                line = key.start_mark.line + 1
                if key.value in lines:
                    raise ValueError(f"'{key.value}' occurs twice, on lines {lines[key.value]} and {line}")
                lines[key.value] = line
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def _first_error(error: ValidationError, schema: type[BaseModel], content: Any) -> str:
    first = min(error.errors(include_url=False), key=lambda found: found["type"] != "extra_forbidden")  # a misspelt key
    place = ".".join(_place(first["loc"], content))
    if first["type"] == "extra_forbidden":
        known = "" if "." in place else f": {closest(place, list(schema.model_fields)).removesuffix('.')}"
        return f"{place} is unknown{known}"
    if first["type"] == "missing":
        return f"{place} is missing"
    wanted = re.sub(r"^\w+ should (be|have)|^Value error,", "", first["msg"]).strip()
    return f"{place}: " * bool(place) + f"got {first['input']!r:.100}, expected {wanted}"


def _place(loc: Sequence[int | str], content: Any) -> Iterator[str]:
    """Keys and indices on the way to a value, without pydantic's names of alternatives; of a key, to its mapping."""
    for i, part in enumerate(loc):
        if loc[i + 1 : i + 2] == ("[key]",):
            return
        if isinstance(content, list) and isinstance(part, int) and part < len(content):
            content = content[part]
        elif isinstance(content, dict) and (str(part) in map(str, content) or i == len(loc) - 1):
            content = {str(key): value for key, value in content.items()}.get(str(part))
        else:
            return
        yield str(part)
