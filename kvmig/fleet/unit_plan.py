"""What a unit needs of a GPU, and when its agent starts and ends. Pure; all sizes are bytes.

The models of a unit share KV cache on one GPU (`kvmig.sharing`), or on one worker's CPUs. The unit
is placed where there is room for that cache and for all of its models; of these, each claims its
bytes when it starts. Its agent runs as long as one of its models does, or waits for its start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace as changed

from kvmig.core.devices import in_gib
from kvmig.core.errors import ConfigError
from kvmig.fleet.device_room import DeviceMemory, DeviceNeed, too_large
from kvmig.fleet.spec import ModelSpec
from kvmig.fleet.worker_nodes import WORKER, InstanceNeed, with_amounts

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


# -- on workers


def allowed_gpus(
    whole: DeviceNeed, chosen: Sequence[str], usable: Mapping[str, int]
) -> tuple[str, ...]:
    """The GPUs of a worker of which a unit may get any, as Ray has it; the chosen ones first.
    whole: of `whole_need`. usable: bytes of each GPU there that the fleet can have."""
    others = (gpu for gpu, size in usable.items() if size >= whole.each and whole.allows(gpu))
    return tuple(dict.fromkeys((*chosen, *others)))


def need_of_unit(need: InstanceNeed, others: Iterable[InstanceNeed], arena: int) -> InstanceNeed:
    """What the first instance of a unit wants of its worker: room for all of the unit. others: of
    its other models. arena: bytes of its KV cache."""
    memory, selector, resources = need.memory + arena, dict(need.selector), need.resources
    for one in others:
        memory += one.memory
        selector |= one.selector
        resources = with_amounts(resources, one.resources)
    return replace(need, memory=memory, selector=selector, resources=resources)


def need_on_worker(need: InstanceNeed, worker: str) -> InstanceNeed:
    """What an instance wants whose unit is on a worker already."""
    return replace(need, selector={**need.selector, WORKER: worker})


def check_selectors(unit: str, models: Iterable[ModelSpec]) -> None:
    """Raises ConfigError for models that no worker can have together."""
    found: dict[str, tuple[str, str]] = {}
    for one in models:
        for label, value in one.worker_selector.items():
            other, before = found.setdefault(label, (one.name, value))
            if before != value:
                raise ConfigError(
                    f"unit {unit}: worker_selector of {one.name} has {label}={value}, must be"
                    f" {label}={before} as of {other}: all of a unit are on one worker"
                )


def check_kinds(unit: str, on_gpus: Mapping[str, bool]) -> None:
    """Raises ConfigError for models some of which use GPUs, and others CPUs. on_gpus: by model."""
    kinds = {uses: name for name, uses in on_gpus.items()}
    if len(kinds) > 1:
        raise ConfigError(
            f"unit {unit}: --ray-resources of {kinds[False]} has no GPU, must have 1 as of"
            f" {kinds[True]}: all of a unit are on one GPU, or all on CPUs"
        )


def node_of_unit(now: str, instances: Sequence[str], leaves: Callable[[str], bool]) -> str:
    """The node on which instances of a unit start; empty: it is to be chosen. now: the present one.
    instances: those of its instances. leaves: whether a node is drained, or was lost.

    A unit goes where one of its instances is already, so that the others come after it.
    """
    if now and not leaves(now):
        return now
    return next((one for one in instances if one and not leaves(one)), "")


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
