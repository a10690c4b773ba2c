"""An engine's queue: by priority, then first come, first served."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from kvmig_tools.sim.request import SimRequest


class WaitingQueue:
    """In order; those that were preempted have come earlier, and so go first again."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._requests: list[tuple[tuple[int, float, int], SimRequest]] = []
        self.blocks = 0
        """Demand of all of them."""
        self.preempted = 0
        """Of them, those that ran already."""

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[SimRequest]:
        return (request for _, request in self._requests)

    @property
    def head(self) -> SimRequest:
        """The next one; there is one."""
        return self._requests[0][1]

    def demand(self, request: SimRequest) -> int:
        """Blocks that it needs to start."""
        return -(-request.tokens // self._block_tokens)

    def add(self, request: SimRequest) -> None:
        """In its place."""
        self.blocks += self.demand(request)
        self.preempted += request.was_preempted
        insort(self._requests, (request.rank, request))

    def pop(self) -> SimRequest:
        """Take the head out."""
        request = self._requests.pop(0)[1]
        self.blocks -= self.demand(request)
        self.preempted -= request.was_preempted
        return request

    def __contains__(self, request: object) -> bool:
        return any(one is request for _, one in self._requests)

    def remove(self, request: SimRequest) -> None:
        """Take it out; it is there."""
        (place,) = [at for at, (_, one) in enumerate(self._requests) if one is request]
        del self._requests[place]
        self.blocks -= self.demand(request)
        self.preempted -= request.was_preempted

    def before(self, time: float) -> tuple[int, int]:
        """(requests, blocks) without the last ones, as far as they came after `time`."""
        count, blocks = len(self._requests), self.blocks
        while count and self._requests[count - 1][1].queued_at > time:
            count -= 1
            blocks -= self.demand(self._requests[count][1])
        return count, blocks
