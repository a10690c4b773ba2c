"""The spans of requests of a front end, made of the times that its table keeps anyway.

What instances measure comes with their reports: they send no spans of their own.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kvmig.frontend.migration_spans import ReportSpan, migration_span
from kvmig.frontend.requests import LiveRequest
from kvmig.kvtransfer.report import MigrationReport
from kvmig.tracing.calls import CallTrace
from kvmig.tracing.spans import AttributeValue, TracedSpan

REMEMBERED = 1024
"""Runs of sampled requests whose migrations are still taken: a report may come after the end."""


@dataclass(eq=False, slots=True)
class _TracedRequest:
    """A sampled request."""

    call: CallTrace
    span: TracedSpan
    placed: float
    """When its first run was sent to an instance, in the router's clock."""
    lost_at: float | None = None
    """When its run was given up that another one follows, in the router's clock."""


class RequestTraces:
    """The spans of one front end's requests. The `RequestTable` reports them."""

    def __init__(self) -> None:
        self._live: dict[str, _TracedRequest] = {}
        """Sampled requests by their present runs' ids."""
        self._ended: OrderedDict[str, _TracedRequest] = OrderedDict()
        """The same of runs that are over, the oldest first."""

    def began(self, request: LiveRequest) -> None:
        """A request is in the table now."""
        trace = None if request.call is None else request.call.trace
        if trace is None or not trace.recorded or request.search is not None:
            return  # a beam search would make spans for each step of each beam
        attributes: dict[str, AttributeValue] = {
            "kvmig.request.id": request.request_id,
            "gen_ai.usage.input_tokens": request.prompt_tokens,
            "kvmig.instance": request.owner,
        }
        began = trace.tracer.unix(request.arrived)
        span = trace.span.begin("sequence", began, attributes)
        self._live[request.run_id] = _TracedRequest(trace, span, request.placed)

    def ended(self, request: LiveRequest, failed: bool) -> None:
        """A request has left the table. failed: its client gets an error."""
        found = self._end_run(request.run_id)
        if found is None:
            return
        tracer, span = found.call.tracer, found.span
        unix = tracer.unix
        last = request.splicer.last_at
        arrived, now = unix(request.arrived), tracer.wall()
        first = None if request.first_at is None else unix(request.first_at)
        placed = min(unix(found.placed + request.queued_s), now if first is None else first)
        span.add("queue", arrived, placed)
        ended = now
        if first is not None:
            cached = {"gen_ai.usage.cache_read.input_tokens": request.cached_tokens}
            span.add("prefill", placed, first, cached)
            ended = first if last is None else unix(last)
            tokens = {"gen_ai.usage.output_tokens": request.position}
            span.add("decode", first, ended, tokens)
        span.set_attributes(
            {
                "gen_ai.usage.output_tokens": request.position,
                "kvmig.moves": request.moves,
                "kvmig.reruns": request.run,
            }
        )
        found.call.count_tokens(request.prompt, request.prompt_tokens, request.position)
        span.end(now if failed else ended, "failed" if failed else "")

    def lost_run(self, request: LiveRequest, run_id: str, now: float) -> None:
        """The run is given up, and the request has no instance until the next one."""
        found = self._end_run(run_id)
        if found is not None:
            found.lost_at = now if found.lost_at is None else found.lost_at
            self._live[request.run_id] = found

    def ran_again(self, request: LiveRequest, instance: str, tokens: int, now: float) -> None:
        """The next run is on its way to an instance, which recomputes that number of tokens."""
        found = self._live.get(request.run_id)
        if found is None or found.lost_at is None:
            return
        unix = found.call.tracer.unix
        said: dict[str, AttributeValue] = {
            "kvmig.instance": instance,
            "kvmig.recomputed_tokens": tokens,
        }
        found.span.add("re-run", unix(found.lost_at), unix(now), said)
        found.lost_at = None

    def migrated(self, report: MigrationReport) -> None:
        """A migration of a run has ended; the report names the run."""
        run_id = report.request_id
        if (found := self._live.get(run_id) or self._ended.get(run_id)) is not None:
            add_span(found.span, migration_span(report))

    def trace_id(self, run_id: str) -> str:
        """The id of a sampled run's trace; empty: it has none."""
        found = self._live.get(run_id)
        return "" if found is None else f"{found.span.parent.trace_id:032x}"

    def _end_run(self, run_id: str) -> _TracedRequest | None:
        if (found := self._live.pop(run_id, None)) is not None:
            self._ended[run_id] = found
            if len(self._ended) > REMEMBERED:
                self._ended.popitem(last=False)
        return found


def add_span(parent: TracedSpan, span: ReportSpan) -> None:
    """Add a report's span, with those under it."""
    made = parent.begin(span.name, span.began, span.attributes)
    for part in span.parts:
        add_span(made, part)
    made.end(span.ended, str(span.attributes.get("kvmig.reason", "")))
