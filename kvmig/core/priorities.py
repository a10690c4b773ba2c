"""Priority classes: named, each with the number by which engines order its requests."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import msgspec

from kvmig.core.errors import ConfigError

CLASS_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_FLAG = "--priority-class"


class PriorityClass(msgspec.Struct, frozen=True):
    """One class of requests.

    Headroom is what an instance keeps free for all its running requests of the class
    together (Llumnix, section 4.4), so that they decode at the speed of a lightly loaded one.
    """

    name: str
    priority: int
    """Value as in vLLM's request field `priority`: the smaller one runs first."""
    headroom_tokens: int = 0
    """Tokens of KV cache."""
    target_ms: float = 0.0
    """Decode step that its requests shall have at most; 0: none is asked for. The headroom
    then follows from a profile of the instance."""


NORMAL = PriorityClass("normal", 0)
"""The class of requests that say nothing, unless another one of priority 0 is configured."""


def with_normal(classes: Sequence[PriorityClass]) -> tuple[PriorityClass, ...]:
    """`classes`, first to run first, and NORMAL if none of them has priority 0."""
    missing = () if any(one.priority == 0 for one in classes) else (NORMAL,)
    return tuple(sorted((*classes, *missing), key=lambda one: one.priority))


def with_priority(classes: Sequence[PriorityClass], priority: int) -> PriorityClass | None:
    """The class of that number; None if there is none."""
    return next((one for one in classes if one.priority == priority), None)


def named(classes: Sequence[PriorityClass], name: str) -> PriorityClass | None:
    """The class of that name; None if there is none."""
    return next((one for one in classes if one.name == name), None)


def class_of(classes: Sequence[PriorityClass], priority: int) -> PriorityClass:
    """The class that a request of this number counts as: its own, else the next one after it.

    Numbers between the classes' are not a client's: vLLM runs a call's later turns one before
    its first.
    """
    after = [one for one in classes if one.priority >= priority]
    choice = min if after else max
    return choice(after or classes, key=lambda one: one.priority)


def names_and_numbers(classes: Sequence[PriorityClass]) -> str:
    """What is allowed, for error messages: "high (-1) or normal (0)"."""
    return " or ".join(f"{one.name} ({one.priority})" for one in classes)


def check_classes(classes: Sequence[PriorityClass]) -> None:
    """Raises ConfigError: a name, number or headroom that can't be, or one given twice."""
    for at, one in enumerate(classes):
        rules: tuple[tuple[bool, str, object, str], ...] = (
            (
                CLASS_NAME.fullmatch(one.name) is not None,
                "name",
                repr(one.name),
                "a letter, then letters, digits, - or _",
            ),
            (one.headroom_tokens >= 0, "headroom", one.headroom_tokens, "0 or more"),
            (
                0 <= one.target_ms < math.inf,
                "target",
                one.target_ms,
                "0 or more and finite",
            ),
            (
                not (one.headroom_tokens and one.target_ms),
                "headroom",
                one.headroom_tokens,
                f"left out where a target ({one.target_ms:g} ms) is given",
            ),
        )
        for holds, field, value, allowed in rules:
            if not holds:
                raise ConfigError(f"{_FLAG} {one.name}: {field} is {value}, must be {allowed}")
        for other in classes[:at]:
            if other.name == one.name:
                raise ConfigError(
                    f"{_FLAG} {one.name} is there twice (priorities {other.priority} and"
                    f" {one.priority}), must be given once"
                )
            if other.priority == one.priority:
                raise ConfigError(
                    f"{_FLAG} {one.name}: priority is {one.priority}, must differ from that of"
                    f" {other.name}"
                )
    if with_priority(classes, 0) is None:
        raise ConfigError(
            f"{_FLAG} is {names_and_numbers(classes)}, must have a class of priority 0: it is"
            " that of requests that say nothing"
        )
