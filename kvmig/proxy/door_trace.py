"""The spans of one call at a fleet's proxy: the call, and its wait for its model. Pure."""

from __future__ import annotations

from kvmig.asgi.route_table import ClientRoute
from kvmig.tracing.calls import CallTrace, CallTracer, Headers
from kvmig.tracing.spans import TracedSpan


class DoorTrace:
    """One call, sampled or not."""

    def __init__(self, trace: CallTrace) -> None:
        self._trace = trace
        self._hold: TracedSpan | None = None
        self._state: TracedSpan | None = None
        self._seen = ""
        self.status = 0
        """Status of its answer; 0: it has none."""

    @classmethod
    def begin(
        cls, calls: CallTracer, route: ClientRoute, headers: Headers, call_id: str, key: str
    ) -> DoorTrace:
        """Begin the span of a call whose key is known. key: its prefix."""
        attributes = {
            "http.request.method": route.method,
            "http.route": route.path,
            "kvmig.call.id": call_id,
            "kvmig.key": key,
        }
        return cls(calls.begin(f"{route.method} {route.path}", headers, attributes))

    def name_model(self, model: str) -> None:
        """Note the model that the call is for."""
        self._trace.span.set_attributes({"gen_ai.request.model": model})

    def hold(self, state: str) -> None:
        """Note that the call waits, while its model is in this state."""
        if not self._trace.recorded or state == self._seen:
            return
        now = self._trace.tracer.wall()
        if self._hold is None:
            self._hold = self._trace.span.begin("hold", now)
        if self._state is not None:
            self._state.end(now)
        self._seen = state
        self._state = self._hold.begin(state, now)

    def end_hold(self) -> None:
        """The call waits no more."""
        now = self._trace.tracer.wall()
        for span in (self._state, self._hold):
            if span is not None:
                span.end(now)
        self._state = self._hold = None
        self._seen = ""

    def replace_headers(self, headers: Headers) -> Headers:
        """The headers for the deployment: this span in place of the client's."""
        own = list(headers)
        self._trace.replace_headers(own)
        return own

    def end(self, *, gone: bool) -> None:
        """End the trace. gone: the client's connection is closed by now."""
        self.end_hold()
        self._trace.end(self.status, {}, left=gone and not self.status)
