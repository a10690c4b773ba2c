"""The Engine port: what an engine does for a llumlet, and in what words.

Every coroutine is called on the llumlet's event loop. What touches the engine's
scheduler runs on the engine's thread between two steps; copies of live stages run
on a copy thread of their own, so no step waits for them. An engine may gather and
scatter the few blocks of a tail between two steps. `request_id` is the id under which
the request was submitted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from kvmig.engines.handover import HOLE, CameBlocks, Export, Stage, Tail
from kvmig.engines.load import ClassLoad, EngineLoad, GroupLoad, Preempted, RequestState, StepTime
from kvmig.ground.layout import KVLayout

__all__ = [
    "HOLE",
    "Cadence",
    "CameBlocks",
    "ClassLoad",
    "Emitted",
    "Engine",
    "EngineLoad",
    "Export",
    "Frame",
    "GroupLoad",
    "OnCallDone",
    "OnOutputs",
    "Preempted",
    "RequestState",
    "ServingEngine",
    "Stage",
    "StepTime",
    "Tail",
]


class Cadence(msgspec.Struct, frozen=True):
    """Where an engine is in its steps, as seen at one moment. Milliseconds."""

    since_ms: float
    """Since the end of its last step."""
    step_ms: float
    """From the end of one step to the end of the next, lately; 0: it has nothing to do."""


class Engine(Protocol):
    """One engine instance behind a llumlet.

    Errors: `RequestGone` when the request is finished, aborted, unknown or was
    preempted since the last call for it; `MigrationRefused` with a reason when
    the engine can't (no room, no batch slot, kind of request not supported).
    After any error of a source method the request runs on as if never asked;
    after any error of a destination method nothing of it is left.
    """

    layout: KVLayout
    """Another one, with other `weights`, once these have been updated."""
    numerics: str
    """Its class (`kvmig.engines.numerics`): engines with equal weights and classes round alike."""
    can_hold: bool
    """Whether a step waits for a commit that it expects: see `expect`."""
    unmovable: str
    """Why none of its requests can be moved, nor any come, in a few words; empty when they can."""

    # -- what it does and holds
    def cadence(self) -> Cadence:
        """A cheap snapshot of its steps; from any thread."""
        ...

    def load(self) -> EngineLoad:
        """A cheap snapshot, taken between the last two steps (or calls, when idle)."""
        ...

    async def requests(self, most_waiting: int | None = None) -> list[RequestState]:
        """The requests that the engine holds; at the end those that wait, in the queue's order.

        most_waiting: of the queue only so many, from its head; None: all. During a long step
        those that it told of last.
        """
        ...

    # -- source
    async def export(self, request_id: str) -> Export:
        """Describe a running, prefilling or waiting request. It runs on."""
        ...

    async def stage(self, request_id: str, sent: int) -> Stage:
        """Post-check the request and name the full blocks after the first `sent`."""
        ...

    async def suspend(self, request_id: str, sent: int, out: memoryview | None = None) -> Tail:
        """Take the request out of the batch at the next step boundary; it keeps its blocks.

        out: where an engine that can gathers the remaining blocks at once, if they fit.
        """
        ...

    async def resume(self, request_id: str) -> None:
        """Put a suspended request back into the batch. Unknown ids are ignored."""
        ...

    async def release(self, request_id: str) -> None:
        """Forget a suspended request and free its blocks. Unknown ids are ignored."""
        ...

    # -- destination
    async def reserve(self, export: Export) -> int:
        """Take blocks for the request and return how many hold its prefix already.

        One that waits gets none, nor a place in the batch: it will wait here.
        """
        ...

    async def grow(self, request_id: str, num_tokens: int) -> list[int]:
        """Hold at least `num_tokens` tokens and one block spare; all block ids by their places.

        Places are the engine's own, and the same at both ends. Where all layers keep all tokens
        they are the request's blocks in order. HOLE: no block is kept there.
        """
        ...

    async def prepare(self, request_id: str) -> None:
        """The reserved request comes within some steps: make its first step a quick one."""
        ...

    def expect(self, request_id: str, ms: float) -> None:
        """The reserved request is committed in about `ms`.

        An engine that can holds the step that would begin shortly before, once, by at most
        `kvmig.engines.step_hold.limit_s`; another one, or one that doesn't know it, does nothing.
        """
        ...

    async def commit(self, request_id: str, tail: Tail, last: CameBlocks | None = None) -> None:
        """Run the reserved request from the tail's state at the next boundary.

        last: blocks to scatter and to check first.
        """
        ...

    async def cancel(self, request_id: str) -> None:
        """Free a reservation. Unknown ids are ignored."""
        ...

    # -- memory
    async def gather(
        self, block_ids: Sequence[int], out: memoryview, urgent: bool = False
    ) -> list[int]:
        """Copy blocks [n] into `out` [n * block_bytes], fused; returns n checksums.

        urgent: nobody decodes the request meanwhile, so it goes before other copies.
        """
        ...

    async def scatter(
        self, block_ids: Sequence[int], fused: memoryview, urgent: bool = False
    ) -> list[int]:
        """Copy `fused` [n * block_bytes] into blocks [n]; returns n checksums of what was read."""
        ...


Frame = bytes | bytearray | memoryview
"""One part of a message, in whatever buffer it came."""


class Emitted(msgspec.Struct, frozen=True):
    """What one step gave one request."""

    request_id: str
    tokens: int
    finished: bool


OnOutputs = Callable[[int, list[Emitted], list[Frame]], None]
"""(client, what each request got, the adapter's encoding of the outputs)."""
OnCallDone = Callable[[int, int, str | None, list[Frame]], None]
"""(client, call_id, error, the adapter's encoding of the result)."""


class ServingEngine(Engine, Protocol):
    """An engine that also takes requests from clients: what a llumlet runs.

    A client is a front end's number at this llumlet (1, 2, ...); 0 is the llumlet itself.
    """

    def connect(
        self,
        on_outputs: OnOutputs,
        on_call_done: OnCallDone,
        on_exit: Callable[[BaseException | None], None],
    ) -> None:
        """Start stepping; the callbacks run on the event loop that is running now."""
        ...

    def submit(
        self,
        client: int,
        request_id: str,
        payload: Sequence[Frame],
        output_token_ids: Sequence[int] = (),
    ) -> None:
        """Run a request (the front end's adapter encoded it) under this id.

        output_token_ids: it ran elsewhere and goes on after these, as if it had run here.
        One that can't ends with an error among the outputs.
        """
        ...

    def step_s(self) -> float:
        """For how many seconds the present step has been running, or what is done between two;
        0 while the engine has nothing to do."""
        ...

    def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests; those not here are ignored."""
        ...

    def call(self, client: int, call_id: int, method: str, payload: Sequence[Frame]) -> None:
        """Run an engine method between two steps; `on_call_done` hears the end."""
        ...

    def assign(self, request_id: str, client: int) -> None:
        """A reserved request's outputs will go to this client."""
        ...

    def describe(self) -> bytes:
        """What front ends must know of the engine, in the adapter's encoding."""
        ...

    async def warm_up(self) -> None:
        """Run what a first request would otherwise wait for."""
        ...

    async def step_times(self, limit_s: float) -> list[StepTime]:
        """How long decode steps take, for batches that grow; known ones, or measured now.

        After `warm_up` and before the first request. Ends after `limit_s` with what it has.
        """
        ...

    async def close(self, timeout_s: float) -> None:
        """Stop stepping and free everything."""
        ...
