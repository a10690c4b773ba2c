"""An engine in memory whose KV cache is real bytes, and which counts what it holds.

A token's KV is 16 bytes that depend on the token, its position and the one before, so a
block in the wrong place, or left out, is seen at the commit.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import msgspec
from msgspec.structs import replace

from kvmig.core.errors import MigrationRefused, RequestGone
from kvmig.core.layout import BlockRegion, KVLayout
from kvmig.engines.base import (
    CacheSharing,
    CameBlocks,
    EngineLoad,
    RequestExport,
    RequestState,
    RequestTail,
    StagedBlocks,
    StepCadence,
)
from kvmig.engines.held_marks import HeldMarks

BLOCK_TOKENS = 4
TOKEN_BYTES = 16
BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES
CHUNK_BLOCKS = 2
"""Of a prompt that is followed."""


@dataclass
class Request:
    """prompt and output tokens, blocks in order."""

    tokens: list[int]
    prompt: int
    blocks: list[int] = field(default_factory=list)
    suspended: bool = False


def kv(tokens: Sequence[int], position: int) -> bytes:
    """KV bytes of one token."""
    before = tokens[position - 1] if position else -1
    return blake2b(f"{tokens[position]} {position} {before}".encode(), digest_size=16).digest()


def next_token(tokens: Sequence[int]) -> int:
    """What the model says."""
    return (tokens[-1] * 31 + len(tokens)) % 50021


class FakeEngine:
    """`before` runs at the start of each call, with the method's name: to fail or to wait there;
    `on_started` when a request that came begins to decode.

    at_once: whether it gathers when it suspends, as far as the buffer's size allows;
    steps: tokens that each request that leaves decodes at every stage and suspend.
    """

    def __init__(
        self,
        num_blocks: int = 200,
        steps: int = 1,
        hits: int = 0,
        at_once: bool = True,
        weights: str = "",
    ) -> None:
        self.layout = KVLayout(
            (BlockRegion(0, BLOCK_BYTES, BLOCK_BYTES),),
            num_blocks,
            BLOCK_TOKENS,
            "m",
            weights=weights,
        )
        self.numerics = "n"
        self.memory = bytearray(num_blocks * BLOCK_BYTES)
        self.free = list(range(num_blocks))
        self.running: dict[str, Request] = {}
        self.reserved: dict[str, Request] = {}
        self.leaving: set[str] = set()
        self.can_hold = True
        self.unmovable = ""
        self.sharing: CacheSharing | str = "it is a fake"
        self.held_marks: HeldMarks | None = None
        self.ballast: list[bytes] = []
        """What a request was submitted with beside its tokens."""
        self.expected: list[tuple[str, float]] = []
        self.now = StepCadence(0.0, 0.0)
        self.steps = steps
        self.hits = hits
        self.calls: list[str] = []
        self.urgent: list[bool] = []
        """Of each gather and scatter."""
        self.corrupt = False
        self.computed: int | None = None
        """Blocks of a prompt that is being computed, two more whenever it is followed; None: it
        is computed."""
        self.decoding = True
        """Whether its requests do, as far as it tells."""
        self.at_once = at_once
        self.on_started: Callable[[str], None] = lambda request_id: None
        self.before: Callable[[str], Awaitable[None]] = self._nothing

    async def _nothing(self, method: str) -> None: ...

    async def _enter(self, method: str) -> None:
        self.calls.append(method)
        await asyncio.sleep(0)
        await self.before(method)

    # -- what a test does with it

    def start(self, request_id: str, prompt: int = 41, output: int = 3) -> Request:
        """A request in mid-decode."""
        request = self.running[request_id] = Request(list(range(prompt)), prompt)
        self.decode(request, output)
        return request

    def decode(self, request: Request, count: int) -> None:
        """Run `count` steps for it; the last token's KV is not computed yet."""
        for _ in range(count):
            request.tokens.append(next_token(request.tokens))
        while len(request.blocks) * BLOCK_TOKENS < len(request.tokens):
            request.blocks.append(self.free.pop(0))
        for position in range(len(request.tokens) - 1):
            start = self._address(request, position)
            self.memory[start : start + TOKEN_BYTES] = kv(request.tokens, position)

    def end(self, request_id: str) -> None:
        """Finished, or aborted by the client."""
        request = self.running.pop(request_id, None)
        if request is not None:
            self.free += request.blocks

    def is_clean(self) -> bool:
        """Nothing is held but by requests that run."""
        held = sum(len(request.blocks) for request in self.running.values())
        suspended = any(request.suspended for request in self.running.values())
        return (
            not self.reserved
            and not suspended
            and not self.leaving
            and held + len(self.free) == self.layout.num_blocks
            and len(set(self.free)) == len(self.free)
        )

    # -- the port

    def cadence(self) -> StepCadence:
        return self.now

    def load(self) -> EngineLoad:
        used = self.layout.num_blocks - len(self.free)
        return EngineLoad(self.layout.num_blocks, used, len(self.running), 0, 0, 0)

    async def requests(self, most_waiting: int | None = None) -> list[RequestState]:
        return []

    async def export(self, request_id: str) -> RequestExport:
        await self._enter("export")
        request = self._live(request_id)
        self.leaving.add(request_id)
        payload = msgspec.msgpack.encode((request.tokens, request.prompt))
        return RequestExport(request_id, len(request.tokens), [payload, *self.ballast])

    async def stage(self, request_id: str, sent: int) -> StagedBlocks:
        await self._enter("stage")
        request = self._live(request_id)
        if self.computed is not None:
            return StagedBlocks(request.blocks[sent : self.computed], len(request.tokens))
        self.decode(request, self.steps)
        full = (len(request.tokens) - 1) // BLOCK_TOKENS
        return StagedBlocks(request.blocks[sent:full], len(request.tokens), decoding=self.decoding)

    async def follow_prompt(
        self, request_id: str, sent: int, most_tokens: int
    ) -> StagedBlocks | RequestTail:
        await self._enter("follow_prompt")
        request = self._live(request_id)
        if self.computed is not None:
            self.computed += CHUNK_BLOCKS
            if self.computed * BLOCK_TOKENS < request.prompt:
                return StagedBlocks(request.blocks[sent : self.computed], len(request.tokens))
            self.computed = None
            self.decode(request, 1)
        if len(request.tokens) > most_tokens:
            full = (len(request.tokens) - 1) // BLOCK_TOKENS
            return StagedBlocks(request.blocks[sent:full], len(request.tokens), decoding=True)
        request.suspended = True
        return self._tail(request, sent)

    async def suspend(
        self, request_id: str, sent: int, out: memoryview | None = None
    ) -> RequestTail:
        await self._enter("suspend")
        request = self._live(request_id)
        self.decode(request, self.steps)
        request.suspended = True
        tail = self._tail(request, sent)
        size = len(tail.block_ids) * BLOCK_BYTES
        if not self.at_once or out is None or size > len(out):
            return tail
        return replace(tail, checksums=self.copy_out(tail.block_ids, out[:size]))

    def _used(self, tokens: list[int]) -> int:
        """Blocks that hold the KV of all but the last one."""
        return -(-(len(tokens) - 1) // BLOCK_TOKENS)

    def _tail(self, request: Request, sent: int) -> RequestTail:
        used = self._used(request.tokens)
        state = msgspec.msgpack.encode(request.tokens)
        outputs = len(request.tokens) - request.prompt
        return RequestTail(request.blocks[sent:used], len(request.tokens), outputs, state)

    async def resume(self, request_id: str) -> None:
        await self._enter("resume")
        self.leaving.discard(request_id)
        if request_id in self.running:
            self.running[request_id].suspended = False

    async def release(self, request_id: str) -> None:
        await self._enter("release")
        self.leaving.discard(request_id)
        if request_id in self.running and self.running[request_id].suspended:
            self.end(request_id)

    async def reserve(self, export: RequestExport) -> int:
        await self._enter("reserve")
        request_id = export.request_id
        if request_id in self.running or request_id in self.reserved:
            raise MigrationRefused("already_migrating", "it is here")
        tokens, prompt = msgspec.msgpack.decode(export.payload[0])
        if len(tokens) > len(self.free) * BLOCK_TOKENS:
            raise MigrationRefused("no_blocks")
        request = self.reserved[request_id] = Request(tokens, prompt)
        for position in range(self.hits * BLOCK_TOKENS):
            if position % BLOCK_TOKENS == 0:
                request.blocks.append(self.free.pop(0))
            start = self._address(request, position)
            self.memory[start : start + TOKEN_BYTES] = kv(tokens, position)
        return self.hits

    async def grow(self, request_id: str, num_tokens: int) -> list[int]:
        await self._enter("grow")
        request = self.reserved[request_id]
        wanted = -(-num_tokens // BLOCK_TOKENS) + 1
        while len(request.blocks) < wanted:
            if not self.free:
                await self.cancel(request_id)
                raise MigrationRefused("no_blocks")
            request.blocks.append(self.free.pop(0))
        return list(request.blocks)

    async def prepare(self, request_id: str) -> None:
        await self._enter("prepare")

    def expect(self, request_id: str, ms: float) -> None:
        self.expected.append((request_id, ms))

    async def commit(
        self, request_id: str, tail: RequestTail, last: CameBlocks | None = None
    ) -> None:
        await self._enter("commit")
        if last is not None:
            last.check(self.copy_in(last.block_ids, last.fused))
        tokens = msgspec.msgpack.decode(tail.state)
        request = self.reserved.pop(request_id)
        request.tokens = tokens
        while len(request.blocks) * BLOCK_TOKENS < len(tokens):
            request.blocks.append(self.free.pop(0))
        for position in range(len(request.tokens) - 1):
            start = self._address(request, position)
            came = bytes(self.memory[start : start + TOKEN_BYTES])
            assert came == kv(request.tokens, position), f"KV of token {position} is wrong"
        self.running[request_id] = request
        self.on_started(request_id)

    async def cancel(self, request_id: str) -> None:
        await self._enter("cancel")
        request = self.reserved.pop(request_id, None)
        if request is not None:
            self.free += request.blocks

    async def gather(
        self, block_ids: Sequence[int], out: memoryview, urgent: bool = False
    ) -> list[int]:
        self.urgent.append(urgent)
        await self._enter("gather")
        return self.copy_out(block_ids, out)

    def copy_out(self, block_ids: Sequence[int], out: memoryview) -> list[int]:
        for index, block in enumerate(block_ids):
            run = self.memory[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
            out[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES] = run
        checksums = _checksums(out)
        if self.corrupt:
            out[0] ^= 1
        return checksums

    async def scatter(
        self, block_ids: Sequence[int], fused: memoryview, urgent: bool = False
    ) -> list[int]:
        self.urgent.append(urgent)
        await self._enter("scatter")
        return self.copy_in(block_ids, fused)

    def copy_in(self, block_ids: Sequence[int], fused: memoryview) -> list[int]:
        for index, block in enumerate(block_ids):
            run = fused[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES]
            self.memory[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES] = run
        return _checksums(fused)

    def _live(self, request_id: str) -> Request:
        request = self.running.get(request_id)
        if request is None:
            self.leaving.discard(request_id)
            raise RequestGone("unknown_request", request_id)
        return request

    def _address(self, request: Request, position: int) -> int:
        block = request.blocks[position // BLOCK_TOKENS]
        return block * BLOCK_BYTES + position % BLOCK_TOKENS * TOKEN_BYTES


def _checksums(fused: memoryview) -> list[int]:
    return [
        zlib.crc32(fused[start : start + BLOCK_BYTES])
        for start in range(0, len(fused), BLOCK_BYTES)
    ]
