"""How a unit's KV cache is shared by its models: quotas, in bytes. Pure.

A rule gets what was seen since the last time and says the new quotas. Their sum never grows
beyond the arena, and none falls below its floor: the cache of one request of the model's greatest
length. With less, a model's only request might never end. None falls below what its model holds,
either, unless another one is owed what it was guaranteed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kvmig.core.errors import ConfigError

PERIOD_S = 8.0
"""How often MuxServe adapts."""
IDLE_BELOW = 0.9
"""Mean use below this share of the quota: the model gives."""
KEPT = 0.95
"""Share of its quota up to which a model gives what it doesn't use."""
MOST_GAIN = 0.1
"""Most gain per period, as a share of its mean use."""


class MemoryUse(NamedTuple):
    """The memory of one model since the last time. Bytes."""

    model: str
    quota: int
    floor: int
    held: int
    """Now."""
    mean: float
    """Held, over the period."""
    wanted: float
    """What all its requests, the waiting ones too, would hold."""
    guarantee: int = 0
    """What it gets whenever it wants it, whichever model holds it now."""


def fair(arena: int, floors: Mapping[str, int], demand: Mapping[str, float]) -> dict[str, int]:
    """The first quotas: each its floor, the rest in the ratio of demand (any unit; rate x bytes of
    a request). Raises ConfigError if the floors don't fit."""
    rest = arena - sum(floors.values())
    if rest < 0:
        raise ConfigError(
            f"one request of each model needs {sum(floors.values()) / 2**20:.0f} MiB of KV cache, "
            f"the arena has {arena / 2**20:.0f} MiB"
        )
    total = sum(demand.values())
    return {
        model: floor + int(rest * (demand[model] / total if total else 1 / len(floors)))
        for model, floor in floors.items()
    }


def muxserve(uses: Sequence[MemoryUse]) -> dict[str, int]:
    """MuxServe's rule: models that use less than 90 % give what is beyond 95 %; those that are full
    and have more to do gain a tenth of their use at most, the fullest first, from all pro rata."""
    spare = {
        one.model: max(0, min(int(KEPT * one.quota - one.mean), one.quota - _least(one)))
        for one in uses
        if one.mean < IDLE_BELOW * one.quota
    }
    quotas = {one.model: one.quota for one in uses}
    full = [one for one in uses if one.model not in spare and one.wanted >= 1.1 * one.mean]
    for one in sorted(full, key=lambda one: (-one.mean / one.quota, one.model)):
        wanted = int(min(MOST_GAIN * one.mean, one.wanted - one.mean))
        left = sum(spare.values())
        gain = min(wanted, left)
        given = {giver: gain * rest // left for giver, rest in spare.items()} if left else {}
        for giver, part in given.items():
            spare[giver] -= part
            quotas[giver] -= part
            quotas[one.model] += part
    return quotas


def fixed(uses: Sequence[MemoryUse]) -> dict[str, int]:
    """Quotas stay as they are."""
    return {one.model: one.quota for one in uses}


def kvmig(uses: Sequence[MemoryUse]) -> dict[str, int]:
    """Every model gets what it wants, as far as that goes; where it doesn't, all who want more are
    levelled from below (max-min fair). What a model holds is taken from it only if others want
    what they were guaranteed: from those first that hold most for their guarantee, and never below
    their own. What no model wants stays where it is, so that a burst finds room at once."""
    arena = sum(one.quota for one in uses)
    quotas = _kept(uses, arena)
    rest = arena - sum(quotas.values())
    short = {one.model: int(one.wanted) for one in uses if one.wanted > quotas[one.model]}
    while rest > 0 and short:
        low = min(short, key=lambda model: (quotas[model], model))
        level = min((quotas[model] for model in short if quotas[model] > quotas[low]), default=None)
        equal = sorted(model for model in short if quotas[model] == quotas[low])
        to = min([short[model] for model in equal] + ([] if level is None else [level]))
        step = min(to - quotas[low], rest // len(equal))
        if step <= 0:
            break
        for model in equal:
            quotas[model] += step
            rest -= step
        short = {model: most for model, most in short.items() if quotas[model] < most}
    spare = {one.model: max(0, one.quota - quotas[one.model]) for one in uses}
    total = sum(spare.values())
    for model, size in spare.items() if rest > 0 else ():
        quotas[model] += rest * size // total
    return quotas


def _kept(uses: Sequence[MemoryUse], arena: int) -> dict[str, int]:
    """What no other model gets: what a model holds, and what it wants of its guarantee."""
    rights = {one.model: max(one.floor, min(int(one.wanted), one.guarantee)) for one in uses}
    kept = {one.model: max(one.held, rights[one.model]) for one in uses}
    if sum(kept.values()) <= arena:
        return kept
    parts = {one.model: max(one.guarantee, one.floor, 1) for one in uses}

    def cut(level: float) -> dict[str, int]:
        """Cut all holdings to at most this multiple of their reservations."""
        return {
            model: max(rights[model], min(size, int(level * parts[model])))
            for model, size in kept.items()
        }

    low, high = 0.0, max(size / parts[model] for model, size in kept.items())
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(cut(middle).values()) <= arena else (low, middle)
    return cut(low)


def _least(one: MemoryUse) -> int:
    return max(one.floor, one.held)


RULES: dict[str, Callable[[Sequence[MemoryUse]], dict[str, int]]] = {
    "muxserve": muxserve,
    "kvmig": kvmig,
    "fixed": fixed,
}
