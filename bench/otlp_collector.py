"""A collector of traces: takes OTLP over HTTP on this host, and keeps the spans."""

from __future__ import annotations

import asyncio
import contextlib
import select
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

WAIT_S = 60.0
SILENT_S = 5.0
"""A client that connects and sends nothing for this time is left."""


@dataclass(frozen=True)
class CollectedSpan:
    """One span. Times in Unix seconds."""

    service: str
    process: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    began: float
    ended: float
    attributes: dict[str, Any]
    links: tuple[str, ...]
    """Ids of traces."""


@dataclass
class OtlpCollector:
    """What came."""

    port: int = 0
    spans: list[CollectedSpan] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """Variables that send traces here, at once."""
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self.port}",
            "OTEL_BSP_SCHEDULE_DELAY": "50",
        }

    def named(self, name: str) -> list[CollectedSpan]:
        """The spans of this name, in the order in which they began."""
        return sorted((one for one in self.spans if one.name == name), key=lambda one: one.began)

    def under(self, span: CollectedSpan) -> list[CollectedSpan]:
        """The spans right under it."""
        found = (one for one in self.spans if one.parent_id == span.span_id)
        return sorted(found, key=lambda one: one.began)

    async def wait_for(self, name: str, count: int = 1) -> list[CollectedSpan]:
        """Wait until this number of spans of the name is there. Raises TimeoutError."""
        async with asyncio.timeout(WAIT_S):
            while len(self.named(name)) < count:  # noqa: ASYNC110 - a thread adds them
                await asyncio.sleep(0.02)
        return self.named(name)


@contextlib.contextmanager
def otlp_collector() -> Iterator[OtlpCollector]:
    """Started, and ended once all that was sent until then is answered."""
    collector = OtlpCollector()

    class Handler(BaseHTTPRequestHandler):
        timeout = SILENT_S

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.spans += spans_of(ExportTraceServiceRequest.FromString(body))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = False  # so that its close waits for them
        collector.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join(timeout=5.0)
            while select.select([server], [], [], 0)[0]:
                server.handle_request()


def spans_of(request: Any) -> Iterator[CollectedSpan]:
    """The spans of one message."""
    for resource in request.resource_spans:
        of = _attributes(resource.resource.attributes)
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield CollectedSpan(
                    of["service.name"],
                    of.get("service.instance.id", ""),
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.start_time_unix_nano / 1e9,
                    span.end_time_unix_nano / 1e9,
                    _attributes(span.attributes),
                    tuple(one.trace_id.hex() for one in span.links),
                )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in pairs}
