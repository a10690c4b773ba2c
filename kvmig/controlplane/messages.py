"""Messages between front ends, llumlets and the scheduler: tagged, versioned, typed."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvmig.controlplane.front_messages import FrontMessage
from kvmig.core.errors import KvmigError
from kvmig.core.order_fence import NO_TOKEN, OrderToken
from kvmig.core.start_times import StartTimes
from kvmig.engines.base import EngineLoad, RequestState
from kvmig.engines.held_marks import PrefixNews
from kvmig.kvtransfer.report import MigrationReport
from kvmig.rpc.messages import Hello, ProtocolVersion, RpcMessage
from kvmig.sharing.messages import InUnit

# -- what a llumlet tells everyone who said hello


class Welcome(RpcMessage, frozen=True, tag=True):
    """Llumlet: answer to Hello. `engine` is the adapter's own description for front ends."""

    protocol: int
    instance: str
    engine: bytes = b""
    minor: int = 0
    weights: str = ""
    """Identity of its weights; load reports show when they are updated."""
    pid: int = 0
    """The process's id, on its host."""
    host: str = ""
    gpus: tuple[str, ...] = ()
    """Ids of the GPUs that it may use."""
    times: StartTimes | None = None
    """How long its start took; None: it doesn't say."""
    block_bytes: int = 0
    """Bytes of a block of its KV cache; 0: it doesn't say."""

    @property
    def version(self) -> ProtocolVersion:
        """The version that the llumlet speaks."""
        return ProtocolVersion(self.protocol, self.minor)


class LoadReport(RpcMessage, frozen=True, tag=True):
    """Llumlet: its load, every `heartbeat_interval_ms` or on change.

    It has one size for any number of requests, so that no other's cost grows with them.
    """

    instance: str
    seq: int
    load: EngineLoad
    migrations_in: int
    migrations_out: int
    state: str = "serving"
    """starting, serving, draining, hung (its present step takes too long) or failed."""
    staging_used: int = 0
    """Staging buffers that migrations out of it hold."""
    headroom: dict[int, float] = msgspec.field(default_factory=dict)
    """Priority -> KV blocks to keep free for all its running requests together (absent: 0)."""
    bandwidth: float = 0.0
    """KV blocks per second that migrations out of it have lately sent; 0: none was measured."""
    refused: dict[str, int] = msgspec.field(default_factory=dict)
    """Messages that it has refused, by reason (`kvmig.core.errors.PeerError`)."""
    unmovable: str = ""
    """Why no request can be moved from it or to it; empty when they can."""
    weights: str = ""
    """Identity of its weights: a stream that has begun goes on nowhere else."""
    numerics: str = ""
    """Numerics class: nothing moves to another one without an order that allows it."""
    shared: InUnit | None = None
    """The instance's share of a unit; None: it shares no KV cache."""
    untold: int = 0
    """Migrations whose outcome was not reported to front ends yet. A request may have gone by one,
    and only this llumlet knows where it is."""
    parked: bool = False
    """Whether the memory of its KV cache is given back."""
    beside_kv: int = 0
    """Most bytes of the host's memory that its processes have taken apart from the KV cache; 0: not
    known."""
    likeness: str = ""
    """What another engine must equal it in besides weights and numerics, so that a request of one
    can go on at the other: in words, for people, too."""
    prefixes: PrefixNews | None = None
    """Beginnings of prompts whose KV has come or gone, for front ends; None: nothing has."""


class Overrun(RpcMessage, frozen=True, tag=True):
    """Llumlet: you have not read so much that your requests here are over: connect again."""


# -- front end to llumlet


class Submit(RpcMessage, frozen=True, tag=True):
    """Front end: run this request (payload frames: the adapter's encoding)."""

    request_id: str
    """The run's own id, see `kvmig.frontend.requests.LiveRequest`."""
    output_token_ids: tuple[int, ...] = ()
    """Tokens of a request that ran elsewhere: it goes on after these."""


class AbortRequests(RpcMessage, frozen=True, tag=True):
    """Front end: these requests are not wanted any more, wherever they went from here."""

    request_ids: list[str]


class Discard(RpcMessage, frozen=True, tag=True):
    """Front end: your copy of this request at this epoch is stale (fenced off or unwanted).

    Drop it there only: unlike AbortRequests, never passed on to where the request went.
    """

    request_id: str
    epoch: int


class EngineCall(RpcMessage, frozen=True, tag="Call"):
    """Front end: run an engine method (payload frames: the adapter's encoding of arguments)."""

    call_id: int
    method: str


class CallDone(RpcMessage, frozen=True, tag=True):
    """Llumlet: the call's result (payload frames), or why it failed."""

    call_id: int
    error: str | None = None


class ListRequests(RpcMessage, frozen=True, tag=True):
    """Front end: which requests are there?"""

    call_id: int


class ListedRequests(RpcMessage, frozen=True, tag="Requests"):
    """Llumlet: these."""

    call_id: int
    requests: list[RequestState]
    fronts: dict[str, str] = msgspec.field(default_factory=dict)
    """Request -> name of the front end whose stream it is."""


class Migrate(RpcMessage, frozen=True, tag=True):
    """Front end: move this request there, and report."""

    call_id: int
    request_id: str
    destination: str
    endpoint: str
    inexact: bool = False
    """Also to an instance of another numerics class."""


class MoveSession(RpcMessage, frozen=True, tag=True):
    """Front end: move what your prefix cache has of a session, and report (`Migrated`).

    Payload: the session's last request, as it was submitted.
    """

    call_id: int
    request_id: str
    """The move's id, which no request has."""
    destination: str
    endpoint: str
    output_token_ids: tuple[int, ...] = ()
    """What that request gave."""
    shared_tokens: int = 0
    """The first ones, which other sessions have, too: they stay."""
    inexact: bool = False
    """Also to an instance of another numerics class."""
    patience_ms: float = 0.0
    """A drain: longest wait for a time when no request moves, for these come first; 0: it is moved
    by hand, at once."""


class Migrated(RpcMessage, frozen=True, tag=True):
    """Llumlet: how a migration ended (call_id 0: the scheduler asked, not a front end)."""

    call_id: int
    report: MigrationReport
    front: str = ""
    """Front end whose stream it is, if it was known here."""
    epoch: int = 0
    """The epoch under which the request ran at the source before."""


class OutputSpan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The position in its stream of one request's tokens in an Outputs message."""

    request_id: str
    epoch: int
    start: int
    """Output tokens of the request before these."""


class Outputs(RpcMessage, frozen=True, tag=True):
    """Llumlet: what a step gave (payload frames: the adapter's encoding), one span a request."""

    spans: list[OutputSpan]


class Fence(RpcMessage, frozen=True, tag=True):
    """Front end: is the migration to this epoch committed there? If not, it never will be."""

    call_id: int
    request_id: str
    epoch: int


class Fenced(RpcMessage, frozen=True, tag=True):
    """Llumlet: answer to Fence, final."""

    call_id: int
    committed: bool


class Resolve(RpcMessage, frozen=True, tag=True):
    """Source llumlet to the front end: the destination doesn't answer; who runs the request?"""

    mid: str
    request_id: str
    epoch: int
    destination: str


class PauseAhead(RpcMessage, frozen=True, tag=True):
    """Source llumlet to the front end: in some steps this request is moved on, and its client waits
    for a token longer than usual. That may be spread over the tokens before it.

    Advice: nothing depends on it, and after an aborted migration none waits for it.
    """

    request_id: str
    pause_ms: float
    stretch_ms: float
    """Added delay of each token over the delay of the one before."""


class Resolved(RpcMessage, frozen=True, tag=True):
    """Front end: `moved` - the destination runs it; otherwise the source goes on."""

    mid: str
    moved: bool


# -- the lives of instances


Refusal = Literal["", "unknown", "conflict", "invalid", "failed"]
"""Why an order isn't carried out: no such instance, not in its present state, bad values; or
the launcher failed at it."""


class OrderRefused(KvmigError):
    """An order can't be carried out, and nothing was changed; the message has the reason."""

    def __init__(self, refusal: Refusal, sentence: str) -> None:
        super().__init__(sentence)
        self.refusal = refusal


class AddInstances(RpcMessage, frozen=True, tag=True):
    """Front end to the launcher: start `count` more, with these flags of vLLM's besides.

    tree: as in RestartInstances; None: that of most of the others. gpus: ids of those that each
    runs on, as CUDA_VISIBLE_DEVICES has them; none: the launcher chooses. unit: name of where they
    are in a placement. decode_share: percent of the device for their steps with decodes only; 0: as
    --unit-shares has it. node: id of the Ray node that they run on; empty:
    Ray chooses. token: of this and other orders, see `kvmig.core.order_fence`.
    """

    call_id: int
    count: int = 1
    flags: str = ""
    tree: str | None = None
    gpus: tuple[str, ...] = ()
    unit: str = ""
    decode_share: int = 0
    node: str = ""
    token: OrderToken = NO_TOKEN


class DrainInstance(RpcMessage, frozen=True, tag=True):
    """Front end to the launcher: let its requests go elsewhere.

    instance: empty: all of the server, whose requests other servers take.
    deadline_s: after that time by recompute, or with an error where no other instance has the
    request's weights; None: the launcher's --drain-deadline, and no such error.
    leave: end it when it is empty. now: end it at once. last: end it even if no other serves;
    it serves until then.
    """

    call_id: int
    instance: str
    deadline_s: float | None = None
    leave: bool = False
    now: bool = False
    last: bool = False
    token: OrderToken = NO_TOKEN


class StopDrain(RpcMessage, frozen=True, tag=True):
    """Front end to the launcher: let it serve again; empty: all of the server that drain."""

    call_id: int
    instance: str
    token: OrderToken = NO_TOKEN


class RestartInstances(RpcMessage, frozen=True, tag=True):
    """Front end to the launcher: start these again, one after the other, each once it is drained.

    instances: none: all that serve. deadline_s: as in DrainInstance, of each. tree: folder of the
    engine that they are from then on, empty: the installed one; None: as they were. flags: of the
    engine, that they have from then on behind those of all, and so do all that start later; None:
    as they were.
    """

    call_id: int
    instances: tuple[str, ...] = ()
    deadline_s: float | None = None
    tree: str | None = None
    flags: str | None = None
    token: OrderToken = NO_TOKEN


class RaiseFence(RpcMessage, frozen=True, tag=True):
    """Front end to the launcher: carry out no order with an earlier token any more. The launcher
    refuses it if its own token is an earlier one."""

    call_id: int
    token: OrderToken


class SetGuarantee(RpcMessage, frozen=True, tag=True):
    """Front end to a llumlet: of your unit's KV cache, this is what you get back whenever you want
    it, bytes; 0: a fair part. It answers with OrderDone."""

    call_id: int
    size: int


class OrderDone(RpcMessage, frozen=True, tag=True):
    """Launcher or llumlet to the front end: the order is carried out on these, or why not."""

    call_id: int
    instances: tuple[str, ...] = ()
    refused: Refusal = ""
    error: str = ""


class EvacuateInstance(RpcMessage, frozen=True, tag="Evacuate"):
    """Launcher to front ends: run what is still on this instance again elsewhere."""

    instance: str
    ends: bool = False
    """End requests with an error that can go on nowhere, for no other has their weights."""


class SetState(RpcMessage, frozen=True, tag=True):
    """Launcher to a llumlet: this is your state from now on; show it in your reports."""

    state: Literal["serving", "draining"]


class ScaleInstances(RpcMessage, frozen=True, tag="Scale"):
    """Scheduler to the launcher: start `add` instances more, or end this one by a drain."""

    add: int = 0
    drain: str = ""


LifecycleMessage = (
    AddInstances
    | DrainInstance
    | StopDrain
    | RestartInstances
    | RaiseFence
    | SetGuarantee
    | OrderDone
    | EvacuateInstance
    | SetState
    | ScaleInstances
)


MemberState = Literal["starting", "serving", "draining", "failed"]
"""The state of an instance as the launcher knows it; failed: given up."""


class ClusterMember(msgspec.Struct, frozen=True):
    """An instance and where its llumlet listens."""

    instance: str
    endpoint: str
    """Empty while it doesn't serve."""
    state: MemberState = "serving"
    detail: str = ""
    """The reason of this state, for people."""
    tree: str = ""
    """Folder of its engine; empty: the installed one."""
    unit: str = ""
    """Name of its unit in a placement; empty: none was given."""
    ordered: bool = False
    """Whether an order has ended its process: that it is gone is no fault."""
    node: str = ""
    """Id of the Ray node that it was ordered to; empty: to none."""
    flags: str = ""
    """Flags that it has behind those of all."""
    server: str = ""
    """Model and address of the server whose launcher started it; empty: the receiver's own."""


class Members(RpcMessage, frozen=True, tag=True):
    """Launcher to the scheduler and to front ends: these instances are the cluster.

    Scheduler to the launcher of one of several servers: these instances of other servers can take
    its requests. The scheduler answers the launcher's with it, and repeats it.
    """

    members: list[ClusterMember]
    weights: str = ""
    """Weights whose instances new requests prefer while both run; empty: no preference."""
    server: str = ""
    """Launcher to a scheduler of several servers: model and address of its server; else empty."""
    unlike: dict[str, str] = msgspec.field(default_factory=dict)
    """Scheduler to a launcher, launcher to front ends: other servers whose instances can't take its
    requests, and why."""


class MessagesRefused(RpcMessage, frozen=True, tag=True):
    """Scheduler to the launcher, launcher to front ends: what one of the two has refused.

    The process sends it when it changes, at most once a second; llumlets send theirs in their load
    reports.
    """

    process: str
    """scheduler or launcher."""
    counts: dict[str, int]
    """Counts since the start, by reason."""


Why = Literal["balance", "defragment", "priority", "drain", "queue", "relieve", "prompt"]
"""The purpose of a move.

balance: more freeness for the source; defragment: room for the head of its queue; priority:
less company for its requests of a higher priority; drain: it shall be empty; queue: a
waiting request that can start elsewhere at once; relieve: others of its unit want back what
they have lent it; prompt: its prompt is computed here, and it is decoded there.
"""

URGENT: tuple[Why, ...] = ("defragment", "priority", "drain", "relieve")
"""Reasons of moves whose end is waited for."""
AT_ONCE: tuple[Why, ...] = ("drain", "relieve")
"""Moves for these reasons run at once, without regard to recent arrivals: what stays longer is
ended, or preempted."""
SEVERAL: tuple[Why, ...] = (*AT_ONCE, "prompt")
"""Reasons for which several requests move to one destination at once."""


class PairedDestination(msgspec.Struct, frozen=True):
    """Move requests to this destination."""

    destination: str
    endpoint: str
    budget_blocks: float = 0.0
    """Move at most this many KV blocks before the next round (defragment: at least, if it can)."""
    room_blocks: float = 0.0
    """Largest single request that may move if nothing fits the budget."""
    why: Why = "balance"
    priority: int | None = None
    """priority: only requests that come after this one (vLLM's: with a larger number)."""


class Pairs(RpcMessage, frozen=True, tag=True):
    """Scheduler to a source llumlet: these, in place of earlier ones; none: stop."""

    pairs: tuple[PairedDestination, ...] = ()


ClusterMessage = (
    Hello
    | Welcome
    | LoadReport
    | Submit
    | AbortRequests
    | Discard
    | EngineCall
    | CallDone
    | ListRequests
    | ListedRequests
    | Migrate
    | MoveSession
    | Migrated
    | Outputs
    | Fence
    | Fenced
    | Overrun
    | PauseAhead
    | Resolve
    | Resolved
    | Members
    | MessagesRefused
    | Pairs
    | LifecycleMessage
    | FrontMessage
)
"""Everything on a control socket besides the migration's own messages."""
