"""A model's life: one start whoever asks, never cut, tried again, adopted.

Every order of events: `kvmig_tools.check.life`.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvmig.fleet.lifecycle import (
    END_S,
    HANG_S,
    LET_END_S,
    REST_S,
    STABLE_S,
    DesiredState,
    ModelStatus,
    ObservedState,
    State,
    awake,
    reconcile,
)

WISH = DesiredState(zero_after_s=300, start_timeout_s=600)
THERE = ObservedState(deployment=True)
READY = ObservedState(deployment=True, ready=True)


def test_nothing_starts_until_somebody_wants_it() -> None:
    assert reconcile(ModelStatus(), WISH, ObservedState(idle_s=1e6), 5) == (ModelStatus(), None)


def test_somebody_who_wants_it_starts_it_once() -> None:
    life, action = reconcile(ModelStatus(), WISH, ObservedState(wanted=True), 5)
    assert (life.state, action) == ("starting", "start")
    assert reconcile(life, WISH, replace(THERE, wanted=True), 6) == (life, None)


def test_one_with_a_least_number_of_instances_starts_by_itself() -> None:
    assert reconcile(ModelStatus(), replace(WISH, least=1), ObservedState(), 0)[1] == "start"


def test_one_without_room_waits_with_the_reason_until_there_is_some() -> None:
    wanted = ObservedState(wanted=True, no_room="no room: 5 of 4 GiB")
    life, action = reconcile(ModelStatus(), WISH, wanted, 5)
    assert (life.state, life.since, life.why, action) == ("waiting", 5, wanted.no_room, None)
    life, _ = reconcile(life, WISH, replace(wanted, no_room="no room: 5 of 4.5 GiB"), 6)
    assert (life.since, life.why) == (5, "no room: 5 of 4.5 GiB")
    life, action = reconcile(life, WISH, ObservedState(wanted=True), 7)
    assert (life.state, life.why, action) == ("starting", "", "start")


def test_one_that_nobody_waits_for_any_more_wants_no_room() -> None:
    life = ModelStatus("waiting", 5, why="no room")
    assert reconcile(life, WISH, ObservedState(no_room="no room"), 6) == (
        ModelStatus(since=6),
        None,
    )


def test_one_that_can_never_start_has_failed() -> None:
    life, action = reconcile(ModelStatus(), WISH, ObservedState(wanted=True, never="too large"), 5)
    assert (life.state, life.why, action) == ("failed", "too large", None)


def test_an_idle_one_makes_room_and_who_wants_it_then_waits() -> None:
    yields = replace(READY, yields=True)
    life, _ = reconcile(ModelStatus("serving"), WISH, yields, 900)
    assert life.state == "emptying"
    assert reconcile(life, WISH, replace(yields, wanted=True), 901)[0].state == "emptying"


def test_requests_that_came_while_one_was_about_to_make_room_end_and_then_it_makes_room() -> None:
    slipped_in = replace(READY, yields=True, wanted=True, running=1)
    life, action = reconcile(ModelStatus("emptying", 900), WISH, slipped_in, 901)
    assert (life.state, action, life.routed) == ("emptying", None, False)
    ended = replace(slipped_in, running=0, unrouted=True)
    assert reconcile(life, WISH, ended, 901.5)[1] == "stop"


def test_one_with_a_long_request_serves_on_as_if_it_had_never_been_about_to_make_room() -> None:
    """Its time to stay does not begin again: it makes room once it is idle."""
    life, _ = reconcile(ModelStatus("starting", 800), WISH, READY, 810)
    assert (life.state, life.there_since) == ("serving", 810)
    life, _ = reconcile(life, WISH, replace(READY, yields=True), 900)
    long = replace(READY, yields=True, wanted=True, running=1)
    assert reconcile(life, WISH, long, 900 + LET_END_S - 1)[0].state == "emptying"
    life, _ = reconcile(life, WISH, long, 900 + LET_END_S)
    assert (life.state, life.there_since, life.since) == ("serving", 810, 900 + LET_END_S)
    assert reconcile(ModelStatus("waking", 5), WISH, READY, 6)[0].there_since == 6


def test_one_that_answers_makes_no_room() -> None:
    yields = replace(READY, yields=True)
    for used in (replace(yields, running=1), replace(yields, wanted=True)):
        assert reconcile(ModelStatus("serving"), WISH, used, 900)[0].state == "serving"
    assert (
        reconcile(ModelStatus("serving"), replace(WISH, least=1), yields, 900)[0].state == "serving"
    )


PARKS = replace(WISH, parks=True)
PARKED = ObservedState(deployment=True, parked=True)


def test_an_idle_one_is_parked_once_nothing_is_sent_to_it() -> None:
    life, action = reconcile(ModelStatus("emptying"), PARKS, READY, 900)
    assert (life.state, action) == ("emptying", None)
    life, action = reconcile(life, PARKS, replace(READY, unrouted=True), 901)
    assert (life.state, action, life.routed) == ("parking", "park", False)
    assert reconcile(life, PARKS, replace(READY, unrouted=True), 902) == (life, None)
    assert reconcile(life, PARKS, PARKED, 903)[0].state == "parked"


def test_one_that_has_no_room_to_be_parked_in_ends() -> None:
    full = replace(READY, unrouted=True, no_park="parked it would need 3.0 GiB of the host")
    life, action = reconcile(ModelStatus("emptying"), PARKS, full, 901)
    assert (life.state, action) == ("stopping", "stop")
    asleep = reconcile(ModelStatus("parked"), PARKS, replace(PARKED, no_park="full"), 902)
    assert asleep == (ModelStatus("parked"), None), "one that is parked has that room"


def test_a_parked_one_wakes_when_it_is_wanted_and_serves_when_it_says_so() -> None:
    life, action = reconcile(ModelStatus("parked"), PARKS, replace(PARKED, wanted=True), 5)
    assert (life.state, action, life.routed) == ("waking", "unpark", False)
    assert reconcile(life, PARKS, replace(PARKED, wanted=True), 6) == (life, None)
    assert reconcile(life, PARKS, READY, 6)[0].state == "serving"


def test_a_parked_one_without_room_waits_with_the_reason() -> None:
    wanted = replace(PARKED, wanted=True, no_room="no room")
    life, action = reconcile(ModelStatus("parked"), PARKS, wanted, 5)
    assert (life.state, life.why, action) == ("parked", "no room", None)


def test_a_parked_one_makes_room_also_if_it_is_wanted() -> None:
    wanted = replace(PARKED, wanted=True, yields=True, unrouted=True)
    life, _ = reconcile(ModelStatus("parked"), PARKS, wanted, 5)
    life, action = reconcile(life, PARKS, wanted, 6)
    assert (life.state, action) == ("stopping", "stop")


def test_one_that_does_not_wake_is_killed_and_one_that_is_not_parked_ends() -> None:
    refused = replace(PARKED, refused="it computes otherwise")
    life, action = reconcile(ModelStatus("waking"), PARKS, refused, 5)
    assert (life.state, action) == ("stopping", "kill")
    again, _ = reconcile(life, PARKS, ObservedState(ended="killed", wanted=True), 6)
    assert reconcile(again, PARKS, ObservedState(wanted=True), 7)[1] == "start"
    refused = replace(READY, refused="it has requests")
    assert reconcile(ModelStatus("parking"), PARKS, refused, 5)[1] == "stop"
    assert reconcile(ModelStatus("waking"), PARKS, PARKED, REST_S + 1)[1] == "kill"


def test_one_that_another_server_has_parked_is_taken_over_so() -> None:
    assert reconcile(ModelStatus(), PARKS, PARKED, 5)[0].state == "parked"
    assert reconcile(ModelStatus("starting"), PARKS, PARKED, 5)[0].state == "parked"
    assert reconcile(ModelStatus("serving"), PARKS, PARKED, 5)[1] == "unpark"


def test_a_refusal_ends_nothing_that_serves_or_is_parked_as_it_was_to_be() -> None:
    """The order before, of a server that was killed, was carried out."""
    refused = replace(READY, refused="it computes otherwise")
    for now in (5, REST_S + 1):
        life, action = reconcile(ModelStatus("waking"), PARKS, refused, now)
        assert (life.state, action) == ("serving", None)
    refused = replace(PARKED, refused="it doesn't answer")
    life, action = reconcile(ModelStatus("parking"), PARKS, refused, 5)
    assert (life.state, action) == ("parked", None)


def test_one_that_another_server_has_woken_or_parked_gets_no_second_order() -> None:
    """Its order was on its way when the server was killed."""
    life, action = reconcile(ModelStatus("parked"), PARKS, replace(READY, wanted=True), 5)
    assert (life.state, action) == ("serving", None)
    life, action = reconcile(ModelStatus("emptying"), PARKS, replace(PARKED, unrouted=True), 5)
    assert (life.state, action) == ("parked", None)


def test_one_that_is_off_does_not_start() -> None:
    assert (
        reconcile(ModelStatus(), replace(WISH, on=False, least=1), ObservedState(wanted=True), 0)[1]
        is None
    )


def test_one_that_another_server_has_started_is_taken_over() -> None:
    assert reconcile(ModelStatus(), WISH, THERE, 5)[0].state == "starting"
    assert reconcile(ModelStatus(), WISH, READY, 5)[0].state == "serving"


def test_one_that_is_off_is_taken_over_only_to_be_emptied() -> None:
    assert reconcile(ModelStatus(), replace(WISH, on=False), THERE, 5)[0].state == "emptying"


def test_one_that_is_switched_off_and_on_while_it_starts_goes_on_starting() -> None:
    life, action = reconcile(ModelStatus("starting"), replace(WISH, on=False), THERE, 5)
    assert (life.state, action) == ("emptying", None)
    assert reconcile(life, WISH, replace(THERE, wanted=True), 6)[0].state == "starting"


def test_a_failed_start_is_tried_again_later_and_later() -> None:
    life, pauses = ModelStatus(), []
    now = 0.0
    for _ in range(7):
        life, action = reconcile(life, WISH, ObservedState(wanted=True), now)
        assert action == "start"
        life, _ = reconcile(life, WISH, ObservedState(ended="exit code 2", wanted=True), now)
        assert (life.state, life.why) == ("failed", "exit code 2")
        assert reconcile(life, WISH, ObservedState(wanted=True), life.retry_at - 0.1)[1] is None
        pauses.append(life.retry_at - now)
        now = life.retry_at
    assert pauses == [10, 20, 40, 80, 160, 300, 300]


def test_one_that_is_woken_does_not_wait_for_its_retry() -> None:
    life = ModelStatus("failed", 0, 3, 300, "exit code 2")
    assert reconcile(awake(life, 5), WISH, ObservedState(wanted=True), 5)[1] == "start"


def test_a_start_that_takes_too_long_is_killed_and_has_failed() -> None:
    life, action = reconcile(ModelStatus("starting"), WISH, replace(THERE, wanted=True), 601)
    assert (life.state, action) == ("stopping", "kill")
    life, action = reconcile(life, WISH, ObservedState(ended="killed by SIGKILL"), 602)
    assert (life.state, life.why) == ("failed", "it was not ready within 600 s")


def test_an_idle_one_is_emptied_then_stopped_then_gone() -> None:
    life, action = reconcile(ModelStatus("serving"), WISH, replace(READY, idle_s=300), 900)
    assert (life.state, action, life.routed) == ("emptying", None, False)
    assert reconcile(life, WISH, replace(READY, idle_s=300), 900)[1] is None
    life, action = reconcile(life, WISH, replace(READY, unrouted=True), 901)
    assert (life.state, action) == ("stopping", "stop")
    assert reconcile(life, WISH, ObservedState(ended="exit code 0"), 902) == (
        ModelStatus(since=902),
        None,
    )


def test_a_request_that_comes_while_it_is_emptied_keeps_it() -> None:
    life = ModelStatus("emptying", 900)
    life, action = reconcile(life, WISH, replace(READY, wanted=True, unrouted=True), 901)
    assert (life.state, action) == ("serving", None)


def test_one_that_is_switched_off_serves_its_requests_to_the_end() -> None:
    off = replace(WISH, on=False)
    life, _ = reconcile(ModelStatus("serving"), off, replace(READY, running=40), 900)
    assert life.state == "emptying"
    assert (
        reconcile(life, off, replace(READY, running=1, unrouted=True, wanted=True), 5000)[1] is None
    )
    assert reconcile(life, off, replace(READY, unrouted=True), 5001)[1] == "stop"


def test_one_that_does_not_stop_is_killed() -> None:
    late = WISH.shutdown_timeout_s + END_S
    life = ModelStatus("stopping", 0)
    assert reconcile(life, WISH, READY, late)[1] is None
    life, action = reconcile(life, WISH, READY, late + 1)
    assert action == "kill"
    assert reconcile(life, WISH, READY, late + 2)[1] is None


def test_one_that_dies_starts_again_at_once_but_not_when_it_dies_soon_again() -> None:
    died = ObservedState(ended="killed by SIGKILL", wanted=True)
    life, _ = reconcile(ModelStatus("serving"), WISH, died, 1)
    life, action = reconcile(life, WISH, ObservedState(wanted=True), 1)
    assert (life.state, action) == ("starting", "start")
    life, _ = reconcile(life, WISH, READY, 2)
    assert reconcile(life, WISH, died, 2 + STABLE_S - 1)[0].state == "failed"
    life, _ = reconcile(life, WISH, READY, 2 + STABLE_S)
    assert reconcile(life, WISH, died, 3 + STABLE_S)[0].state == "zero"


HUNG: list[tuple[State, DesiredState]] = [("serving", WISH), ("emptying", WISH), ("parked", PARKS)]


@pytest.mark.parametrize(("state", "wish"), HUNG)
def test_one_that_hangs_is_killed_has_failed_and_starts_again_at_once(
    state: State, wish: DesiredState
) -> None:
    silent = replace(THERE, running=3, wanted=state == "serving")
    life, action = reconcile(ModelStatus(state), wish, silent, 1000)
    assert (life.state, action) == (state, None)
    life, action = reconcile(life, wish, silent, 1000 + HANG_S)
    assert (life.state, action) == (state, None)
    life, action = reconcile(life, wish, silent, 1001 + HANG_S)
    assert (life.state, action) == ("stopping", "kill")
    life, _ = reconcile(life, wish, ObservedState(ended="killed by SIGKILL"), 1002 + HANG_S)
    assert (life.state, life.why) == ("failed", "it said nothing for 30 s and was killed")
    life, action = reconcile(life, wish, ObservedState(wanted=True), 1002 + HANG_S)
    assert (life.state, action) == ("starting", "start")
    assert "said nothing" in life.why


def test_one_that_hangs_soon_again_waits_for_its_retry() -> None:
    life = ModelStatus("stopping", why="it said nothing", failures=1, lost_at=0.0)
    life, _ = reconcile(life, WISH, ObservedState(ended="killed by SIGKILL"), 40)
    assert (life.state, life.retry_at) == ("failed", 60)


def test_one_that_answers_again_in_time_serves_on() -> None:
    life, _ = reconcile(ModelStatus("serving"), WISH, THERE, 1000)
    life, _ = reconcile(life, WISH, READY, 1020)
    life, _ = reconcile(life, WISH, THERE, 1040)
    assert reconcile(life, WISH, THERE, 1040 + HANG_S)[0].state == "serving"


def test_one_whose_instances_start_again_gets_the_time_of_a_start() -> None:
    tells = replace(THERE, tells=True)
    life, _ = reconcile(ModelStatus("serving"), WISH, tells, 1000)
    assert reconcile(life, WISH, tells, 1000 + WISH.start_timeout_s) == (life, None)
    life, action = reconcile(life, WISH, tells, 1001 + WISH.start_timeout_s)
    assert (action, life.why) == ("kill", "none of its instances served for 600 s")


def test_one_that_dies_says_how_until_it_serves_again() -> None:
    life, _ = reconcile(ModelStatus("serving"), WISH, ObservedState(ended="killed by SIGKILL"), 1)
    assert (life.state, life.why) == ("zero", "killed by SIGKILL")
    life, _ = reconcile(life, WISH, ObservedState(wanted=True), 2)
    assert reconcile(life, WISH, READY, 3)[0].why == ""
