"""A wrapper around an engine that watches whether its adapter keeps the Engine port's rules.

A broken rule raises ContractViolation, with the rule and the request's history, where the
migration can still be given up: so the request stays where it is. What is found too late for
that (a token that was put out, say) is kept in `violations`, and logged. `ledger.RULES` has all
rules. Costs a dictionary look-up a call, and with `content` a second gather of each request's
blocks in its pause: for tests.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from kvmig.engines.base import (
    Cadence,
    CameBlocks,
    Emitted,
    Engine,
    EngineLoad,
    Export,
    Frame,
    OnCallDone,
    OnOutputs,
    RequestState,
    ServingEngine,
    Stage,
    Tail,
)
from kvmig.engines.ledger import Ledger
from kvmig.ground.errors import ContractViolation, KvmigError

log = logging.getLogger(__name__)

T = TypeVar("T")


class CheckedEngine:
    """Implements `Engine`; what else the engine has is passed on."""

    def __init__(self, engine: Engine, content: bool = False) -> None:
        """content: gather staged blocks again in the pause and compare them."""
        self._engine = engine
        self._content = content
        self.layout = engine.layout
        self.numerics = engine.numerics
        self.can_hold = engine.can_hold
        self.unmovable = engine.unmovable
        self._ledger = Ledger(engine.layout)
        self.violations: list[ContractViolation] = []
        """All that were found, raised or not."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    # -- what it does and holds

    def cadence(self) -> Cadence:
        return self._engine.cadence()

    def load(self) -> EngineLoad:
        return self._engine.load()

    async def requests(self, most_waiting: int | None = None) -> list[RequestState]:
        return await self._call("", "requests", self._engine.requests(most_waiting))

    # -- source

    async def export(self, request_id: str) -> Export:
        export = await self._call(request_id, "export", self._engine.export(request_id))
        self._ledger.exported(request_id, export.num_tokens)
        return export

    async def stage(self, request_id: str, sent: int) -> Stage:
        stage = await self._call(request_id, f"stage {sent}", self._engine.stage(request_id, sent))
        self._check(self._ledger.staged, request_id, sent, stage)
        if self._content and stage.block_ids:
            self._check(
                self._ledger.gathered, request_id, sent, await self._checksums(stage.block_ids)
            )
        return stage

    async def suspend(self, request_id: str, sent: int, out: memoryview | None = None) -> Tail:
        tail = await self._call(
            request_id, f"suspend {sent}", self._engine.suspend(request_id, sent, out)
        )
        self._check(self._ledger.suspended, request_id, sent, tail)
        entry = self._ledger.entry(request_id)
        if self._content and entry.checksums:
            staged = [entry.blocks[place] for place in sorted(entry.checksums)]
            now = await self._checksums(staged)
            self._check(self._ledger.gathered, request_id, min(entry.checksums), now)
        return tail

    async def resume(self, request_id: str) -> None:
        self._ledger.left(request_id, "")
        await self._call(request_id, "resume", self._engine.resume(request_id))

    async def release(self, request_id: str) -> None:
        await self._call(request_id, "release", self._engine.release(request_id))
        if self._ledger.entry(request_id).state == "suspended":
            self._ledger.left(request_id, "released")

    # -- destination

    async def reserve(self, export: Export) -> int:
        request_id = export.request_id
        hits = await self._call(request_id, "reserve", self._engine.reserve(export))
        self._ledger.reserved(request_id, hits)
        return hits

    async def grow(self, request_id: str, num_tokens: int) -> list[int]:
        block_ids = await self._call(
            request_id, f"grow {num_tokens}", self._engine.grow(request_id, num_tokens)
        )
        self._check(self._ledger.grown, request_id, num_tokens, block_ids)
        return block_ids

    async def prepare(self, request_id: str) -> None:
        await self._call(request_id, "prepare", self._engine.prepare(request_id))

    def expect(self, request_id: str, ms: float) -> None:
        self._engine.expect(request_id, ms)

    async def commit(self, request_id: str, tail: Tail, last: CameBlocks | None = None) -> None:
        # From now on it may put tokens out, before this call has returned.
        self._ledger.free(request_id)
        await self._call(request_id, "commit", self._engine.commit(request_id, tail, last))

    async def cancel(self, request_id: str) -> None:
        if self._ledger.entry(request_id).state == "reserved":
            self._ledger.free(request_id)
        await self._call(request_id, "cancel", self._engine.cancel(request_id))

    # -- memory

    async def gather(
        self, block_ids: Sequence[int], out: memoryview, urgent: bool = False
    ) -> list[int]:
        return await self._copied("gather", block_ids, self._engine.gather(block_ids, out, urgent))

    async def scatter(
        self, block_ids: Sequence[int], fused: memoryview, urgent: bool = False
    ) -> list[int]:
        copy = self._engine.scatter(block_ids, fused, urgent)
        return await self._copied("scatter", block_ids, copy)

    # -- helpers

    async def _copied(
        self, method: str, block_ids: Sequence[int], copy: Awaitable[list[int]]
    ) -> list[int]:
        checksums = await self._call("", method, copy)
        self._check(self._ledger.copied, "", len(block_ids), checksums)
        return checksums

    async def _checksums(self, block_ids: Sequence[int]) -> list[int]:
        size = len(block_ids) * self.layout.block_bytes
        return await self._engine.gather(block_ids, memoryview(bytearray(size)))

    async def _call(self, request_id: str, what: str, call: Awaitable[T]) -> T:
        if request_id:
            self._ledger.note(request_id, what)
        try:
            result = await call
        except KvmigError as error:
            if request_id:
                self._ledger.note(request_id, f"({error})")
            raise
        except Exception as error:
            violation = self._ledger.broken("known-errors", request_id, f"{what}: {error!r}")
            self._found(violation)
            raise violation from error
        self.layout = self._engine.layout
        self._check(self._ledger.layout_is, self.layout)
        return result

    def _check(self, rule: Callable[..., None], *args: Any) -> None:
        try:
            rule(*args)
        except ContractViolation as violation:
            self._found(violation)
            raise

    def _found(self, violation: ContractViolation) -> None:
        log.error("%s", violation)
        self.violations.append(violation)


class CheckedServingEngine(CheckedEngine):
    """Implements `ServingEngine`, and watches what requests put out."""

    def __init__(self, engine: ServingEngine, content: bool = False) -> None:
        super().__init__(engine, content)
        self._serving = engine

    def connect(
        self,
        on_outputs: OnOutputs,
        on_call_done: OnCallDone,
        on_exit: Callable[[BaseException | None], None],
    ) -> None:
        """As the engine's."""

        def heard(client: int, emitted: list[Emitted], frames: list[Frame]) -> None:
            for entry in emitted:
                try:
                    self._ledger.emitted(entry.request_id)
                except ContractViolation as violation:
                    self._found(violation)
            on_outputs(client, emitted, frames)

        self._serving.connect(heard, on_call_done, on_exit)

    def submit(
        self,
        client: int,
        request_id: str,
        payload: Sequence[Frame],
        output_token_ids: Sequence[int] = (),
    ) -> None:
        """As the engine's: a new request."""
        self._ledger.free(request_id)
        self._serving.submit(client, request_id, payload, output_token_ids)
