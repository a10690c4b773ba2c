"""How a unit's KV cache is shared by its models: quotas, in bytes. Pure.

A rule gets what was seen since the last time and says the new quotas. Their sum never grows
beyond the arena, and no quota falls below what its model holds, or below its floor: the cache of
one request of the model's greatest length. With less, a model's only request might never end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kvmig.ground.errors import ConfigError

PERIOD_S = 8.0
"""How often MuxServe adapts."""
IDLE_BELOW = 0.9
"""Mean use below this share of the quota: the model gives."""
KEPT = 0.95
"""Share of its quota up to which a model gives what it doesn't use."""
MOST_GAIN = 0.1
"""Of its mean use, per period."""


class Use(NamedTuple):
    """Of one model since the last time. Bytes."""

    model: str
    quota: int
    floor: int
    held: int
    """Now."""
    mean: float
    """Held, over the period."""
    wanted: float
    """What all its requests, the waiting ones too, would hold."""


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


def muxserve(uses: Sequence[Use]) -> dict[str, int]:
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


def fixed(uses: Sequence[Use]) -> dict[str, int]:
    """Quotas stay as they are."""
    return {one.model: one.quota for one in uses}


def kvmig(uses: Sequence[Use]) -> dict[str, int]:
    """Every model gets what it wants, as far as that goes; where it doesn't, all who want more are
    levelled from below (max-min fair), never below what a model holds. What nobody wants is lent
    in the ratio of quotas, so that a burst finds room at once."""
    arena = sum(one.quota for one in uses)
    quotas = {one.model: _least(one) for one in uses}
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
    total = sum(one.quota for one in uses)
    if rest > 0 and total:
        for one in uses:
            quotas[one.model] += rest * one.quota // total
    return quotas


def _least(one: Use) -> int:
    return max(one.floor, one.held)


RULES: dict[str, Callable[[Sequence[Use]], dict[str, int]]] = {
    "muxserve": muxserve,
    "kvmig": kvmig,
    "fixed": fixed,
}
