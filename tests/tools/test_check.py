"""The model checker: the handshake as it is holds, and each kind of bug is found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.engines.base import RequestTail
from kvmig.frontend.ownership import RequestOwnership
from kvmig.frontend.splice import StreamSplicer
from kvmig.kvtransfer import destination_machine as there
from kvmig.kvtransfer import source_machine
from kvmig.kvtransfer import source_machine as here
from kvmig.kvtransfer.destination_machine import DestinationMachine, MachineTombstones
from kvmig.kvtransfer.messages import Commit
from kvmig.kvtransfer.source_machine import SourceMachine, SourceState, SourceTransition
from kvmig_tools.check.__main__ import _chosen, _options, main
from kvmig_tools.check.explore import Result
from kvmig_tools.check.freeze import freeze
from kvmig_tools.check.request import Request
from kvmig_tools.check.scenarios import SCENARIOS, SHORT, Scenario, explore
from kvmig_tools.check.site import Shape
from tests.support.examples import examples

ONE = Scenario("one", SHORT)
PLANT = pytest.MonkeyPatch


def test_with_a_fault_every_invariant_holds() -> None:
    result = explore(ONE)
    assert (result.violation, result.trace) == ("", [])
    assert result.states > 1000
    assert result.ends > 10
    assert 0 < result.gap_s <= 10.2, result.gap


def _decodes_before_commit(plant: PLANT) -> None:
    reserved = DestinationMachine.reserved

    def early(self: DestinationMachine, *given: object) -> list[there.Action]:
        return [*reserved(self, *given), there.RunRequest(RequestTail([], 2, 0, bytes([3])))]  # type: ignore[arg-type]

    plant.setattr(DestinationMachine, "reserved", early)


def _commits_without_its_blocks(plant: PLANT) -> None:
    def trusting(self: DestinationMachine, message: Commit) -> int:
        return message.blocks

    plant.setattr(DestinationMachine, "_come_with", trusting)


def _commits_twice(plant: PLANT) -> None:
    commit = DestinationMachine.committed

    def twice(self: DestinationMachine, ms: float) -> list[there.Action]:
        return [*commit(self, ms), there.RunRequest(RequestTail([], 2, 0, bytes([2])))]

    plant.setattr(DestinationMachine, "committed", twice)


def _forgets_that_it_committed(plant: PLANT) -> None:
    plant.setattr(MachineTombstones, "bury", lambda self, machine, attempt: None)


def _resumes_after_the_commit(plant: PLANT) -> None:
    def committed(self: SourceMachine) -> list[here.Action]:
        self.apply_event(SourceTransition.COMMITTED)
        return [here.ResumeRequest()]

    plant.setattr(SourceMachine, "committed", committed)


def _resumes_when_nobody_answers(plant: PLANT) -> None:
    def unanswered(self: SourceMachine) -> list[here.Action]:
        self.apply_event(SourceTransition.REFUSED)
        return [here.ResumeRequest()]

    plant.setattr(SourceMachine, "unanswered", unanswered)


def _does_not_ask_again(plant: PLANT) -> None:
    def unanswered(self: SourceMachine) -> list[here.Action]:
        self.apply_event(SourceTransition.TIMEOUT)
        return []

    plant.setattr(SourceMachine, "unanswered", unanswered)


def _stays_suspended_when_it_failed(plant: PLANT) -> None:
    tells = [here.SendAbort("error")]
    plant.setattr(SourceMachine, "_kept", lambda self, reason, detail="": tells)


def _abort_forgets_to_free(plant: PLANT) -> None:
    abort = DestinationMachine.abort
    plant.setattr(DestinationMachine, "abort", lambda self: abort(self)[-1:])


def _the_lease_forgets_to_free(plant: PLANT) -> None:
    cancel = DestinationMachine.cancel
    plant.setattr(DestinationMachine, "cancel", lambda self, reason: cancel(self, reason)[-1:])


def _an_arrow_is_missing(plant: PLANT) -> None:
    arrows = dict(SourceMachine.table[SourceState.COMMITTING])
    del arrows[SourceTransition.CANCEL]
    plant.setattr(SourceMachine, "table", {**SourceMachine.table, SourceState.COMMITTING: arrows})


def _the_splice_takes_a_gap(plant: PLANT) -> None:
    def advance(self: StreamSplicer, epoch: int, start: int, count: int, now: float) -> bool:
        self.next += count
        self.last_at = now
        return True

    plant.setattr(StreamSplicer, "advance", advance)


def _the_front_end_guesses(plant: PLANT) -> None:
    plant.setattr(RequestOwnership, "decide", lambda self, question, committed: "source")


def _nobody_looks_for_the_lost(plant: PLANT) -> None:
    plant.setattr(RequestOwnership, "_leave", lambda self, entries, instance, reason: None)
    plant.setattr(RequestOwnership, "_leave_lost", lambda self: None)


def _waits_for_the_dead(plant: PLANT) -> None:
    unreachable = SourceMachine.unreachable
    sends = 9

    def patient(self: SourceMachine) -> list[here.Action]:
        if self.state is SourceState.COMMITTING and self._commits < sends:
            self.apply_event(SourceTransition.TIMEOUT)
            return []
        return unreachable(self)

    plant.setattr(source_machine, "COMMIT_SENDS", sends)
    plant.setattr(SourceMachine, "unreachable", patient)


@pytest.mark.parametrize(
    ("bug", "found"),
    [
        (_decodes_before_commit, "decodes with blocks"),
        (_commits_without_its_blocks, "decodes with blocks"),
        (_commits_twice, "twice"),
        (_forgets_that_it_committed, "commit is undone"),
        (_resumes_after_the_commit, "decode the request at once"),
        (_resumes_when_nobody_answers, "decode the request at once"),
        (_does_not_ask_again, "circle"),
        (_stays_suspended_when_it_failed, "suspended blocks"),
        (_abort_forgets_to_free, "reserved blocks"),
        (_the_lease_forgets_to_free, "reserved blocks"),
        (_an_arrow_is_missing, "no transition for cancel"),
        (_the_splice_takes_a_gap, "the client gets token"),
        (_the_front_end_guesses, "decode the request at once"),
        (_nobody_looks_for_the_lost, "waits for ever"),
        (_waits_for_the_dead, "nobody decodes for"),
    ],
    ids=lambda one: one.__name__.strip("_") if callable(one) else "",
)
def test_a_planted_bug_is_found(
    monkeypatch: pytest.MonkeyPatch, bug: Callable[[PLANT], None], found: str
) -> None:
    bug(monkeypatch)
    result = explore(Scenario("planted", Shape(tokens=2, stages=0)))
    assert found in result.violation
    assert result.trace


WAITS = Scenario("waits", Shape(tokens=1, stages=0, waits=True))


def test_one_that_waits_moves_or_stays_and_every_invariant_holds() -> None:
    result = explore(WAITS)
    assert (result.violation, result.trace) == ("", [])
    assert result.states > 1000


def test_one_that_began_to_run_must_not_be_sent_to_where_nobody_reserved_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SourceMachine, "waits", False)
    assert "nobody reserved room" in explore(WAITS).violation


def test_a_broken_invariant_is_told_with_its_shortest_trace(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _resumes_after_the_commit(monkeypatch)
    assert main(["--only", "there and back", "--faults", "0"]) == 1
    told = capsys.readouterr().out
    assert "a and b decode the request at once:" in told
    assert "  1 a hears Order of the scheduler" in told
    assert "An invariant is broken." in told


def test_what_was_explored_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "two, one way", "--faults", "0"]) == 0
    told = capsys.readouterr().out
    assert "a commit is carried out once, and never undone" in told
    assert "All invariants hold." in told


def test_long_scenarios_are_explored_only_when_asked_for() -> None:
    def names(*arguments: str) -> list[str]:
        return [one.name for one in _chosen(_options(arguments))]

    assert {"two, one way", "two, both ways", "two long, one way"}.isdisjoint(names())
    assert "there and back" in names()
    assert {*names("--long")} == {*names("--whole")} == {one.name for one in SCENARIOS}
    assert names("--only=two long, one way") == ["two long, one way"]


@pytest.mark.parametrize(
    ("option", "message"),
    [("--faults=-1", "is -1, must be a whole number"), ("--only=nothing", "invalid choice")],
)
def test_a_bad_option_is_one_clear_error(
    option: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([option])
    assert message in capsys.readouterr().err


WALKED = Request("ab", Shape(tokens=3, stages=2), {"a": "b", "b": "a"})


@examples(100)
@given(st.data())
def test_with_many_faults_too(data: st.DataObject) -> None:
    at, left = 0, 6
    while True:
        steps = list(WALKED.free(at))
        if left and data.draw(st.integers(0, 9)) == 0:
            steps += [step for step in WALKED.faults(at) if step.cost <= left]
        if not steps:
            break
        step = steps[data.draw(st.integers(0, len(steps) - 1))]
        assert not step.violation
        at, left = step.target, left - step.cost
        assert len(WALKED.decoding(at)) <= 1
    assert WALKED.held(at) == []
    assert not WALKED.waits(at)


def test_equal_states_have_equal_pictures() -> None:
    assert freeze(Result(trace=["a"])) == freeze(Result(trace=["a"]))
    assert freeze(Result(trace=["a"])) != freeze(Result(trace=["b"]))
