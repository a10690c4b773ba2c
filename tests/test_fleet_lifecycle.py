"""A model's life: one start whoever asks, never cut, tried again, adopted.

Every order of events: `kvmig_tools.check.life`.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvmig.fleet.lifecycle import (
    END_S,
    HANG_S,
    REST_S,
    STABLE_S,
    Life,
    Seen,
    State,
    Wish,
    awake,
    turn,
)

WISH = Wish(zero_after_s=300, start_timeout_s=600)
THERE = Seen(deployment=True)
READY = Seen(deployment=True, ready=True)


def test_nothing_starts_until_somebody_wants_it() -> None:
    assert turn(Life(), WISH, Seen(idle_s=1e6), 5) == (Life(), None)


def test_somebody_who_wants_it_starts_it_once() -> None:
    life, action = turn(Life(), WISH, Seen(wanted=True), 5)
    assert (life.state, action) == ("starting", "start")
    assert turn(life, WISH, replace(THERE, wanted=True), 6) == (life, None)


def test_one_with_a_least_number_of_instances_starts_by_itself() -> None:
    assert turn(Life(), replace(WISH, least=1), Seen(), 0)[1] == "start"


def test_one_without_room_waits_with_the_reason_until_there_is_some() -> None:
    wanted = Seen(wanted=True, no_room="no room: 5 of 4 GiB")
    life, action = turn(Life(), WISH, wanted, 5)
    assert (life.state, life.since, life.why, action) == ("waiting", 5, wanted.no_room, None)
    life, _ = turn(life, WISH, replace(wanted, no_room="no room: 5 of 4.5 GiB"), 6)
    assert (life.since, life.why) == (5, "no room: 5 of 4.5 GiB")
    life, action = turn(life, WISH, Seen(wanted=True), 7)
    assert (life.state, life.why, action) == ("starting", "", "start")


def test_one_that_nobody_waits_for_any_more_wants_no_room() -> None:
    life = Life("waiting", 5, why="no room")
    assert turn(life, WISH, Seen(no_room="no room"), 6) == (Life(since=6), None)


def test_one_that_can_never_start_has_failed() -> None:
    life, action = turn(Life(), WISH, Seen(wanted=True, never="too large"), 5)
    assert (life.state, life.why, action) == ("failed", "too large", None)


def test_an_idle_one_makes_room_and_who_wants_it_then_waits() -> None:
    yields = replace(READY, yields=True)
    life, _ = turn(Life("serving"), WISH, yields, 900)
    assert life.state == "emptying"
    assert turn(life, WISH, replace(yields, wanted=True), 901)[0].state == "emptying"
    assert turn(life, WISH, replace(yields, wanted=True, running=1), 901)[0].state == "serving"


def test_one_that_answers_makes_no_room() -> None:
    yields = replace(READY, yields=True)
    for used in (replace(yields, running=1), replace(yields, wanted=True)):
        assert turn(Life("serving"), WISH, used, 900)[0].state == "serving"
    assert turn(Life("serving"), replace(WISH, least=1), yields, 900)[0].state == "serving"


PARKS = replace(WISH, parks=True)
PARKED = Seen(deployment=True, parked=True)


def test_an_idle_one_is_parked_once_nothing_is_sent_to_it() -> None:
    life, action = turn(Life("emptying"), PARKS, READY, 900)
    assert (life.state, action) == ("emptying", None)
    life, action = turn(life, PARKS, replace(READY, unrouted=True), 901)
    assert (life.state, action, life.routed) == ("parking", "park", False)
    assert turn(life, PARKS, replace(READY, unrouted=True), 902) == (life, None)
    assert turn(life, PARKS, PARKED, 903)[0].state == "parked"


def test_a_parked_one_wakes_when_it_is_wanted_and_serves_when_it_says_so() -> None:
    life, action = turn(Life("parked"), PARKS, replace(PARKED, wanted=True), 5)
    assert (life.state, action, life.routed) == ("waking", "unpark", False)
    assert turn(life, PARKS, replace(PARKED, wanted=True), 6) == (life, None)
    assert turn(life, PARKS, READY, 6)[0].state == "serving"


def test_a_parked_one_without_room_waits_with_the_reason() -> None:
    wanted = replace(PARKED, wanted=True, no_room="no room")
    life, action = turn(Life("parked"), PARKS, wanted, 5)
    assert (life.state, life.why, action) == ("parked", "no room", None)


def test_a_parked_one_makes_room_also_if_it_is_wanted() -> None:
    wanted = replace(PARKED, wanted=True, yields=True, unrouted=True)
    life, _ = turn(Life("parked"), PARKS, wanted, 5)
    life, action = turn(life, PARKS, wanted, 6)
    assert (life.state, action) == ("stopping", "stop")


def test_one_that_does_not_wake_is_killed_and_one_that_is_not_parked_ends() -> None:
    refused = replace(PARKED, refused="it computes otherwise")
    life, action = turn(Life("waking"), PARKS, refused, 5)
    assert (life.state, action) == ("stopping", "kill")
    again, _ = turn(life, PARKS, Seen(ended="killed", wanted=True), 6)
    assert turn(again, PARKS, Seen(wanted=True), 7)[1] == "start"
    refused = replace(READY, refused="it has requests")
    assert turn(Life("parking"), PARKS, refused, 5)[1] == "stop"
    assert turn(Life("waking"), PARKS, PARKED, REST_S + 1)[1] == "kill"


def test_one_that_another_server_has_parked_is_taken_over_so() -> None:
    assert turn(Life(), PARKS, PARKED, 5)[0].state == "parked"
    assert turn(Life("starting"), PARKS, PARKED, 5)[0].state == "parked"
    assert turn(Life("serving"), PARKS, PARKED, 5)[1] == "unpark"


def test_one_that_is_off_does_not_start() -> None:
    assert turn(Life(), replace(WISH, on=False, least=1), Seen(wanted=True), 0)[1] is None


def test_one_that_another_server_has_started_is_taken_over() -> None:
    assert turn(Life(), WISH, THERE, 5)[0].state == "starting"
    assert turn(Life(), WISH, READY, 5)[0].state == "serving"


def test_one_that_is_off_is_taken_over_only_to_be_emptied() -> None:
    assert turn(Life(), replace(WISH, on=False), THERE, 5)[0].state == "emptying"


def test_one_that_is_switched_off_and_on_while_it_starts_goes_on_starting() -> None:
    life, action = turn(Life("starting"), replace(WISH, on=False), THERE, 5)
    assert (life.state, action) == ("emptying", None)
    assert turn(life, WISH, replace(THERE, wanted=True), 6)[0].state == "starting"


def test_a_failed_start_is_tried_again_later_and_later() -> None:
    life, pauses = Life(), []
    now = 0.0
    for _ in range(7):
        life, action = turn(life, WISH, Seen(wanted=True), now)
        assert action == "start"
        life, _ = turn(life, WISH, Seen(ended="exit code 2", wanted=True), now)
        assert (life.state, life.why) == ("failed", "exit code 2")
        assert turn(life, WISH, Seen(wanted=True), life.retry_at - 0.1)[1] is None
        pauses.append(life.retry_at - now)
        now = life.retry_at
    assert pauses == [10, 20, 40, 80, 160, 300, 300]


def test_one_that_is_woken_does_not_wait_for_its_retry() -> None:
    life = Life("failed", 0, 3, 300, "exit code 2")
    assert turn(awake(life, 5), WISH, Seen(wanted=True), 5)[1] == "start"


def test_a_start_that_takes_too_long_is_killed_and_has_failed() -> None:
    life, action = turn(Life("starting"), WISH, replace(THERE, wanted=True), 601)
    assert (life.state, action) == ("stopping", "kill")
    life, action = turn(life, WISH, Seen(ended="killed by SIGKILL"), 602)
    assert (life.state, life.why) == ("failed", "it was not ready within 600 s")


def test_an_idle_one_is_emptied_then_stopped_then_gone() -> None:
    life, action = turn(Life("serving"), WISH, replace(READY, idle_s=300), 900)
    assert (life.state, action, life.routed) == ("emptying", None, False)
    assert turn(life, WISH, replace(READY, idle_s=300), 900)[1] is None
    life, action = turn(life, WISH, replace(READY, unrouted=True), 901)
    assert (life.state, action) == ("stopping", "stop")
    assert turn(life, WISH, Seen(ended="exit code 0"), 902) == (Life(since=902), None)


def test_a_request_that_comes_while_it_is_emptied_keeps_it() -> None:
    life = Life("emptying", 900)
    life, action = turn(life, WISH, replace(READY, wanted=True, unrouted=True), 901)
    assert (life.state, action) == ("serving", None)


def test_one_that_is_switched_off_serves_its_requests_to_the_end() -> None:
    off = replace(WISH, on=False)
    life, _ = turn(Life("serving"), off, replace(READY, running=40), 900)
    assert life.state == "emptying"
    assert turn(life, off, replace(READY, running=1, unrouted=True, wanted=True), 5000)[1] is None
    assert turn(life, off, replace(READY, unrouted=True), 5001)[1] == "stop"


def test_one_that_does_not_stop_is_killed() -> None:
    late = WISH.shutdown_timeout_s + END_S
    life = Life("stopping", 0)
    assert turn(life, WISH, READY, late)[1] is None
    life, action = turn(life, WISH, READY, late + 1)
    assert action == "kill"
    assert turn(life, WISH, READY, late + 2)[1] is None


def test_one_that_dies_starts_again_at_once_but_not_when_it_dies_soon_again() -> None:
    died = Seen(ended="killed by SIGKILL", wanted=True)
    life, _ = turn(Life("serving"), WISH, died, 1)
    life, action = turn(life, WISH, Seen(wanted=True), 1)
    assert (life.state, action) == ("starting", "start")
    life, _ = turn(life, WISH, READY, 2)
    assert turn(life, WISH, died, 2 + STABLE_S - 1)[0].state == "failed"
    life, _ = turn(life, WISH, READY, 2 + STABLE_S)
    assert turn(life, WISH, died, 3 + STABLE_S)[0].state == "zero"


HUNG: list[tuple[State, Wish]] = [("serving", WISH), ("emptying", WISH), ("parked", PARKS)]


@pytest.mark.parametrize(("state", "wish"), HUNG)
def test_one_that_hangs_is_killed_has_failed_and_starts_again_at_once(
    state: State, wish: Wish
) -> None:
    silent = replace(THERE, running=3, wanted=state == "serving")
    life, action = turn(Life(state), wish, silent, 1000)
    assert (life.state, action) == (state, None)
    life, action = turn(life, wish, silent, 1000 + HANG_S)
    assert (life.state, action) == (state, None)
    life, action = turn(life, wish, silent, 1001 + HANG_S)
    assert (life.state, action) == ("stopping", "kill")
    life, _ = turn(life, wish, Seen(ended="killed by SIGKILL"), 1002 + HANG_S)
    assert (life.state, life.why) == ("failed", "it said nothing for 30 s and was killed")
    life, action = turn(life, wish, Seen(wanted=True), 1002 + HANG_S)
    assert (life.state, action) == ("starting", "start")
    assert "said nothing" in life.why


def test_one_that_hangs_soon_again_waits_for_its_retry() -> None:
    life = Life("stopping", why="it said nothing", failures=1, lost_at=0.0)
    life, _ = turn(life, WISH, Seen(ended="killed by SIGKILL"), 40)
    assert (life.state, life.retry_at) == ("failed", 60)


def test_one_that_answers_again_in_time_serves_on() -> None:
    life, _ = turn(Life("serving"), WISH, THERE, 1000)
    life, _ = turn(life, WISH, READY, 1020)
    life, _ = turn(life, WISH, THERE, 1040)
    assert turn(life, WISH, THERE, 1040 + HANG_S)[0].state == "serving"


def test_one_whose_instances_start_again_gets_the_time_of_a_start() -> None:
    tells = replace(THERE, tells=True)
    life, _ = turn(Life("serving"), WISH, tells, 1000)
    assert turn(life, WISH, tells, 1000 + WISH.start_timeout_s) == (life, None)
    life, action = turn(life, WISH, tells, 1001 + WISH.start_timeout_s)
    assert (action, life.why) == ("kill", "none of its instances served for 600 s")


def test_one_that_dies_says_how_until_it_serves_again() -> None:
    life, _ = turn(Life("serving"), WISH, Seen(ended="killed by SIGKILL"), 1)
    assert (life.state, life.why) == ("zero", "killed by SIGKILL")
    life, _ = turn(life, WISH, Seen(wanted=True), 2)
    assert turn(life, WISH, READY, 3)[0].why == ""
