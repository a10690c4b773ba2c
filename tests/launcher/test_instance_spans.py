"""The spans of instances' starts and drains."""

from __future__ import annotations

from kvmig.controlplane.messages import ClusterMember, MemberState
from kvmig.core.api_records import DRAIN_ENDED
from kvmig.launcher.instance_spans import DRAIN, START, InstanceSpans
from tests.support.span_memory import SpanMemory, span_memory


class Watched:
    """What the launcher reports of one instance, a second later each time."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.memory: SpanMemory = span_memory(clock=lambda: self.now, wall=lambda: self.now)
        self._spans = InstanceSpans(self.memory.tracer, "m")

    def say(self, state: MemberState | None, detail: str = "") -> None:
        """None: it is gone."""
        self.now += 1.0
        members = [] if state is None else [ClusterMember("i0", "", state, detail)]
        self._spans.observe(members)

    @property
    def seen(self) -> list[tuple[str, float, float]]:
        return [
            (one.name, (one.start_time or 0) / 1e9, (one.end_time or 0) / 1e9)
            for one in self.memory.spans
        ]


def test_the_first_start_lasts_from_the_launchers_begin_until_the_instance_serves() -> None:
    watched = Watched()
    watched.say("starting")
    watched.say("starting")
    watched.say("serving")
    assert watched.seen == [(START, 1000.0, 1003.0)]


def test_a_start_that_fails_is_an_error() -> None:
    watched = Watched()
    watched.say("starting")
    watched.say("failed", "no memory")
    (span,) = watched.memory.spans
    assert span.attributes is not None
    assert span.attributes["error.type"] == "failed"


def test_a_drain_ends_when_the_instance_is_empty_or_gone_or_serves_again() -> None:
    watched = Watched()
    watched.say("serving")
    for last in ("empty", "serves", "gone"):
        watched.say("draining")
        watched.say("draining")
        match last:
            case "empty":
                watched.say("draining", DRAIN_ENDED)
                watched.say("serving")
            case "serves":
                watched.say("serving")
            case _:
                watched.say(None)
    assert [round(end - began) for name, began, end in watched.seen if name == DRAIN] == [2, 2, 2]


def test_a_restart_of_a_drained_instance_is_another_start() -> None:
    watched = Watched()
    for state in ("serving", "draining", "starting", "serving"):
        watched.say(state)
    assert [name for name, _, _ in watched.seen] == [START, DRAIN, START]
