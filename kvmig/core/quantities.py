"""Amounts of bytes as people write them."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable

from kvmig.core.errors import ConfigError

_STEPS = {"K": 1, "M": 2, "G": 3, "T": 4}
UNITS = {
    "B": 1.0,
    **{f"{letter}B": 1000.0**power for letter, power in _STEPS.items()},
    **{f"{letter}iB": 1024.0**power for letter, power in _STEPS.items()},
}
"""Bytes of each."""


def quantity(unit: str) -> Callable[[str], float]:
    """A parser of a flag's value: bytes; a number without a unit is in `unit`.

    Example: `quantity("MB")` takes 500 and 0.5GB for 5e8.
    """

    def parse(text: str) -> float:
        found = re.fullmatch(r"([0-9.eE+-]+) *([A-Za-z]*?)(/s)?", text.strip())
        try:
            value = float(found[1]) * UNITS[found[2] or unit] if found else math.nan
        except (ValueError, KeyError):
            value = math.nan
        if not 0 <= value < math.inf:
            raise argparse.ArgumentTypeError(
                f"{text!r} must be a number of {unit}, or one with a unit: {', '.join(UNITS)}"
            )
        return value

    return parse


def bytes_of(flag: str, text: str) -> int:
    """Bytes that a flag gives; empty: 0. Raises ConfigError."""
    try:
        return int(quantity("B")(text)) if text else 0
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"{flag} is {error}") from error


def size_text(count: float) -> str:
    """Bytes, for people."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"
