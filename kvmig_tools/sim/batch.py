"""The requests that an engine decodes together, many steps at a time.

All get one token a step, so what happens in k steps follows from sums: the context
grows by k a request, and a request takes a new block in every `block_tokens`th step.
`phase[p]` counts those that do it in the steps s with s mod block_tokens = p.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from kvmig_tools.sim.request import SimRequest


class DecodeBatch:
    """Sizes in blocks and tokens; `steps` counts from the start of the engine."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.steps = 0
        self.context = 0
        """Tokens of all requests together."""
        self.requests: dict[int, SimRequest] = {}
        """By index, in the order in which they joined."""
        self._phase = [0] * block_tokens
        self._ends: list[tuple[int, int, SimRequest]] = []
        self._joined = 0

    def __len__(self) -> int:
        return len(self.requests)

    def __contains__(self, request: SimRequest) -> bool:
        return request.index in self.requests

    def add(self, request: SimRequest) -> None:
        """It has at least one token to go."""
        tokens = request.tokens
        request.offset = tokens - self.steps
        request.end_step = self.steps + request.final_tokens - tokens
        request.joined = self._joined
        self._joined += 1
        self.requests[request.index] = request
        self._phase[(1 - request.offset) % self.block_tokens] += 1
        self.context += tokens
        heappush(self._ends, (request.end_step, request.joined, request))

    def remove(self, request: SimRequest) -> None:
        """Its `generated` is brought up to date."""
        del self.requests[request.index]
        tokens = self.tokens(request)
        request.generated = tokens - request.input_tokens
        self._phase[(1 - request.offset) % self.block_tokens] -= 1
        self.context -= tokens
        if len(self._ends) > 64 and len(self._ends) > 4 * len(self.requests):
            self._ends = [end for end in self._ends if self._holds(end)]
            heapify(self._ends)

    def tokens(self, request: SimRequest, ahead: int = 0) -> int:
        """Input and output tokens `ahead` steps from now."""
        return request.offset + self.steps + ahead

    def blocks(self, request: SimRequest, ahead: int = 0) -> int:
        """What it holds between two steps: the last token's KV isn't computed yet."""
        return -(-(request.offset + self.steps + ahead - 1) // self.block_tokens)

    def growth(self, steps: int) -> int:
        """New blocks that the next `steps` steps take."""
        cycles, rest = divmod(steps, self.block_tokens)
        grown = cycles * len(self.requests)
        if rest:
            begin = self.steps % self.block_tokens
            end = begin + rest
            grown += sum(self._phase[begin:end])
            if end > self.block_tokens:
                grown += sum(self._phase[: end - self.block_tokens])
        return grown

    def steps_within(self, free: int, most: int) -> int:
        """The largest k <= `most` with growth(k) <= `free`."""
        cycles, left = divmod(free, len(self.requests))
        steps = cycles * self.block_tokens
        while steps < most:
            left -= self._phase[(self.steps + steps) % self.block_tokens]
            if left < 0:
                break
            steps += 1
        return min(steps, most)

    def steps_to_end(self) -> int:
        """Steps until the first of them finishes; the batch is not empty."""
        while not self._holds(self._ends[0]):
            heappop(self._ends)
        return self._ends[0][0] - self.steps

    def advance(self, steps: int) -> list[SimRequest]:
        """Do them, at most `steps_to_end`. Those that finished, which are still in it."""
        self.steps += steps
        self.context += steps * len(self.requests)
        finished: list[SimRequest] = []
        while self._ends and self._ends[0][0] <= self.steps:
            end = heappop(self._ends)
            if self._holds(end):
                finished.append(end[2])
        return finished

    def _holds(self, end: tuple[int, int, SimRequest]) -> bool:
        request = end[2]
        return self.requests.get(request.index) is request and request.joined == end[1]
