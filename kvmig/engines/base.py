"""The Engine port: what an engine does for a llumlet, and in what words.

First what an engine reports of its load and of its requests, then what one engine gives another
of a request that moves, then the port itself (`Engine`, `ServingEngine`,
and `TrainableEngine` for one whose weights change).

Every coroutine is called on the llumlet's event loop. What touches the engine's
scheduler runs on the engine's thread between two steps; copies of live stages run
on a copy thread of their own, so no step waits for them. An engine may gather and
scatter the few blocks of a tail between two steps. `request_id` is the id under which
the request was submitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from kvmig.core.errors import MigrationRefused
from kvmig.core.layout import KVLayout
from kvmig.engines.gate import StepGate
from kvmig.engines.held_marks import HeldMarks


class ClassLoad(msgspec.Struct, frozen=True):
    """The load of one priority's requests. Sizes in KV blocks, counts in requests."""

    priority: int
    running: int
    waiting: int
    used_blocks: int
    """Blocks of those that run."""


class GroupLoad(msgspec.Struct, frozen=True):
    """A further pool of KV blocks, in an engine that has several. Sizes in its own blocks."""

    total_blocks: int
    used_blocks: int
    head_blocks: int
    waiting_blocks: int


class PreemptionCount(msgspec.Struct, frozen=True):
    """How often requests of one priority were preempted since the start."""

    priority: int
    times: int
    below: int
    """The preemptions at which a request of a smaller number was in the batch."""


class EngineLoad(msgspec.Struct, frozen=True):
    """The load of an instance now: of one size however many requests it has.

    Sizes in KV blocks, counts in requests.
    """

    total_blocks: int
    used_blocks: int
    running: int
    waiting: int
    head_blocks: int
    """Demand of the request at the head of the queue (0 when none waits)."""
    waiting_blocks: int
    """Demand of all waiting requests."""
    classes: tuple[ClassLoad, ...] = ()
    """The load of each priority that has requests here; empty: all are of priority 0."""
    groups: tuple[GroupLoad, ...] = ()
    """Further pools of blocks."""
    preempted: tuple[PreemptionCount, ...] = ()
    """Preemptions of each priority that was ever preempted."""
    seats: int = 0
    """Requests that can run at once; 0: as many as there are blocks for."""
    preempted_waiting: int = 0
    """Waiting requests that ran here and were preempted; 0 where the engine doesn't know."""
    prefill_blocks: int = 0
    """Blocks of running requests' prompts that are still to be computed before they decode."""
    limit_blocks: int = 0
    """What `total_blocks` could be if others that share its memory gave theirs; 0: none does."""
    unread: int = 0
    """Requests that have ended, and whose blocks a KV connector still keeps: another engine is to
    read them. They neither run nor wait."""

    @property
    def most_blocks(self) -> int:
        """What one request may need at most to ever run here."""
        return max(self.total_blocks, self.limit_blocks)


class CacheRoom(msgspec.Struct, frozen=True):
    """What an engine can have of KV cache that it shares with others. Bytes."""

    floor: int
    """Bytes of one request of the greatest length."""
    capacity: int
    """The most that it could use."""
    granule: int
    """Bytes that the engine gives and takes at a time."""


class KVUse(msgspec.Struct, frozen=True):
    """What an engine has of the KV cache that it shares with others of its host. Bytes."""

    lease: int
    """What it has not given back."""
    used: int
    """Bytes that requests hold."""
    cached: int
    """Bytes that only the prefix cache holds."""
    wanted: int
    """Bytes that all requests want: running ones with their growth soon, and waiting ones."""


class RequestState(msgspec.Struct, frozen=True):
    """One request as its engine sees it, for the admin API and for choosing victims."""

    request_id: str
    state: str
    """running, waiting or suspended."""
    tokens: int
    """Prompt and output tokens."""
    output_tokens: int
    blocks: int
    priority: int
    unmovable: str = ""
    """Why it can't be moved now, in a few words; empty when it can."""
    wanted_blocks: int = 0
    """Blocks that starting it takes; 0 when it runs."""
    age_ms: float = 0.0
    """How long ago all that was so: an engine in the middle of a step can't be asked."""
    arrived_s: float = 0.0
    """When it came to its front end, seconds of that one's clock; 0: not known."""

    @property
    def weight_blocks(self) -> int:
        """Blocks that the request will take at another instance: those it holds, or waits for."""
        return self.blocks or self.wanted_blocks


class StepTime(msgspec.Struct, frozen=True):
    """How long a decode step took, of a batch with `tokens` tokens of KV cache."""

    tokens: int
    ms: float


class StepCadence(msgspec.Struct, frozen=True):
    """An engine's position in its steps at one moment. Milliseconds."""

    since_ms: float
    """Time since the end of the last step."""
    step_ms: float
    """Recent time from the end of one step to the end of the next; 0: the engine is idle."""
    launch_ms: float = 0.0
    """How long before it begins a step is launched, where the engine launches one while another one
    runs (asynchronous scheduling). What comes after that, or leaves, does so a step later.
    0: a step is made when the one before has ended."""


HOLE = -1
"""Stands for a block id where the engine keeps no block, as before a window."""


MOST_BYTES = 256 << 20
"""A request that was submitted with more stays where it is. A connection carries that much in a
second or two, and a destination is waited for as long."""
MOST_FRAMES = 4000
"""Pieces of such a request, such as images."""


def too_large(payload: Sequence[bytes]) -> str:
    """Why a request that was submitted like this can't be moved; empty when it can."""
    size = sum(map(len, payload))
    if size > MOST_BYTES:
        return f"a request of {size} bytes with its images, allowed are {MOST_BYTES}"
    if len(payload) > MOST_FRAMES:
        return f"a request in {len(payload)} pieces, allowed are {MOST_FRAMES}"
    return ""


class RequestExport(msgspec.Struct, frozen=True):
    """A request as another engine needs it to take it over. `payload` is the adapter's own.

    Between two llumlets the payload travels behind the message, each of its parts as a frame.
    """

    request_id: str
    num_tokens: int
    payload: list[bytes]
    idle: bool = False
    """No request, but a session's blocks in a prefix cache: nothing runs after the commit. The
    payload is one that an engine refuses which doesn't know this field."""


class StagedBlocks(msgspec.Struct, frozen=True):
    """The blocks that may be copied while the source decodes on."""

    block_ids: list[int]
    """Full blocks of the request after the first `sent`, in order. They don't change any more."""
    num_tokens: int
    """The request's tokens now: the destination must have room for them and one block more.
    0: it waits and holds no block. It will wait there, whether there is room now or not."""
    decoding: bool = False
    """Whether its prompt is computed: then it gets a token each step."""
    places: list[int] = []
    """Positions of `block_ids` among the request's blocks, see `Engine.grow`; empty: from the
    first `sent` on, one after the other."""


class RequestTail(msgspec.Struct, frozen=True):
    """The rest of a suspended request."""

    block_ids: list[int]
    """The request's remaining blocks after the first `sent`, the last one usually part full."""
    num_tokens: int
    num_output_tokens: int
    state: bytes
    """The adapter's own: tokens since the export, sampling state."""
    checksums: list[int] = []
    """Checksums of `block_ids`, where `suspend` has gathered them already."""
    places: list[int] = []
    """Positions, as in `StagedBlocks`."""


class CopySums(list[int]):
    """Checksums of a copy's blocks, by an engine that measures its device."""

    def __init__(self, checksums: Iterable[int] = (), device_ms: float | None = None) -> None:
        super().__init__(checksums)
        self.device_ms = device_ms
        """Time from the copy's first work on the device to its end, by the device's events."""


def device_ms_of(checksums: list[int]) -> float | None:
    """How long a copy took on its device; None: no device copied, or it isn't known."""
    return checksums.device_ms if isinstance(checksums, CopySums) else None


@dataclass(frozen=True, slots=True)
class CameBlocks:
    """Fused blocks that came for a request, and where they go."""

    first: int
    """Which block of the request the first one is."""
    block_ids: list[int]
    fused: memoryview
    """[n * block_bytes]"""
    checksums: list[int]
    """Checksums of what the source has read."""

    def check(self, checksums: Sequence[int]) -> None:
        """Raises MigrationRefused ("corrupt") unless the destination has read the same."""
        for index, (sent, came) in enumerate(zip(self.checksums, checksums, strict=True)):
            if sent != came:
                raise MigrationRefused("corrupt", f"block {self.first + index} came changed")


class CacheSharing(Protocol):
    """The side of an engine whose KV cache can shrink and grow while it serves."""

    room: CacheRoom
    unlimited: str
    """Why its steps may take all of the device despite their share, in a few words; empty:
    they keep to it, or have none."""

    @property
    def use(self) -> KVUse:
        """A cheap snapshot, taken between two steps; from any thread."""
        ...

    def watch(self, on_use: Callable[[], None]) -> None:
        """Call `on_use`, from any thread, whenever `use` has changed."""
        ...

    async def resize(self, quota: int, limit: int, patience_s: float) -> None:
        """Have at most this many bytes: more at once, fewer as soon as they are free (see `use`).

        Requests that run keep what they hold for `patience_s`, so that they may move elsewhere;
        then the last ones are preempted. limit: bytes to have if others gave.
        """
        ...

    async def gated(self, gate: StepGate) -> None:
        """Ask `gate` before each step from now on."""
        ...


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
    """The engine's numerics class, see `kvmig.engines.identity`."""
    can_hold: bool
    """Whether a step waits for a commit that it expects: see `expect`."""
    unmovable: str
    """Why none of its requests can be moved, nor any come, in a few words; empty when they can."""
    sharing: CacheSharing | str
    """How the engine shares KV cache; or a short reason why it doesn't."""
    held_marks: HeldMarks | None
    """Which prompts' beginnings its prefix cache holds; None: it has no prefix cache, or doesn't
    say."""

    # -- what it does and holds
    def cadence(self) -> StepCadence:
        """A cheap snapshot of its steps; from any thread."""
        ...

    def load(self) -> EngineLoad:
        """A cheap snapshot, taken between the last two steps (or calls, when idle)."""
        ...

    async def requests(self, most_waiting: int | None = None) -> list[RequestState]:
        """The requests that the engine holds; at the end those that wait, in the queue's order.

        most_waiting: how many of the queue, from its head; None: all. During a long step
        those that it reported last.
        """
        ...

    # -- source
    async def export(self, request_id: str) -> RequestExport:
        """Describe a running, prefilling or waiting request. It runs on."""
        ...

    async def stage(self, request_id: str, sent: int) -> StagedBlocks:
        """Post-check the request and name the full blocks after the first `sent`."""
        ...

    async def follow_prompt(
        self, request_id: str, sent: int, most_tokens: int
    ) -> StagedBlocks | RequestTail:
        """Follow the request's prompt: while it is being computed this is `stage`, a step later at
        most, and once it is, `suspend`, between the same two steps: none here decodes the request.

        most_tokens: a request with more has decoded on, and isn't suspended.
        """
        ...

    async def suspend(
        self, request_id: str, sent: int, out: memoryview | None = None
    ) -> RequestTail:
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
    async def reserve(self, export: RequestExport) -> int:
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
        `kvmig.engines.steps.limit_s`; another one, or one that doesn't know it, does nothing.
        """
        ...

    async def commit(
        self, request_id: str, tail: RequestTail, last: CameBlocks | None = None
    ) -> None:
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

        urgent: the request isn't decoded meanwhile, so it goes before other copies. Of no blocks:
        a GPU does what it must do once with `out`, such as pinning its pages. Checksums that a
        device has computed may be `CopySums`. It may be called while copies are under way: they
        run one after the other, urgent ones first.
        """
        ...

    async def scatter(
        self, block_ids: Sequence[int], fused: memoryview, urgent: bool = False
    ) -> list[int]:
        """Copy `fused` [n * block_bytes] into blocks [n]; returns n checksums of what was read.

        Of no blocks, while copies are under way (the request's own, too), and `CopySums`: see
        `gather`. A call that is cancelled ends when no copy is at the blocks any more.
        """
        ...


Frame = bytes | bytearray | memoryview
"""One part of a message, in the buffer in which it came."""
Frames = Sequence[Frame]


class EndedRequest(msgspec.Struct, frozen=True):
    """A request that has ended, of which the prefix cache may have blocks still."""

    payload: Frames
    """The request as submitted."""
    output_token_ids: Sequence[int]
    shared_tokens: int = 0
    """The first tokens, which other sessions have, too: their blocks stay cached here."""


class EmittedTokens(msgspec.Struct, frozen=True):
    """The tokens that one step gave one request."""

    request_id: str
    tokens: int
    finished: bool


OnOutputs = Callable[[int, list[EmittedTokens], list[Frame]], None]
"""(client, what each request got, the adapter's encoding of the outputs)."""
OnCallDone = Callable[[int, int, str | None, list[Frame]], None]
"""(client, call_id, error, the adapter's encoding of the result)."""


OnExit = Callable[[BaseException | None], None]
"""Why the engine can't go on; None: it was closed."""


FIRST_GUEST = 1 << 20
"""Number of the first client that is a front end of another server."""


class ServingEngine(Engine, Protocol):
    """An engine that also takes requests from clients: what a llumlet runs.

    A client is a front end's number at this llumlet (1, 2, ..., from FIRST_GUEST on those of other
    servers, which get no statistics of the engine); 0 is the llumlet itself.
    """

    def connect(self, on_outputs: OnOutputs, on_call_done: OnCallDone, on_exit: OnExit) -> None:
        """Start stepping; the callbacks run on the event loop that is running now."""
        ...

    def submit(
        self, client: int, request_id: str, payload: Frames, output_token_ids: Sequence[int] = ()
    ) -> None:
        """Run a request (the front end's adapter encoded it) under this id.

        output_token_ids: it ran elsewhere and goes on after these, as if it had run here.
        One that can't ends with an error among the outputs.
        """
        ...

    def step_s(self) -> float:
        """Seconds since the present step, or the call between two steps, began;
        0 while the engine has nothing to do."""
        ...

    def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests; those not here are ignored."""
        ...

    def call(self, client: int, call_id: int, method: str, payload: Frames) -> None:
        """Run an engine method between two steps; `on_call_done` gets the result."""
        ...

    def assign(self, request_id: str, client: int) -> None:
        """A reserved request's outputs will go to this client."""
        ...

    def describe(self) -> bytes:
        """The engine's description for front ends, in the adapter's encoding."""
        ...

    async def hold_session(self, request_id: str, ended: EndedRequest) -> None:
        """Hold what the prefix cache has of a request that has ended, so that it can be moved.

        It is then exported, copied and released (or resumed: it stays cached here) as a request of
        this id, which never runs. Raises MigrationRefused, also where the engine can't.
        """
        ...

    async def warm_up(self) -> None:
        """Run what a first request would otherwise wait for."""
        ...

    async def step_times(self, limit_s: float) -> list[StepTime]:
        """How long decode steps take, for batches that grow; known ones, or measured now.

        After `warm_up` and before the first request. Ends after `limit_s` with what it has.
        """
        ...

    async def park(self) -> None:
        """Give the memory of the KV cache back, and forget what is in it, until requests come.

        Raises NotParked for an engine that has requests, or can't.
        """
        ...

    async def unpark(self) -> None:
        """Answer as before `park`. Raises NotParked if the engine doesn't compute what it did."""
        ...

    async def close(self, timeout_s: float) -> None:
        """Stop stepping and free everything."""
        ...


class TrainableEngine(ServingEngine, Protocol):
    """A serving engine whose weights a trainer replaces in place."""

    async def load_weights(self, source: Path) -> str:
        """Load the weights at `source`, forget what the prefix cache has of those before, and
        return their identity, which `layout` has as well.

        Requests that come meanwhile begin under the new weights. What a migration that was given up
        still holds is waited for. Raises WeightsInUse while the engine has requests, and
        ConfigError for a source that isn't there: then all is as before. After any other error the
        weights are part old: requests wait until another load succeeds.
        """
        ...
