"""A device of the tests' own that copies into, and from, a vLLM engine's cache; and a request whose
tail goes through it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest

from kvmig.engines.base import CameBlocks, RequestTail
from kvmig.engines.device_copies import DeviceCopies
from kvmig.engines.vllm.memory import BlockMemory
from kvmig.engines.vllm.migration import VllmDestination
from tests.support.vllm_pair import PROMPT, Pair
from tests.support.vllm_side import Side


class CopyDevice:
    """Stands for a device that copies from and into the cache of one engine: `before` each urgent
    copy it does what a test wants; the copy itself is the CPU's."""

    def __init__(self, side: Side, patch: pytest.MonkeyPatch) -> None:
        self.before: Callable[[], None] = lambda: None
        self.copied = threading.Event()
        copies = side.engine._memory.copies
        self._by = copies._by
        patch.setattr(copies, "_by", self)
        patch.setattr(BlockMemory, "on_gpu", True)

    def gather(self, ids: Sequence[int], out: memoryview, urgent: bool = False) -> list[int]:
        if urgent:
            self.before()
        return self._by.gather(ids, out, urgent)

    def scatter(self, ids: Sequence[int], data: memoryview, urgent: bool = False) -> list[int]:
        self.before()
        sums = self._by.scatter(ids, data, urgent)
        self.copied.set()
        return sums


async def ready_to_commit(pair: Pair) -> tuple[RequestTail, CameBlocks]:
    """`moved` is suspended at `a`, and all its blocks are on their way with the commit."""
    export = await pair.exported("moved", PROMPT, until=10)
    await pair.done(pair.b.engine.reserve(export))
    tail = await pair.suspend(pair.a, "moved", 0)
    buffer = memoryview(bytearray(pair.a.engine.layout.block_bytes * len(tail.block_ids)))
    sums = await pair.done(pair.a.engine.gather(tail.block_ids, buffer, urgent=True))
    blocks = await pair.done(pair.b.engine.grow("moved", tail.num_tokens))
    pair.b.engine.assign("moved", 1)
    return tail, CameBlocks(0, [blocks[place] for place in tail.places], buffer, sums)


def device_copies_of(side: Side) -> DeviceCopies | None:
    """Its copies on a GPU, if its cache is there."""
    return side.engine._memory._gpu


def destination_of(side: Side) -> VllmDestination:
    """What takes requests over there."""
    return side.engine._destination
