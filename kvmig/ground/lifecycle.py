"""How many instances and front ends there may be, and when one is given up."""

from __future__ import annotations

import msgspec

from kvmig.ground.errors import ConfigError

USUAL_MOST = 16
"""Instances at most, if neither --max-instances nor --instances says more."""


class LifecycleConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The lives of processes. Times in seconds."""

    max_instances: int = USUAL_MOST
    """At once, those that start or drain included."""
    max_restarts: int = 5
    """How often in a row an instance is started again that dies soon after."""
    drain_deadline_s: float = 300.0
    """What a drain hasn't moved by then goes on elsewhere by recompute."""
    front_ends: int = 1
    """Processes that share the port."""


def check_lifecycle(config: LifecycleConfig, instances: int) -> None:
    """Raises ConfigError with the flag, its value and what is allowed.

    instances: how many there are at the start.
    """
    rules: tuple[tuple[bool, str, object, str], ...] = (
        (
            config.max_instances >= instances,
            "--max-instances",
            config.max_instances,
            f"at least --instances ({instances})",
        ),
        (config.max_restarts >= 0, "--max-restarts", config.max_restarts, "0 or more"),
        (config.drain_deadline_s >= 0, "--drain-deadline", config.drain_deadline_s, "0 or more"),
        (config.front_ends >= 1, "--front-ends", config.front_ends, "1 or more"),
    )
    for holds, field, value, allowed in rules:
        if not holds:
            raise ConfigError(f"{field} is {value}, must be {allowed}")


def instance_name(number: int) -> str:
    """Of instance `number`, from 0."""
    return f"i{number}"


def instance_number(name: str) -> int:
    """The other way; the number is below `LifecycleConfig.max_instances`."""
    return int(name.removeprefix("i"))
