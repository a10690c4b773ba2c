"""What becomes of instances on workers that are drained, or were lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvmig.core.api_records import InstanceRow
from kvmig.fleet.leaving_instances import LeavingStep, leaving_step
from kvmig.fleet.workers import Leaving

FULL = "no worker has room: b: it is cordoned"


def row(name: str, state: str = "serving", used: int = 0, running: int = 0) -> InstanceRow:
    return InstanceRow(id=name, state=state, blocks_total=1000, blocks_used=used, running=running)


def drains(*names: str) -> dict[str, Leaving]:
    return dict.fromkeys(names, "drain")


def lost(*names: str) -> dict[str, Leaving]:
    return dict.fromkeys(names, "lost")


def test_others_start_first() -> None:
    step = leaving_step([row("i0")], drains("i0"), (), 1, "")
    assert step == LeavingStep(blocked="other instances start first")
    rows = [row("i0"), row("i1", "starting")]
    assert leaving_step(rows, drains("i0"), (), 1, "") == step


def test_once_others_serve_it_is_drained() -> None:
    rows = [row("i0"), row("i1")]
    assert leaving_step(rows, drains("i0"), (), 1, "") == LeavingStep(drained=("i0",))


def test_one_that_drains_already_is_left_to_it() -> None:
    rows = [row("i0", "draining"), row("i1")]
    assert leaving_step(rows, drains("i0"), ("i0",), 1, "") == LeavingStep()


def test_where_nothing_has_room_the_others_take_its_requests_if_they_hold_them() -> None:
    rows = [row("i0", used=300, running=3), row("i1", used=300, running=3)]
    assert leaving_step(rows, drains("i0"), (), 2, FULL).drained == ("i0",)
    rows = [row("i0", used=800, running=3), row("i1", used=300, running=3)]
    assert leaving_step(rows, drains("i0"), (), 2, FULL) == LeavingStep(blocked=FULL)


def test_the_only_one_stays_where_nothing_has_room() -> None:
    assert leaving_step([row("i0")], drains("i0"), (), 1, FULL) == LeavingStep(blocked=FULL)


def test_a_lost_one_is_taken_out_once_another_one_serves() -> None:
    assert leaving_step([row("i0", "starting")], lost("i0"), (), 1, "").removed == ()
    rows = [row("i0", "starting"), row("i1", "starting")]
    waits = LeavingStep(blocked="other instances start first")
    assert leaving_step(rows, lost("i0"), (), 1, "") == waits, "the other one may fail"
    rows = [row("i0", "starting"), row("i1")]
    assert leaving_step(rows, lost("i0"), (), 1, "") == LeavingStep(removed=("i0",))


def test_one_that_never_served_on_a_worker_that_is_drained_is_taken_out() -> None:
    rows = [row("i0", "failed"), row("i1")]
    assert leaving_step(rows, drains("i0"), (), 1, "") == LeavingStep(removed=("i0",))


def test_one_whose_worker_stays_after_all_serves_again() -> None:
    rows = [row("i0", "draining"), row("i1", "draining"), row("i2")]
    assert leaving_step(rows, {}, ("i0",), 1, "") == LeavingStep(kept=("i0",))


states = st.sampled_from(["serving", "starting", "draining", "failed", "silent"])


@given(
    st.lists(st.tuples(states, st.sampled_from(["", "drain", "lost"]), st.integers(0, 1000))),
    st.integers(1, 4),
    st.sampled_from(["", FULL]),
)
def test_whatever_is_seen_one_stays_and_nothing_is_ordered_twice(
    seen: list[tuple[str, Leaving, int]], wanted: int, no_room: str
) -> None:
    rows = [row(f"i{at}", state, used) for at, (state, _, used) in enumerate(seen)]
    leaving = {f"i{at}": why for at, (_, why, _) in enumerate(seen) if why}
    step = leaving_step(rows, leaving, (), wanted, no_room)
    state = {one.id: one.state for one in rows}
    assert not set(step.drained) & set(step.removed)
    assert all(leaving[one] == "drain" and state[one] == "serving" for one in step.drained)
    assert all(state[one] != "draining" and one in leaving for one in step.removed)
    if step.drained:
        assert any(one.state == "serving" and one.id not in leaving for one in rows)
    if step.removed:
        assert any(one.state == "serving" and one.id not in leaving for one in rows)
