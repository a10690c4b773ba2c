"""From Outputs messages to the front side: every item past its request's splicer.

Nearly always a whole batch is what comes next for each of its requests; then it goes
on as decoded, at the cost of a look-up an item.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from kvmig.controlplane.messages import Outputs, Span
from kvmig.gateway.ports import Batch, Decode, Item, Sink
from kvmig.gateway.requests import Entry, RequestTable
from kvmig.gateway.splice import Action, Fed
from kvmig.ground.errors import PeerError


class Streams:
    """All streams of one front end.

    index_of: an instance's engine index. act: does what a splicer asks for. stray: told
    of every output of a request that isn't in the table (instance, span, whether last).
    """

    def __init__(
        self,
        table: RequestTable,
        sink: Sink,
        decode: Decode,
        index_of: Callable[[str], int],
        act: Callable[[Entry, Action], None],
        stray: Callable[[str, Span, bool], None],
    ) -> None:
        self._table = table
        self._sink = sink
        self._decode = decode
        self._index_of = index_of
        self._act = act
        self._stray = stray

    def take(
        self, instance: str, outputs: Outputs, payload: Sequence[memoryview], now: float
    ) -> None:
        """Deliver what an instance's step gave, as far as it is its turn.

        Raises PeerError when spans and items don't match; nothing is delivered then.
        """
        batch = self._decode(payload)
        if len(batch.items) != len(outputs.spans):
            raise PeerError(
                f"{instance} sent {len(outputs.spans)} spans for {len(batch.items)} items"
            )
        entries = self._table.entries
        odd: list[int] = []
        ended: list[str] = []
        for at, (span, item) in enumerate(zip(outputs.spans, batch.items, strict=True)):
            entry = entries.get(span.request_id)
            if entry is None or not entry.splicer.advance(
                span.epoch, span.start, len(item.new_token_ids), now
            ):
                odd.append(at)
            elif item.finished:
                ended.append(span.request_id)
        for request_id in ended:
            self._table.remove(request_id)
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
            entry = self._table.entries.get(span.request_id)
            if entry is None:
                self._stray(instance, span, item.finished)
            else:
                self._settle(entry, entry.splicer.feed(instance, span, item, now))

    def _settle(self, entry: Entry, fed: Fed) -> None:
        for owner, pairs in itertools.groupby(fed.deliver, key=lambda pair: pair[0]):
            items: list[Item] = [item for _, item in pairs]
            self._sink.deliver(self._index_of(owner), items, None)
        if entry.splicer.closed:
            self._table.remove(entry.request_id)
        for action in fed.actions:
            self._act(entry, action)
