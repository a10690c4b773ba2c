"""A process's way to the collector of traces."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import threading
import time
from typing import TYPE_CHECKING

from kvmig.core.clock import monotonic
from kvmig.core.errors import ConfigError
from kvmig.tracing.settings import TraceSettings
from kvmig.tracing.spans import SpanTracer

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

SCOPE = "kvmig"
CLOSE_S = 2.0
"""Longest wait, at the end of a process, for the collector to take the last spans."""
POLL_S = 0.02
EXPORTERS: dict[str, str] = {
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
}


class TraceCollector:
    """Takes the spans of one process, and sends them from a thread of its own."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self.tracer = SpanTracer(provider.get_tracer(SCOPE), monotonic, time.time)

    async def close(self) -> None:
        """Send what is left, for a limited time: the collector may be away."""
        ending = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        ending.start()
        deadline = monotonic() + CLOSE_S
        while ending.is_alive() and monotonic() < deadline:  # noqa: ASYNC110 - a thread's end is no event
            await asyncio.sleep(POLL_S)


def open_collector(settings: TraceSettings | None, process: str) -> TraceCollector | None:
    """The way to the collector; None without settings. process: names it among those of the
    service. Raises ConfigError where a package is missing.
    """
    if settings is None:
        return None
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise _missing(error) from error
    given = Resource.create({"service.instance.id": process})
    named = given.attributes.get("service.name", "")
    if str(named).startswith("unknown_service"):
        given = given.merge(Resource({"service.name": SCOPE}))
    provider = TracerProvider(resource=given, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(_exporter(settings)))
    return TraceCollector(provider)


def check_packages(settings: TraceSettings | None) -> None:
    """Raises ConfigError where there are settings, and a package is missing."""
    if settings is not None:
        for name in ("opentelemetry.sdk.trace", EXPORTERS[settings.protocol]):
            try:
                found = importlib.util.find_spec(name)
            except ModuleNotFoundError as error:  # of a package that it is in
                raise _missing(error) from error
            if found is None:
                raise _missing(ModuleNotFoundError(f"No module named {name!r}"))


def _exporter(settings: TraceSettings) -> SpanExporter:
    try:
        module = importlib.import_module(EXPORTERS[settings.protocol])
    except ImportError as error:
        raise _missing(error) from error
    exporter: SpanExporter = module.OTLPSpanExporter()
    return exporter


def _missing(error: ImportError) -> ConfigError:
    return ConfigError(
        f"traces need a package that is missing ({error}): pip install 'kvmig[otel]', or unset"
        " OTEL_EXPORTER_OTLP_ENDPOINT"
    )
