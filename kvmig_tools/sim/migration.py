"""One migration in virtual time: both real machines of the handshake on modelled engines.

Engine calls happen between two steps, messages take a hop, blocks the network's time.
The lease and lost messages are left out: nothing dies here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from kvmig.engines import base
from kvmig.engines.base import RequestTail, StagedBlocks
from kvmig.kvtransfer import destination_machine as there
from kvmig.kvtransfer import source_machine as here
from kvmig.kvtransfer.destination_machine import DestinationMachine
from kvmig.kvtransfer.messages import (
    Aborted,
    Chunk,
    ChunkDone,
    Commit,
    Committed,
    Refused,
    Reserve,
    Reserved,
)
from kvmig.kvtransfer.source_machine import SourceMachine
from kvmig.rpc.messages import RpcMessage
from kvmig_tools.sim.engine import SimEngine
from kvmig_tools.sim.events import Action, EventQueue
from kvmig_tools.sim.network import Copying, Network
from kvmig_tools.sim.prompt import Place
from kvmig_tools.sim.request import SimRequest


class Outcome:
    """How a migration ended: `state` committed or aborted."""

    __slots__ = ("began_at", "blocks", "ended_at", "paused_s", "reason", "stages", "state")

    def __init__(self, began_at: float) -> None:
        self.began_at = began_at
        self.ended_at = began_at
        self.state = ""
        self.reason = ""
        self.stages = 0
        self.blocks = 0
        self.paused_s = 0.0


class Migration:
    """Moves `request` from one engine to another; `on_end` hears how it went.

    may_enter: asked at the destination before blocks are taken; "" or why not.
    on_moved: when the destination runs it.
    """

    def __init__(
        self,
        events: EventQueue,
        network: Network,
        request: SimRequest,
        source: tuple[str, SimEngine],
        destination: tuple[str, SimEngine],
        max_stages: int,
        may_enter: Callable[[], str],
        on_moved: Callable[[SimRequest], None],
        on_end: Callable[[Outcome], None],
        *,
        after_prompt: bool = False,
    ) -> None:
        self._events = events
        self._network = network
        self.request = request
        self._source_name, self._source = source
        self._destination_name, self._destination = destination
        self._may_enter = may_enter
        self._on_moved = on_moved
        self._on_end = on_end
        key = f"{request.request_id}-{request.migrations}"
        self._here = SourceMachine(key, max_stages, after_prompt=after_prompt)
        self._after_prompt = after_prompt
        self._there = DestinationMachine(key)
        self._hop_s = source[1].cost.copy.hop_ms / 1e3
        self._copying: Copying | None = None
        self._engine_busy = False
        """A call into the destination's engine is under way: messages wait."""
        self._unheard: deque[Action] = deque()
        self._suspended_at = 0.0
        self._place = Place(0, 0, False)
        """When it was suspended."""
        self._computed = 0
        """Tokens whose KV was there when it was exported."""
        self.outcome = Outcome(events.now)

    def start(self) -> None:
        """Begin."""
        self._act_here(self._here.start())

    def lost(self, reason: str) -> None:
        """The request finished or was preempted at the source, which ends the attempt."""
        if self._here.ended or self._here.beyond:
            return
        if self._copying is not None:
            self._network.stop(self._copying)
            self._copying = None
        self._act_here(self._here.failed(reason))

    # -- source

    def _act_here(self, actions: list[here.Action]) -> None:
        for action in actions:
            self._do_here(action)

    def _at_source(self, then: Callable[[], list[here.Action]]) -> None:
        """Call the engine between two steps, if the attempt still lives by then."""

        def call() -> None:
            if not self._here.ended:
                self._act_here(then())

        self._source.at_boundary(call)

    def _do_here(self, action: here.Action) -> None:
        match action:
            case here.ExportRequest():
                self._at_source(self._export)
            case here.SendReserve(stage, num_tokens):
                export = base.RequestExport(self.request.request_id, num_tokens, [])
                message = Reserve(
                    self._here.key,
                    self.request.request_id,
                    1,
                    stage,
                    num_tokens,
                    export if stage == 0 else None,
                )
                self._send(partial(self._hear_reserve, message))
            case here.CheckRequest(sent):
                self._at_source(partial(self._check, sent))
            case here.CopyStage(stage, first, block_ids):
                self.outcome.stages += 1
                blocks = len(block_ids)
                self._copy(blocks, partial(self._copied, stage, first, blocks))
            case here.FollowPrompt(sent, most_tokens):
                # Not in the present boundary: the next step computes the next chunk.
                follow = partial(self._at_source, partial(self._follow, sent, most_tokens))
                self._events.after(0.0, follow)
            case here.SuspendRequest(sent):
                self._at_source(partial(self._suspend, sent))
            case here.SendTail(first, tail):
                self._copy(len(tail.block_ids), partial(self._tail_sent, first, tail))
            case here.ResumeRequest():
                self._end("aborted")
            case here.ReleaseRequest():
                self._source.release(self.request)
                self._end("committed")
            case here.SendAbort():
                self._send(self._hear_abort)
            case _:
                raise NotImplementedError(f"{type(action).__name__} in the simulator")

    def _export(self) -> list[here.Action]:
        place = self._source.place_of(self.request)
        self._computed = place.computed
        return self._here.exported(self._wanted(place))

    def _check(self, sent: int) -> list[here.Action]:
        return self._here.checked(self._stage(self._source.place_of(self.request), sent))

    def _stage(self, place: Place, sent: int) -> StagedBlocks:
        full = place.computed // self._source.cost.capacity.block_tokens
        return StagedBlocks([0] * max(full - sent, 0), self._wanted(place), place.decoding)

    def _wanted(self, place: Place) -> int:
        """Tokens that there must be room for: none for one that waits, and will wait there."""
        return place.tokens if place.computed or self._after_prompt else 0

    def _follow(self, sent: int, most_tokens: int) -> list[here.Action]:
        place = self._source.place_of(self.request)
        if place.decoding and place.tokens <= most_tokens:
            return self._here.followed(self._take_out(sent))
        return self._here.followed(self._stage(place, sent))

    def _suspend(self, sent: int) -> list[here.Action]:
        return self._here.suspended(self._take_out(sent))

    def _take_out(self, sent: int) -> RequestTail:
        self._place = self._source.suspend(self.request)
        self._suspended_at = self._events.now
        blocks = self._source.blocks_for(self._place.computed)
        return RequestTail([0] * (blocks - sent), self._place.tokens, self.request.generated, b"")

    def _copy(self, blocks: int, done: Callable[[], None]) -> None:
        cost = self._source.cost
        nbytes = blocks * cost.capacity.block_tokens * cost.copy.bytes_per_token
        self.outcome.blocks += blocks

        def begin() -> None:
            if not self._here.ended:
                self._copying = self._network.copy(
                    self._source_name, self._destination_name, nbytes, finish
                )

        def finish() -> None:
            self._copying = None
            done()

        if blocks:
            self._events.after(cost.copy.stage_ms / 1e3, begin)
        else:
            done()

    def _copied(self, stage: int, first: int, blocks: int) -> None:
        self._hear_chunk(stage, first, blocks)
        if not self._here.ended:
            self._act_here(self._here.copied())

    def _tail_sent(self, first: int, tail: RequestTail) -> None:
        blocks = len(tail.block_ids)
        self._hear_chunk(self._here.stage, first, blocks)
        self._act_here(self._here.commit_sent())
        commit = Commit(self._here.key, self.request.request_id, 1, tail, first + blocks)
        self._send(partial(self._hear_commit, commit))

    def _answer(self, message: RpcMessage) -> None:
        """What the destination said."""
        if self._here.ended:
            return
        match message:
            case Reserved(stage=stage, hit_blocks=hits) if self._here.expects(stage):
                self._act_here(self._here.reserved(hits))
            case Refused(reason=reason, detail=detail):
                self._act_here(self._here.refused(reason, detail))
            case Committed():
                self._act_here(self._here.committed())
            case Aborted() | ChunkDone():
                pass
            case _:
                raise NotImplementedError(f"{type(message).__name__} in the simulator")

    def _end(self, state: str) -> None:
        outcome = self.outcome
        outcome.state, outcome.reason = state, self._here.reason
        outcome.ended_at = self._events.now
        if state == "aborted" and self.request.index in self._source.held:
            self._source.at_boundary(partial(self._source.commit, self.request, self._place))
        self._on_end(outcome)

    # -- destination

    def _act_there(self, actions: list[there.Action]) -> None:
        for action in actions:
            match action:
                case there.ReserveBlocks(export, num_tokens):
                    self._at_destination(partial(self._reserve, export is not None, num_tokens))
                case there.ScatterChunk(chunk):
                    self._act_there(self._there.scattered(chunk, 0.0))
                case there.RunRequest():
                    self._at_destination(self._run)
                case there.FreeBlocks():
                    self._destination.release(self.request)
                case there.SendAnswer(ChunkDone()):
                    pass  # the source has no staging buffer to wait for
                case there.SendAnswer(message):
                    self._events.after(self._hop_s, partial(self._answer, message))
                case _:
                    raise NotImplementedError(f"{type(action).__name__} in the simulator")

    def _at_destination(self, call: Action) -> None:
        """Call the engine between two steps; messages that come meanwhile wait."""

        def done() -> None:
            self._engine_busy = False
            call()
            while self._unheard and not self._engine_busy:
                self._unheard.popleft()()

        self._engine_busy = True
        self._destination.at_boundary(done)

    def _send(self, hear: Action) -> None:
        def arrive() -> None:
            if self._engine_busy:
                self._unheard.append(hear)
            else:
                hear()

        self._events.after(self._hop_s, arrive)

    def _hear_reserve(self, message: Reserve) -> None:
        if self._there.ended:
            return
        refusal = self._may_enter() if message.stage == 0 else ""
        if refusal:
            self._act_there(self._there.failed(refusal))
        else:
            self._act_there(self._there.reserve(message))

    def _reserve(self, opening: bool, num_tokens: int) -> None:
        take = self._destination.reserve if opening else self._destination.grow
        hits = self._destination.hits(self.request, self._computed) if opening else 0
        if take(self.request, num_tokens):
            self._act_there(self._there.reserved(hits))
        else:
            self._act_there(self._there.failed("no_room"))

    def _hear_chunk(self, stage: int, first: int, blocks: int) -> None:
        if blocks and not self._there.ended:
            chunk = Chunk(self._here.key, stage, first, 0, 0, [0] * blocks)
            self._act_there(self._there.chunk(chunk))

    def _hear_commit(self, message: Commit) -> None:
        self._act_there(self._there.commit(message))

    def _run(self) -> None:
        self._destination.commit(self.request, self._place)
        if self._place.computed:
            self.outcome.paused_s = self._events.now - self._suspended_at
            self.request.paused_s += self.outcome.paused_s
        self.request.migrations += 1
        self._on_moved(self.request)
        self._act_there(self._there.committed(0.0))

    def _hear_abort(self) -> None:
        self._act_there(self._there.abort())
