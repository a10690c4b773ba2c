"""The pause of one migration: the request is suspended at the best moment that is in sight, and its
rest sent with Commit. Nobody decodes it meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from kvmig.engines.base import Cadence, Tail
from kvmig.kvtransfer.block_sender import BlockSender
from kvmig.kvtransfer.errand import Errand
from kvmig.kvtransfer.experience import Experience
from kvmig.kvtransfer.meeting import PUT_OFF_STEPS, due_ms, put_off_ms
from kvmig.kvtransfer.messages import (
    Chunk,
    Commit,
    Committed,
    Expect,
    Message,
    Reserve,
    Reserved,
)
from kvmig.kvtransfer.source_actions import Action, SendTail
from kvmig.kvtransfer.spread import Measured, spread
from kvmig.kvtransfer.wire import Frame

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
