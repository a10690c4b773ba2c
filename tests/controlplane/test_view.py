"""The frozen view, and what its builder makes of reports."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.controlplane.messages import ClusterMember, LoadReport
from kvmig.controlplane.view import FIELDS, ClusterView, ViewBuilder
from kvmig.engines.base import EngineLoad


def report(instance: str, seq: int, used: int = 0, state: str = "serving") -> LoadReport:
    return LoadReport(instance, seq, EngineLoad(100, used, 1, 0, 0, 0), 0, 0, state)


def builder(*instances: str) -> ViewBuilder:
    made = ViewBuilder(stale_after_s=1.0, settle_s=0.1)
    made.members(ClusterMember(name, f"tcp://{name}") for name in instances)
    return made


def used(views: ViewBuilder, now: float = 0.0) -> dict[str, int]:
    return {one.instance: one.load.used_blocks for one in views.view(now).instances}


def test_a_report_older_than_the_last_is_ignored() -> None:
    views = builder("a")
    views.report(report("a", 5, used=50), 0.0)
    views.report(report("a", 4, used=40), 0.1)
    assert used(views) == {"a": 50}


def test_a_report_of_a_stranger_is_ignored() -> None:
    views = builder("a")
    views.report(report("b", 1), 0.0)
    assert used(views) == {"a": 0}


def test_an_instance_is_stale_before_its_first_report_and_long_after_its_last() -> None:
    views = builder("a")
    assert views.view(0.0).stale(views.view(0.0).instances[0])
    views.report(report("a", 1), 5.0)
    for now, stale in ((5.0, False), (6.0, False), (6.1, True)):
        view = views.view(now)
        assert view.stale(view.instances[0]) is stale


def test_what_was_dispatched_counts_until_a_report_can_count_it() -> None:
    views = builder("a")

    def pending() -> tuple[float, int]:
        one = views.view(0.0).instances[0]
        return one.pending_blocks, one.pending_requests

    views.dispatched("a", 7, now=1.0)
    views.dispatched("a", 3, now=1.08)
    assert pending() == (10, 2)
    views.report(report("a", 1), now=1.05)
    assert pending() == (10, 2)
    views.report(report("a", 2), now=1.12)
    assert pending() == (3, 1)
    views.report(report("a", 3), now=1.2)
    assert pending() == (0, 0)


def test_members_that_are_gone_are_forgotten_and_the_others_keep_their_load() -> None:
    views = builder("a", "b")
    views.report(report("a", 1, used=10), 0.0)
    views.members([ClusterMember("a", "tcp://a"), ClusterMember("c", "tcp://c")])
    assert used(views) == {"a": 10, "c": 0}


def test_an_instance_at_a_new_endpoint_starts_anew() -> None:
    views = builder("a")
    views.report(report("a", 9, used=10), 0.0)
    views.members([ClusterMember("a", "tcp://elsewhere")])
    assert used(views) == {"a": 0}
    views.report(report("a", 0, used=20), 1.0)
    assert used(views) == {"a": 20}


def test_policies_cannot_change_what_they_see() -> None:
    columns = builder("a").view(0.0).columns
    with pytest.raises(ValueError, match="read-only"):
        columns.used[0] = 5


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("join"), st.sampled_from("abc"), st.just(0)),
            st.tuples(st.just("leave"), st.sampled_from("abc"), st.just(0)),
            st.tuples(st.just("report"), st.sampled_from("abc"), st.integers(0, 100)),
            st.tuples(st.just("dispatched"), st.sampled_from("abc"), st.integers(0, 9)),
        )
    )
)
def test_the_columns_always_show_what_the_instances_say(
    events: list[tuple[str, str, int]],
) -> None:
    views = builder()
    for now, (what, name, blocks) in enumerate(events):
        match what:
            case "join":
                views.join(ClusterMember(name, f"tcp://{name}"))
            case "leave":
                views.leave(name)
            case "report":
                views.report(report(name, now, used=blocks), now)
            case _:
                views.dispatched(name, blocks, now)
        view = views.view(now)
        anew = ClusterView(now, view.instances).columns
        assert len(anew) == len(view.columns)
        for field in FIELDS:
            assert list(getattr(anew, field)) == list(getattr(view.columns, field))
