"""The toy's continuous batching: requests that wait, and requests that get a token each step."""

from __future__ import annotations

from dataclasses import dataclass, field

from examples.toy_engine.cache import Cache
from examples.toy_engine.model import compute, sample

CHUNK = 64
"""Prompt tokens that one step computes of one request."""


@dataclass(eq=False)
class Request:
    """One request; `tokens` are prompt and outputs."""

    request_id: str
    client: int
    tokens: list[int]
    num_prompt: int
    max_tokens: int
    seed: int | None
    computed: int = 0
    """Tokens whose KV is in the blocks."""
    blocks: list[int] = field(default_factory=list)
    preemptions: int = 0

    @property
    def num_outputs(self) -> int:
        """Tokens that it has put out."""
        return len(self.tokens) - self.num_prompt

    @property
    def finished(self) -> bool:
        """Whether it has all its tokens."""
        return self.num_outputs >= self.max_tokens


class Batch:
    """Who runs and who waits."""

    def __init__(self, cache: Cache, max_running: int) -> None:
        self._cache = cache
        self.max_running = max_running
        self.running: list[Request] = []
        self.waiting: list[Request] = []

    def find(self, request_id: str) -> Request | None:
        """Of those that run or wait."""
        for request in (*self.running, *self.waiting):
            if request.request_id == request_id:
                return request
        return None

    def remove(self, request: Request) -> None:
        """Take it out, with its blocks."""
        (self.running if request in self.running else self.waiting).remove(request)

    def step(self) -> list[Request]:
        """One step; returns those that got a token."""
        self._admit()
        given = [one for one in list(self.running) if one in self.running and self._run(one)]
        for request in given:
            if request.finished:
                self.running.remove(request)
                self._cache.give_back(request.blocks)
        return given

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.max_running:
            request = self.waiting[0]
            if not self._cache.take(request.blocks, len(request.tokens)):
                return
            self.running.append(self.waiting.pop(0))

    def _run(self, request: Request) -> bool:
        """Whether it got a token."""
        while not self._cache.take(request.blocks, len(request.tokens)):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        cache, blocks = self._cache, request.blocks
        last = min(len(request.tokens), request.computed + CHUNK)
        for position in range(request.computed, last):
            before = cache.read(blocks, position - 1, position) if position else b""
            cache.write(blocks, position, compute(request.tokens[position], position, before))
        request.computed = last
        if last < len(request.tokens):
            return False
        request.tokens.append(sample(cache.read(blocks, 0, last), request.seed))
        return True

    def _preempt(self, request: Request) -> None:
        """Its KV is computed again later."""
        self.running.remove(request)
        self._cache.give_back(request.blocks)
        request.computed, request.preemptions = 0, request.preemptions + 1
        self.waiting.insert(0, request)
