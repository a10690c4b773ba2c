"""Spans by opentelemetry-sdk, which only a process with traces imports. Pure.

Most spans are made when what they show is over, with the times that were noted anyway: a token
costs nothing. Times are in Unix seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal

from kvmig.tracing.parents import TraceParent

if TYPE_CHECKING:
    from opentelemetry.trace import Span, SpanContext, Tracer

AttributeValue = str | int | float | bool
Attributes = Mapping[str, AttributeValue]
SpanSide = Literal["server", "internal"]


class TracedSpan:
    """A span that others can be made under."""

    __slots__ = ("_span", "_tracer", "parent")

    def __init__(self, tracer: SpanTracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span
        context = span.get_span_context()
        self.parent = TraceParent(
            context.trace_id, context.span_id, bool(context.trace_flags.sampled)
        )
        """What spans of other processes are made under."""

    @property
    def recorded(self) -> bool:
        """Whether it is sampled; else what is said of it is dropped."""
        return self._span.is_recording()

    def begin(self, name: str, began: float, attributes: Attributes | None = None) -> TracedSpan:
        """Begin a span under this one."""
        return self._tracer.begin(name, began, attributes, parent=self.parent, local=True)

    def add(
        self, name: str, began: float, ended: float, attributes: Attributes | None = None
    ) -> TracedSpan:
        """Add a span under this one that is over."""
        span = self.begin(name, began, attributes)
        span.end(ended)
        return span

    def set_attributes(self, attributes: Attributes) -> None:
        """Add attributes."""
        self._span.set_attributes(attributes)

    def end(self, ended: float, error: str = "") -> None:
        """End the span. error: why it failed, as one word; empty: it did not."""
        if error:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR, error))
            self._span.set_attribute("error.type", error)
        self._span.end(round(ended * 1e9))


class SpanTracer:
    """Makes the spans of one process."""

    def __init__(
        self, tracer: Tracer, clock: Callable[[], float], wall: Callable[[], float]
    ) -> None:
        """clock: that of the times that callers convert with `unix`. wall: Unix time."""
        self._tracer = tracer
        self._clock = clock
        self.wall = wall

    def unix(self, at: float) -> float:
        """A time of the process's clock in Unix seconds."""
        return self.wall() - self._clock() + at

    def begin(
        self,
        name: str,
        began: float,
        attributes: Attributes | None = None,
        *,
        parent: TraceParent | None = None,
        local: bool = False,
        linked: TraceParent | None = None,
        side: SpanSide = "internal",
    ) -> TracedSpan:
        """Begin a span. parent: None: it begins a trace. local: whether that is of this process.

        linked: a span of another trace that it has to do with.
        """
        from opentelemetry.context import Context
        from opentelemetry.trace import Link, NonRecordingSpan, SpanKind, set_span_in_context

        context = Context()
        if parent is not None:
            context = set_span_in_context(NonRecordingSpan(_context(parent, not local)), context)
        span = self._tracer.start_span(
            name,
            context,
            SpanKind.SERVER if side == "server" else SpanKind.INTERNAL,
            attributes,
            None if linked is None else [Link(_context(linked, True))],
            start_time=round(began * 1e9),
        )
        return TracedSpan(self, span)


def _context(parent: TraceParent, remote: bool) -> SpanContext:
    from opentelemetry.trace import SpanContext, TraceFlags

    flags = TraceFlags(TraceFlags.SAMPLED if parent.sampled else TraceFlags.DEFAULT)
    return SpanContext(parent.trace_id, parent.span_id, remote, flags)
