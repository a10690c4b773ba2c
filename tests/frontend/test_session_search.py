"""Which front end served a session's last call, as all of them remember it."""

from __future__ import annotations

import pytest

from kvmig.asgi.errors import AmbiguousSession, SessionBusy, UnknownSession
from kvmig.controlplane.front_messages import KnownSession, SessionsFound
from kvmig.frontend.session_search import find_latest


def found(*sessions: tuple[int, float], running: tuple[int, ...] = ()) -> SessionsFound:
    return SessionsFound(tuple(KnownSession(*one) for one in sessions), running)


def test_the_front_end_that_served_the_last_call_counts() -> None:
    told = {"": found((1, 5.0)), "b": found((1, 7.0)), "c": found((1, 6.0))}
    assert find_latest(told) == (1, "b")
    assert find_latest({"": found((1, 5.0)), "b": found()}) == (1, "")


def test_an_id_of_two_accounts_and_one_of_nobody_are_named() -> None:
    with pytest.raises(AmbiguousSession, match="2 accounts have a session of that id, name one"):
        find_latest({"": found((1, 5.0)), "b": found((2, 5.0))})
    with pytest.raises(UnknownSession, match="no request of such a session has ended here"):
        find_latest({"": found(), "b": found(running=(1,))})


def test_a_session_that_runs_at_another_front_end_is_busy() -> None:
    with pytest.raises(SessionBusy):
        find_latest({"": found((1, 5.0)), "b": found(running=(1,))})
    assert find_latest({"": found((1, 5.0)), "b": found(running=(2,))}) == (1, "")
