"""The sessions that leave an instance that drains: which, where to, and in what order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvmig.controlplane.front_messages import KnownSession, SessionsCarried, SessionsFound
from kvmig.controlplane.session_carriage import (
    CachedSession,
    SessionCarriage,
    add_reports,
    latest_fronts,
    plan_carriages,
    sentence_of,
)

BLOCK = 16


def session(
    owner: int, tokens: int, used_at: float = 0.0, held: dict[str, int] | None = None
) -> CachedSession:
    return CachedSession(owner, tokens, used_at, held or {})


def test_of_equal_savings_the_one_that_was_used_last_goes_first() -> None:
    plan = plan_carriages([session(1, 160, 5.0), session(2, 320, 6.0)], {"b": 100}, BLOCK)
    assert plan == [SessionCarriage(2, "b", 20, 320), SessionCarriage(1, "b", 10, 160)]


def test_what_saves_little_for_each_byte_goes_last() -> None:
    """c holds most of session 2, and has no room: the whole of it would travel for a little."""
    plan = plan_carriages(
        [session(1, 160, 5.0), session(2, 320, 6.0, {"c": 304})], {"b": 100, "c": 0}, BLOCK
    )
    assert [(one.owner, one.blocks, one.saved_tokens) for one in plan] == [
        (1, 10, 160),
        (2, 20, 16),
    ]


def test_a_session_goes_where_its_beginning_is_and_else_where_most_room_is() -> None:
    rooms = {"b": 100, "c": 50}
    plan = plan_carriages([session(1, 320, 0.0, {"c": 160}), session(2, 160, 9.0)], rooms, BLOCK)
    assert {one.owner: (one.destination, one.blocks) for one in plan} == {
        1: ("c", 10),
        2: ("b", 10),
    }


def test_sessions_spread_as_room_gets_less() -> None:
    plan = plan_carriages([session(n, 160, -n) for n in range(5)], {"b": 25, "c": 20}, BLOCK)
    assert [one.destination for one in plan] == ["b", "c", "b", "c"]


def test_what_another_instance_holds_whole_needs_no_move() -> None:
    assert plan_carriages([session(1, 160, 0.0, {"c": 160})], {"b": 100, "c": 100}, BLOCK) == []


NAMES = st.sampled_from("bcd")
SESSIONS = st.lists(
    st.builds(
        session,
        st.integers(0, 30),
        st.integers(0, 400),
        st.floats(0, 9),
        st.dictionaries(NAMES, st.integers(0, 400), max_size=3),
    ),
    max_size=12,
    unique_by=lambda one: one.owner,
)
ROOMS = st.dictionaries(NAMES, st.integers(-5, 60), max_size=3)


@given(SESSIONS, ROOMS, st.integers(1, 1 << 20))
def test_the_largest_saving_for_each_byte_goes_first_within_the_room(
    sessions: list[CachedSession], rooms: dict[str, int], block_bytes: int
) -> None:
    plan = plan_carriages(sessions, rooms, BLOCK, block_bytes)
    by_owner = {one.owner: one for one in sessions}
    savings = [one.saved_per_byte(block_bytes) for one in plan]
    assert savings == sorted(savings, reverse=True)
    assert len({one.owner for one in plan}) == len(plan)
    left = dict(rooms)
    for one in plan:
        its = by_owner[one.owner]
        assert one.saved_tokens == its.tokens - max(its.held.values(), default=0) > 0
        assert one.blocks * BLOCK >= its.tokens - its.held.get(one.destination, 0)
        left[one.destination] -= one.blocks
    assert all(room >= min(0, rooms[name]) for name, room in left.items())
    for owner in by_owner.keys() - {one.owner for one in plan}:
        its = by_owner[owner]
        held = max(its.held.values(), default=0)
        fits = any(
            -(-(its.tokens - its.held.get(name, 0)) // BLOCK) <= room for name, room in left.items()
        )
        assert its.tokens <= held or not fits, "it saves something and had room"


@given(SESSIONS, ROOMS, st.randoms())
def test_the_plan_does_not_depend_on_the_order_of_the_sessions(
    sessions: list[CachedSession], rooms: dict[str, int], random: object
) -> None:
    shuffled = list(sessions)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert plan_carriages(shuffled, rooms, BLOCK) == plan_carriages(sessions, rooms, BLOCK)


@given(
    st.dictionaries(
        st.text("abc", max_size=1),
        st.lists(st.tuples(st.integers(0, 3), st.floats(0, 9)), max_size=4),
    )
)
def test_no_front_end_knows_a_later_call(told: dict[str, list[tuple[int, float]]]) -> None:
    latest = latest_fronts(
        {
            front: SessionsFound(tuple(KnownSession(*one) for one in known))
            for front, known in told.items()
        }
    )
    assert latest.keys() == {owner for known in told.values() for owner, _ in known}
    for owner, front in latest.items():
        times = {name: [at for one, at in known if one == owner] for name, known in told.items()}
        assert max(times[front]) == max(at for known in times.values() for at in known)


def test_the_reports_of_front_ends_are_one_sentence() -> None:
    some = SessionsCarried(2, 1_500_000, {"no_room": 1, "deadline": 2})
    together = add_reports([some, SessionsCarried(1, 0, {"deadline": 1})])
    assert sentence_of(together) == (
        "3 idle sessions moved (1.5 MB), 4 did not (3 deadline, 1 no_room)"
    )
    assert sentence_of(SessionsCarried(1, 100_000)) == "1 idle sessions moved (0.1 MB), 0 did not"
    assert sentence_of(add_reports([])) == ""
