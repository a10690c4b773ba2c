"""Idle sessions that move by themselves, simulated: bench.idle_sessions."""

from __future__ import annotations

import pytest

from bench import idle_sessions
from bench.idle_sessions import AHEAD, LOADS, RELIEF, STAY, IdleLoad, simulate
from bench.mooncake import turns_of_trace
from kvmig_tools.sim.session_moves import SessionRelief, SessionRules

BUSY = IdleLoad("Mooncake, 2 instances", "trace", 2, 1.0)


def test_turns_of_the_trace_have_a_beginning_in_common_with_earlier_ones() -> None:
    requests = list(turns_of_trace(BUSY.rate, 2000))
    begun: dict[int | None, int] = {}
    for one in requests:
        if one.prefix_tokens:
            assert one.prefix_tokens <= begun[one.session] + 511
        begun[one.session] = max(begun.get(one.session, 0), one.input_tokens)
    later = sum(one.prefix_tokens > 0 for one in requests)
    assert 200 < later < 1000


def test_turns_that_leave_crowded_instances_find_more_once_their_blocks_go_first() -> None:
    load = IdleLoad("conversations, 2 instances", "turns", 2, 8.0, 1)
    stay, ahead = (simulate((rule, load, 25.0, 300)) for rule in (STAY, AHEAD))
    assert (stay.moved, ahead.moved > 0) == (0, True)
    assert ahead.hit_share > stay.hit_share


def test_over_a_slow_link_nothing_moves_and_all_is_as_it_was() -> None:
    stay, ahead = (simulate((rule, BUSY, 1.25, 120)) for rule in (STAY, AHEAD))
    assert ahead.moved == 0
    assert ahead.figures == stay.figures


def test_sessions_leave_an_instance_until_it_has_room_again() -> None:
    relief = SessionRelief(leave_below=0.2, leave_until=0.3, take_above=0.4)
    free = {"full": 0.1, "between": 0.25, "roomy": 0.9}
    assert relief.find_sources(free, set()) == {"full"}
    assert relief.find_sources(free, {"between"}) == {"full", "between"}
    assert relief.find_rooms(free) == {"roomy": 0.5}


def test_sessions_leave_instances_that_are_short_of_room(monkeypatch: pytest.MonkeyPatch) -> None:
    soon = SessionRules(relief=SessionRelief(0.97, 0.98, 0.98))
    monkeypatch.setitem(idle_sessions.RULES, RELIEF, soon)
    (load, _) = (one for one in LOADS if one.kind == "long")
    assert simulate((RELIEF, load, 25.0, 200)).moved > 0
