"""The model checker, an idle session: it moves, with every loss, and each kind of bug is found."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvmig.frontend.session_memory import SessionMemory
from kvmig.kvtransfer import destination_machine as there
from kvmig.kvtransfer import source_machine as here
from kvmig.kvtransfer.destination_machine import DestinationMachine
from kvmig.kvtransfer.source_machine import SourceMachine, SourceTransition
from kvmig_tools.check.prefix_cache import BLOCKS, POOL, PrefixCache, SessionEngine
from kvmig_tools.check.scenarios import SHORT, Scenario, explore

IDLE = Scenario("idle", SHORT, orders=(("Fb",),), session=True)
PLANT = pytest.MonkeyPatch


def test_with_a_fault_every_invariant_holds() -> None:
    result = explore(IDLE)
    assert (result.violation, result.trace) == ("", [])
    assert result.states > 1000
    assert result.ends > 10


def test_there_and_back_nothing_is_left() -> None:
    result = explore(Scenario("back", SHORT, orders=(("Fba",),), session=True, faults=0))
    assert (result.violation, result.trace) == ("", [])


def _frees_when_nobody_answers(plant: PLANT) -> None:
    def orphaned(self: SourceMachine) -> list[here.Action]:
        self.apply_event(SourceTransition.ORPHANED)
        return [here.ReleaseRequest(), here.SendAbort("timeout")]

    plant.setattr(SourceMachine, "orphaned", orphaned)


def _the_lease_forgets_to_free(plant: PLANT) -> None:
    cancel = DestinationMachine.cancel
    plant.setattr(DestinationMachine, "cancel", lambda self, reason: cancel(self, reason)[-1:])


def _blocks_never_arrive(plant: PLANT) -> None:
    plant.setattr(SessionEngine, "write", lambda self, move, chunk: None)


def _commits_twice(plant: PLANT) -> None:
    committed = DestinationMachine.committed

    def twice(self: DestinationMachine, ms: float) -> list[there.Action]:
        return [*committed(self, ms), there.FreeBlocks(), there.RunRequest(None)]  # type: ignore[arg-type]

    plant.setattr(DestinationMachine, "committed", twice)


def _what_is_held_is_given_away(plant: PLANT) -> None:
    def make_way(self: PrefixCache) -> None:
        for block in self.blocks:
            block.name = block.content = -1

    plant.setattr(PrefixCache, "make_way", make_way)


def _memory_keeps_what_is_lost(plant: PLANT) -> None:
    plant.setattr(SessionMemory, "forget", lambda self, instance: None)


@pytest.mark.parametrize(
    ("bug", "found"),
    [
        (_frees_when_nobody_answers, "whole nowhere"),
        (_the_lease_forgets_to_free, "blocks"),
        (_blocks_never_arrive, "which has not come"),
        (_commits_twice, "twice"),
        (_what_is_held_is_given_away, "whole nowhere"),
        (_memory_keeps_what_is_lost, "which is gone"),
    ],
    ids=lambda one: one.__name__.strip("_") if callable(one) else "",
)
def test_a_planted_bug_is_found(
    monkeypatch: pytest.MonkeyPatch, bug: Callable[[PLANT], None], found: str
) -> None:
    bug(monkeypatch)
    result = explore(IDLE)
    assert found in result.violation
    assert result.trace


def test_others_take_what_nobody_holds() -> None:
    cache = PrefixCache()
    cache.fill(range(BLOCKS))
    held = cache.find()
    assert cache.held == BLOCKS
    cache.free(held)
    cache.make_way()
    assert (cache.state, cache.find(), len(cache.take(POOL))) == ("evicted", [], POOL)
