"""An engine that computes nothing, behind the Engine port: what a real llumlet runs here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from bench.load.pace import Given, Group, Metronome
from bench.load.words import BLOCK_TOKENS, Words
from kvmig.core.errors import MigrationRefused, NotParked
from kvmig.core.layout import BlockRegion, KVLayout
from kvmig.engines.base import (
    CacheSharing,
    CameBlocks,
    EmittedTokens,
    EndedRequest,
    EngineLoad,
    Frame,
    OnCallDone,
    OnOutputs,
    RequestExport,
    RequestState,
    RequestTail,
    StagedBlocks,
    StepCadence,
    StepTime,
)
from kvmig.engines.held_marks import HeldMarks

NUM_BLOCKS = 1 << 20
REQUEST_BLOCKS = 4
"""That a request is said to hold."""


class StubEngine:
    """Implements `ServingEngine`."""

    numerics = ""
    can_hold = False
    unmovable = "it has no KV cache"
    sharing: CacheSharing | str = "it has no KV cache"
    held_marks: HeldMarks | None = None

    def __init__(self, words: Words, metronome: Metronome, phase: float) -> None:
        """phase: of its steps among those of the other instances, 0 to 1."""
        self.layout = KVLayout((BlockRegion(0, 64, 64),), NUM_BLOCKS, BLOCK_TOKENS, "stub")
        self.group = Group()
        self._words = words
        self._metronome = metronome
        self._phase = phase
        self._stepping: asyncio.Task[None] | None = None
        self._on_outputs: OnOutputs = lambda client, emitted, frames: None
        self._on_call_done: OnCallDone = lambda client, call_id, error, frames: None

    # -- its life

    def connect(
        self,
        on_outputs: OnOutputs,
        on_call_done: OnCallDone,
        on_exit: Callable[[BaseException | None], None],
    ) -> None:
        self._on_outputs, self._on_call_done = on_outputs, on_call_done
        self._stepping = asyncio.create_task(self._metronome.run(self._phase, self._step))
        self._stepping.add_done_callback(
            lambda task: None if task.cancelled() else on_exit(task.exception())
        )

    def _step(self) -> None:
        for client, given in self.group.tick().items():
            self._put_out(client, given)

    def _put_out(self, client: int, given: list[Given]) -> None:
        emitted = [EmittedTokens(one.request_id, 1, one.last) for one in given]
        self._on_outputs(client, emitted, self._words.say(given))

    async def warm_up(self) -> None:
        """Nothing is cold."""

    async def hold_session(self, request_id: str, ended: EndedRequest) -> None:
        raise MigrationRefused("unsupported", "a stub keeps nothing")

    async def park(self) -> None:
        raise NotParked("a stub can't be parked")

    async def unpark(self) -> None:
        """It never is."""

    async def step_times(self, limit_s: float) -> list[StepTime]:
        return []

    def step_s(self) -> float:
        return 0.0

    def describe(self) -> bytes:
        return self._words.describe()

    async def close(self, timeout_s: float) -> None:
        if self._stepping is not None:
            self._stepping.cancel()
            await asyncio.wait([self._stepping], timeout=timeout_s)

    # -- clients

    def submit(
        self,
        client: int,
        request_id: str,
        payload: Sequence[Frame],
        output_token_ids: Sequence[int] = (),
    ) -> None:
        tokens = self._words.tokens(payload) - len(output_token_ids)
        self._put_out(client, [self.group.begin(request_id, client, tokens)])

    def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.group.end(request_id)

    def call(self, client: int, call_id: int, method: str, payload: Sequence[Frame]) -> None:
        self._on_call_done(client, call_id, None, self._words.answer(call_id, method))

    def assign(self, request_id: str, client: int) -> None:
        raise MigrationRefused("unsupported", "a stub")

    # -- what it does and holds

    def cadence(self) -> StepCadence:
        return StepCadence(0.0, 0.0)

    def load(self) -> EngineLoad:
        running = len(self.group)
        return EngineLoad(NUM_BLOCKS, running * REQUEST_BLOCKS, running, 0, 0, 0)

    async def requests(self, most_waiting: int | None = None) -> list[RequestState]:
        return []

    # -- migrations

    async def export(self, request_id: str) -> RequestExport:
        raise MigrationRefused("unsupported", "a stub")

    async def stage(self, request_id: str, sent: int) -> StagedBlocks:
        raise MigrationRefused("unsupported", "a stub")

    async def follow_prompt(
        self, request_id: str, sent: int, most_tokens: int
    ) -> StagedBlocks | RequestTail:
        raise MigrationRefused("unsupported", "a stub")

    async def suspend(
        self, request_id: str, sent: int, out: memoryview | None = None
    ) -> RequestTail:
        raise MigrationRefused("unsupported", "a stub")

    async def resume(self, request_id: str) -> None:
        """It runs."""

    async def release(self, request_id: str) -> None:
        """Nothing is suspended."""

    async def reserve(self, export: RequestExport) -> int:
        raise MigrationRefused("unsupported", "a stub")

    async def grow(self, request_id: str, num_tokens: int) -> list[int]:
        raise MigrationRefused("unsupported", "a stub")

    async def prepare(self, request_id: str) -> None:
        """Nothing comes."""

    def expect(self, request_id: str, ms: float) -> None:
        """Nothing comes."""

    async def commit(
        self, request_id: str, tail: RequestTail, last: CameBlocks | None = None
    ) -> None:
        raise MigrationRefused("unsupported", "a stub")

    async def cancel(self, request_id: str) -> None:
        """Nothing is reserved."""

    async def gather(
        self, block_ids: Sequence[int], out: memoryview, urgent: bool = False
    ) -> list[int]:
        raise MigrationRefused("unsupported", "a stub")

    async def scatter(
        self, block_ids: Sequence[int], fused: memoryview, urgent: bool = False
    ) -> list[int]:
        raise MigrationRefused("unsupported", "a stub")
