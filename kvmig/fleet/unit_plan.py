"""What a unit needs of a GPU, and when its agent starts and ends. Pure; all sizes are bytes.

The models of a unit share KV cache on one GPU (`kvmig.sharing`). The unit is placed on a GPU that
has room for that cache and for all of its models; of these, each claims its bytes when it starts.
Its agent runs as long as one of its models does, or waits for its start.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace as changed

from kvmig.core.devices import in_gib
from kvmig.core.errors import ConfigError
from kvmig.fleet.device_room import DeviceMemory, DeviceNeed, too_large
from kvmig.fleet.spec import ModelSpec

STABLE_S = 60.0
"""An agent that ends later than this is the first one again that has ended."""
FIRST_PAUSE_S = 0.5
LAST_PAUSE_S = 30.0

Step = Literal["start", "stop"]


def arena_of(models: Iterable[ModelSpec]) -> int:
    """Bytes of KV cache of the unit with these models."""
    return max((one.unit_memory for one in models), default=0)


def whole_need(needs: Mapping[str, DeviceNeed], arena: int) -> DeviceNeed:
    """What a unit wants of its GPU. needs: of each of its models alone, by name."""
    allowed = [one.only for one in needs.values() if one.only]
    only = frozenset.intersection(*allowed) if allowed else frozenset()
    return DeviceNeed(arena + sum(one.each for one in needs.values()), 1, only)


def check_unit(
    unit: str, needs: Mapping[str, DeviceNeed], arena: int, devices: tuple[DeviceMemory, ...]
) -> None:
    """Raises ConfigError for a unit that no GPU can hold. needs: as `whole_need` has them."""
    whole = whole_need(needs, arena)
    if not whole.only and any(one.only for one in needs.values()):
        raise ConfigError(f"unit {unit}: gpus of its models must have one GPU in common")
    parts = ", ".join(
        [
            f"{in_gib(arena)} of KV cache",
            *(f"{in_gib(one.each)} of {name}" for name, one in needs.items()),
        ]
    )
    if wrong := too_large(f"unit {unit} ({parts})", whole, devices):
        raise ConfigError(wrong)


def need_in_unit(need: DeviceNeed, gpus: Iterable[str]) -> DeviceNeed:
    """What a model wants of the GPU that its unit has already."""
    return replace(need, only=frozenset(gpus))


class AgentLife(Struct, frozen=True):
    """The state of a unit's agent."""

    agent: str = ""
    """The deployment; empty: none runs, and none is ordered."""
    since: float = 0.0
    """When that was ordered."""
    ends: bool = False
    """Whether it was ordered to end."""
    deaths: int = 0
    """Ends in a row that were not ordered."""
    retry_at: float = 0.0
    why: str = ""
    """How the last one ended; empty: as it was ordered to."""


def next_step(life: AgentLife, wanted: bool, now: float) -> Step | None:
    """What is to be done. wanted: whether a model of the unit runs, or waits for its start."""
    if not life.agent:
        return "start" if wanted and now >= life.retry_at else None
    return "stop" if not (wanted or life.ends) else None


def started(life: AgentLife, agent: str, now: float) -> AgentLife:
    """Note an order to start."""
    return changed(life, agent=agent, since=now, ends=False)


def ended(life: AgentLife, why: str, now: float) -> AgentLife:
    """Note the end. Another agent starts after a pause, unless the end was ordered."""
    if life.ends:
        return AgentLife()
    deaths = 1 if now - life.since >= STABLE_S else life.deaths + 1
    pause_s = min(FIRST_PAUSE_S * 2 ** (deaths - 1), LAST_PAUSE_S)
    return AgentLife(deaths=deaths, retry_at=now + pause_s, why=why)
