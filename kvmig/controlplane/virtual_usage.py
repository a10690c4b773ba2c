"""Virtual usage: what an instance's requests weigh, in KV blocks (Llumnix, section 4.4).

Example: 3 running requests of 10, 20 and 30 blocks, then a queue that wants 8 and 5
blocks: 10 + 20 + 30 + 8 + 0 = 68. The request behind the head weighs nothing yet.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from kvmig.engines.base import EngineLoad

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


def virtual_blocks(load: EngineLoad, *, terminating: bool = False, headroom: float = 0.0) -> float:
    """The sum of `virtual_usage` from an engine's totals, whatever the number of requests.

    headroom: the sum of `Headroom` over the priorities that have a running request.
    """
    return math.inf if terminating else load.used_blocks + headroom + load.head_blocks
