"""The one error of the scheduler package: a value that cannot be used, told in one line."""

from __future__ import annotations

import math


class ParameterError(ValueError):
    """An impossible value; ``field``, ``value`` and ``allowed`` are also the message."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field} is {value}, allowed: {allowed}")
        self.field, self.value, self.allowed = field, value, allowed


def at_least(field: str, value: float, low: float, *, above: bool = False) -> None:
    """Refuse what is not finite or lies below ``low`` (with ``above``: also ``low`` itself)."""
    if not math.isfinite(value) or value < low or (above and value == low):
        raise ParameterError(field, value, f"{'>' if above else '>='} {low:g}")
