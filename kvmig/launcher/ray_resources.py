"""What an instance takes of a Ray node, by Ray's names. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from kvmig.core.errors import ConfigError

Resources = Mapping[str, float]
"""Amounts by Ray's names: CPU, GPU, memory (bytes), and those that a node was started with."""

EXAMPLE = """'{"CPU": 4}'"""
ONLY_WHOLE_ABOVE = 1.0
"""Ray gives out parts of a CPU or GPU, but above one only whole ones."""


def parse_resources(text: str, flag: str = "--ray-resources") -> dict[str, float]:
    """Parse '{"GPU": 1}' into amounts; "" into none. flag: the flag that has it. Raises
    ConfigError."""
    if not text:
        return {}
    allowed = f"must be a JSON object of amounts above 0, such as {EXAMPLE}"
    try:
        given = msgspec.json.decode(text, type=dict[str, float])
    except msgspec.DecodeError as error:
        raise ConfigError(f"{flag} is {text!r}, {allowed}: {error}") from error
    for name, amount in given.items():
        whole = name not in ("CPU", "GPU") or amount <= ONLY_WHOLE_ABOVE or amount.is_integer()
        if not name or not amount > 0 or not whole:
            rule = allowed if whole else f"{name} above 1 must be whole"
            raise ConfigError(f"{flag} is {text!r}, {rule}")
    if not given:
        raise ConfigError(f"{flag} is {text!r}, {allowed}")
    return given


def needs_of(given: Resources, workers: int) -> dict[str, float]:
    """Resources that an instance takes: those given, or a GPU a worker."""
    return dict(given) or {"GPU": float(workers)}


def amounts(resources: Resources) -> str:
    """Amounts for people: `1 GPU, 0.5 CPU`."""
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items())
