"""The pause of one migration: the request is suspended at the best moment that is in sight, and its
rest sent with Commit. Nobody decodes it meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from kvmig.engines.base import Cadence, Tail
from kvmig.engines.steps import limit_s
from kvmig.kvtransfer.copying import ChunkSizer
from kvmig.kvtransfer.messages import Chunk, Commit, Committed, Expect, Message, Reserve, Reserved
from kvmig.kvtransfer.source_machine import Action, SendTail
from kvmig.kvtransfer.wire import Frame

if TYPE_CHECKING:
    from kvmig.kvtransfer.source import BlockSender, Errand


NEAR = 0.3
"""Of a step: so long a wait at the destination is good enough."""
NEAR_IF_HELD = 0.1
"""The same, where the destination's step waits, too."""
SURE = 2 / 3
"""Of what a step waits: a request that is expected within that comes in time, if steps vary."""
LATER = 0.1
"""Of a step, after its expected end: then it is asked again, when the next one runs surely."""
PUT_OFF_STEPS = 16
"""Own steps after which the request is suspended, come what may."""
FIRST_LEAD_MS = 2.0
WEIGHT = 0.25


class LeadTime:
    """How long a suspended request is on its way into the destination's engine, by the last ones.

    The answer's way back is in it, so that a request comes early rather than late.
    """

    def __init__(self) -> None:
        self.ms = FIRST_LEAD_MS

    def observe(self, answered_ms: float, commit_ms: float) -> None:
        """answered_ms: from the suspension to Committed; commit_ms: of it, in the engine."""
        self.ms += WEIGHT * (max(0.0, answered_ms - commit_ms) - self.ms)


def due_ms(here: Cadence, lead_ms: float) -> float:
    """When a request whose suspension is asked for now reaches the destination's engine."""
    if not here.step_ms:
        return lead_ms
    return here.step_ms - here.since_ms % here.step_ms + lead_ms


def put_off_ms(here: Cadence, there: Cadence, lead_ms: float, can_hold: bool = False) -> float:
    """How long to let the request decode on; 0: ask for its suspension now, which happens when the
    step that runs here ends. Only that step is foreseen: of later ones too little is known.

    can_hold: a step there waits for a request that comes just after it could begin.

    Example: steps of 10 ms; here one ended just now, there one ended 3 ms ago, and a request is
    2 ms on its way. It would come 12 ms from now, 5 ms before a step ends there: too long a wait.
    In 11 ms, when the next step runs here, it is time to ask again. Had the one there ended
    6 ms ago, the request would wait 2 ms: now. Had it ended just now, the request would come 2 ms
    after the end of the step: now, if the next one waits for it.
    """
    if not here.step_ms or not there.step_ms:
        return 0.0
    ends_ms = here.step_ms - here.since_ms % here.step_ms
    waits_ms = -(there.since_ms + ends_ms + lead_ms) % there.step_ms
    near_ms = (NEAR_IF_HELD if can_hold else NEAR) * there.step_ms
    late_ms = SURE * limit_s(there.step_ms / 1e3) * 1e3 if can_hold else 0.0
    if waits_ms <= near_ms or waits_ms >= there.step_ms - late_ms:
        return 0.0
    return ends_ms + LATER * here.step_ms


MOST_STEPS = 16
"""That a suspension is put off for it; what is left of a longer pause stays one gap."""
FIRST_MS = 2.0


class Measured(NamedTuple):
    """One pause, milliseconds."""

    tail_copy_ms: float
    answered_ms: float
    """From the suspension to Committed: the copy of the tail, the commit, and Commit's way and
    the answer's, equally long."""
    commit_ms: float
    """In the destination's engine."""
    first_token_ms: float
    """From there to the end of the first step."""


class PauseTime:
    """How long clients wait longer than for a step, by the last migrations.

    busy: whether the destination makes steps of its own, which a request that comes waits for.
    """

    def __init__(self) -> None:
        self._ms: dict[bool, float] = {}

    def expected_ms(self, busy: bool) -> float:
        """Of the next one."""
        return self._ms.get(busy, FIRST_MS)

    def observe(self, busy: bool, pause: Measured, step_ms: float) -> None:
        """step_ms: from one token to the next at the source."""
        way_ms = max(0.0, pause.answered_ms - pause.tail_copy_ms - pause.commit_ms) / 2
        until_first_ms = pause.tail_copy_ms + way_ms + pause.commit_ms + pause.first_token_ms
        ms = max(0.0, until_first_ms - step_ms)
        known = self._ms.get(busy)
        self._ms[busy] = ms if known is None else known + WEIGHT * (ms - known)


class Spread(NamedTuple):
    """stretch_ms: how much later each token comes; steps: of them before the suspension."""

    pause_ms: float
    stretch_ms: float
    steps: int


def spread(pause_ms: float, step_ms: float, share: float) -> Spread | None:
    """Over how many steps of `step_ms` a pause is spread, `share` of a step for each.

    None: it isn't. Example: 5 ms, steps of 20 ms and a share of 0.1: 3 steps, 2 ms each.
    """
    stretch_ms = share * step_ms
    if stretch_ms <= 0.0 or pause_ms <= 0.0:
        return None
    steps = min(math.ceil(pause_ms / stretch_ms), MOST_STEPS)
    return Spread(min(pause_ms, steps * stretch_ms), stretch_ms, steps)


class Experience:
    """Copy rates, and how long messages and threads take in the pause."""

    def __init__(self, sizer: ChunkSizer) -> None:
        self.sizer = sizer
        self.lead = LeadTime()
        self.pause = PauseTime()


ANSWER_STEPS = 4
"""Own steps that the last answers are awaited beyond PUT_OFF_STEPS."""


class Pause:
    """Methods that wait return what a message asks for instead, [] if none came in between."""

    def __init__(self, errand: Errand, experience: Experience, share: float) -> None:
        """share: of a step, by which the tokens before it are spread."""
        self._errand = errand
        self._share = share
        self._experience = experience
        self._there = Cadence(0.0, 0.0)
        self._can_hold = False
        self._heard_at = 0.0
        self._asked = Reserve("", "", 0, 0, 0)
        self._unanswered = 0
        """Questions to the destination that are on their way, or in its engine."""
        self._grown = 0
        self._suspended_at = 0.0
        self._step_ms = 0.0
        self._busy_there = False
        self._answered: tuple[float, float] | None = None
        self._commit: Commit | None = None
        self._payload: Sequence[Frame] = ()

    def asks(self, message: Reserve) -> None:
        """What Reserved will answer."""
        self._asked, self._grown, self._unanswered = message, 0, 1

    def grew(self, tokens: int) -> None:
        """The request has so many tokens more."""
        self._grown += tokens

    @property
    def num_tokens(self) -> int:
        """Of the request now, as far as its engine has told."""
        return self._asked.num_tokens + self._grown

    def hears(self, answer: Reserved) -> None:
        """Where the destination is in its steps."""
        self._there, self._heard_at = answer.cadence, self._errand.clock()
        self._can_hold = answer.can_hold
        self._unanswered = max(0, self._unanswered - 1)

    async def put_off(self, decoding: bool) -> list[Action]:
        """Let the request decode on until its way meets a step of the destination.

        Commit would wait there behind an unanswered question, and miss its step: so the answers
        are awaited, too. decoding: before that, for as long as the pause is spread.
        """
        clock, engine = self._errand.clock, self._errand.engine
        if decoding and (stop := await self._spread()):
            return stop
        step_s = engine.cadence().step_ms / 1e3
        until = clock() + PUT_OFF_STEPS * step_s
        at_last = until + ANSWER_STEPS * step_s
        while True:
            here, now = engine.cadence(), clock()
            gone_ms = (now - self._heard_at) * 1e3
            there = replace(self._there, since_ms=self._there.since_ms + gone_ms)
            wait_ms = put_off_ms(here, there, self._experience.lead.ms, self._can_hold)
            due = wait_ms == 0.0 or now >= until
            if now >= at_last or (due and not self._unanswered):
                return []
            if due:
                stop = await self._errand.mailbox.wait(at_last - now)
            else:
                self._ask()
                stop = await self._wait_until(now + wait_ms / 1e3)
            if stop:
                return stop

    def _foretell(self) -> int:
        """Let the pause be spread over the tokens from now on; for how many steps that is."""
        errand = self._errand
        step_ms = errand.engine.cadence().step_ms
        self._busy_there = self._there.step_ms > 0
        pause_ms = self._experience.pause.expected_ms(self._busy_there)
        found = spread(pause_ms, step_ms, self._share)
        if found is None:
            return 0
        told = errand.foretell(errand.move.request_id, found.pause_ms, found.stretch_ms)
        return found.steps if told else 0

    async def _spread(self) -> list[Action]:
        step_s = self._errand.engine.cadence().step_ms / 1e3
        if not (steps := self._foretell()):
            return []
        clock = self._errand.clock
        until = clock() + (steps - 1) * step_s
        while True:
            # However slow the steps are, the destination hears something within its lease.
            if stop := await self._wait_until(min(until, clock() + self._errand.timeout_s / 2)):
                return stop
            last = clock() >= until
            self._ask(again=last)
            if last:
                return await self._wait_until(clock() + step_s)

    def _ask(self, again: bool = False) -> None:
        """Room for what the request has become, and how far is the destination in its steps?

        again: and it may prepare once more.
        """
        last = self._asked.last and again
        self._errand.send(replace(self._asked, num_tokens=self.num_tokens, last=last), ())
        self._unanswered += 1

    async def _wait_until(self, at: float) -> list[Action]:
        while (left := at - self._errand.clock()) > 0:
            if stop := await self._errand.mailbox.wait(left):
                return stop
        return []

    async def suspend(self, sent: int, blocks: BlockSender | None, decoding: bool) -> Tail:
        """blocks: has a slot in hand for the tail, so that nobody's chunks stand in the pause.

        decoding: somebody waits for the next token.
        """
        errand = self._errand
        out = None if blocks is None else blocks.copier.room()
        if decoding:
            self._step_ms = errand.engine.cadence().step_ms
            self._announce()
        errand.timeline.pause()
        tail = await errand.bounded(errand.engine.suspend(errand.move.request_id, sent, out))
        errand.timeline.pause()
        self._suspended_at = errand.clock()
        return tail

    def _announce(self) -> None:
        """When the request comes: a step there may wait for it."""
        if self._can_hold:
            errand = self._errand
            due = due_ms(errand.engine.cadence(), self._experience.lead.ms)
            errand.send(Expect(errand.move.mid, due), ())

    async def send_tail(self, stage: int, rest: SendTail, blocks: BlockSender) -> list[Action]:
        """The blocks, one by one or, if they were gathered already, with the commit."""
        errand, tail = self._errand, rest.tail
        errand.timeline.tail_blocks = len(tail.block_ids)
        errand.timeline.output_tokens = tail.num_output_tokens
        came_along: list[Chunk] = []

        def keep(message: Message, payload: Sequence[Frame]) -> None:
            assert isinstance(message, Chunk)
            came_along.append(message)
            self._payload = payload

        if tail.checksums:
            await blocks.copier.push(
                stage, rest.first, tail.checksums, keep, urgent=True, places=tail.places
            )
        elif stop := await blocks.send(stage, rest.first, tail.block_ids, tail.places, urgent=True):
            return stop
        if stop := errand.mailbox.read():
            return stop
        self._commit = Commit(
            errand.move.mid,
            errand.move.request_id,
            errand.move.epoch,
            replace(tail, checksums=[], places=[]),
            rest.first + len(tail.block_ids),
            came_along[0] if came_along else None,
        )
        self.send_commit()
        errand.timeline.pause()
        return []

    def send_commit(self) -> None:
        """Commit, or the same once more."""
        if self._commit is not None:
            self._errand.send(self._commit, self._payload)

    def committed(self, answer: Committed) -> None:
        """Learn from how long it took."""
        downtime = self._errand.timeline.downtime(None)
        if downtime is None:
            return
        answered_ms = (self._errand.clock() - self._suspended_at) * 1e3
        self._experience.lead.observe(answered_ms, answer.commit_ms)
        self._answered = answered_ms, answer.commit_ms

    def first_token(self, ms: float) -> None:
        """Learn how long the client had to wait in all. ms: from the commit on."""
        downtime = self._errand.timeline.downtime(None)
        if downtime is None or self._answered is None or not self._step_ms:
            return
        pause = Measured(downtime.tail_copy, *self._answered, ms)
        self._experience.pause.observe(self._busy_there, pause, self._step_ms)
