"""The spans of calls that engines work for, in OpenTelemetry's words for generative models. Pure.

No prompt and no answer is ever in one.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvmig.asgi.call import HttpCall
from kvmig.asgi.route_table import ClientRoute
from kvmig.tracing.calls import CallTrace, CallTracer
from kvmig.tracing.spans import SpanTracer

_CHATS = ("chat", "messages", "responses")
_EMBEDS = ("embed", "embeddings", "pooling")


def operation_of(route: ClientRoute) -> str:
    """The operation's name, of those that OpenTelemetry knows where one fits."""
    words = route.path.split("/")
    if any(one in words for one in _CHATS):
        return "chat"
    if any(one in words for one in _EMBEDS):
        return "embeddings"
    if route.content == "generation":
        return "text_completion"
    return words[-1]


class CallSpans:
    """Makes the spans of one front end's calls."""

    def __init__(self, tracer: SpanTracer, model: str) -> None:
        """model: its name for clients."""
        self._calls = CallTracer(tracer, trusts=True)
        self._model = model

    def begin(
        self, call: HttpCall, route: ClientRoute, headers: Sequence[tuple[bytes, bytes]]
    ) -> CallTrace:
        """Begin a call's span. The parent is the span of the fleet's proxy; without a proxy, the
        client's."""
        operation = operation_of(route)
        attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "kvmig",
            "gen_ai.request.model": self._model,
            "http.request.method": route.method,
            "http.route": route.path,
            "kvmig.call.id": call.call_id,
        }
        return self._calls.begin(f"{operation} {self._model}", headers, attributes)


def end_call(trace: CallTrace, call: HttpCall) -> None:
    """End a call's span, with the usage that its answer names, or else with what was counted."""
    prompt, output = trace.counted if call.told is None else call.told
    usage = {"gen_ai.usage.input_tokens": prompt, "gen_ai.usage.output_tokens": output}
    trace.end(call.status, usage, left=call.left)
