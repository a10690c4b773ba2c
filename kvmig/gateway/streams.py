"""From Outputs messages to the front side: every item past its request's splicer.

Nearly always a whole batch is what comes next for each of its requests; then it goes
on as decoded, at the cost of a look-up an item.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from kvmig.controlplane.messages import Outputs, Span
from kvmig.gateway.ports import NOT_BEGUN, Arithmetic, Batch, Decode, Item, Observer, Sink
from kvmig.gateway.requests import Entry, RequestTable
from kvmig.gateway.splice import Action, Fed
from kvmig.ground.errors import PeerError


def not_known(instance: str) -> Arithmetic:
    """Where nothing is told of what instances compute by."""
    return NOT_BEGUN


class Streams:
    """All streams of one front end.

    index_of: an instance's engine index. act: does what a splicer asks for. stray: told
    of every output of a request that isn't in the table (instance, span, whether last).
    observer: hears of first and last tokens. arithmetic_of: by what an instance computes.
    """

    def __init__(
        self,
        table: RequestTable,
        sink: Sink,
        decode: Decode,
        index_of: Callable[[str], int],
        act: Callable[[Entry, Action], None],
        stray: Callable[[str, Span, bool], None],
        observer: Observer,
        arithmetic_of: Callable[[str], Arithmetic] = not_known,
    ) -> None:
        self._table = table
        self._sink = sink
        self._decode = decode
        self._index_of = index_of
        self._act = act
        self._stray = stray
        self._observer = observer
        self._arithmetic_of = arithmetic_of

    def take(
        self, instance: str, outputs: Outputs, payload: Sequence[memoryview], now: float
    ) -> None:
        """Deliver what an instance's step gave, as far as it is its turn.

        Raises PeerError when spans and items don't match, msgspec.MsgspecError when items can't be
        read; nothing is delivered then.
        """
        batch = self._decode(payload)
        if len(batch.items) != len(outputs.spans):
            raise PeerError(
                f"{instance} sent {len(outputs.spans)} spans for {len(batch.items)} items"
            )
        runs = self._table.runs
        odd: list[int] = []
        ended: list[Entry] = []
        for at, (span, item) in enumerate(zip(outputs.spans, batch.items, strict=True)):
            entry = runs.get(span.request_id)
            if entry is None or not entry.splicer.advance(
                span.epoch, span.start, len(item.new_token_ids), now
            ):
                odd.append(at)
                continue
            _keep(entry, item)
            if entry.first_at is None:
                self._began(entry, instance, now)
            if item.finished:
                ended.append(entry)
        for entry in ended:
            self.ended(entry)
        if odd:
            self._take_odd(instance, outputs.spans, batch, odd, now)
        else:
            self._sink.deliver(self._index_of(instance), batch.items, batch.meta)

    def _take_odd(
        self, instance: str, spans: Sequence[Span], batch: Batch, odd: list[int], now: float
    ) -> None:
        """A batch in which the items at `odd` need more than a look."""
        apart = set(odd)
        plain = [item for at, item in enumerate(batch.items) if at not in apart]
        self._sink.deliver(self._index_of(instance), plain, batch.meta)
        for at in odd:
            span, item = spans[at], batch.items[at]
            if span.epoch < 0:
                continue  # aborted there before it came out: nobody's
            entry = self._table.runs.get(span.request_id)
            if entry is None:
                self._stray(instance, span, item.finished)
            else:
                self._settle(entry, entry.splicer.feed(instance, span, item, now), now)

    def ended(self, entry: Entry) -> None:
        """The client has all that it wanted."""
        self._table.remove(entry.request_id)
        splicer = entry.splicer
        if entry.first_at is not None and splicer.last_at is not None:
            self._observer.ended(
                entry.priority,
                splicer.last_at - entry.arrived,
                splicer.last_at - entry.first_at,
                splicer.next,
            )

    def _began(self, entry: Entry, instance: str, now: float) -> None:
        if entry.splicer.next:
            entry.first_at = now
            entry.begun = self._arithmetic_of(instance)
            if entry.caller is not None:
                entry.caller.began(entry.request_id)
            self._observer.began(entry.priority, now - entry.arrived)

    def _settle(self, entry: Entry, fed: Fed, now: float) -> None:
        for _, item in fed.deliver:
            _keep(entry, item)
        for owner, pairs in itertools.groupby(fed.deliver, key=lambda pair: pair[0]):
            items: list[Item] = [item for _, item in pairs]
            self._sink.deliver(self._index_of(owner), items, None)
        if entry.first_at is None and fed.deliver:
            self._began(entry, fed.deliver[0][0], now)
        if fed.deliver and fed.deliver[-1][1].finished:
            self.ended(entry)
        for action in fed.actions:
            self._act(entry, action)


def _keep(entry: Entry, item: Item) -> None:
    """What the client gets is where the request would go on; it knows nothing of runs."""
    entry.output_token_ids += item.new_token_ids
    if entry.run:
        item.request_id = entry.request_id
