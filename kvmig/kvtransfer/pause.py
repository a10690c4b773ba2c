"""The pause of one migration: its request is suspended at a good moment, and its tail sent with
Commit. The request isn't decoded meanwhile.

First the pause is spread over the steps before it (`spread`): the front end holds each token back
a little longer than the one before. Then the suspension is put off until the request would reach
the destination just as a step begins there (`put_off_ms`). Both ends' steps run on by themselves,
each at its own pace, and the request decodes on meanwhile: the wait costs it nothing.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any, NamedTuple

from msgspec.structs import replace

from kvmig.engines.base import RequestTail, StepCadence
from kvmig.engines.steps import limit_s
from kvmig.kvtransfer.copying import BlockSender, ChunkBatcher
from kvmig.kvtransfer.mailbox import EventMailbox
from kvmig.kvtransfer.measured import MeasuredPause
from kvmig.kvtransfer.messages import Chunk, Commit, Committed, Expect, Reserve, Reserved
from kvmig.kvtransfer.timeline import MigrationSpec, MigrationTimeline
from kvmig.rpc.codec import Frames
from kvmig.rpc.messages import RpcMessage

MOST_STEPS = 16
"""Steps over which a pause is spread; what is left of a longer one stays one gap."""
EARLY = 0.3
"""Part of a step before its end at which a suspension is asked for where steps overlap: it ends
with the step after that one, which holds the request already, and what is foreseen of both ends is
new."""
NEAR = 0.3
"""Part of a step that is a short enough wait at the destination."""
NEAR_IF_HELD = 0.1
"""The same where the destination's step waits, too."""
SURE = 2 / 3
"""Part of a step's hold: a request that is expected within it comes in time, if steps vary."""
LATER = 0.1
"""Part of a step after its expected end: by then the next one surely runs."""
PUT_OFF_STEPS = 16
"""Own steps after which the request is suspended, come what may."""
ANSWER_STEPS = 4
"""Own steps that the last answers are awaited beyond PUT_OFF_STEPS."""


class PauseSpread(NamedTuple):
    """stretch_ms: how much later each token comes; steps: of them before the suspension."""

    pause_ms: float
    stretch_ms: float
    steps: int


def spread(pause_ms: float, step_ms: float, share: float) -> PauseSpread | None:
    """Over how many steps of `step_ms` a pause is spread, `share` of a step for each.

    None: it isn't. Example: 5 ms, steps of 20 ms and a share of 0.1: 3 steps, 2 ms each.
    """
    stretch_ms = share * step_ms
    if stretch_ms <= 0.0 or pause_ms <= 0.0:
        return None
    steps = min(math.ceil(pause_ms / stretch_ms), MOST_STEPS)
    return PauseSpread(min(pause_ms, steps * stretch_ms), stretch_ms, steps)


def rest_ms(cadence: StepCadence) -> float:
    """How long the step that runs now still takes."""
    return cadence.step_ms - cadence.since_ms % cadence.step_ms


def drain_ms(here: StepCadence) -> float:
    """How long a request whose suspension is asked for now is in a step: the one that runs, and the
    next one, where that is launched already."""
    return rest_ms(here) + (here.step_ms if here.launch_ms else 0.0)


def due_ms(here: StepCadence, lead_ms: float) -> float:
    """When a request whose suspension is asked for now reaches the destination's engine."""
    return lead_ms + (drain_ms(here) if here.step_ms else 0.0)


def put_off_ms(
    here: StepCadence, there: StepCadence, lead_ms: float, can_hold: bool = False
) -> float:
    """How long to let the request decode on; 0: ask for its suspension now, which happens when the
    step that runs here ends. Only that step is foreseen: of later ones too little is known.

    can_hold: a step there waits for a request that comes just after it could begin.

    Example: steps of 10 ms; here one ended just now, there one ended 3 ms ago, and a request is
    2 ms on its way. It would come 12 ms from now, 5 ms before a step ends there: too long a wait.
    In 11 ms, when the next step runs here, it is time to ask again. Had the one there ended
    6 ms ago, the request would wait 2 ms: now. Had it ended just now, the request would come 2 ms
    after the end of the step: now, if the next one waits for it.

    Where steps there overlap, a request must be there `launch_ms` before the step ends.
    """
    if not here.step_ms or not there.step_ms:
        return 0.0
    comes_ms = due_ms(here, lead_ms) + there.launch_ms
    waits_ms = -(there.since_ms + comes_ms) % there.step_ms
    near_ms = (NEAR_IF_HELD if can_hold else NEAR) * there.step_ms
    late_ms = SURE * limit_s(there.step_ms / 1e3) * 1e3 if can_hold else 0.0
    if waits_ms <= near_ms or waits_ms >= there.step_ms - late_ms:
        return 0.0
    return rest_ms(here) + LATER * here.step_ms


def spare_ms(here: StepCadence) -> float:
    """How long a suspension that is to happen when the present step ends needn't be asked for."""
    if not here.step_ms or not here.launch_ms:
        return 0.0
    return max(0.0, rest_ms(here) - EARLY * here.step_ms)


class MigrationPause:
    """The steps of one pause, in their order. Those that wait raise ActionInterrupted."""

    def __init__(
        self,
        move: MigrationSpec,
        batcher: ChunkBatcher,
        mailbox: EventMailbox[Any, Any],
        timeline: MigrationTimeline,
    ) -> None:
        self._move = move
        self._context = batcher.context
        self._send = batcher.send
        self._mailbox = mailbox
        self._timeline = timeline
        # What the destination was asked last, and reported of its steps.
        self._last_reserve = Reserve("", "", 0, 0, 0)
        self._new_tokens = 0
        self._asked_at = 0.0
        """When the last question was sent, by the clock of time-outs."""
        self._unanswered = 0
        """Questions to the destination that are on their way, or in its engine."""
        self._destination_cadence = StepCadence(0.0, 0.0)
        self._can_hold = False
        self._cadence_at = 0.0
        # What is measured of the pause, for those that come after it.
        self._step_ms = 0.0
        self._busy_there = False
        self._suspended_at = 0.0
        self._commit_times: tuple[float, float] | None = None
        # Commit, to be sent again until it is answered.
        self._commit: Commit | None = None
        self._payload: Frames = ()

    # -- before it

    def record_reserve(self, message: Reserve) -> None:
        """`message` was sent: Reserved will answer it."""
        self._last_reserve, self._new_tokens, self._unanswered = message, 0, 1
        self._asked_at = asyncio.get_running_loop().time()

    def keep_lease(self) -> None:
        """Let the destination know, now and then, that the request still comes."""
        if asyncio.get_running_loop().time() - self._asked_at > self._context.timeout_s / 2:
            self._ask()

    def add_tokens(self, tokens: int) -> None:
        """Record that the request has `tokens` tokens more."""
        self._new_tokens += tokens

    def record_reserved(self, answer: Reserved) -> None:
        """The destination says where it is in its steps."""
        self._destination_cadence, self._cadence_at = answer.cadence, self._context.clock()
        self._can_hold = answer.can_hold
        self._unanswered = max(0, self._unanswered - 1)

    async def spread_out(self) -> None:
        """Let the request decode on for as long as the pause is spread over its tokens."""
        clock, step_ms = self._context.clock, self._context.engine.cadence().step_ms
        self._busy_there = self._destination_cadence.step_ms > 0
        pause_ms = self._context.pauses.expected_ms(self._busy_there, step_ms)
        found = spread(
            pause_ms, step_ms, 0.0 if self._move.urgent else self._context.config.pause_spread
        )
        if found is None or not self._context.host.announce_pause(
            self._move.request_id, found.pause_ms, found.stretch_ms
        ):
            return
        until = clock() + (found.steps - 1) * step_ms / 1e3
        last = False
        while not last:
            # However slow the steps are, the destination hears something within its lease.
            await self._wait_until(min(until, clock() + self._context.timeout_s / 2))
            last = clock() >= until
            self._ask(prepare=last)
        await self._wait_until(clock() + step_ms / 1e3)

    async def put_off(self) -> None:
        """Let the request decode on until its way meets a step of the destination.

        Commit would wait there behind an unanswered question, and miss its step: so the answers
        are awaited, too.
        """
        clock, engine = self._context.clock, self._context.engine
        step_s = engine.cadence().step_ms / 1e3
        until = clock() + PUT_OFF_STEPS * step_s
        at_last = until + ANSWER_STEPS * step_s
        while True:
            here, now = engine.cadence(), clock()
            gone_ms = (now - self._cadence_at) * 1e3
            there = self._destination_cadence
            there = replace(there, since_ms=there.since_ms + gone_ms)
            wait_ms = put_off_ms(here, there, self._context.lead.ms, self._can_hold)
            due = wait_ms == 0.0 or now >= until
            if now >= at_last or (due and not self._unanswered):
                await self._wait_until(now + spare_ms(here) / 1e3)
                return
            if due:
                await self._mailbox.wait(at_last - now)
            else:
                self._ask()
                await self._wait_until(now + wait_ms / 1e3)

    def _ask(self, prepare: bool = False) -> None:
        """Ask for room for what the request has become, and where the destination is in its steps.

        prepare: and it may prepare once more.
        """
        num_tokens = self._last_reserve.num_tokens + self._new_tokens
        last = self._last_reserve.last and prepare
        self._send(replace(self._last_reserve, num_tokens=num_tokens, last=last))
        self._asked_at = asyncio.get_running_loop().time()
        self._unanswered += 1

    async def _wait_until(self, at: float) -> None:
        while (left := at - self._context.clock()) > 0:
            await self._mailbox.wait(left)

    # -- the pause itself

    async def suspend(self, sent: int, blocks: BlockSender | None, decoding: bool) -> RequestTail:
        """Take the request out of the batch, after the `sent` blocks that were sent.

        blocks: holds a slot for the tail, so that no chunks of others stand in the pause; decoding:
        the next token is waited for.
        """
        engine, timeline = self._context.engine, self._timeline
        out = None if blocks is None else await blocks.room()
        if decoding:
            self._step_ms = engine.cadence().step_ms
            if self._can_hold:  # a step there may wait for the request
                due = due_ms(engine.cadence(), self._context.lead.ms)
                self._send(Expect(self._move.mid, due))
        timeline.mark("drain")
        async with asyncio.timeout(self._context.timeout_s):
            tail = await engine.suspend(self._move.request_id, sent, out)
        self.record_suspended()
        return tail

    def record_suspended(self) -> None:
        """The request is out of the batch: from now on its tail is copied."""
        if not self._timeline.pausing:
            self._timeline.mark("drain")  # the engine did it at the end of a step
        self._timeline.mark("tail copy")
        self._suspended_at = self._context.clock()

    async def send_tail(
        self, stage: int, first: int, tail: RequestTail, blocks: BlockSender
    ) -> None:
        """Send the blocks after the `first` ones, and Commit: with it, if they are gathered."""
        self._timeline.tail_blocks = len(tail.block_ids)
        self._timeline.output_tokens = tail.num_output_tokens
        came_along: list[Chunk] = []

        def keep(message: RpcMessage, payload: Frames) -> None:
            assert isinstance(message, Chunk)
            came_along.append(message)
            self._payload = payload

        if tail.checksums:
            await blocks.push(stage, first, tail.checksums, tail.places, keep)
        else:
            await blocks.send_urgent(stage, first, tail.block_ids, tail.places)
        self._mailbox.read()
        move = self._move
        self._commit = Commit(
            move.mid,
            move.request_id,
            move.epoch,
            replace(tail, checksums=[], places=[]),
            first + len(tail.block_ids),
            came_along[0] if came_along else None,
        )
        self.send_commit()
        self._timeline.mark("commit")

    def send_commit(self) -> None:
        """Send Commit, or the same once more."""
        if self._commit is not None:
            self._send(self._commit, self._payload)

    # -- after it

    def record_committed(self, answer: Committed) -> None:
        """Learn how long the request was on its way."""
        self._timeline.commit_engine_ms = answer.commit_ms
        if self._timeline.downtime() is not None:
            answered_ms = (self._context.clock() - self._suspended_at) * 1e3
            self._context.lead.observe(answered_ms, answer.commit_ms)
            self._commit_times = answered_ms, answer.commit_ms

    def record_first_token(self, ms: float) -> None:
        """Learn how long the client had to wait in all. ms: from the commit on."""
        downtime = self._timeline.downtime()
        if downtime is not None and self._commit_times is not None and self._step_ms:
            measured = MeasuredPause(downtime.tail_copy, *self._commit_times, ms)
            self._context.pauses.observe(self._busy_there, measured, self._step_ms)
