"""The ledger of a unit: leases never add up to more than the arena, whatever is on its way."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvmig.core.errors import ConfigError
from kvmig.sharing.lease_ledger import MIB, LeaseLedger, LeaseOrder, MemberClaim, MemberReport
from kvmig.sharing.memory_quotas import RULES
from tests.support.examples import examples

ARENA = 64 * MIB


def claim(floor: int = 4, guarantee: int = 0, lease: int = 0, capacity: int = 64) -> MemberClaim:
    """In MiB."""
    return MemberClaim("model", floor * MIB, capacity * MIB, MIB, guarantee * MIB, lease * MIB)


def told(seq: int, lease: int, used: int, wanted: int) -> MemberReport:
    """In MiB."""
    return MemberReport(seq, lease * MIB, used * MIB, 0, wanted * MIB)


def quotas(ledger: LeaseLedger) -> dict[str, int]:
    """In MiB."""
    return {name: one.due // MIB for name, one in ledger.members.items()}


class Site:
    """A ledger whose members are as quick as can be: they do at once what they are told."""

    def __init__(self, rule: str = "kvmig") -> None:
        self.ledger = LeaseLedger(ARENA, rule)
        self.used: dict[str, int] = {}
        self.wanted: dict[str, int] = {}
        self.lease: dict[str, int] = {}
        self.now = 0.0

    def join(self, *names: str, guarantee: int = 0) -> None:
        for name in names:
            self.ledger.join(name, claim(guarantee=guarantee), self.now)
            self.used[name] = self.wanted[name] = self.lease[name] = 0
        self.settle()

    def want(self, name: str, wanted: int, used: int | None = None) -> None:
        """It has so many MiB of requests, as many as fit of them run."""
        self.wanted[name] = wanted
        self.used[name] = min(wanted, self.lease[name]) if used is None else used
        self._tell(name, self.ledger.members[name].seq)
        self.settle()

    def settle(self) -> None:
        for _ in range(20):
            self.now += 1.0
            self.ledger.adapt(self.now)
            for name, order in self.ledger.orders():
                self.lease[name] = max(order.quota // MIB, self.used[name])
                self._tell(name, order.seq)
            assert self.ledger.leased <= ARENA

    def finish(self, name: str) -> None:
        """Its requests end, as far as it has more than its quota."""
        self.used[name] = min(self.used[name], quotas(self.ledger)[name])
        self.lease[name] = quotas(self.ledger)[name]
        self.want(name, self.wanted[name], self.used[name])

    def _tell(self, name: str, seq: int) -> None:
        self.ledger.record_report(
            name, told(seq, self.lease[name], self.used[name], self.wanted[name]), self.now
        )


def test_the_only_member_gets_the_whole_arena() -> None:
    site = Site()
    site.join("a")
    assert site.lease == {"a": 64}


@pytest.mark.parametrize("rule", sorted(RULES))
def test_members_that_want_nothing_have_equal_parts(rule: str) -> None:
    site = Site(rule)
    site.join("a", "b")
    assert site.lease == {"a": 32, "b": 32}


def test_what_nobody_wants_is_lent_to_who_does() -> None:
    site = Site()
    site.join("a", "b")
    site.want("a", 100)
    assert site.lease == {"a": 60, "b": 4}


def test_a_loan_is_called_back_up_to_the_guarantee_when_its_owner_wants_it() -> None:
    site = Site()
    site.join("a", "b")
    site.want("a", 100)
    site.want("a", 100)
    site.want("b", 100, used=4)
    assert quotas(site.ledger) == {"a": 32, "b": 32}
    assert site.lease == {"a": 60, "b": 4}, "it holds that still"
    site.finish("a")
    assert site.lease == {"a": 32, "b": 32}


def test_who_wants_less_than_its_guarantee_gets_back_no_more_than_that() -> None:
    site = Site()
    site.join("a", "b")
    site.want("a", 100)
    site.want("a", 100)
    site.want("b", 10, used=4)
    assert quotas(site.ledger) == {"a": 54, "b": 10}


def test_whoever_holds_most_for_its_guarantee_gives_first() -> None:
    site = Site()
    site.join("a", "b", "c", guarantee=16)
    for name, wanted in (("a", 34), ("b", 20), ("a", 34), ("b", 20)):
        site.want(name, wanted)
    assert site.used == {"a": 34, "b": 20, "c": 0}
    site.want("c", 16, used=site.lease["c"])
    assert quotas(site.ledger)["b"] == 20
    assert quotas(site.ledger)["c"] == 16
    assert quotas(site.ledger)["a"] in (27, 28), "in whole granules"


def test_muxserves_rule_waits_for_its_period() -> None:
    site = Site("muxserve")
    site.join("a", "b")
    site.want("a", 64)
    assert site.lease["a"] > 32
    ledger = site.ledger
    before = quotas(ledger)
    ledger.record_report("b", told(ledger.members["b"].seq, 4, 4, 60), site.now)
    ledger.adapt(site.now + 0.1)
    assert quotas(ledger) == before


def test_who_is_gone_leaves_its_memory() -> None:
    site = Site()
    site.join("a", "b")
    site.ledger.remove_member("b", site.now)
    del site.lease["b"]
    site.settle()
    assert site.lease == {"a": 64}


def test_nothing_grows_before_others_could_have_come_back() -> None:
    ledger = LeaseLedger(ARENA)
    ledger.join("new", claim())
    assert ledger.orders(grow=False) == []
    ledger.join("old", claim(lease=60))
    assert ledger.orders(grow=False) == [("old", LeaseOrder(1, 32 * MIB, 60 * MIB, 32 * MIB))]
    assert ledger.leased == 60 * MIB
    assert dict(ledger.orders())["new"].quota == 4 * MIB, "what is free"


def test_a_member_is_told_of_its_guarantee_when_others_come_and_go() -> None:
    ledger = LeaseLedger(ARENA)
    ledger.join("a", claim())
    assert dict(ledger.orders())["a"].guarantee == ARENA
    ledger.join("b", claim(guarantee=44))
    assert dict(ledger.orders())["a"].guarantee == 20 * MIB
    ledger.remove_member("b")
    ledger.join("b", claim(guarantee=24))
    assert dict(ledger.orders())["a"].guarantee == 40 * MIB
    assert ledger.orders() == []


def test_a_guarantee_that_grows_is_had_back_whenever_it_is_wanted() -> None:
    site = Site()
    site.join("a", "b", guarantee=8)
    site.want("a", 60, used=60)
    site.ledger.guarantee("b", 40 * MIB, site.now)
    assert site.ledger.guarantees()["b"] == 40 * MIB
    site.want("b", 100)
    assert quotas(site.ledger)["b"] == 40
    assert quotas(site.ledger)["a"] in (23, 24), "in whole granules"


def test_a_guarantee_of_nothing_is_a_fair_part_of_what_others_were_not_promised() -> None:
    site = Site()
    site.join("a", "b", guarantee=8)
    site.ledger.guarantee("b", 0, site.now)
    assert site.ledger.guarantees() == {"a": 8 * MIB, "b": 56 * MIB}


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (3 * MIB, f"a: its guarantee is {3 * MIB} bytes, must be {4 * MIB} or more"),
        (-MIB, "must be 4194304 or more, which one request of the greatest length takes, or 0"),
        (57 * MIB, "no room for a: its guarantee takes 57.0 MiB, those of 1 others 8.0 MiB"),
    ],
)
def test_a_guarantee_that_cannot_be_is_refused_and_the_old_one_holds(size: int, words: str) -> None:
    site = Site()
    site.join("a", "b", guarantee=8)
    with pytest.raises(ConfigError, match=words):
        site.ledger.guarantee("a", size, site.now)
    assert site.ledger.guarantees() == {"a": 8 * MIB, "b": 8 * MIB}


def test_an_answer_to_an_older_order_changes_no_lease() -> None:
    ledger = LeaseLedger(ARENA)
    ledger.join("a", claim())
    ((_, first),) = ledger.orders()
    ledger.join("b", claim())
    ledger.orders()
    ledger.record_report("a", told(first.seq, 0, 0, 0), 0.0)
    assert ledger.members["a"].lease == 64 * MIB


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (claim(floor=61), "one request takes 61.0 MiB, those of 1 others 4.0 MiB, .* 1.0 MiB are"),
        (claim(guarantee=61), "its guarantee takes 61.0 MiB, .* 1.0 MiB are missing"),
        (claim(floor=8, capacity=4), "one request of the greatest length takes 8.0 MiB .* 4.0 MiB"),
        (MemberClaim("m", MIB, MIB, 3000), "can't be"),
        (claim(guarantee=-1), "can't be"),
        (claim(lease=-1), "can't be"),
    ],
)
def test_who_does_not_fit_is_refused_with_what_is_missing(given: MemberClaim, words: str) -> None:
    ledger = LeaseLedger(ARENA)
    ledger.join("a", claim())
    with pytest.raises(ConfigError, match=words):
        ledger.join("b", given)
    assert set(ledger.members) == {"a"}


@pytest.mark.parametrize(("arena", "quotas"), [(0, "kvmig"), (-1, "kvmig"), (MIB, "none")])
def test_an_arena_that_cannot_be_is_refused(arena: int, quotas: str) -> None:
    with pytest.raises(ConfigError, match=r"--memory is .* 1 MiB or more|--quotas is 'none', must"):
        LeaseLedger(arena, quotas)


class Arena(RuleBasedStateMachine):
    """Members whose orders and answers are on their way for as long as the test likes; agents that
    die, members that are killed. What members have in pages is counted."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = LeaseLedger(ARENA)
        self.has: dict[str, int] = {}
        """Pages that may be touched, MiB."""
        self.quota: dict[str, int] = {}
        self.used: dict[str, int] = {}
        self.orders: dict[str, deque[LeaseOrder]] = {}
        self.answers: deque[tuple[str, MemberReport]] = deque()
        self.settled = True
        self.now = 0.0

    @rule(name=st.sampled_from("abcd"), guarantee=st.integers(0, 16))
    def joins(self, name: str, guarantee: int) -> None:
        if name in self.has:
            return
        others = [one.claim for one in self.ledger.members.values()]
        claims = [*others, claim(guarantee=guarantee)]
        if sum(max(one.floor, one.guarantee) for one in claims) > ARENA:
            with pytest.raises(ConfigError, match="no room"):
                self.ledger.join(name, claims[-1], self.now)
            return
        self.ledger.join(name, claims[-1], self.now)
        self.has[name] = self.quota[name] = self.used[name] = 0
        self.orders[name] = deque()

    @precondition(lambda self: self.has)
    @rule(data=st.data())
    def dies(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.has)))
        self.ledger.remove_member(name, self.now)
        for kept in (self.has, self.quota, self.used, self.orders):
            kept.pop(name, None)
        self.answers = deque(one for one in self.answers if one[0] != name)

    @rule()
    def agent_dies(self) -> None:
        self.ledger, self.settled = LeaseLedger(ARENA), False
        self.answers.clear()
        for name, has in self.has.items():
            self.orders[name].clear()
            self.ledger.join(name, claim(lease=max(has, self.quota[name])), self.now)
            assert not [one for one in self.ledger.orders(grow=False) if one[1].quota > ARENA]
            self._collect(grow=False)

    @precondition(lambda self: self.has)
    @rule(data=st.data(), guarantee=st.integers(0, 70))
    def guarantee_changes(self, data: st.DataObject, guarantee: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.has)))
        before = self.ledger.members[name].claim
        try:
            self.ledger.guarantee(name, guarantee * MIB, self.now)
        except ConfigError:
            assert self.ledger.members[name].claim == before
        assert sum(max(one.claim.floor, one.claim.guarantee)
                   for one in self.ledger.members.values()) <= ARENA  # fmt: skip

    @rule()
    def settles(self) -> None:
        self.settled = True

    @rule()
    def agent_looks(self) -> None:
        self.now += 1.0
        self.ledger.adapt(self.now)
        self._collect(grow=self.settled)

    def _collect(self, *, grow: bool) -> None:
        for name, order in self.ledger.orders(grow=grow):
            self.orders[name].append(order)

    @precondition(lambda self: any(self.orders.values()))
    @rule(data=st.data())
    def member_hears(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(one for one, told in self.orders.items() if told)))
        order = self.orders[name].popleft()
        self.quota[name] = order.quota // MIB
        self.has[name] = max(self.used[name], min(self.has[name], self.quota[name]))
        self._answer(name, order.seq)

    @precondition(lambda self: self.has)
    @rule(data=st.data(), wanted=st.integers(0, 100))
    def load_changes(self, data: st.DataObject, wanted: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.has)))
        self.used[name] = min(wanted, self.quota[name])
        self.has[name] = max(self.used[name], min(self.has[name], self.quota[name]))
        self._answer(name, self._seq(name), wanted)

    def _seq(self, name: str) -> int:
        """Of the last order that it heard."""
        pending = self.orders[name]
        return pending[0].seq - 1 if pending else self.ledger.members[name].seq

    def _answer(self, name: str, seq: int, wanted: int = 0) -> None:
        has = max(self.has[name], min(self.quota[name], self.has[name]))
        self.answers.append((name, told(seq, has, self.used[name], max(wanted, self.used[name]))))

    @precondition(lambda self: self.answers)
    @rule()
    def agent_hears(self) -> None:
        name, answer = self.answers.popleft()
        self.ledger.record_report(name, answer, self.now)

    @invariant()
    def leases_fit(self) -> None:
        assert self.ledger.leased <= ARENA
        assert sum(self.has.values()) <= ARENA
        for name, one in self.ledger.members.items():
            assert max(self.has[name], self.quota[name] if not self.orders[name] else 0) <= max(
                one.lease, self.has[name]
            )
            assert self.has[name] <= one.lease
            assert one.due >= one.claim.floor


TestArena = Arena.TestCase
TestArena.settings = examples(25, stateful_step_count=40, deadline=None)
