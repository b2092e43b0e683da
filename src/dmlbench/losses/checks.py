"""Ranges of numbers that losses and regularizers are configured with."""

import math

from dmlbench.types import ConfigError


def check_positive(**values: float) -> None:
    """Check that numbers are above 0 and finite."""
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ConfigError(f"{name}: got {value}, expected a positive number.")


def check_at_least(least: float, **values: float) -> None:
    """Check that numbers are finite and not below a limit."""
    for name, value in values.items():
        if not least <= value < math.inf:
            raise ConfigError(f"{name}: got {value}, expected at least {least}.")


def check_share(**values: float) -> None:
    """Check that numbers are in [0, 1)."""
    for name, value in values.items():
        if not 0 <= value < 1:
            raise ConfigError(f"{name}: got {value}, expected a number in [0, 1).")
