"""Where sessions were sent last: kvmig.controlplane.session_hints."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvmig.controlplane.session_hints import TRUST, SessionHints, SessionPlace

MOST = 3


def test_a_session_was_last_where_its_last_request_was_sent() -> None:
    hints = SessionHints()
    hints.remember_place(1, SessionPlace("i0", 10))
    hints.remember_place(1, SessionPlace("i1", 20))
    assert hints.find(1) == SessionPlace("i1", 20)
    assert hints.find(2) is None


def test_no_more_is_presumed_than_the_last_prompt_or_the_next_one_has() -> None:
    assert SessionPlace("i0", 10).presumed_blocks(100) == TRUST * 10
    assert SessionPlace("i0", 100).presumed_blocks(10) == TRUST * 10


def test_an_instance_that_is_gone_has_no_sessions() -> None:
    hints = SessionHints()
    hints.remember_place(1, SessionPlace("i0", 10))
    hints.remember_place(2, SessionPlace("i1", 10))
    hints.forget("i0")
    assert hints.find(1) is None
    assert hints.find(2) is not None


def test_one_tenants_flood_of_sessions_pushes_out_none_of_another_ones() -> None:
    hints = SessionHints(MOST)
    hints.remember_place(1, SessionPlace("i0", 10, "ours"))
    for number in range(10, 1000):
        hints.remember_place(number, SessionPlace("i1", 10, "theirs"))
        assert len(hints) <= MOST
    assert hints.find(1) is not None
    assert [hints.find(one) is not None for one in (997, 998, 999)] == [False, True, True]
    hints.forget_session(999)
    hints.forget("i1")
    assert len(hints) == 1


@given(st.lists(st.integers(0, 9)))
def test_the_sessions_that_were_used_last_are_kept(used: list[int]) -> None:
    hints = SessionHints(MOST)
    for session in used:
        hints.remember_place(session, SessionPlace("i0", 1))
    last = list(dict.fromkeys(reversed(used)))
    assert {one for one in range(10) if hints.find(one)} == set(last[:MOST])
    assert len(hints) <= MOST
