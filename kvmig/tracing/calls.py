"""The span of one HTTP call, in a proxy or in a front end, and the headers that go on. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from http import HTTPStatus

from kvmig.tracing.parents import DROPPED, TRACEPARENT, TRACESTATE, read_context
from kvmig.tracing.spans import Attributes, SpanTracer, TracedSpan

Headers = list[tuple[bytes, bytes]]


class CallTrace:
    """A call, sampled or not."""

    __slots__ = ("_output", "_prompts", "_state", "span", "tracer")

    def __init__(self, tracer: SpanTracer, span: TracedSpan, state: bytes = b"") -> None:
        """state: the tracestate that goes on."""
        self.tracer = tracer
        self.span = span
        self._state = state
        self._prompts: dict[Hashable, int] = {}
        self._output = 0

    @property
    def recorded(self) -> bool:
        """Whether it is sampled."""
        return self.span.recorded

    @property
    def sampled_id(self) -> str:
        """The trace's id, as logs and collectors show it; empty: it isn't sampled."""
        return f"{self.span.parent.trace_id:032x}" if self.recorded else ""

    def count_tokens(self, prompt: Hashable, prompt_tokens: int, output: int) -> None:
        """Count a sequence that has ended. prompt: names its prompt, which several may share."""
        self._prompts[prompt] = prompt_tokens
        self._output += output

    @property
    def counted(self) -> tuple[int, int]:
        """Tokens of the prompts, and of the answers, of all sequences that have ended."""
        return sum(self._prompts.values()), self._output

    def replace_headers(self, headers: Headers) -> None:
        """Put this span in place of the client's, for the next process."""
        headers[:] = [one for one in headers if one[0] not in DROPPED]
        headers.append((TRACEPARENT, self.span.parent.header()))
        if self._state:
            headers.append((TRACESTATE, self._state))

    def end(self, status: int, attributes: Attributes, *, left: bool = False) -> None:
        """End the call's span. status: of the answer; 0: none. left: the client has gone."""
        said = {**attributes, "http.response.status_code": status} if status else attributes
        self.span.set_attributes(said)
        error = str(status) if status >= HTTPStatus.INTERNAL_SERVER_ERROR else ""
        self.span.end(self.tracer.wall(), "client_left" if left and not error else error)


class CallTracer:
    """Begins the spans of calls."""

    def __init__(self, tracer: SpanTracer, *, trusts: bool) -> None:
        """trusts: whether a call's own traceparent goes on; else a trace begins here, with a link
        to the client's span, and its wish to be sampled counts nothing."""
        self.tracer = tracer
        self._trusts = trusts

    def begin(
        self, name: str, headers: Sequence[tuple[bytes, bytes]], attributes: Attributes
    ) -> CallTrace:
        """Begin a call's span. headers: as they came."""
        given = read_context(headers)
        trusted = self._trusts and given.parent is not None
        span = self.tracer.begin(
            name,
            self.tracer.wall(),
            attributes,
            parent=given.parent if trusted else None,
            linked=None if trusted else given.parent,
            side="server",
        )
        return CallTrace(self.tracer, span, given.state if trusted else b"")
