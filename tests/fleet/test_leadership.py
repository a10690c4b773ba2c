"""When a standby may lead: its decisions, and all of it with a database that is made up."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvmig.fleet.leadership import (
    BEAT_S,
    GAP_S,
    LOOK_S,
    SILENT_S,
    UNSEEN_S,
    Chance,
    LeaderRow,
    LeadProof,
    StandbyWatch,
)

A, B = "a:/data", "b:/data"


def looks(watch: StandbyWatch, row: LeaderRow, seconds: float, begin: float = 0.0) -> list[Chance]:
    """What looks in this time find, of a leader that stands still."""
    count = round(seconds / LOOK_S)
    return [watch.take_row(row, begin + at * LOOK_S) for at in range(1, count + 1)]


def watching(name: str = B) -> StandbyWatch:
    """A standby that has seen the leader beat once."""
    watch = StandbyWatch(name)
    watch.take_row(LeaderRow(5, 1, A), 0.0)
    watch.take_row(LeaderRow(5, 2, A), LOOK_S)
    return watch


def is_silent_at_last(found: list[Chance]) -> bool:
    """Whether the last look is the first one that finds the leader silent."""
    return found[-1] == "silent" and set(found[:-1]) == {"none"}


def test_nobody_leads_a_new_database() -> None:
    assert StandbyWatch(B).take_row(None, 0.0) == "free"


@pytest.mark.parametrize("host", ["", B], ids=["left in order", "of this host"])
def test_a_lead_that_was_left_or_was_this_hosts_is_free_at_once(host: str) -> None:
    assert StandbyWatch(B).take_row(LeaderRow(5, 9, host), 0.0) == "free"


def test_a_leader_that_stops_beating_has_lost_the_lead() -> None:
    assert is_silent_at_last(looks(watching(), LeaderRow(5, 2, A), SILENT_S, LOOK_S))


def test_a_leader_that_was_never_seen_to_beat_has_more_time() -> None:
    watch = StandbyWatch(B)
    watch.take_row(LeaderRow(5, 1, A), 0.0)
    assert is_silent_at_last(looks(watch, LeaderRow(5, 1, A), UNSEEN_S))


def test_a_leader_that_could_not_beat_has_more_time() -> None:
    """The database was away: the leader connects again, maybe later than the standby does."""
    watch = watching()
    watch.note_miss()
    watch.take_row(LeaderRow(5, 2, A), 3 * LOOK_S)
    assert set(looks(watch, LeaderRow(5, 2, A), UNSEEN_S - LOOK_S, 3 * LOOK_S)) == {"none"}


def test_a_leader_that_beats_slowly_keeps_the_lead() -> None:
    """Its silences don't add up."""
    watch = StandbyWatch(B)
    found = [watch.take_row(LeaderRow(5, at // 4, A), at * LOOK_S) for at in range(200)]
    assert set(found) == {"none"}


def test_a_standby_that_stood_still_itself_has_seen_no_silence() -> None:
    watch = watching()
    assert watch.take_row(LeaderRow(5, 2, A), LOOK_S + GAP_S + 60) == "none"


def test_a_leader_that_stood_still_gives_no_order_before_its_next_beat() -> None:
    proof = LeadProof(10.0)
    assert proof.holds(10.0 + SILENT_S - 0.1)
    assert not proof.holds(10.0 + SILENT_S), "a standby may lead"
    proof.note_away(10.0 + SILENT_S)
    assert not proof.holds(10.0 + SILENT_S), "it led before the database was away"
    proof.note_beat(20.0)
    assert proof.holds(20.0)


def test_a_leader_whose_database_is_away_goes_on_giving_orders() -> None:
    proof = LeadProof(10.0)
    proof.note_away(10.0 + BEAT_S)
    assert proof.holds(100.0)
    proof.note_away(100.0)
    assert proof.holds(200.0)
    proof.note_beat(200.0)
    assert not proof.holds(200.0 + SILENT_S)


def test_another_leader_begins_with_all_its_time() -> None:
    watch = watching("c:/data")
    looks(watch, LeaderRow(5, 2, A), SILENT_S - LOOK_S, LOOK_S)
    assert watch.take_row(LeaderRow(6, 0, B), SILENT_S + LOOK_S) == "none"


def test_another_leader_that_was_never_seen_to_beat_has_more_time() -> None:
    """A third host has seen the one before it beat."""
    watch = watching("c:/data")
    watch.take_row(LeaderRow(6, 0, B), 2 * LOOK_S)
    assert is_silent_at_last(looks(watch, LeaderRow(6, 0, B), UNSEEN_S, 2 * LOOK_S))


class MadeUpDatabase:
    """One lock, which a session has until it ends, and the leader's row."""

    def __init__(self) -> None:
        self.up = True
        self.row: LeaderRow | None = None
        self.lock: int | None = None
        """The session that has it."""
        self.sessions = 0
        self.orders: list[tuple[int, int]] = []
        """Number and token of each that is committed."""

    def connect(self) -> int:
        self.sessions += 1
        return self.sessions

    def end(self, session: int | None) -> None:
        if session is not None and self.lock == session:
            self.lock = None


class MadeUpServer:
    """A server, by the steps of `kvmig.fleet.standby` and `kvmig.fleet.tables`."""

    def __init__(self, host: str, database: MadeUpDatabase) -> None:
        self.host, self.database = host, database
        self.frozen = self.alive = False
        self.begin()

    def begin(self) -> None:
        self.alive, self.frozen = True, False
        self.watch = StandbyWatch(self.host)
        self.token = 0
        self.session: int | None = None
        self.deposed = False
        self.wish: tuple[Chance, LeaderRow | None] = ("none", None)
        """What it found, and will act on later."""

    @property
    def runs(self) -> bool:
        return self.alive and not self.frozen

    @property
    def acts(self) -> bool:
        """Whether it takes itself for the leader."""
        return self.alive and self.token != 0 and not self.deposed

    def kill(self) -> None:
        self.database.end(self.session)
        self.alive, self.session, self.token = False, None, 0

    def beat(self) -> None:
        row = self.database.row
        assert row is not None
        if row.token == self.token:
            self.database.row = row._replace(beat=row.beat + 1)
        else:
            self.deposed = True

    def look(self, now: float) -> None:
        if not self.database.up:
            self.watch.note_miss()
            self.wish = "none", None
        else:
            row = self.database.row
            self.wish = self.watch.take_row(row, now), row

    def depose(self) -> None:
        """The first step of a take-over from a silent leader; the row may have changed since."""
        chance, row = self.wish
        if chance == "silent" and self.database.up and self.database.row == row:
            self.database.end(self.database.lock)

    def take(self) -> None:
        """The second one: the lock, then the token in the same transaction."""
        self.wish = "none", None
        if not self.database.up or self.database.lock is not None:
            self.watch.note_miss()
            return
        before = self.database.row
        self.session = self.database.lock = self.database.connect()
        self.token = 1 + (before.token if before else 0)
        self.deposed = False
        self.database.row = LeaderRow(self.token, 0, self.host)

    def order(self, number: int) -> bool:
        """An order is carried out or refused: a connection that is lost is made again first."""
        database = self.database
        if not database.up:
            return False
        if self.session is None or database.lock != self.session:
            assert database.row is not None
            if database.row.token != self.token:
                self.deposed = True
                return False
            if database.lock is not None:
                return False
            self.session = database.lock = database.connect()
        database.orders.append((number, self.token))
        return True


class TwoServers(RuleBasedStateMachine):
    """Two servers in any order of steps: beats and looks come as time passes, unless something is
    frozen, killed or away."""

    def __init__(self) -> None:
        super().__init__()
        self.database = MadeUpDatabase()
        self.servers = [MadeUpServer(A, self.database), MadeUpServer(B, self.database)]
        self.now = 0.0
        self.number = 0
        self.disturbed_at = 0.0
        """When something was last frozen, killed or away."""

    @initialize()
    def a_leads(self) -> None:
        self.servers[0].look(self.now)
        self.servers[0].take()

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds / BEAT_S)):
            self.now += BEAT_S
            for one in self.servers:
                if one.runs and one.acts and self.database.up:
                    one.beat()
            for one in self.servers:
                if one.runs and not one.acts and not one.deposed:
                    one.look(self.now)

    @rule(seconds=st.sampled_from([BEAT_S, 1.0, 2.0, 8.0]))
    def time_passes(self, seconds: float) -> None:
        self.pass_time(seconds)

    @rule(at=st.integers(0, 1))
    def one_deposes(self, at: int) -> None:
        if self.servers[at].runs and not self.servers[at].acts:
            self.servers[at].depose()

    @rule(at=st.integers(0, 1))
    def one_takes(self, at: int) -> None:
        one = self.servers[at]
        if one.runs and not one.acts and one.wish[0] != "none":
            one.take()

    @rule(at=st.integers(0, 1))
    def one_orders(self, at: int) -> None:
        if self.servers[at].runs and self.servers[at].acts:
            self.number += 1
            self.servers[at].order(self.number)

    @rule(at=st.integers(0, 1))
    def one_is_killed(self, at: int) -> None:
        self.servers[at].kill()
        self.disturbed_at = self.now

    @rule(at=st.integers(0, 1))
    def one_begins_again(self, at: int) -> None:
        one = self.servers[at]
        if not one.alive or one.deposed:
            self.database.end(one.session)
            one.begin()

    @rule(at=st.integers(0, 1), frozen=st.booleans())
    def one_is_frozen_or_goes_on(self, at: int, frozen: bool) -> None:
        self.servers[at].frozen = frozen
        self.disturbed_at = self.now

    @rule()
    def the_database_goes(self) -> None:
        self.database.up, self.database.lock = False, None
        self.disturbed_at = self.now

    @rule()
    def the_database_is_back(self) -> None:
        self.database.up = True
        self.disturbed_at = self.now

    @precondition(lambda self: self.servers[0].runs and self.servers[0].acts)
    @rule()
    def a_leader_that_beats_keeps_the_lead(self) -> None:
        """However late the other one looks: nobody ends the session of one that shows life."""
        leader, other = self.servers
        if self.database.up and self.database.row and self.database.row.token == leader.token:
            self.pass_time(UNSEEN_S + 2)
            assert other.wish[0] == "none" or other.frozen or not other.alive or other.acts

    @rule()
    def once_all_is_well_one_leads(self) -> None:
        """And within the time that a standby waits."""
        self.the_database_is_back()
        for at, one in enumerate(self.servers):
            one.frozen = False
            self.one_begins_again(at)
        self.pass_time(UNSEEN_S + 2)
        for at in range(2):
            self.one_deposes(at)
            self.one_takes(at)
        self.pass_time(BEAT_S)
        assert sum(one.acts for one in self.servers) == 1

    @invariant()
    def tokens_never_fall(self) -> None:
        tokens = [token for _, token in self.database.orders]
        assert tokens == sorted(tokens), "an order of an older leader came after a newer one's"

    @invariant()
    def no_two_leaders_have_one_token(self) -> None:
        mine = [one.token for one in self.servers if one.acts]
        assert len(mine) == len(set(mine))

    @invariant()
    def each_order_is_carried_out_once_at_most(self) -> None:
        numbers = [number for number, _ in self.database.orders]
        assert len(numbers) == len(set(numbers))


TwoServers.TestCase.settings = settings(stateful_step_count=40)
test_two_servers_in_any_order_of_steps = TwoServers.TestCase
