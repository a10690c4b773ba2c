"""Room for models: who starts, who waits, who ends for whom."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.fleet.capacity import (
    GIB,
    CapacityPlan,
    HostCapacity,
    ResidentModel,
    WaitingModel,
    free,
    why_not_parked,
)
from kvmig.fleet.capacity import plan as plan_on
from kvmig.fleet.lifecycle import DesiredState, ModelStatus, ObservedState, reconcile
from kvmig.fleet.worker_nodes import LOCAL, InstancePlace, WorkerNode

HOST = HostCapacity(total=20, available=1000)
WISH = DesiredState(zero_after_s=300)
NOW = 100.0


def plan(
    host: HostCapacity, waiting: list[WaitingModel], residents: list[ResidentModel], now: float
) -> CapacityPlan:
    """On one host without GPUs."""
    return plan_on([WorkerNode(LOCAL, host.total, host.available)], waiting, residents, now)


def idle(name: str, claim: int = 10, idle_s: float = 50, priority: int = 0) -> ResidentModel:
    return ResidentModel(name, claim, since=0, stay_s=10, idle_s=idle_s, priority=priority)


def busy(name: str, claim: int = 10, since: float = 0) -> ResidentModel:
    return ResidentModel(name, claim, since=since, stay_s=10, kept=True)


def test_one_that_fits_starts_and_nobody_ends() -> None:
    found = plan(HOST, [WaitingModel("a", 10, 90)], [busy("b")], NOW)
    assert (found.refused, found.never, found.yielding) == ({}, {}, frozenset())
    assert (found.places, found.spare()) == ({"a": (InstancePlace(LOCAL),)}, 0)


def test_one_that_does_not_fit_waits_and_hears_why() -> None:
    found = plan(HOST, [WaitingModel("a", 10, 90)], [busy("b"), busy("c")], NOW)
    assert found.yielding == frozenset()
    assert found.refused["a"].startswith("no room: it needs 0.0 GiB, 0.0 GiB is free, and no model")


def test_one_that_is_larger_than_the_host_never_starts_and_hears_by_how_many_bytes() -> None:
    found = plan(HOST, [WaitingModel("a", 25, 90)], [], NOW)
    assert found.never == {
        "a": "model a needs 25 bytes of memory, 5 more than the 20 that all models may take"
    }


def test_the_least_important_idle_one_ends_then_the_one_idle_longest() -> None:
    waiting = [WaitingModel("a", 5, 90)]
    by_time = [idle("b", idle_s=20), idle("c", idle_s=60)]
    assert plan(HOST, waiting, by_time, NOW).yielding == {"c"}
    by_priority = [idle("b", idle_s=20, priority=1), idle("c", idle_s=60)]
    assert plan(HOST, waiting, by_priority, NOW).yielding == {"b"}


def test_no_more_end_than_must() -> None:
    residents = [idle("b", claim=4, idle_s=90), idle("c", claim=16, idle_s=60)]
    assert plan(HOST, [WaitingModel("a", 12, 90)], residents, NOW).yielding == {"c"}


def test_nobody_ends_in_vain() -> None:
    residents = [idle("b", claim=5), busy("c", claim=15)]
    assert plan(HOST, [WaitingModel("a", 12, 90)], residents, NOW).yielding == frozenset()


def test_one_that_ends_already_is_not_joined_by_another() -> None:
    leaving = ResidentModel("b", 10, since=99, stay_s=10, leaving=True)
    assert plan(HOST, [WaitingModel("a", 10, 90)], [leaving, idle("c")], NOW).yielding == {"b"}


def test_one_that_has_just_started_stays_for_a_while() -> None:
    young = ResidentModel("b", 20, since=95, stay_s=10, idle_s=5)
    assert plan(HOST, [WaitingModel("a", 10, 90)], [young], NOW).yielding == frozenset()
    assert plan(HOST, [WaitingModel("a", 10, 90)], [young], NOW + 5).yielding == {"b"}


def parked(name: str, claim: int = 10, idle_s: float = 50) -> ResidentModel:
    return ResidentModel(name, claim, since=99, stay_s=10, idle_s=idle_s, kept=True, parked=True)


def test_parked_ones_end_before_idle_ones_those_first_that_rest_longest() -> None:
    waiting = [WaitingModel("a", 5, 90)]
    residents = [parked("b", 4, 20), parked("c", 4, 30), idle("d", 12, 90)]
    assert plan(HOST, waiting, residents, NOW).yielding == {"b", "c"}


@given(st.integers(-8, 8), st.integers(0, 8))
def test_one_is_parked_only_if_what_that_takes_is_free(more: int, free_gib: int) -> None:
    why = why_not_parked(more * GIB, free_gib * GIB)
    assert bool(why) == (more > free_gib)


def test_a_parked_one_that_wakes_is_not_ended_for_itself_but_for_who_came_first() -> None:
    residents = [parked("a", 8), parked("b", 8)]
    waiting = [WaitingModel("b", 8, 95), WaitingModel("a", 8, 90)]
    found = plan(HOST, waiting, residents, NOW)
    assert found.yielding == {"b"}
    assert set(found.refused) == {"a", "b"}
    assert plan(HOST, waiting[1:], [residents[0]], NOW).refused == {}


def test_a_parked_one_waits_where_its_room_is_kept_for_who_came_first() -> None:
    wakes = WaitingModel("wakes", 5, 95, wakes_on={LOCAL: 5})
    found = plan(HOST, [WaitingModel("large", 16, 90), wakes], [busy("b"), parked("wakes", 1)], NOW)
    assert found.refused["wakes"] == (
        "no room: it needs 0.0 GiB, which are kept, and 1 that came first wait too"
    )


def test_a_parked_one_that_takes_nothing_more_wakes_though_others_have_no_room() -> None:
    wakes = WaitingModel("wakes", 0, 95, wakes_on={LOCAL: 0})
    there = [busy("b", 12, since=95), parked("wakes", 1)]
    found = plan(HOST, [WaitingModel("large", 16, 90), wakes], there, NOW)
    assert set(found.refused) == {"large"}


def test_who_has_waited_longest_starts_first() -> None:
    waiting = [WaitingModel("late", 10, 95), WaitingModel("early", 10, 90)]
    assert list(plan(HOST, waiting, [busy("b")], NOW).refused) == ["late"]


def test_one_that_came_later_takes_no_room_that_the_first_will_need() -> None:
    waiting = [WaitingModel("large", 16, 90), WaitingModel("small", 5, 95)]
    assert set(plan(HOST, waiting, [busy("b")], NOW).refused) == {"large", "small"}


def test_one_that_came_later_starts_beside_the_first_ones_room() -> None:
    waiting = [WaitingModel("large", 16, 90), WaitingModel("small", 4, 95)]
    assert set(plan(HOST, waiting, [busy("b")], NOW).refused) == {"large"}
    taken = [busy("b"), busy("small", claim=4, since=95)]
    waiting = [WaitingModel("large", 16, 90), WaitingModel("smaller", 2, 96)]
    assert set(plan(HOST, waiting, taken, NOW).refused) == {"large", "smaller"}


def test_later_ones_together_take_no_room_that_the_first_will_need() -> None:
    waiting = [WaitingModel("large", 16, 90), *(WaitingModel(name, 3, 95) for name in "ab")]
    assert set(plan(HOST, waiting, [busy("c", claim=10)], NOW).refused) == {"large", "b"}


def test_one_that_can_never_come_in_keeps_nobody_else_out() -> None:
    pinned = ResidentModel("b", 10, since=0, stay_s=0, idle_s=90, pinned=True)
    waiting = [WaitingModel("large", 16, 90), WaitingModel("small", 10, 95)]
    found = plan(HOST, waiting, [pinned], NOW)
    assert set(found.refused) == {"large"}
    assert found.refused["large"].endswith("the rest is taken for good")
    assert found.yielding == frozenset()


def test_what_is_not_ready_has_its_memory_still_to_take() -> None:
    starting = ResidentModel("b", 10, since=99, stay_s=10, ready=False, kept=True)
    assert free(HostCapacity(total=100, available=15), [starting]) == 5
    assert free(HostCapacity(total=12, available=15), [starting]) == 2


RESIDENTS = st.lists(
    st.builds(
        ResidentModel,
        name=st.uuids().map(str),
        claim=st.integers(1, 10),
        since=st.floats(0, NOW),
        stay_s=st.floats(0, 50),
        ready=st.booleans(),
        idle_s=st.floats(0, NOW),
        priority=st.integers(-1, 1),
        kept=st.booleans(),
        pinned=st.booleans(),
        leaving=st.booleans(),
        parked=st.booleans(),
    ),
    max_size=6,
)
WAITING = st.lists(
    st.builds(
        WaitingModel, name=st.uuids().map(str), claim=st.integers(1, 25), since=st.floats(0, NOW)
    ),
    max_size=5,
)


def test_a_parked_one_that_leaves_is_counted_once() -> None:
    residents = [replace(parked("a", 1), leaving=True), parked("b", 10)]
    found = plan(HostCapacity(20, 0), [WaitingModel("c", 12, 0.0)], residents, NOW)
    assert found.yielding == {"a"}, "the other's end would not be enough"


@given(WAITING, RESIDENTS, st.integers(0, 60))
def test_whatever_there_is_the_host_holds_it_and_nobody_in_use_ends(
    waiting: list[WaitingModel], residents: list[ResidentModel], available: int
) -> None:
    host = HostCapacity(20, available)
    found = plan(host, waiting, residents, NOW)
    starting = [
        one for one in waiting if one.name not in found.refused and one.name not in found.never
    ]
    assert sum(one.claim for one in starting) <= free(host, residents)
    assert set(found.never) == {one.name for one in waiting if one.claim > host.total}
    for one in residents:
        if one.name in found.yielding and not (one.leaving or one.parked):
            assert not one.kept
            assert not one.pinned
            assert NOW - one.since >= one.stay_s
    if found.refused and found.yielding - {one.name for one in residents if one.leaving}:
        first = min(
            (
                one
                for one in waiting
                if not found.refused.get(one.name, "for good").endswith("for good")
            ),
            key=lambda one: (one.since, one.name),
        )
        given_back = sum(one.claim for one in residents if one.name in found.yielding)
        assert free(host, residents) + given_back >= first.claim


@given(st.data())
def test_everyone_who_waits_gets_in_while_others_come_again_and_again(data: st.DataObject) -> None:
    """Models that work for a while, are idle for a while, and are wanted again at once."""
    claims = data.draw(st.lists(st.integers(1, 20), min_size=2, max_size=5))
    wants: dict[str, float] = {f"m{number}": 0.0 for number in range(len(claims))}
    claim = {f"m{number}": size for number, size in enumerate(claims)}
    there: dict[str, float] = {}
    longest = 0.0
    for now in range(400):
        residents = [
            ResidentModel(
                name, claim[name], since, 4, idle_s=max(0.0, now - since - 3),
                kept=now - since < 3,
            )
            for name, since in there.items()
        ]  # fmt: skip
        waiting = [WaitingModel(name, claim[name], since) for name, since in wants.items()]
        found = plan(HOST, waiting, residents, now)
        for name in found.yielding:
            del there[name]
            wants[name] = now
        for name in [one for one in wants if one not in found.refused]:
            if name not in found.yielding:
                longest = max(longest, now - wants.pop(name))
                there[name] = now
        assert sum(claim[name] for name in there) <= HOST.total
    longest = max([longest, *(399 - since for since in wants.values())])
    assert longest <= 10 * len(claims)


@pytest.mark.parametrize("told_s", [0.1, 0.4, 0.8])
@pytest.mark.parametrize("pauses", [(0.3,), (0.7, 1.1)])
def test_models_that_take_turns_have_as_many_turns_each(
    told_s: float, pauses: tuple[float, ...]
) -> None:
    """Three models on room for two. Each has clients that ask again after a pause each.

    told_s: until proxies know that a model is emptied; until then they send it requests.
    """
    turns = TurnsSimulation("abc", pauses, start_s=1.0, told_s=told_s)
    for _ in range(3000):
        turns.tick(0.05)
    answered = sorted(turns.answered.values())
    assert answered[0] * 1.5 > answered[-1], answered
    assert turns.longest_wait < 8, "a start, four times as long until one may end, and a start"


@dataclass
class AskingClient:
    """A client that asks a model again and again."""

    pause_s: float
    asks_at: float = 0.0
    runs_until: float | None = None


class TurnsSimulation:
    """Models with clients that ask again and again, decided by `plan` and `reconcile`."""

    ANSWER_S, CLAIM = 0.3, 10

    def __init__(
        self, names: str, pauses: tuple[float, ...], start_s: float, told_s: float
    ) -> None:
        self.now = 0.0
        self.answered = dict.fromkeys(names, 0)
        self.longest_wait = 0.0
        self._start_s, self._told_s = start_s, told_s
        self._clients = {name: [AskingClient(one) for one in pauses] for name in names}
        self._life = {name: ModelStatus() for name in names}
        self._ended_at = dict.fromkeys(names, 0.0)
        self._asks_since: dict[str, float] = {}
        self._there: set[str] = set()

    def tick(self, seconds: float) -> None:
        self.now += seconds
        for name, clients in self._clients.items():
            for one in clients:
                self._serve(name, one)
        seen = {name: self._seen(name) for name in self.answered}
        for name, life in self._life.items():
            if life.state in ("zero", "waiting") and seen[name].wanted:
                self._asks_since.setdefault(name, self.now)
            else:
                self._asks_since.pop(name, None)
        waiting = [
            WaitingModel(name, self.CLAIM, since) for name, since in self._asks_since.items()
        ]
        residents = [self._resident(name, seen[name]) for name in sorted(self._there)]
        found = plan(HOST, waiting, residents, self.now)
        for name, life in self._life.items():
            told = msgspec.structs.replace(
                seen[name],
                no_room=found.refused.get(name, ""),
                yields=name in found.yielding,
            )
            self._life[name], action = reconcile(life, WISH, told, self.now)
            if action == "start":
                self._there.add(name)
            elif action == "stop":
                self._there.remove(name)

    def _routed(self, name: str) -> bool:
        life = self._life[name]
        empties = life.state == "emptying" and self.now < life.since + self._told_s
        return life.state == "serving" or empties

    def _serve(self, name: str, client: AskingClient) -> None:
        if client.runs_until is not None:
            if self.now >= client.runs_until:
                self.answered[name] += 1
                self._ended_at[name] = self.now
                client.runs_until, client.asks_at = None, self.now + client.pause_s
        elif self.now >= client.asks_at and self._routed(name):
            self.longest_wait = max(self.longest_wait, self.now - client.asks_at)
            client.runs_until = self.now + self.ANSWER_S

    def _seen(self, name: str) -> ObservedState:
        life, clients = self._life[name], self._clients[name]
        running = sum(one.runs_until is not None for one in clients)
        there = name in self._there
        starts = life.state == "starting" and self.now - life.since < self._start_s
        return ObservedState(
            deployment=there,
            ready=there and not starts,
            ended="exit code 0" if life.state == "stopping" and not there else "",
            clean=life.state == "stopping",
            wanted=any(one.runs_until is None and self.now >= one.asks_at for one in clients),
            running=running,
            idle_s=0.0 if running else self.now - self._ended_at[name],
            unrouted=life.state == "emptying" and not self._routed(name),
        )

    def _resident(self, name: str, seen: ObservedState) -> ResidentModel:
        life = self._life[name]
        return ResidentModel(
            name,
            self.CLAIM,
            since=life.there_since,
            stay_s=4 * self._start_s,
            ready=seen.ready,
            idle_s=seen.idle_s,
            kept=life.state == "starting" or seen.wanted or seen.running > 0,
            leaving=life.state in ("emptying", "stopping"),
        )
