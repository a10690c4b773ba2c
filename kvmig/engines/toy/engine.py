"""The toy's adapter: `kvmig.engines.base.ServingEngine`, method by method, and both ends of a move.

Only what the comments say is worth copying: an adapter is about *when* a request may be touched,
and about giving back what it took whenever something fails.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from kvmig.core.errors import MigrationRefused, NotParked, RequestGone, WeightsInUse
from kvmig.engines.base import (
    CacheSharing,
    CameBlocks,
    ClassLoad,
    EmittedTokens,
    EndedRequest,
    EngineLoad,
    Frame,
    Frames,
    OnCallDone,
    OnExit,
    OnOutputs,
    PreemptionCount,
    RequestExport,
    RequestState,
    RequestTail,
    StagedBlocks,
    StepCadence,
    StepTime,
)
from kvmig.engines.block_copies import BlockCopies
from kvmig.engines.held_marks import HeldMarks
from kvmig.engines.identity import numerics_class
from kvmig.engines.toy.core import VOCABULARY, ToyBatch, ToyCache, ToyRequest
from kvmig.engines.toy.script import ScriptFile, weights_at
from kvmig.engines.transformers.payload import (
    StepOutput,
    SubmittedRequest,
    TokenLogprob,
    decode,
    encode,
)

STEP_MS = 1.0
SETTLE_S = 10.0
"""Longest wait for migrations to give back what they hold."""
LOOK_S = 0.001
"""Pause between two looks whether they have."""


class ToyEngine:
    """A toy of 256 blocks of 8 tokens, and the port over it."""

    can_hold = False
    unmovable = ""
    sharing: CacheSharing | str = "it is a toy"
    held_marks: HeldMarks | None = None

    def __init__(
        self,
        num_blocks: int = 256,
        block_tokens: int = 8,
        max_running: int = 16,
        step_ms: float = STEP_MS,
        script: ScriptFile | None = None,
        numerics: str = "toy",
    ) -> None:
        """step_ms: from one step to the next. script: what it does besides."""
        self._script = script or ScriptFile(None)
        self._weights = self._script
        weights = self._weights.read()
        self._cache = ToyCache(num_blocks, block_tokens, weights.weights)
        self._batch = ToyBatch(self._cache, max_running, weights.counts_by)
        self.numerics = numerics_class(engine=numerics)
        self._source = ToySource(self._batch, self._cache)
        self._destination = ToyDestination(self._batch, self._cache)
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

    def connect(self, on_outputs: OnOutputs, on_call_done: OnCallDone, on_exit: OnExit) -> None:
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

    def _hand_out(self, given: list[ToyRequest]) -> None:
        for client in {one.client for one in given}:
            outputs = [
                StepOutput(
                    one.request_id,
                    [one.tokens[-1]],
                    one.finish_reason,
                    [] if one.asked.logprobs is None else [TokenLogprob(0.0)],
                )
                for one in given
                if one.client == client
            ]
            self._put_out(client, outputs)

    def _put_out(self, client: int, outputs: list[StepOutput]) -> None:
        emitted = [
            EmittedTokens(one.request_id, len(one.token_ids), one.finished) for one in outputs
        ]
        self._on_outputs(client, emitted, [encode(outputs)])

    async def close(self, timeout_s: float) -> None:
        if self._stepping is not None:
            self._stepping.cancel()
            await asyncio.wait([self._stepping], timeout=timeout_s)
        self._copies.close()

    async def warm_up(self) -> None:
        """Do nothing: a toy compiles and loads nothing."""

    async def hold_session(self, request_id: str, ended: EndedRequest) -> None:
        raise MigrationRefused("unsupported", "a toy engine keeps no ended requests")

    async def park(self) -> None:
        # A migration's copy may be under way, into blocks that would be forgotten.
        if self._batch.running or self._batch.waiting or self._moving:
            raise NotParked("it has requests")
        self._cache.forget()

    async def unpark(self) -> None:
        if self._weights.read().counts_by != self._batch.counts_by:
            raise NotParked("it counts otherwise than before it was parked")

    async def load_weights(self, source: Path) -> str:
        """source: a script, whose `counts_by` is the weights; nothing else of it counts here."""
        await self._settled()
        weights = weights_at(source)
        self._batch.counts_by = weights.read().counts_by
        self._weights = weights
        self._cache.forget()
        self.layout = replace(self.layout, weights=weights.read().weights)
        return self.layout.weights

    async def _settled(self) -> None:
        """Wait until migrations hold nothing here: of one that was given up the destination has its
        blocks until its copies under way have ended. Raises WeightsInUse for requests."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            if self._batch.running or self._batch.waiting:
                raise WeightsInUse("it has requests")
            if not self._moving:
                return
            if time.monotonic() > deadline:
                raise WeightsInUse("it has requests that move")
            await asyncio.sleep(LOOK_S)

    @property
    def _moving(self) -> bool:
        """Whether migrations hold blocks here that no request in the batch has."""
        return bool(self._source.suspended() or self._destination.arriving)

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
        self, client: int, request_id: str, payload: Frames, output_token_ids: Sequence[int] = ()
    ) -> None:
        asked = decode(b"".join(payload), SubmittedRequest)
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
        self._batch.enter(ToyRequest(request_id, client, asked, tokens))
        self._work.set()

    def _refuse(self, client: int, request_id: str, why: str) -> None:
        self._put_out(client, [StepOutput(request_id, [], "error", error=why)])

    def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            request = self._source.forget(request_id) or self._batch.find(request_id)
            if request is None:
                continue
            if self._batch.find(request_id) is request:
                self._batch.remove(request)
            self._cache.give_back(request.blocks)

    def call(self, client: int, call_id: int, method: str, payload: Frames) -> None:
        self._on_call_done(client, call_id, f"a toy has no method {method}", [])

    def assign(self, request_id: str, client: int) -> None:
        self._destination.known(request_id).client = client

    def encode_request(
        self, prompt: Sequence[int], max_tokens: int, seed: int | None = None
    ) -> list[Frame]:
        """Encode a request, for the conformance suite."""
        return [
            encode(
                SubmittedRequest(
                    prompt_token_ids=list(prompt),
                    max_tokens=max_tokens,
                    temperature=0.0 if seed is None else 1.0,
                    seed=seed,
                )
            )
        ]

    def decode_outputs(self, frames: Frames) -> list[StepOutput]:
        """Decode outputs, for the conformance suite."""
        return decode(frames[0], list[StepOutput])

    # -- what it does and holds

    def cadence(self) -> StepCadence:
        """A cadence without times: steps are so short that none need wait for their ends."""
        return StepCadence(0.0, 0.0)

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
                PreemptionCount(priority, times, batch.below[priority])
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

    async def export(self, request_id: str) -> RequestExport:
        return self._source.export(request_id)

    async def stage(self, request_id: str, sent: int) -> StagedBlocks:
        return self._source.stage(request_id, sent)

    async def follow_prompt(
        self, request_id: str, sent: int, most_tokens: int
    ) -> StagedBlocks | RequestTail:
        stage = self._source.stage(request_id, sent)
        if not stage.decoding and not stage.block_ids:
            await asyncio.sleep(self._step_ms / 1000)  # the next chunk
            stage = self._source.stage(request_id, sent)
        if not stage.decoding or stage.num_tokens > most_tokens:
            return stage
        return self._source.suspend(request_id, sent)

    async def suspend(
        self, request_id: str, sent: int, out: memoryview | None = None
    ) -> RequestTail:
        return self._source.suspend(request_id, sent)

    async def resume(self, request_id: str) -> None:
        self._source.resume(request_id)
        self._work.set()

    async def release(self, request_id: str) -> None:
        self._source.release(request_id)

    # -- destination

    async def reserve(self, export: RequestExport) -> int:
        return self._destination.reserve(export)

    async def grow(self, request_id: str, num_tokens: int) -> list[int]:
        return self._destination.grow(request_id, num_tokens)

    async def prepare(self, request_id: str) -> None:
        """A step after a pause is like any other."""

    def expect(self, request_id: str, ms: float) -> None:
        """Do nothing: no step waits for a request."""

    async def commit(
        self, request_id: str, tail: RequestTail, last: CameBlocks | None = None
    ) -> None:
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


class ToyMoving(msgspec.Struct, frozen=True):
    """A request on its way: all that its next step depends on, except the KV. Clients and toys
    exchange what clients and transformers engines do."""

    asked: SubmittedRequest
    outputs: bytes
    """Tokens that it has put out."""
    computed: int
    """Tokens whose KV is in the blocks."""


@dataclass
class ToyLeaving:
    """A request that was exported. A preemption since then takes its blocks: it can't go on."""

    request: ToyRequest
    preemptions: int
    suspended: bool = False


class ToySource:
    """Requests that leave. Until `release` they can go on here at any moment."""

    def __init__(self, batch: ToyBatch, cache: ToyCache) -> None:
        self._batch = batch
        self._cache = cache
        self._leaving: dict[str, ToyLeaving] = {}

    def export(self, request_id: str) -> RequestExport:
        """Describe all of the request except its KV; it runs on."""
        request = self._batch.find(request_id)
        if request is None:
            raise RequestGone("unknown_request", f"{request_id} is not here")
        self._leaving[request_id] = ToyLeaving(request, request.preemptions)
        return RequestExport(request_id, len(request.tokens), [_encode(request)])

    def stage(self, request_id: str, sent: int) -> StagedBlocks:
        """Full blocks: no step writes them any more, so they can be copied while it runs on."""
        request = self._checked(request_id).request
        full = request.computed // self._cache.block_tokens
        room = len(request.tokens) if request.blocks else 0  # one that waits needs none yet
        return StagedBlocks(request.blocks[sent:full], room, request.num_outputs > 0)

    def suspend(self, request_id: str, sent: int) -> RequestTail:
        """Take the request out of the batch with its blocks; the last of them is part full."""
        leaving = self._checked(request_id)
        request = leaving.request
        leaving.suspended = True
        self._batch.remove(request)
        used = self._cache.needed(request.computed)
        return RequestTail(
            request.blocks[sent:used], len(request.tokens), request.num_outputs, _encode(request)
        )

    def resume(self, request_id: str) -> None:
        """Back to where it was, if it still lives."""
        leaving = self._leaving.pop(request_id, None)
        if leaving is not None and leaving.suspended:
            self._batch.put_back(leaving.request)

    def release(self, request_id: str) -> None:
        """Free a suspended request, which runs elsewhere now."""
        leaving = self._leaving.pop(request_id, None)
        if leaving is not None and leaving.suspended:
            self._cache.give_back(leaving.request.blocks)

    def forget(self, request_id: str) -> ToyRequest | None:
        """Forget a request whose client has left; returns it if it was suspended."""
        leaving = self._leaving.pop(request_id, None)
        return leaving.request if leaving is not None and leaving.suspended else None

    def suspended(self) -> list[ToyRequest]:
        """Requests out of the batch on a migration's behalf."""
        return [one.request for one in self._leaving.values() if one.suspended]

    def _checked(self, request_id: str) -> ToyLeaving:
        """Still here, and with the blocks that it had at the export."""
        leaving = self._leaving.get(request_id)
        if leaving is None:
            raise RequestGone("unknown_request", f"{request_id} was not exported")
        request = leaving.request
        if self._batch.find(request_id) is not request:
            del self._leaving[request_id]
            raise RequestGone("finished", f"{request_id} has ended")
        if request.preemptions != leaving.preemptions:
            del self._leaving[request_id]
            raise RequestGone("preempted", f"{request_id} was preempted")
        return leaving


class ToyDestination:
    """Requests that come. Until `commit` they are elsewhere; those that run hold blocks here."""

    def __init__(self, batch: ToyBatch, cache: ToyCache) -> None:
        self._batch = batch
        self._cache = cache
        self.arriving: dict[str, ToyRequest] = {}
        """Requests that hold a reservation, by id."""

    def reserve(self, export: RequestExport) -> int:
        """Blocks for the request. This engine shares no prefixes, so none has its KV yet."""
        request_id = export.request_id
        if self._batch.find(request_id) is not None or request_id in self.arriving:
            raise MigrationRefused("already_migrating", f"{request_id} is here")
        request = _decode(request_id, export.payload)
        asked = request.asked
        most = self._cache.needed(len(asked.prompt_token_ids) + asked.max_tokens)
        if most > self._cache.layout.num_blocks:
            raise MigrationRefused("incompatible", f"{most} blocks will never be free")
        if request.computed:
            self._take(request, len(request.tokens))
        self.arriving[request_id] = request
        return 0

    def grow(self, request_id: str, num_tokens: int) -> list[int]:
        """Hold room for `num_tokens` tokens and a block more; without room the reservation ends."""
        request = self.known(request_id)
        try:
            self._take(request, num_tokens + self._cache.block_tokens)
        except MigrationRefused:
            self.cancel(request_id)
            raise
        return list(request.blocks)

    def commit(self, request_id: str, tail: RequestTail) -> None:
        """Run the request here, and nowhere else, from now on."""
        arriving = self.known(request_id)
        request = _decode(request_id, [tail.state])
        request.client, request.blocks = arriving.client, arriving.blocks
        request.owed = request.computed > 0
        if self._cache.needed(request.computed) > len(request.blocks):
            raise MigrationRefused("no_blocks", f"{request.computed} tokens were never reserved")
        del self.arriving[request_id]
        if not request.computed:
            self._cache.give_back(request.blocks)  # it waits here as it did there
        self._batch.enter(request)

    def cancel(self, request_id: str) -> None:
        """Give back all that it held."""
        request = self.arriving.pop(request_id, None)
        if request is not None:
            self._cache.give_back(request.blocks)

    def _take(self, request: ToyRequest, num_tokens: int) -> None:
        """Hold room for `num_tokens` tokens; the first blocks bring a place in the batch."""
        if not request.blocks:
            taken = len(self._batch.running) + sum(bool(o.blocks) for o in self.arriving.values())
            if taken >= self._batch.max_running:
                raise MigrationRefused("no_batch_slot", f"{taken} requests run, or are about to")
        if not self._cache.extend_blocks(request.blocks, num_tokens):
            raise MigrationRefused("no_blocks", f"no room for {num_tokens} tokens")

    def known(self, request_id: str) -> ToyRequest:
        """Raises MigrationRefused."""
        if request_id not in self.arriving:
            raise MigrationRefused("unknown_request", f"{request_id} has no reservation")
        return self.arriving[request_id]


def _encode(request: ToyRequest) -> bytes:
    outputs = bytes(request.tokens[len(request.asked.prompt_token_ids) :])
    return msgspec.msgpack.encode(ToyMoving(request.asked, outputs, request.computed))


def _decode(request_id: str, payload: list[bytes]) -> ToyRequest:
    try:
        moving = msgspec.msgpack.decode(b"".join(payload), type=ToyMoving)
        tokens = bytearray(moving.asked.prompt_token_ids) + moving.outputs
    except (msgspec.MsgspecError, ValueError) as error:
        raise MigrationRefused("incompatible", f"an export of another kind: {error}") from error
    return ToyRequest(request_id, 0, moving.asked, tokens, moving.computed)
