"""The toy's adapter: `kvmig.engines.base.ServingEngine`, method by method.

Only what the comments say is worth copying: an adapter is about *when* a request may be touched,
and about giving back what it took whenever something fails.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from kvmig.engines.base import (
    Cadence,
    CameBlocks,
    ClassLoad,
    Emitted,
    EngineLoad,
    Export,
    Frame,
    OnCallDone,
    OnOutputs,
    Preempted,
    RequestState,
    Stage,
    StepTime,
    Tail,
)
from kvmig.engines.block_copies import BlockCopies
from kvmig.engines.numerics import numerics_class
from kvmig.engines.toy.batch import Batch, Request
from kvmig.engines.toy.cache import Cache
from kvmig.engines.toy.model import VOCABULARY
from kvmig.engines.toy.script import ScriptFile
from kvmig.engines.toy.sides import Destination, Source
from kvmig.engines.transformers.payload import Logprob, Output, Submitted, decode, encode

STEP_MS = 1.0


class ToyEngine:
    """A toy of 256 blocks of 8 tokens, and the port over it."""

    can_hold = False
    unmovable = ""

    def __init__(
        self,
        num_blocks: int = 256,
        block_tokens: int = 8,
        max_running: int = 16,
        step_ms: float = STEP_MS,
        script: ScriptFile | None = None,
        numerics: str = "toy",
    ) -> None:
        """step_ms: from one step to the next. script: what it does beside that."""
        self._script = script or ScriptFile(None)
        weights = self._script.read()
        self._cache = Cache(num_blocks, block_tokens, weights.weights)
        self._batch = Batch(self._cache, max_running, weights.counts_by)
        self.numerics = numerics_class(engine=numerics)
        self._source = Source(self._batch, self._cache)
        self._destination = Destination(self._batch, self._cache)
        self.layout = self._cache.layout
        # Copies run on a thread of their own, so that no step waits for one.
        self._copies = BlockCopies(self.layout)
        self.gather, self.scatter = self._copies.gather, self._copies.scatter
        self._step_ms = step_ms
        self._hangs_since: float | None = None
        self._work = asyncio.Event()
        self._stepping: asyncio.Task[None] | None = None
        self._on_outputs: OnOutputs = lambda client, emitted, frames: None
        self._on_call_done: OnCallDone = lambda client, call_id, error, frames: None

    # -- the engine's own life

    def connect(
        self,
        on_outputs: OnOutputs,
        on_call_done: OnCallDone,
        on_exit: Callable[[BaseException | None], None],
    ) -> None:
        self._on_outputs, self._on_call_done = on_outputs, on_call_done
        self._stepping = asyncio.get_running_loop().create_task(self._steps())
        self._stepping.add_done_callback(
            lambda task: None if task.cancelled() else on_exit(task.exception())
        )

    async def _steps(self) -> None:
        while True:
            await self._work.wait()
            if hang_s := self._script.fault([one.num_outputs for one in self._batch.running]):
                self._hangs_since = time.monotonic()
                await asyncio.sleep(hang_s)
                self._hangs_since = None
            script = self._script.read()
            self._hand_out(self._batch.step(script.hold, script.prefill))
            if not self._batch.running and not self._batch.waiting:
                self._work.clear()
            await asyncio.sleep(self._step_ms / 1000)

    def _hand_out(self, given: list[Request]) -> None:
        for client in {one.client for one in given}:
            outputs = [
                Output(
                    one.request_id,
                    [one.tokens[-1]],
                    one.finish_reason,
                    [] if one.asked.logprobs is None else [Logprob(0.0)],
                )
                for one in given
                if one.client == client
            ]
            self._put_out(client, outputs)

    def _put_out(self, client: int, outputs: list[Output]) -> None:
        emitted = [Emitted(one.request_id, len(one.token_ids), one.finished) for one in outputs]
        self._on_outputs(client, emitted, [encode(outputs)])

    async def close(self, timeout_s: float) -> None:
        if self._stepping is not None:
            self._stepping.cancel()
            await asyncio.wait([self._stepping], timeout=timeout_s)
        self._copies.close()

    async def warm_up(self) -> None:
        """Nothing is cold."""

    async def step_times(self, limit_s: float) -> list[StepTime]:
        return [StepTime(1, self._step_ms)]

    def step_s(self) -> float:
        # Another step holds the event loop: nobody could ask during it.
        return 0.0 if self._hangs_since is None else time.monotonic() - self._hangs_since

    def describe(self) -> bytes:
        return msgspec.msgpack.encode(
            {
                "block_tokens": self._cache.block_tokens,
                "max_request_tokens": self._cache.block_tokens * self.layout.num_blocks,
            }
        )

    # -- clients

    def submit(
        self,
        client: int,
        request_id: str,
        payload: Sequence[Frame],
        output_token_ids: Sequence[int] = (),
    ) -> None:
        asked = decode(b"".join(payload), Submitted)
        most = len(asked.prompt_token_ids) + asked.max_tokens
        room = self.layout.num_blocks * self._cache.block_tokens
        try:
            tokens = bytearray([*asked.prompt_token_ids, *output_token_ids])
        except ValueError:
            self._refuse(client, request_id, f"a token is not in 0 to {VOCABULARY - 1}")
            return
        if not asked.prompt_token_ids or most > room:
            self._refuse(client, request_id, f"{most} tokens, must be 1 to {room}")
            return
        self._batch.enter(Request(request_id, client, asked, tokens))
        self._work.set()

    def _refuse(self, client: int, request_id: str, why: str) -> None:
        self._put_out(client, [Output(request_id, [], "error", error=why)])

    def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            request = self._source.forget(request_id) or self._batch.find(request_id)
            if request is None:
                continue
            if self._batch.find(request_id) is request:
                self._batch.remove(request)
            self._cache.give_back(request.blocks)

    def call(self, client: int, call_id: int, method: str, payload: Sequence[Frame]) -> None:
        self._on_call_done(client, call_id, f"a toy has no method {method}", [])

    def assign(self, request_id: str, client: int) -> None:
        self._destination.known(request_id).client = client

    def encode_request(
        self, prompt: Sequence[int], max_tokens: int, seed: int | None = None
    ) -> list[Frame]:
        """For the conformance suite."""
        return [
            encode(
                Submitted(
                    prompt_token_ids=list(prompt),
                    max_tokens=max_tokens,
                    temperature=0.0 if seed is None else 1.0,
                    seed=seed,
                )
            )
        ]

    def decode_outputs(self, frames: Sequence[Frame]) -> list[Output]:
        """For the conformance suite."""
        return decode(frames[0], list[Output])

    # -- what it does and holds

    def cadence(self) -> Cadence:
        """Its steps are so short that nobody need wait for their ends."""
        return Cadence(0.0, 0.0)

    def load(self) -> EngineLoad:
        batch, needed = self._batch, self._cache.needed
        needs = [needed(len(one.tokens)) for one in batch.waiting]
        left = [len(one.tokens) - one.computed for one in batch.running]
        total = self.layout.num_blocks
        return EngineLoad(
            total_blocks=total,
            used_blocks=total - len(self._cache.free),
            running=len(batch.running),
            waiting=len(needs),
            head_blocks=needs[0] if needs else 0,
            waiting_blocks=sum(needs),
            classes=self._classes(),
            preempted=tuple(
                Preempted(priority, times, batch.below[priority])
                for priority, times in batch.preempted.items()
            ),
            seats=batch.max_running,
            preempted_waiting=sum(bool(one.preemptions) for one in batch.waiting),
            # One that decodes has its last token to compute, and no more.
            prefill_blocks=sum(needed(tokens) for tokens in left if tokens > 1),
        )

    def _classes(self) -> tuple[ClassLoad, ...]:
        running = Counter(one.asked.priority for one in self._batch.running)
        waiting = Counter(one.asked.priority for one in self._batch.waiting)
        blocks: Counter[int] = Counter()
        for one in self._batch.running:
            blocks[one.asked.priority] += len(one.blocks)
        return tuple(
            ClassLoad(priority, running[priority], waiting[priority], blocks[priority])
            for priority in sorted(running | waiting)
        )

    async def requests(self, most_waiting: int | None = None) -> list[RequestState]:
        batch = self._batch
        groups = (
            ("running", batch.running),
            ("suspended", self._source.suspended()),
            ("waiting", batch.waiting[:most_waiting]),
        )
        return [
            RequestState(
                one.request_id,
                state,
                len(one.tokens),
                one.num_outputs,
                len(one.blocks),
                one.asked.priority,
                wanted_blocks=self._cache.needed(len(one.tokens)) if state == "waiting" else 0,
            )
            for state, group in groups
            for one in group
        ]

    # -- source

    async def export(self, request_id: str) -> Export:
        return self._source.export(request_id)

    async def stage(self, request_id: str, sent: int) -> Stage:
        return self._source.stage(request_id, sent)

    async def suspend(self, request_id: str, sent: int, out: memoryview | None = None) -> Tail:
        return self._source.suspend(request_id, sent)

    async def resume(self, request_id: str) -> None:
        self._source.resume(request_id)
        self._work.set()

    async def release(self, request_id: str) -> None:
        self._source.release(request_id)

    # -- destination

    async def reserve(self, export: Export) -> int:
        return self._destination.reserve(export)

    async def grow(self, request_id: str, num_tokens: int) -> list[int]:
        return self._destination.grow(request_id, num_tokens)

    async def prepare(self, request_id: str) -> None:
        """A step after a pause is like any other."""

    def expect(self, request_id: str, ms: float) -> None:
        """Its steps wait for nobody."""

    async def commit(self, request_id: str, tail: Tail, last: CameBlocks | None = None) -> None:
        try:
            if last is not None:
                last.check(self._copies.scatter_now(last.block_ids, last.fused))
            self._destination.commit(request_id, tail)
        except BaseException:
            self._destination.cancel(request_id)
            raise
        self._work.set()

    async def cancel(self, request_id: str) -> None:
        self._destination.cancel(request_id)
