"""The toy's continuous batching: requests that wait, and requests that get a token each step."""

from __future__ import annotations

import itertools
from bisect import insort
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from kvmig.engines.toy.cache import Cache
from kvmig.engines.toy.model import compute, sample
from kvmig.engines.transformers.payload import Submitted

CHUNK = 64
"""Prompt tokens that one step computes of one request."""


@dataclass(eq=False)
class Request:
    """One request; `tokens` are prompt and outputs."""

    request_id: str
    client: int
    asked: Submitted
    tokens: bytearray
    computed: int = 0
    """Tokens whose KV is in the blocks."""
    blocks: list[int] = field(default_factory=list)
    preemptions: int = 0
    arrival: int = 0
    """Its number among those that came to this engine."""
    owed: bool = False
    """It has just come from elsewhere, where somebody waits for its first token."""

    @property
    def num_outputs(self) -> int:
        """Tokens that it has put out."""
        return len(self.tokens) - len(self.asked.prompt_token_ids)

    @property
    def finish_reason(self) -> Literal["", "stop", "length"]:
        """Empty while it runs."""
        if self.num_outputs and self.tokens[-1] in self.asked.stop_token_ids:
            return "stop"
        return "length" if self.num_outputs >= self.asked.max_tokens else ""


def rank(request: Request) -> tuple[int, int]:
    """Whoever has less goes first; whoever has most gives way."""
    return request.asked.priority, request.arrival


def _held(request: Request, hold: int | None, prefill: int | None) -> bool:
    if request.computed < len(request.asked.prompt_token_ids):
        return prefill is not None and request.computed >= prefill
    return hold is not None and request.num_outputs >= hold


class Batch:
    """Who runs and who waits."""

    def __init__(self, cache: Cache, max_running: int, counts_by: int = 1) -> None:
        self._cache = cache
        self._counts_by = counts_by
        self._arrivals = itertools.count()
        self.max_running = max_running
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        """By rank."""
        self.preempted: Counter[int] = Counter()
        """Preemptions by priority, and `below` those where a smaller priority number ran on."""
        self.below: Counter[int] = Counter()

    def find(self, request_id: str) -> Request | None:
        """Of those that run or wait."""
        for request in (*self.running, *self.waiting):
            if request.request_id == request_id:
                return request
        return None

    def enter(self, request: Request) -> None:
        """A new one: it runs if it has blocks, else it waits."""
        request.arrival = next(self._arrivals)
        self.put_back(request)

    def put_back(self, request: Request) -> None:
        """One that was here before."""
        if request.blocks:
            self.running.append(request)
        else:
            insort(self.waiting, request, key=rank)

    def remove(self, request: Request) -> None:
        """Take it out, with its blocks."""
        (self.running if request in self.running else self.waiting).remove(request)

    def step(self, hold: int | None = None, prefill: int | None = None) -> list[Request]:
        """One step; returns those that got a token. hold, prefill: see `Script`."""
        self._admit()
        given = [
            one
            for one in list(self.running)
            if one in self.running
            and (one.owed or not _held(one, hold, prefill))
            and self._run(one)
        ]
        for request in given:
            if request.finish_reason:
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
            victim = max(self.running, key=rank)
            self._preempt(victim)
            if victim is request:
                return False
        tokens, first = bytes(request.tokens), request.computed
        last = request.computed = min(len(tokens), first + CHUNK)
        self._cache.write(request.blocks, first, compute(tokens[:last], first))
        if last < len(tokens):
            return False
        cache, asked = self._cache.read(request.blocks, last), request.asked
        request.owed = False
        seed = asked.seed if asked.temperature else None
        request.tokens.append(sample(cache, tokens, seed, self._counts_by))
        return True

    def _preempt(self, request: Request) -> None:
        """Its KV is computed again later."""
        priority = request.asked.priority
        self.running.remove(request)
        self.preempted[priority] += 1
        self.below[priority] += any(one.asked.priority < priority for one in self.running)
        self._cache.give_back(request.blocks)
        request.computed, request.preemptions = 0, request.preemptions + 1
        insort(self.waiting, request, key=rank)
