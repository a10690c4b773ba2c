"""The spans of instances' lives: each start, and each drain. Each is a trace of its own. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvmig.controlplane.messages import ClusterMember, MemberState
from kvmig.core.api_records import DRAIN_ENDED
from kvmig.tracing.spans import SpanTracer, TracedSpan

START, DRAIN = "start instance", "drain instance"


@dataclass(eq=False, slots=True)
class _Known:
    state: MemberState | None = None
    span: TracedSpan | None = None


class InstanceSpans:
    """Made from what the launcher reports of its instances."""

    def __init__(self, tracer: SpanTracer, model: str) -> None:
        """model: its name for clients."""
        self._tracer = tracer
        self._model = model
        self._began = tracer.wall()
        self._known: dict[str, _Known] = {}

    def observe(self, members: Sequence[ClusterMember]) -> None:
        """Take the instances as they are now."""
        now = self._tracer.wall()
        there = {one.instance for one in members}
        for name in [name for name in self._known if name not in there]:
            self._end(self._known.pop(name), now, "")
        for member in members:
            first = member.instance not in self._known
            known = self._known.setdefault(member.instance, _Known())
            if member.state != known.state:
                self._change(known, member, self._began if first else now)
            elif member.detail.startswith(DRAIN_ENDED):
                self._end(known, now, "")

    def _change(self, known: _Known, member: ClusterMember, since: float) -> None:
        now = self._tracer.wall()
        self._end(known, now, "failed" if member.state == "failed" else "")
        name = {"starting": START, "draining": DRAIN}.get(member.state)
        if known.state is None and member.state == "serving":
            name = START  # a first one is reported once it serves
        known.state = member.state
        if name is None:
            return
        said = {"kvmig.instance": member.instance, "gen_ai.request.model": self._model}
        known.span = self._tracer.begin(name, since if name == START else now, said)
        if member.state == "serving":
            self._end(known, now, "")

    def _end(self, known: _Known, now: float, error: str) -> None:
        if known.span is not None:
            known.span.end(now, error)
            known.span = None
