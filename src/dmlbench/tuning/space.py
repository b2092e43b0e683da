"""The search space: keys of a run with their bounds or choices."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dmlbench.identity import NOT_PART_OF_CONFIG_HASH, NOT_PART_OF_RUN_HASH
from dmlbench.recipes import applies
from dmlbench.types import ConfigError, check_choice, closest

if TYPE_CHECKING:
    from optuna.trial import BaseTrial

Value = float | int | str | bool | None

_WORDS = ("low", "high", "log", "step", "integer", "choices", "when")
_BOUNDS = "{low: 1e-6, high: 1e-3, log: true}"
_CHOICES = "{choices: [gap, gsp]}"
_DIGITS = 4
_FIXED = (*NOT_PART_OF_CONFIG_HASH, *NOT_PART_OF_RUN_HASH, "dataset", "protocol", "evaluation", "fit.monitor")
"""Keys that all trials share, so that their scores compare."""


@dataclass(frozen=True)
class Dimension:
    """A key of the space, with inclusive bounds or with choices.

    Attributes:
        key: of a run's configuration, or a group such as ``pooling``.
        step: of a grid from ``low`` on.
    """

    key: str
    low: float | None = None
    high: float | None = None
    log: bool = False
    step: float | None = None
    integer: bool = False
    choices: tuple[Value, ...] = ()

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
    if value is None or isinstance(value, bool):
        text = "null" if value is None else str(value).lower()
    else:
        text = str(value) if isinstance(value, str) else repr(value)
    return f"{key}={text}"


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
        if fixed := next((name for name in _FIXED if f"{key}.".startswith(f"{name}.")), None):
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
            raise ConfigError(f"space searches {key} and {inner}, which not each option of {key} has. Search one.")
    return tuple(found.values())


def corners(space: Sequence[Dimension]) -> list[dict[str, Value]]:
    """A few points that cover every bound and every choice."""
    ends = [dimension.choices or (dimension.low, dimension.high) for dimension in space]
    return [{d.key: end[min(i, len(end) - 1)] for d, end in zip(space, ends, strict=True)}
            for i in range(max(map(len, ends)))]  # fmt: skip


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
        if not value or set(value) & set(_WORDS) or not any(isinstance(v, Mapping) for v in value.values()):
            yield key, value
        else:
            yield from _entries(value, key)


def _dimension(key: str, entry: Mapping[str, Any]) -> Dimension:
    for word in entry:
        if word not in _WORDS:
            raise ConfigError(f"space.{key} '{word}' is unknown; {closest(str(word), _WORDS)}")
    if "choices" in entry:
        return _choices(key, entry)
    for word in ("low", "high"):
        if not _is_number(entry.get(word)):
            raise ConfigError(f"space.{key}.{word}: got {entry.get(word, 'nothing')}, expected a number.")
    for word in ("log", "integer"):
        if not isinstance(entry.get(word, False), bool):
            raise ConfigError(f"space.{key}.{word}: got {entry[word]}, expected true or false.")
    low, high, log, step = entry["low"], entry["high"], entry.get("log", False), entry.get("step")
    if not low < high:
        raise ConfigError(f"space.{key}.low: got {low}, expected a number below high ({high}).")
    if log and low <= 0:
        raise ConfigError(f"space.{key}.low: got {low}, expected a positive number with log: true.")
    if step is not None and (not _is_number(step) or not 0 < step <= high - low):
        raise ConfigError(f"space.{key}.step: got {step}, expected a number in (0, {high - low}].")
    if step is not None and log:
        raise ConfigError(f"space.{key} has step and log: true. Leave one out, or list choices.")
    integer = entry.get("integer", False)
    for word in ("low", "high", "step") if integer else ():
        if entry.get(word) is not None and entry[word] != int(entry[word]):
            raise ConfigError(f"space.{key}.{word}: got {entry[word]}, expected a whole number with integer: true.")
    if step is not None:
        high = low + step * math.floor((high - low) / step + 1e-9)
    kind = int if integer else float
    return Dimension(key, kind(low), kind(high), log, None if step is None else kind(step), integer)


def _choices(key: str, entry: Mapping[str, Any]) -> Dimension:
    if other := next((word for word in entry if word not in ("choices", "when")), None):
        raise ConfigError(f"space.{key} has choices and {other}. Leave one out.")
    choices = entry["choices"]
    if not isinstance(choices, Sequence) or isinstance(choices, str) or len(choices) < 2:
        raise ConfigError(f"space.{key}.choices: got {choices}, expected two or more values, such as {_CHOICES}.")
    for i, choice in enumerate(choices):
        if not isinstance(choice, float | int | str | bool | None):
            raise ConfigError(f"space.{key}.choices: got {choice}, expected a number, a word, true, false or null.")
        if any(choice == other and type(choice) is type(other) for other in choices[:i]):
            raise ConfigError(f"space.{key}.choices names {choice} twice.")
    return Dimension(key, choices=tuple(choices))


def _is_number(value: Any) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool) and math.isfinite(value)
