"""vLLM's own order of requests, which must be by priority where there is more than one class."""

from __future__ import annotations

from collections.abc import Sequence

from kvmig.ground.errors import ConfigError
from kvmig.ground.priorities import PriorityClass

_FLAG = "--scheduling-policy"


def scheduling_flags(argv: Sequence[str], classes: Sequence[PriorityClass]) -> list[str]:
    """What to add to `argv`, vLLM's flags. Raises ConfigError if they say something else."""
    if len(classes) == 1:
        return []
    words = [word.replace("_", "-") for word in argv]
    for at, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag != _FLAG:
            continue
        value = value if equals else "".join(words[at + 1 : at + 2])
        if value != "priority":
            raise ConfigError(
                f"{_FLAG} is {value}, must be priority (or left out) where requests have"
                f" {len(classes)} priority classes"
            )
    return [f"{_FLAG}=priority"]
