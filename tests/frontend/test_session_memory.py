"""What a front end remembers of sessions: whose is whose, how much, and for how long."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.asgi.errors import UnknownSession
from kvmig.core.prefix_marks import MARK_TOKENS
from kvmig.frontend.session_memory import (
    FIXED_BYTES,
    KEPT_S,
    RememberedSession,
    SessionMemory,
    common_length,
)


class Hands:
    """A clock that stands still until a test moves it."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def session(
    owner: int,
    name: int | None = None,
    instance: str = "a",
    marks: Sequence[int] = (),
    size: int = 1,
    tenant: str = "",
) -> RememberedSession:
    payload, tokens = [b"x" * size], array("I", [1, 2])
    return RememberedSession(
        owner, owner if name is None else name, instance, payload, tokens, marks, tenant
    )


def test_a_session_is_found_by_its_id_and_the_last_request_counts() -> None:
    memory, last = SessionMemory(Hands()), session(1, instance="b")
    memory.remember_session(session(1))
    memory.remember_session(last)
    assert memory.find(1) is last
    assert len(memory) == 1
    assert memory.nbytes == last.nbytes


def test_an_id_that_two_accounts_use_is_two_sessions() -> None:
    memory, ours, theirs = SessionMemory(Hands()), session(1, 9), session(2, 9)
    memory.remember_session(ours)
    memory.remember_session(theirs)
    memory.remember_session(session(3, 8))
    assert memory.find_all(9) == [ours, theirs]
    assert (memory.find_all(9, 2), memory.find(2)) == ([theirs], theirs)
    assert memory.find_all(9, 3) == []
    assert len(memory.find_all()) == 3
    with pytest.raises(UnknownSession):
        memory.find(9)


def test_a_session_that_has_moved_is_where_it_went_unless_it_was_elsewhere_by_then() -> None:
    memory = SessionMemory(Hands())
    memory.remember_session(session(1, instance="a"))
    memory.remember_session(session(2, instance="c"))
    for owner in (1, 2, 3):
        memory.note_move(owner, "a", "b")
    assert [memory.find(owner).instance for owner in (1, 2)] == ["b", "c"]
    memory.forget_at(1, "a")
    memory.forget_at(2, "c")
    assert [one.owner for one in memory.find_all()] == [1]


def test_a_session_is_forgotten_an_hour_after_its_last_request() -> None:
    clock = Hands()
    memory = SessionMemory(clock)
    memory.remember_session(session(1))
    clock.now += KEPT_S - 1
    memory.remember_session(session(2))
    assert memory.find(1).owner == 1
    clock.now += 2
    with pytest.raises(UnknownSession, match="in the last 60 minutes"):
        memory.find(1)
    assert memory.find(2).owner == 2


def test_what_an_instance_held_is_forgotten_with_it() -> None:
    memory = SessionMemory(Hands())
    memory.remember_session(session(1, instance="a"))
    memory.remember_session(session(2, instance="b"))
    memory.forget("a")
    with pytest.raises(UnknownSession):
        memory.find(1)
    assert memory.nbytes == memory.find(2).nbytes


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5000)), max_size=40))
def test_no_bound_is_passed_and_the_newest_that_fit_are_kept(
    ended: list[tuple[int, int]],
) -> None:
    memory = SessionMemory(Hands(), most=4, most_bytes=FIXED_BYTES * 8)
    for owner, size in ended:
        memory.remember_session(session(owner, size=size))
        assert len(memory) <= 4
        assert memory.nbytes <= FIXED_BYTES * 8
        assert memory.find(owner).owner == owner
    kept = [owner for owner in range(10) if any(owner == one for one, _ in ended)]
    found = sum(memory.find(owner).nbytes for owner in kept if _has(memory, owner))
    assert found == memory.nbytes


def _has(memory: SessionMemory, owner: int) -> bool:
    try:
        memory.find(owner)
    except UnknownSession:
        return False
    return True


def test_one_that_is_larger_than_all_may_be_is_not_kept() -> None:
    memory = SessionMemory(Hands(), most_bytes=FIXED_BYTES * 2)
    memory.remember_session(session(1, size=FIXED_BYTES * 2))
    assert (len(memory), memory.nbytes) == (0, 0)


def test_one_that_is_larger_than_all_may_be_pushes_out_no_other() -> None:
    memory, small = SessionMemory(Hands(), most_bytes=FIXED_BYTES * 2), session(1)
    memory.remember_session(small)
    memory.remember_session(session(2, size=FIXED_BYTES * 2))
    assert memory.find_all() == [small]
    memory.remember_session(session(1, size=FIXED_BYTES * 2))
    assert memory.find_all() == [], "what it has of an earlier turn isn't its last"


@pytest.mark.parametrize("size", [1, FIXED_BYTES])
def test_one_tenants_flood_of_sessions_pushes_out_none_of_another_ones(size: int) -> None:
    memory = SessionMemory(Hands(), most=8, most_bytes=16 * FIXED_BYTES)
    ours = [session(number, tenant="ours") for number in range(3)]
    for one in ours:
        memory.remember_session(one)
    for number in range(10, 1000):
        memory.remember_session(session(number, tenant="theirs", size=size))
        assert len(memory) <= 8
    assert memory.find_all()[:3] == ours
    assert memory.find(999).tenant == "theirs"


def test_the_beginning_that_sessions_of_one_instance_share_is_known() -> None:
    memory, ours = SessionMemory(Hands()), session(1, marks=[5, 6, 7])
    memory.remember_session(ours)
    assert memory.find_shared_tokens(ours) == 0
    memory.remember_session(session(2, marks=[5, 6, 8, 7]))
    memory.remember_session(session(3, marks=[5]))
    memory.remember_session(session(4, instance="b", marks=[5, 6, 7]))
    assert memory.find_shared_tokens(ours) == 2 * MARK_TOKENS


@pytest.mark.parametrize(
    ("one", "other", "length"), [([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [4, 2, 3], 0)]
)
def test_the_common_beginning_of_two_lists(one: list[int], other: list[int], length: int) -> None:
    assert common_length(one, other) == common_length(other, one) == length
