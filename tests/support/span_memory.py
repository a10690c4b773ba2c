"""A tracer whose spans stay in memory."""

from __future__ import annotations

import time
from dataclasses import dataclass

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import DEFAULT_ON, Sampler

from kvmig.core.clock import TimeSource, monotonic
from kvmig.tracing.spans import SpanTracer


@dataclass
class SpanMemory:
    """A tracer, and the spans that it has ended."""

    tracer: SpanTracer
    exporter: InMemorySpanExporter

    @property
    def spans(self) -> list[ReadableSpan]:
        """In the order in which they ended."""
        return list(self.exporter.get_finished_spans())

    def named(self, name: str) -> list[ReadableSpan]:
        """Those of this name."""
        return [one for one in self.spans if one.name == name]

    def attributes_of(self, name: str) -> dict[str, object]:
        """Of the only span of this name."""
        (span,) = self.named(name)
        return dict(span.attributes or {})

    def tree(self, parent: ReadableSpan | None = None) -> list[object]:
        """Names of spans, each with those under it, in the order in which they began. parent:
        None: of what has none here."""
        ids = {one.context.span_id for one in self.spans}
        wanted = None if parent is None else parent.context.span_id
        found = [
            one
            for one in self.spans
            if (wanted is None and (one.parent is None or one.parent.span_id not in ids))
            or (one.parent is not None and one.parent.span_id == wanted)
        ]
        found.sort(key=lambda one: one.start_time or 0)
        return [[one.name, *self.tree(one)] if self.tree(one) else one.name for one in found]


def span_memory(
    sampler: Sampler = DEFAULT_ON, clock: TimeSource = monotonic, wall: TimeSource = time.time
) -> SpanMemory:
    """A new one."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler, shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return SpanMemory(SpanTracer(provider.get_tracer("test"), clock, wall), exporter)
