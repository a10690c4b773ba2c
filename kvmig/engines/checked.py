"""A wrapper around an engine that watches whether its adapter keeps the Engine port's rules.

A broken rule raises ContractViolation, with the rule and the request's history, where the
migration can still be given up: so the request stays where it is. What is found too late for
that (a token that was put out, say) is kept in `violations`, and logged. `RULES` has all
rules. Costs a dictionary look-up a call, and with `content` a second gather of each request's
blocks in its pause: for tests.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from kvmig.core.errors import ContractViolation, KvmigError
from kvmig.core.layout import KVLayout
from kvmig.engines.base import (
    CameBlocks,
    EmittedTokens,
    Engine,
    EngineLoad,
    Frame,
    Frames,
    OnCallDone,
    OnExit,
    OnOutputs,
    RequestExport,
    RequestState,
    RequestTail,
    ServingEngine,
    StagedBlocks,
    StepCadence,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

RULES = {
    "known-blocks": "Block ids are below the layout's num_blocks, and none is named twice.",
    "own-blocks": "A reserved block belongs to one request only, except for prefixes that were"
    " cached before.",
    "stable-blocks": "Named blocks keep their position in the request.",
    "enough-blocks": "grow holds as many tokens as were requested.",
    "full-blocks": "stage names full blocks only.",
    "whole-tail": "A tail's blocks end with the request's last token, and not before.",
    "growing-tokens": "A request never has fewer tokens than before.",
    "still-when-suspended": "The engine outputs nothing for a suspended request.",
    "silent-until-commit": "The engine outputs nothing for a reserved request before its commit.",
    "gone-after-release": "The engine outputs nothing for a released request.",
    "same-layout": "The layout never changes, except for the identity of the weights.",
    "one-checksum-a-block": "gather and scatter return a checksum for each block.",
    "same-content": "Staged blocks are not written any more.",
    "known-errors": "Methods raise RequestGone or MigrationRefused, and nothing else.",
}
_REMEMBERED = 64
_KEPT = 4096
"""Requests that don't move now, but whose history may be wanted."""


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
        self.sharing = engine.sharing
        self.held_marks = engine.held_marks
        self._rules = AdapterRules(engine.layout)
        self.violations: list[ContractViolation] = []
        """The violations found, raised or not."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    # -- what it does and holds

    def cadence(self) -> StepCadence:
        return self._engine.cadence()

    def load(self) -> EngineLoad:
        return self._engine.load()

    async def requests(self, most_waiting: int | None = None) -> list[RequestState]:
        return await self._call("", "requests", self._engine.requests(most_waiting))

    # -- source

    async def export(self, request_id: str) -> RequestExport:
        export = await self._call(request_id, "export", self._engine.export(request_id))
        self._rules.exported(request_id, export.num_tokens)
        return export

    async def stage(self, request_id: str, sent: int) -> StagedBlocks:
        stage = await self._call(request_id, f"stage {sent}", self._engine.stage(request_id, sent))
        self._check(self._rules.staged, request_id, sent, stage)
        if self._content and stage.block_ids:
            self._check(
                self._rules.gathered, request_id, sent, await self._checksums(stage.block_ids)
            )
        return stage

    async def follow_prompt(
        self, request_id: str, sent: int, most_tokens: int
    ) -> StagedBlocks | RequestTail:
        found = await self._call(
            request_id,
            f"follow_prompt {sent}",
            self._engine.follow_prompt(request_id, sent, most_tokens),
        )
        if isinstance(found, StagedBlocks):
            self._check(self._rules.staged, request_id, sent, found)
            return found
        return await self._checked_tail(request_id, sent, found)

    async def suspend(
        self, request_id: str, sent: int, out: memoryview | None = None
    ) -> RequestTail:
        tail = await self._call(
            request_id, f"suspend {sent}", self._engine.suspend(request_id, sent, out)
        )
        return await self._checked_tail(request_id, sent, tail)

    async def _checked_tail(self, request_id: str, sent: int, tail: RequestTail) -> RequestTail:
        self._check(self._rules.suspended, request_id, sent, tail)
        entry = self._rules.entry(request_id)
        if self._content and entry.checksums:
            staged = [entry.blocks[place] for place in sorted(entry.checksums)]
            now = await self._checksums(staged)
            self._check(self._rules.gathered, request_id, min(entry.checksums), now)
        return tail

    async def resume(self, request_id: str) -> None:
        self._rules.record_left(request_id, "")
        await self._call(request_id, "resume", self._engine.resume(request_id))

    async def release(self, request_id: str) -> None:
        await self._call(request_id, "release", self._engine.release(request_id))
        if self._rules.entry(request_id).state == "suspended":
            self._rules.record_left(request_id, "released")

    # -- destination

    async def reserve(self, export: RequestExport) -> int:
        request_id = export.request_id
        hits = await self._call(request_id, "reserve", self._engine.reserve(export))
        self._rules.reserved(request_id, hits)
        return hits

    async def grow(self, request_id: str, num_tokens: int) -> list[int]:
        block_ids = await self._call(
            request_id, f"grow {num_tokens}", self._engine.grow(request_id, num_tokens)
        )
        self._check(self._rules.grown, request_id, num_tokens, block_ids)
        return block_ids

    async def prepare(self, request_id: str) -> None:
        await self._call(request_id, "prepare", self._engine.prepare(request_id))

    def expect(self, request_id: str, ms: float) -> None:
        self._engine.expect(request_id, ms)

    async def commit(
        self, request_id: str, tail: RequestTail, last: CameBlocks | None = None
    ) -> None:
        # From now on it may put tokens out, before this call has returned.
        self._rules.free(request_id)
        await self._call(request_id, "commit", self._engine.commit(request_id, tail, last))

    async def cancel(self, request_id: str) -> None:
        if self._rules.entry(request_id).state == "reserved":
            self._rules.free(request_id)
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
        self._check(self._rules.copied, "", len(block_ids), checksums)
        return checksums

    async def _checksums(self, block_ids: Sequence[int]) -> list[int]:
        size = len(block_ids) * self.layout.block_bytes
        return await self._engine.gather(block_ids, memoryview(bytearray(size)))

    async def _call(self, request_id: str, what: str, call: Awaitable[T]) -> T:
        if request_id:
            self._rules.add_history(request_id, what)
        try:
            result = await call
        except KvmigError as error:
            if request_id:
                self._rules.add_history(request_id, f"({error})")
            raise
        except Exception as error:
            violation = self._rules.broken("known-errors", request_id, f"{what}: {error!r}")
            self._found(violation)
            raise violation from error
        self.layout = self._engine.layout
        self._check(self._rules.layout_is, self.layout)
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

    def connect(self, on_outputs: OnOutputs, on_call_done: OnCallDone, on_exit: OnExit) -> None:

        def heard(client: int, emitted: list[EmittedTokens], frames: list[Frame]) -> None:
            for entry in emitted:
                try:
                    self._rules.emitted(entry.request_id)
                except ContractViolation as violation:
                    self._found(violation)
            on_outputs(client, emitted, frames)

        self._serving.connect(heard, on_call_done, on_exit)

    def submit(
        self, client: int, request_id: str, payload: Frames, output_token_ids: Sequence[int] = ()
    ) -> None:
        self._rules.free(request_id)
        self._serving.submit(client, request_id, payload, output_token_ids)


@dataclass
class CheckedRequest:
    """What is known of one request at one engine."""

    history: deque[str] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    num_tokens: int = 0
    blocks: dict[int, int] = field(default_factory=dict)
    """Blocks named so far, by their place: from the destination's hits on."""
    hits: int = 0
    checksums: dict[int, int] = field(default_factory=dict)
    """Checksums of staged blocks, by place, when they were gathered first."""
    state: str = ""
    """leaving, suspended, released or reserved; empty: not moving."""


class AdapterRules:
    """Checks what an adapter says of each request that moves against what it said before: pure.

    Methods raise ContractViolation.
    """

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout
        self._entries: dict[str, CheckedRequest] = {}

    def entry(self, request_id: str) -> CheckedRequest:
        """Made at the first call."""
        if request_id not in self._entries:
            self._forget_old()
        return self._entries.setdefault(request_id, CheckedRequest())

    def add_history(self, request_id: str, what: str) -> None:
        """Add a line to the request's history."""
        self.entry(request_id).history.append(what)

    def broken(self, rule: str, request_id: str, detail: str) -> ContractViolation:
        """The error of a broken rule, with the request's history."""
        history = tuple(self.entry(request_id).history) if request_id else ()
        return ContractViolation(rule, request_id, f"{detail}. {RULES[rule]}", history)

    def layout_is(self, layout: KVLayout) -> None:
        """Check the layout that the engine says now."""
        if replace(layout, weights=self._layout.weights) != self._layout:
            raise self.broken("same-layout", "", f"it was {self._layout}, is {layout}")

    # -- source

    def exported(self, request_id: str, num_tokens: int) -> None:
        """A new attempt to move it."""
        history = self.entry(request_id).history
        self._entries[request_id] = CheckedRequest(history, num_tokens, state="leaving")

    def staged(self, request_id: str, sent: int, stage: StagedBlocks) -> None:
        """`stage` returned this."""
        if stage.num_tokens:
            self._tokens(request_id, stage.num_tokens)
        self._named(request_id, sent, stage.block_ids)
        most = stage.num_tokens // self._layout.block_tokens
        if sent + len(stage.block_ids) > max(most, sent):
            raise self.broken(
                "full-blocks",
                request_id,
                f"{sent + len(stage.block_ids)} blocks of {stage.num_tokens} tokens",
            )

    def suspended(self, request_id: str, sent: int, tail: RequestTail) -> None:
        """`suspend` returned this."""
        self.entry(request_id).state = "suspended"
        self._rest(request_id, sent, tail)

    def gathered(self, request_id: str, first: int, checksums: Sequence[int]) -> None:
        """Checksums of the request's full blocks from the `first` on, now."""
        known = self.entry(request_id).checksums
        for place, checksum in enumerate(checksums, first):
            if known.setdefault(place, checksum) != checksum:
                raise self.broken("same-content", request_id, f"block {place} has changed")

    def record_left(self, request_id: str, state: str) -> None:
        """The request was resumed (state empty) or released."""
        entry = self.entry(request_id)
        self._entries[request_id] = CheckedRequest(entry.history, state=state)

    # -- destination

    def reserved(self, request_id: str, hits: int) -> None:
        """`reserve` found `hits` blocks."""
        entry = self.entry(request_id)
        self._entries[request_id] = CheckedRequest(entry.history, hits=hits, state="reserved")

    def grown(self, request_id: str, num_tokens: int, block_ids: Sequence[int]) -> None:
        """`grow` returned these."""
        entry = self.entry(request_id)
        if len(block_ids) * self._layout.block_tokens < num_tokens:
            raise self.broken(
                "enough-blocks", request_id, f"{len(block_ids)} blocks for {num_tokens} tokens"
            )
        self._named(request_id, 0, block_ids)
        mine = set(block_ids[entry.hits :])
        for other_id, other in self._entries.items():
            shared = mine & set(other.blocks.values()) if other_id != request_id else ()
            if shared and other.state == "reserved":
                raise self.broken(
                    "own-blocks", request_id, f"blocks {sorted(shared)} are {other_id}'s"
                )

    def free(self, request_id: str) -> None:
        """The request was committed or cancelled: nothing is known of its blocks any more."""
        self.record_left(request_id, "")

    # -- both

    def emitted(self, request_id: str) -> None:
        """The request put something out."""
        state = self._entries[request_id].state if request_id in self._entries else ""
        rule = {
            "suspended": "still-when-suspended",
            "reserved": "silent-until-commit",
            "released": "gone-after-release",
        }.get(state)
        if rule:
            raise self.broken(rule, request_id, f"it is {state}, and has put out a token")

    def copied(self, request_id: str, blocks: int, checksums: Sequence[int]) -> None:
        """gather or scatter of `blocks` blocks returned these checksums."""
        if len(checksums) != blocks:
            raise self.broken(
                "one-checksum-a-block", request_id, f"{len(checksums)} for {blocks} blocks"
            )

    def _forget_old(self) -> None:
        if len(self._entries) < _KEPT:
            return
        still = [key for key, one in self._entries.items() if one.state in ("", "released")]
        for key in still[: _KEPT // 2]:
            del self._entries[key]

    def _rest(self, request_id: str, sent: int, tail: RequestTail) -> None:
        self._tokens(request_id, tail.num_tokens)
        self._named(request_id, sent, tail.block_ids)
        count, size = sent + len(tail.block_ids), self._layout.block_tokens
        least = -(-(tail.num_tokens - 1) // size) if tail.num_output_tokens and count else 0
        if not least <= max(count, sent) <= max(-(-tail.num_tokens // size), sent):
            raise self.broken(
                "whole-tail", request_id, f"{count} blocks for {tail.num_tokens} tokens"
            )

    def _tokens(self, request_id: str, num_tokens: int) -> None:
        entry = self.entry(request_id)
        if num_tokens < entry.num_tokens:
            raise self.broken(
                "growing-tokens", request_id, f"{entry.num_tokens} tokens before, now {num_tokens}"
            )
        entry.num_tokens = num_tokens

    def _named(self, request_id: str, first: int, block_ids: Sequence[int]) -> None:
        entry, layout = self.entry(request_id), self._layout
        wrong = [block for block in block_ids if not 0 <= block < layout.num_blocks]
        if wrong or len(set(block_ids)) < len(block_ids):
            raise self.broken("known-blocks", request_id, f"blocks {list(block_ids)}")
        named = dict(enumerate(block_ids, first))
        known = {place: block for place, block in entry.blocks.items() if place in named}
        if any(named[place] != block for place, block in known.items()):
            raise self.broken(
                "stable-blocks",
                request_id,
                f"from block {first} on {list(known.values())} before, now {list(block_ids)}",
            )
        entry.blocks |= named
