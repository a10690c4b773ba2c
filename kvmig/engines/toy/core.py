"""The toy engine: a "model" that counts on, a paged KV cache, and continuous batching.

The model counts on until one byte of its KV cache is wrong. Its tokens are bytes of text. Example:
after "Count: 0017 0018" it puts out " 0019 0020".
"""

from __future__ import annotations

import itertools
import re
from bisect import insort
from collections import Counter
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvmig.core.layout import BlockRegion, KVLayout
from kvmig.engines.transformers.payload import SubmittedRequest

VOCABULARY = 256
HALF = 8
"""Bytes of a token's key, and of its value."""
LOST = ord("?")
"""The token that is put out where the KV cache is wrong."""
_NUMBER = re.compile(rb"(\d{4})([ \n])(\d{0,3})$")
_ODD = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F], np.uint64)


def compute(tokens: bytes, first: int) -> NDArray[np.uint64]:
    """Keys and values [tokens - first, 2] of the tokens from `first` on.

    They depend on the token, its place and the one before it.
    """
    padded = np.frombuffer(b"\0" + tokens, np.uint8)[first:].astype(np.uint64)
    places = np.arange(first + 1, len(tokens) + 1, dtype=np.uint64)
    mixed = (padded[1:] << np.uint64(40)) | (padded[:-1] << np.uint64(32)) | places
    return mixed[:, None] * _ODD


def sample(cache: NDArray[np.uint64], tokens: bytes, seed: int | None, counts_by: int = 1) -> int:
    """The next token of a request: counts on without a seed, drawn with one.

    cache: keys and values [tokens, 2] as they are in the request's blocks.
    """
    if not np.array_equal(cache, compute(tokens, 0)):
        return LOST
    if seed is None:
        return _counted(tokens[-16:], counts_by)
    digest = blake2b(b"%d %d %d" % (seed, len(tokens), tokens[-1]), digest_size=8).digest()
    return ord(" ") + int.from_bytes(digest, "little") % 95


def _counted(text: bytes, by: int) -> int:
    """The next digit of the number after the last one, or the space before it.

    After a line's end the last number is said again.
    """
    if (found := _NUMBER.search(text)) is None:
        return ord(" ") if re.search(rb"\d{4}$", text) else ord("0")
    number = (int(found[1]) + by * (found[2] == b" ")) % 10_000
    return (b"%04d" % number)[len(found[3])]


class ToyCache:
    """`num_blocks` blocks of `block_tokens` tokens, which requests have lists of; keys lie in one
    region, values in another."""

    def __init__(self, num_blocks: int, block_tokens: int, weights: str = "") -> None:
        """weights: identity of those that its content is computed with."""
        self.block_tokens = block_tokens
        self.free = list(range(num_blocks))
        # Axes: key or value, block, token.
        self._memory = np.zeros((2, num_blocks, block_tokens), np.uint64)
        run = block_tokens * HALF
        base = self._memory.ctypes.data
        self.layout = KVLayout(
            (BlockRegion(base, run, run), BlockRegion(base + num_blocks * run, run, run)),
            num_blocks,
            block_tokens,
            model="toy 2",
            weights=weights,
        )

    def needed(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens take."""
        return -(-num_tokens // self.block_tokens)

    def extend_blocks(self, blocks: list[int], num_tokens: int) -> bool:
        """Extend `blocks` to hold `num_tokens` tokens; whether there was room."""
        more = self.needed(num_tokens) - len(blocks)
        if more > len(self.free):
            return False
        blocks += [self.free.pop(0) for _ in range(more)]
        return True

    def give_back(self, blocks: list[int]) -> None:
        """Free the blocks, and empty the list."""
        self.free += blocks
        blocks.clear()

    def forget(self) -> None:
        """Fill the whole cache with zeros."""
        self._memory[:] = 0

    def write(self, blocks: list[int], first: int, kv: NDArray[np.uint64]) -> None:
        """Keys and values [n, 2] of the tokens from `first` on."""
        places = np.arange(first, first + len(kv))
        block = np.array(blocks)[places // self.block_tokens]
        self._memory[:, block, places % self.block_tokens] = kv.T

    def read(self, blocks: list[int], tokens: int) -> NDArray[np.uint64]:
        """Keys and values [tokens, 2] of the first `tokens` tokens."""
        used = blocks[: self.needed(tokens)]
        return self._memory[:, used].reshape(2, -1)[:, :tokens].T


CHUNK = 64
"""Prompt tokens that one step computes of one request."""


@dataclass(eq=False)
class ToyRequest:
    """One request; `tokens` are prompt and outputs."""

    request_id: str
    client: int
    asked: SubmittedRequest
    tokens: bytearray
    computed: int = 0
    """Tokens whose KV is in the blocks."""
    blocks: list[int] = field(default_factory=list)
    preemptions: int = 0
    arrival: int = 0
    """Number among the requests that came to this engine."""
    owed: bool = False
    """Whether it has just come from elsewhere, and its first token is awaited there."""

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


def rank(request: ToyRequest) -> tuple[int, int]:
    """Sort key of a request: the lowest goes first, the highest gives way."""
    return request.asked.priority, request.arrival


def _held(request: ToyRequest, hold: int | None, prefill: int | None) -> bool:
    if request.computed < len(request.asked.prompt_token_ids):
        return prefill is not None and request.computed >= prefill
    return hold is not None and request.num_outputs >= hold


class ToyBatch:
    """Continuous batching: who runs and who waits."""

    def __init__(self, cache: ToyCache, max_running: int, counts_by: int = 1) -> None:
        self._cache = cache
        self.counts_by = counts_by
        self._arrivals = itertools.count()
        self.max_running = max_running
        self.running: list[ToyRequest] = []
        self.waiting: list[ToyRequest] = []
        """Waiting requests by rank."""
        self.preempted: Counter[int] = Counter()
        """Preemptions by priority, and `below` those where a smaller priority number ran on."""
        self.below: Counter[int] = Counter()

    def find(self, request_id: str) -> ToyRequest | None:
        """The request with this id, if it runs or waits."""
        for request in (*self.running, *self.waiting):
            if request.request_id == request_id:
                return request
        return None

    def enter(self, request: ToyRequest) -> None:
        """Take a new request: it runs if it has blocks, else it waits."""
        request.arrival = next(self._arrivals)
        self.put_back(request)

    def put_back(self, request: ToyRequest) -> None:
        """Let a request that was here before run or wait again."""
        if request.blocks:
            self.running.append(request)
        else:
            insort(self.waiting, request, key=rank)

    def remove(self, request: ToyRequest) -> None:
        """Remove a request, with its blocks."""
        (self.running if request in self.running else self.waiting).remove(request)

    def step(self, hold: int | None = None, prefill: int | None = None) -> list[ToyRequest]:
        """Make one step; the requests that got a token. hold, prefill: see `Script`."""
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
            if not self._cache.extend_blocks(request.blocks, len(request.tokens)):
                return
            self.running.append(self.waiting.pop(0))

    def _run(self, request: ToyRequest) -> bool:
        """Whether it got a token."""
        while not self._cache.extend_blocks(request.blocks, len(request.tokens)):
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
        request.tokens.append(sample(cache, tokens, seed, self.counts_by))
        return True

    def _preempt(self, request: ToyRequest) -> None:
        """Let the request wait; its KV is computed again later."""
        priority = request.asked.priority
        self.running.remove(request)
        self.preempted[priority] += 1
        self.below[priority] += any(one.asked.priority < priority for one in self.running)
        self._cache.give_back(request.blocks)
        request.computed, request.preemptions = 0, request.preemptions + 1
        insort(self.waiting, request, key=rank)
