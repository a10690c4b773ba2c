"""Streams: tokens from Outputs messages, past each request's splicer, to the sink.

Nearly always a whole batch is what comes next for each of its requests; then it goes on as
decoded, at the cost of a look-up an item.

A migration's pause is spread over the tokens before it: for a moment no instance decodes a request
that moves, so the first token of its new owner comes late. The tokens before it are held back here,
each a little longer than the one before, until the last of them is as late as the next one will be.
The client sees several short delays in place of one long gap, and every token in its order.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvmig.accounts.allowances import TokenAllowance
from kvmig.asgi.call import HttpCall
from kvmig.controlplane.messages import Outputs, OutputSpan
from kvmig.core.clock import TimeSource
from kvmig.core.errors import Failure, PeerError
from kvmig.frontend.ports import InstancePort, OutputDecoder, OutputItem, OutputSink, RouterObserver
from kvmig.frontend.quotas import QuotaClient
from kvmig.frontend.requests import LiveRequest, RequestTable
from kvmig.frontend.splice import Action

MOST_S = 1.0
"""Longest time for which a token is held."""
GIVE_UP_S = 10.0
"""A pause that hasn't come by then doesn't come."""


@dataclass(frozen=True, slots=True)
class DelayRamp:
    """Delays of the tokens before a pause. Pure."""

    pause_s: float
    stretch_s: float

    def delay_s(self, number: int) -> float:
        """Delay of the `number`th step's tokens since the pause was foretold, from 1 on.

        Example: a pause of 5 ms and a stretch of 2 ms: 2, 4, 5, 5 ms and so on.
        """
        return max(0.0, min(MOST_S, self.pause_s, number * self.stretch_s))


@dataclass(slots=True)
class _Spread:
    """Tokens of one request that are held until they are due."""

    ramp: DelayRamp
    index: int
    ends: asyncio.TimerHandle
    number: int = 0
    held: deque[tuple[float, OutputItem]] = field(default_factory=deque)
    timer: asyncio.TimerHandle | None = None


@dataclass(eq=False)
class RequestStreams:
    """The streams of one front end."""

    table: RequestTable
    sink: OutputSink
    decode: OutputDecoder
    instances: InstancePort
    observer: RouterObserver
    clock: TimeSource
    quotas: QuotaClient | None = None
    """Pays for tokens of requests with an allowance."""
    _spreads: dict[str, _Spread] = field(default_factory=dict, init=False)
    too_large: set[HttpCall] = field(default_factory=set, init=False)
    """Calls of whose answers more is kept than may be: they are to end."""

    def deliver_outputs(
        self, instance: str, outputs: Outputs, payload: Sequence[memoryview]
    ) -> list[tuple[OutputSpan, OutputItem]]:
        """Deliver the outputs of an instance's step that come next in their streams.

        Returns the others, for `splice`. Raises PeerError when spans and items don't match,
        msgspec.MsgspecError when items can't be read; nothing is delivered then.
        """
        if not payload:
            raise PeerError(f"{instance} sent outputs without items", "unusable")
        now = self.clock()
        batch = self.decode(payload)
        if len(batch.items) != len(outputs.spans):
            raise PeerError(
                f"{instance} sent {len(outputs.spans)} spans for {len(batch.items)} items"
            )
        runs = self.table.runs
        others: list[tuple[OutputSpan, OutputItem]] = []
        ended: list[LiveRequest] = []
        held: set[int] = set()
        for run_id, tokens in batch.cached.items():
            if (request := runs.get(run_id)) is not None and request.first_at is None:
                request.cached_tokens = min(tokens, request.prompt_tokens)
                request.queued_s = batch.queued.get(run_id, 0.0)
                self.instances.note_prompt(
                    request.prompt_tokens - request.cached_tokens,
                    now - request.placed - request.queued_s,
                )
        items = batch.items
        for span, item in zip(outputs.spans, items, strict=True):
            request = runs.get(span.request_id)
            if (
                request is not None
                and (allowance := request.allowance) is not None
                and not self._pays(allowance, instance, span, item)
            ):
                held.add(id(item))
                continue
            if request is None or not request.splicer.advance(
                span.epoch, span.start, len(item.new_token_ids), now
            ):
                others.append((span, item))
                continue
            self._keep(request, item, instance, now)
            if item.finished:
                ended.append(request)
        for request in ended:
            self.end(request)
        if others or held:
            apart = held.union(id(item) for _, item in others)
            items = [item for item in items if id(item) not in apart]
        index = self.instances.index(instance)
        self.sink.deliver(index, self.due(index, items), batch.meta)
        return others

    def _pays(
        self,
        allowance: TokenAllowance[tuple[str, OutputSpan, OutputItem]],
        instance: str,
        span: OutputSpan,
        item: OutputItem,
    ) -> bool:
        """Whether the output is paid for; else it waits for the next grant."""
        assert self.quotas is not None
        tokens = len(item.new_token_ids)
        paid = allowance.admits(tokens)
        if not paid:
            allowance.hold(tokens, (instance, span, item))
        if allowance.low or not paid:
            self.quotas.want_more(allowance)
        return paid

    def splice(
        self, request: LiveRequest, instance: str, span: OutputSpan, item: OutputItem
    ) -> list[Action]:
        """Deliver what follows from an output that didn't just come next; what else to do."""
        now = self.clock()
        fed = request.splicer.feed(instance, span, item, now)
        for owner, pairs in itertools.groupby(fed.deliver, key=lambda pair: pair[0]):
            items = [one for _, one in pairs]
            for one in items:
                self._keep(request, one, owner, now)
            index = self.instances.index(owner)
            self.sink.deliver(index, self.due(index, items), None)
        if fed.deliver and fed.deliver[-1][1].finished:
            self.end(request)
        return fed.actions

    def _keep(self, request: LiveRequest, item: OutputItem, instance: str, now: float) -> None:
        """The next run goes on after these tokens; the client knows nothing of runs."""
        if request.call is not None and (writers := request.call.writers) is not None:
            writers.add_token(instance, len(request.output_token_ids))
        request.output_token_ids += item.new_token_ids
        if request.whole and request.call is not None:
            tokens = len(item.new_token_ids)
            request.call.room.count_kept(tokens, tokens * request.logprobs)
            if request.call.room.full():
                self.too_large.add(request.call)
        if request.run:
            item.request_id = request.request_id
        if request.first_at is None and request.splicer.next:
            request.first_at = now
            request.begun = self.instances.arithmetic(instance)
            if request.call is not None:
                request.call.began(request.request_id)
            self.observer.began(request.priority, now - request.arrived)

    def end(self, request: LiveRequest) -> None:
        """The client has all that it wanted."""
        self.table.remove(request.request_id)
        splicer = request.splicer
        if request.first_at is not None and splicer.last_at is not None:
            self.observer.ended(
                request.priority,
                splicer.last_at - request.arrived,
                splicer.last_at - request.first_at,
                splicer.next,
            )

    def finish(self, requests: Sequence[LiveRequest]) -> None:
        """End requests with what their clients have got, as if they had asked for no more."""
        for request in requests:
            self.end_spread(request.request_id)
            self.end(request)
        if requests:
            self.sink.finish([one.request_id for one in requests])

    def fail(self, request_ids: Sequence[str], reason: str, kind: Failure) -> None:
        """Fail requests, see `OutputSink.fail`; tokens that are held come first."""
        for request_id in request_ids:
            self.end_spread(request_id)
        self.sink.fail(request_ids, reason, kind)

    def close(self) -> None:
        """Drop all held tokens."""
        for spread in self._spreads.values():
            spread.ends.cancel()
            if spread.timer is not None:
                spread.timer.cancel()
        self._spreads.clear()

    # -- spreading a pause. PauseAhead is advice: tokens come in order, each once, whatever it says

    def spread(self, request_id: str, index: int, pause_s: float, stretch_s: float) -> None:
        """Hold the request's tokens: soon one comes `pause_s` later than usual.

        index: of the instance that decodes until then. Each token may come later by `stretch_s`
        more than the one before.
        """
        self.end_spread(request_id)
        ends = asyncio.get_running_loop().call_later(GIVE_UP_S, self.end_spread, request_id)
        self._spreads[request_id] = _Spread(DelayRamp(pause_s, stretch_s), index, ends)

    def end_spread(self, request_id: str) -> None:
        """Deliver what is held and hold nothing more: the pause is over, or doesn't come.

        Unknown ids are ignored.
        """
        spread = self._spreads.pop(request_id, None)
        if spread is None:
            return
        spread.ends.cancel()
        if spread.timer is not None:
            spread.timer.cancel()
        if spread.held:
            self.sink.deliver(spread.index, [item for _, item in spread.held], None)

    def due(self, index: int, items: Sequence[OutputItem]) -> Sequence[OutputItem]:
        """The items that go on at once; the others are kept for later."""
        if not self._spreads:
            return items
        return [item for item in items if not self._holds(index, item)]

    def _holds(self, index: int, item: OutputItem) -> bool:
        """Whether the item is kept for later. If not, what was kept before it has gone on."""
        request_id = item.request_id
        spread = self._spreads.get(request_id)
        if spread is None:
            return False
        if item.finished or index != spread.index:
            self.end_spread(request_id)
            return False
        spread.number += 1
        delay_s = spread.ramp.delay_s(spread.number)
        spread.held.append((self.clock() + delay_s, item))
        if spread.timer is None:
            self._wait(request_id, spread, delay_s)
        return True

    def _wait(self, request_id: str, spread: _Spread, delay_s: float) -> None:
        loop = asyncio.get_running_loop()
        spread.timer = loop.call_later(delay_s, self._pass_on, request_id)

    def _pass_on(self, request_id: str) -> None:
        spread = self._spreads[request_id]
        spread.timer = None
        _, item = spread.held.popleft()
        self.sink.deliver(spread.index, [item], None)
        if spread.held:
            due, _ = spread.held[0]
            self._wait(request_id, spread, max(0.0, due - self.clock()))
