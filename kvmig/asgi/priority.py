"""The priority of a call: vLLM's request models have a field for it, and a header goes before it.

Both must name a configured class. A call without one is of the class of priority 0. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kvmig.asgi.problems import shorten_value
from kvmig.core.priorities import PriorityClass, named, names_and_numbers, with_priority

PRIORITY = "x-vllm-priority"
PRIORITY_FIELD = "priority"


class UnknownPriority(ValueError):
    """`param`: the field or header that is to blame."""

    def __init__(self, param: str, value: Any, classes: Sequence[PriorityClass]) -> None:
        allowed = names_and_numbers(classes)
        super().__init__(f"{param} is {shorten_value(value)}, must be {allowed}")
        self.param = param


def checked_body(body: bytes, classes: Sequence[PriorityClass]) -> tuple[bytes, int]:
    """`body` with the number of the class that it names, or itself; and the number.

    What is no JSON object is the engine's to refuse. Raises UnknownPriority.
    """
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return body, 0
    if PRIORITY_FIELD not in fields:
        return body, 0
    try:
        value = msgspec.json.decode(fields[PRIORITY_FIELD])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        cut = bytes(fields[PRIORITY_FIELD])[:100].decode(errors="replace")
        raise UnknownPriority(PRIORITY_FIELD, cut, classes) from None
    number = number_of(PRIORITY_FIELD, value, classes)
    if number == value:
        return body, number
    return msgspec.json.encode({**fields, PRIORITY_FIELD: number}), number


def checked_header(given: str, classes: Sequence[PriorityClass]) -> int:
    """The number of the class that the header names. Raises UnknownPriority."""
    try:
        value: int | str = int(given)
    except ValueError:
        value = given
    return number_of(PRIORITY, value, classes)


def number_of(param: str, value: Any, classes: Sequence[PriorityClass]) -> int:
    """The number of the class that `value`, a name or a number, means. Raises UnknownPriority."""
    found = None
    if isinstance(value, str):
        found = named(classes, value)
    elif isinstance(value, int) and not isinstance(value, bool):
        found = with_priority(classes, value)
    if found is None:
        raise UnknownPriority(param, value, classes)
    return found.priority
