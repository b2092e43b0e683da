"""The search space: keys of a run with their bounds or choices."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from pydantic import Field

from dmlbench.external_files import Schema, validated
from dmlbench.identity import NOT_PART_OF_CONFIG_HASH, NOT_PART_OF_RUN_HASH
from dmlbench.recipes import applies
from dmlbench.types import ConfigError, check_choice, is_within

if TYPE_CHECKING:
    from optuna.trial import BaseTrial

Value = float | int | str | bool | None

_BOUNDS = "{low: 1e-6, high: 1e-3, log: true}"
_CHOICES = "{choices: [gap, gsp]}"
_DIGITS = 4
_FIXED = (*NOT_PART_OF_CONFIG_HASH, *NOT_PART_OF_RUN_HASH, "dataset", "protocol", "evaluation", "fit.monitor")
"""Keys that all trials share, so that their scores compare."""


@dataclass(frozen=True)
class Dimension:
    """A key of the space, with inclusive bounds or with choices."""

    key: str  # of a run's configuration, or a group such as ``pooling``
    low: float | None = None
    high: float | None = None
    log: bool = False
    step: float | None = None  # of a grid from ``low`` on
    integer: bool = False
    choices: tuple[Value, ...] = ()

    @property
    def described(self) -> str:
        """The values, for messages."""
        if self.low is None or self.high is None:
            return ", ".join(map(_as_yaml, self.choices))
        step = f" in steps of {self.step:g}" if self.step else ""
        return f"{self.low:g} to {self.high:g}{step}{' (log)' if self.log else ''}"

    def draw(self, trial: "BaseTrial") -> None:
        """Draw a value, unless the trial has one."""
        if self.low is None or self.high is None:
            trial.suggest_categorical(self.key, self.choices)
        elif self.integer:
            trial.suggest_int(self.key, int(self.low), int(self.high), log=self.log, step=int(self.step or 1))
        else:
            trial.suggest_float(self.key, self.low, self.high, log=self.log, step=self.step)

    def value(self, drawn: Value) -> Value:
        """Round a drawn number to four digits within the bounds, so that a recipe can hold it exactly."""
        if not isinstance(drawn, float) or self.low is None or self.high is None:
            return drawn
        return min(max(float(f"{drawn:.{_DIGITS}g}"), float(self.low)), float(self.high))

    def is_at_edge(self, value: Value) -> bool:
        """Whether a value is within a twentieth of the range from a bound."""
        if self.low is None or self.high is None or not isinstance(value, float | int) or self.low == self.high:
            return False
        low, high, here = (math.log(x) if self.log else x for x in (self.low, self.high, value))
        return min(here - low, high - here) < 0.05 * (high - low)


def override(key: str, value: Value) -> str:
    """``key=value`` for the command line."""
    return f"{key}={_as_yaml(value)}"


def _as_yaml(value: Value) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def make_space(node: Mapping[str, Any], chosen: Mapping[str, str | None]) -> tuple[Dimension, ...]:
    """Make dimensions from YAML, such as ``{optim.lr: {low: 1e-6, high: 1e-3, log: true}}``.

    Args:
        node: by key, nested or with dots: ``low`` and ``high`` with ``log``, ``step`` and ``integer``, or ``choices``;
            and ``when``, options by group for which the key is searched. Of a list the last that applies is taken.
        chosen: option of each group in all trials.
    """
    found: dict[str, Dimension] = {}
    groups = {key for key, _ in _entries(node)}
    for key, entry in _entries(node):
        if fixed := next((name for name in _FIXED if is_within(key, [name])), None):
            raise ConfigError(f"space.{key}: {fixed} must be the same in all trials. Leave it out.")
        when = entry.get("when") or {}
        for group in when:
            check_choice(f"space.{key}.when", group, sorted(set(chosen) - groups))
        dimension = _dimension(key, entry)
        if applies(when, chosen):
            found[key] = dimension
    if not found:
        raise ConfigError(f"space has nothing to search. Name keys of a run, such as space={{optim.lr: {_BOUNDS}}}.")
    for key in found:
        if inner := next((other for other in found if other.startswith(f"{key}.")), None):
            raise ConfigError(
                f"space: got both {key} and {inner}, but not every option of {key} has {inner}. Search one of them."
            )
    return tuple(found.values())


def corners(space: Sequence[Dimension]) -> list[dict[str, Value]]:
    """A few points that cover every bound and every choice."""
    ends = [dimension.choices or (dimension.low, dimension.high) for dimension in space]
    return [{d.key: end[min(i, len(end) - 1)] for d, end in zip(space, ends, strict=True)}
            for i in range(max(map(len, ends)))]  # fmt: skip


def grid(space: Sequence[Dimension]) -> list[dict[str, Value]]:
    """All combinations of choices, in the order of the space."""
    if drawn := next((dimension.key for dimension in space if not dimension.choices), None):
        raise ConfigError(f"method: got grid, but space.{drawn} has bounds. Give it choices, or use method=tpe.")
    keys = [dimension.key for dimension in space]
    return [dict(zip(keys, values, strict=True)) for values in product(*(dimension.choices for dimension in space))]


def _entries(node: Any, prefix: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Dotted keys and their entries."""
    for name, value in node.items():
        key = f"{prefix}.{name}" if prefix else str(name)
        if isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(v, Mapping) for v in value):
            yield from ((key, entry) for entry in value)
            continue
        if not isinstance(value, Mapping):
            raise ConfigError(
                f"space.{key}: got {value}, expected bounds such as {_BOUNDS} or choices such as {_CHOICES}."
            )
        if value.keys() & _Entry.model_fields.keys() or not any(isinstance(v, Mapping) for v in value.values()):
            yield key, value
        else:
            yield from _entries(value, key)


class _Entry(Schema):
    low: float | None = None
    high: float | None = None
    log: bool = False
    step: float | None = Field(None, gt=0)
    integer: bool = False
    choices: list[Value] | None = Field(None, min_length=1)
    when: dict[str, Any] | None = None


def _dimension(key: str, node: Mapping[str, Any]) -> Dimension:
    try:
        entry = validated(node, _Entry)
    except ValueError as error:
        raise ConfigError(f"space.{key}: {error}.") from None
    low, high, step = entry.low, entry.high, entry.step
    if entry.choices is not None:
        if other := next((word for word in node if word not in ("choices", "when")), None):
            raise ConfigError(f"space.{key} has choices and {other}. Leave one out.")
        if len({(type(choice), choice) for choice in entry.choices}) < len(entry.choices):
            raise ConfigError(f"space.{key}.choices: got {entry.choices}, expected each value once.")
        return Dimension(key, choices=tuple(entry.choices))
    if low is None or high is None or not low < high or (entry.log and low <= 0):
        raise ConfigError(
            f"space.{key}: got low={low} and high={high}, expected low < high, both positive with log: true."
        )
    if step is not None and (entry.log or step > high - low):
        raise ConfigError(f"space.{key}.step: got {step}, expected at most {high - low}, and no log: true.")
    for word in ("low", "high", "step") if entry.integer else ():
        if node.get(word) is not None and node[word] != int(node[word]):
            raise ConfigError(f"space.{key}.{word}: got {node[word]}, expected a whole number with integer: true.")
    if step is not None:
        high = low + step * math.floor((high - low) / step + 1e-9)
    kind = int if entry.integer else float
    return Dimension(key, kind(low), kind(high), entry.log, None if step is None else kind(step), entry.integer)
