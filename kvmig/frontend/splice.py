"""Splices one stream out of several owners' outputs: the exact tokens, none lost, none twice. Pure.

Each owner decodes under its own epoch, and a higher one takes over where the lower one stopped; but
their connections are different, so outputs of the new owner may arrive first. They are held until
the stream has come to where they start.
"""

from __future__ import annotations

from typing import NamedTuple

from kvmig.controlplane.messages import OutputSpan
from kvmig.frontend.ports import OutputItem
from kvmig.kvtransfer.source_machine import LEAP

HOLD_LIMIT = 1024
"""Most items of one request that wait for the old owner's; more is an error."""


class StaleCopy(NamedTuple):
    """The instance runs a copy of the request whose tokens don't count: discard it, once."""

    instance: str
    epoch: int


class OwnerSwitched(NamedTuple):
    """The stream went over to a new owner.

    gap_s: from the old owner's last token to the new one's first, as they came here, before the
    pause is spread; None when there was no token before.
    """

    source: str
    destination: str
    epoch: int
    gap_s: float | None


class StreamGap(NamedTuple):
    """Tokens are missing and will never come: the stream is closed."""

    reason: str


Action = StaleCopy | OwnerSwitched | StreamGap


class SplicedItems(NamedTuple):
    """The outcome of one item: (instance, item) to deliver in this order, and what else to do."""

    deliver: list[tuple[str, OutputItem]]
    actions: list[Action]


class _Held(NamedTuple):
    instance: str
    epoch: int
    start: int
    end: int
    item: OutputItem
    at: float


class StreamSplicer:
    """The stream of one request.

    owner, epoch: the instance whose tokens the client gets, and under which epoch; next: index of
    the client's next token; last_at: when the last item came.
    """

    __slots__ = (
        "_fenced", "_granted", "_held", "_told", "closed", "epoch", "last_at", "next", "owner",
    )  # fmt: skip

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.epoch = 0
        self.next = 0
        self.last_at: float | None = None
        self.closed = False
        self._held: list[_Held] = []
        self._fenced: set[int] = set()
        self._granted: set[int] = set()
        self._told: set[StaleCopy] = set()

    def restart(self, owner: str) -> None:
        """Begin a new run where the stream is. Outputs of earlier runs must not be fed any more."""
        self.owner, self.epoch, self.closed = owner, 0, False
        self._held = []
        for names in (self._fenced, self._granted, self._told):
            names.clear()

    def advance(self, epoch: int, start: int, count: int, now: float) -> bool:
        """Count `count` tokens if they are just what comes next, as nearly always.

        True: the caller delivers the item. False: nothing happened, `feed` it.
        """
        if epoch != self.epoch or start != self.next or self._held or self.closed:
            return False
        self.next += count
        self.last_at = now
        return True

    def feed(self, instance: str, span: OutputSpan, item: OutputItem, now: float) -> SplicedItems:
        """Take an item from `instance`, whose outputs come in their order."""
        fed = SplicedItems([], [])
        end = span.start + len(item.new_token_ids)
        if self.closed or span.epoch < self.epoch or self.fenced(span.epoch):
            if not item.finished:
                self._stale(instance, span.epoch, fed)
        elif span.start < self.next and end <= self.next:
            pass  # a duplicate
        elif span.start < self.next:
            self._break(f"outputs of {instance} overlap at token {self.next}", fed)
        elif span.epoch == self.epoch and span.start > self.next:
            self._break(f"tokens {self.next} to {span.start - 1} of {instance} were lost", fed)
        elif len(self._held) >= HOLD_LIMIT:
            self._break(f"{HOLD_LIMIT} outputs wait for token {self.next} of {self.owner}", fed)
        else:
            self._held.append(_Held(instance, span.epoch, span.start, end, item, now))
            self._drain(now, fed)
        return fed

    def mark_discarded(self, stale: StaleCopy) -> None:
        """The instance was sent Discard: once is enough."""
        self._told.add(stale)

    def waits_since(self, then: float) -> bool:
        """Whether items have waited for the old owner's tokens since before `then`."""
        return bool(self._held) and self._held[0].at < then

    def holds(self, instance: str) -> bool:
        """Whether items of this instance wait for an old owner's tokens: then it runs the request,
        or has handed it on."""
        return any(held.instance == instance for held in self._held)

    def reached(self, epoch: int) -> bool:
        """Whether it is known that `epoch`, or a later one, runs the request."""
        return (
            epoch <= self.epoch
            or any(granted >= epoch for granted in self._granted)
            or any(held.epoch >= epoch for held in self._held)
        )

    def grant(self, epoch: int) -> None:
        """`epoch` is known to run the request, though nothing of it was seen yet."""
        self._granted.add(epoch)

    def fence(self, epoch: int) -> bool:
        """Shut out `epoch` and every later one that a migration from there may have begun.

        False if it runs the request already.
        """
        if self.reached(epoch):
            return False
        self._fenced.add(epoch)
        return True

    def fenced(self, epoch: int) -> bool:
        """Whether `epoch` is shut out."""
        return any(first <= epoch < first + LEAP for first in self._fenced)

    def _drain(self, now: float, fed: SplicedItems) -> None:
        while not self.closed:
            ready = [held for held in self._held if held.start == self.next]
            if not ready:
                return
            # Highest first: who holds a later epoch took over from the one before.
            best = max(ready, key=lambda held: held.epoch)
            if best.epoch > self.epoch:
                self._switch(best, now, fed)
            self.next, self.last_at, self.closed = best.end, now, best.item.finished
            fed.deliver.append((best.instance, best.item))
            self._held.remove(best)
            self._sort_out(fed)

    def _switch(self, to: _Held, now: float, fed: SplicedItems) -> None:
        gap = None if self.last_at is None else now - self.last_at
        fed.actions.append(OwnerSwitched(self.owner, to.instance, to.epoch, gap))
        self.owner, self.epoch = to.instance, to.epoch

    def _sort_out(self, fed: SplicedItems) -> None:
        """Keep those of the held items that are still to come."""
        kept = []
        for held in self._held:
            if held.epoch < self.epoch or self.closed:
                if not held.item.finished:
                    self._stale(held.instance, held.epoch, fed)
            elif held.start >= self.next:
                kept.append(held)
            elif held.end > self.next:
                self._break(f"outputs of {held.instance} overlap at token {self.next}", fed)
                return
        self._held = kept

    def _stale(self, instance: str, epoch: int, fed: SplicedItems) -> None:
        action = StaleCopy(instance, epoch)
        if action not in self._told and action not in fed.actions:
            fed.actions.append(action)

    def _break(self, reason: str, fed: SplicedItems) -> None:
        self.closed = True
        self._held = []
        fed.actions.append(StreamGap(reason))
