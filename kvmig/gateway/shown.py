"""A value in an error's sentence: enough to know it by, however large it is. Pure."""

from __future__ import annotations

from itertools import islice
from typing import Any

MOST = 100
"""Characters of it."""


def shown(value: Any) -> str:
    """As Python writes it, in printable ASCII, and cut short.

    Example: a list of a million numbers is "[0, 1, 2]... (1000000 items)".
    """
    match value:
        case str() | bytes() if len(value) > MOST:
            return f"{value[:MOST]!a}..."
        case list() | dict() if len(value) > MOST:
            few = islice(value.items() if isinstance(value, dict) else value, 3)
            return f"{_cut(ascii(list(few)))}... ({len(value)} items)"
        case int() if value.bit_length() > 3 * MOST:
            return f"a number of {value.bit_length()} bits"
    return _cut(ascii(value))


def _cut(text: str) -> str:
    return text if len(text) <= MOST else f"{text[:MOST]}..."
