"""Virtual usage: what an instance's requests weigh, in KV blocks (Llumnix, section 4.4).

Example: 3 running requests of 10, 20 and 30 blocks, then a queue that wants 8 and 5
blocks: 10 + 20 + 30 + 8 + 0 = 68. The request behind the head weighs nothing yet.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from kvmig.engines.base import ClassLoad, EngineLoad, GroupLoad

Place = Literal["running", "head", "behind", "terminating"]
"""Where a request stands; `terminating` is the fake one that empties an instance."""

Headroom = Mapping[int, float]
"""Priority -> blocks kept free for all its running requests together (absent: 0)."""


class Holding(NamedTuple):
    """A request's weight: blocks that it holds when running, blocks that it wants when queued."""

    place: Place
    blocks: float = 0.0
    priority: int = 0


def virtual_usage(holdings: Iterable[Holding], headroom: Headroom | None = None) -> list[float]:
    """The virtual usage of each request of one instance, in the order given."""
    held = list(holdings)
    headroom = headroom or {}
    running = Counter(one.priority for one in held if one.place == "running")

    def weigh(one: Holding) -> float:
        match one.place:
            case "running":
                return one.blocks + headroom.get(one.priority, 0.0) / running[one.priority]
            case "head":
                return one.blocks
            case "behind":
                return 0.0
            case "terminating":
                return math.inf

    return [weigh(one) for one in held]


class Usage(NamedTuple):
    """What an instance's requests weigh together, whatever their number. In KV blocks."""

    virtual: float
    """The sum of `virtual_usage`."""
    behind: float
    """Demand of those behind the head, which weigh nothing in the paper."""
    kept: float
    """Headroom, a part of `virtual`."""
    lower: float
    """Held by running requests whose priority comes after one with headroom."""


def usage(
    load: EngineLoad, headroom: Headroom | None = None, *, terminating: bool = False
) -> Usage:
    """From an engine's totals. Of several pools of blocks, the one that is scarcest counts.

    It is expressed in blocks of the first pool: a share of one is as good as the same share
    of the other.
    """
    pools: tuple[EngineLoad | GroupLoad, ...] = (load, *load.groups)
    scarcest = max(pools, key=lambda p: (p.used_blocks + p.waiting_blocks) / max(p.total_blocks, 1))
    scale = load.total_blocks / max(scarcest.total_blocks, 1)
    kept, lower = _headroom(load, headroom) if headroom else (0.0, 0.0)
    held = scale * (scarcest.used_blocks + scarcest.head_blocks) + kept
    behind = scale * (scarcest.waiting_blocks - scarcest.head_blocks)
    return Usage(math.inf if terminating else held, behind, kept, lower)


def _headroom(load: EngineLoad, headroom: Headroom) -> tuple[float, float]:
    """(headroom that is kept, blocks held by those who come after its owners)."""
    classes = load.classes or (ClassLoad(0, load.running, load.waiting, load.used_blocks),)
    owners = [one.priority for one in classes if one.running and headroom.get(one.priority)]
    if not owners:
        return 0.0, 0.0
    lower = sum(one.used_blocks for one in classes if one.priority > min(owners))
    return sum(headroom[priority] for priority in owners), lower
