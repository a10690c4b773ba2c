"""`--priority-class NAME=PRIORITY[,headroom=TOKENS|,target=MS]`."""

from __future__ import annotations

import argparse

from kvmig.ground.errors import ConfigError
from kvmig.ground.priorities import PriorityClass, with_normal

FORM = "NAME=PRIORITY[,headroom=TOKENS|,target=MS]"


def add_priority_flags(root: argparse.ArgumentParser) -> None:
    """Add the group to the parser of kvmig's flags."""
    group = root.add_argument_group("priorities")
    group.add_argument(
        "--priority-class",
        action="append",
        default=[],
        metavar=FORM,
        help="a class of requests: a smaller priority runs first (vLLM's number); headroom: tokens"
        " of KV cache kept free beside its requests; target: a decode step in ms that is kept"
        " instead, measured at start; may be given several times; normal=0 is always there",
    )


def priority_classes(flags: argparse.Namespace) -> tuple[PriorityClass, ...]:
    """The configured classes, first to run first. Raises ConfigError."""
    return with_normal([parse_class(words) for words in flags.priority_class])


def parse_class(words: str) -> PriorityClass:
    """Example: "high=-1,headroom=1600". Raises ConfigError."""
    (name, number), *options = (word.partition("=")[::2] for word in words.split(","))
    given = dict(options)
    try:
        if len(given) < len(options) or not given.keys() <= {"headroom", "target"}:
            raise ValueError(options)
        found = PriorityClass(
            name.strip(),
            int(number),
            headroom_tokens=int(given.get("headroom", 0)),
            target_ms=float(given.get("target", 0)),
        )
    except ValueError as error:
        raise ConfigError(f"--priority-class is {words!r}, must be {FORM}") from error
    if "target" in given and not found.target_ms > 0:
        raise ConfigError(
            f"--priority-class {found.name}: target is {found.target_ms:g}, must be more than 0"
        )
    return found
