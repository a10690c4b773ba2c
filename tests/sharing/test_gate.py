"""The step gate: what an engine's thread waits for, and who decides."""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvmig.engines.entrance import StepAdmission
from kvmig.engines.gate import (
    EVERYTHING,
    NOTHING,
    PARTS,
    ComputeShares,
    StepGrant,
    StepRequest,
)
from kvmig.sharing.policies import POLICIES
from kvmig.sharing.step_gate import UnitGate
from kvmig.sharing.step_scheduler import StepScheduler
from tests.support.inside import running_steps
from tests.support.local_unit import LocalUnit

PROMPTS = StepRequest(prompt_tokens=100, decodes=0, oldest_prompt=1.0)
DECODES = StepRequest(prompt_tokens=0, decodes=3, oldest_decode=1.0)
BOTH = StepRequest(prompt_tokens=100, decodes=3, oldest_prompt=1.0, oldest_decode=1.0)
DECODE = StepGrant(prompts=False, decodes=True)
STANDING = StepGrant(prompts=False, decodes=True, stands=True)


class Gate:
    """Answers when the test says so."""

    def __init__(self, limit_s: float = 0.02) -> None:
        self.limit_s, self.answers = limit_s, 0
        self.waited_s = 0.0
        self.on_answer: Callable[[], None] = lambda: None
        self.alone = False
        self.asked: list[StepRequest] = []
        self.ended = 0
        self.next: StepGrant | None = None
        self.standing: StepGrant | None = None

    def request_step(self, want: StepRequest) -> None:
        self.asked.append(want)

    def answer(self) -> StepGrant | None:
        grant, self.next = self.next, None
        self.answers += grant is not None
        return grant

    def reuse_grant(self) -> StepGrant | None:
        return self.standing

    def finish_step(self) -> None:
        self.ended += 1

    def close(self) -> None:
        pass


def test_who_is_alone_asks_nobody() -> None:
    gate = Gate()
    gate.alone = True
    assert StepAdmission(gate, time.sleep).enter(lambda: BOTH) is EVERYTHING
    assert gate.asked == []


def test_who_wants_nothing_asks_nobody() -> None:
    gate = Gate()
    assert StepAdmission(gate, time.sleep).enter(lambda: NOTHING) is None
    assert gate.asked == []


def test_a_gate_says_how_long_steps_have_waited_at_it() -> None:
    gate = Gate(limit_s=5.0)

    def serve(left: float) -> None:
        time.sleep(0.02)
        gate.next = DECODE

    StepAdmission(gate, serve).enter(lambda: DECODES)
    assert 0.02 <= gate.waited_s < 2.0


def test_a_grant_is_given_back_when_its_step_is_over() -> None:
    gate = Gate()
    entrance = StepAdmission(gate, lambda left: setattr(gate, "next", DECODE))
    assert entrance.enter(lambda: DECODES) == DECODE
    assert gate.ended == 0
    entrance.finish_step(True)
    entrance.finish_step(True)
    assert gate.ended == 1


def test_with_a_grant_that_stands_only_prompts_are_asked_for() -> None:
    gate = Gate()
    gate.standing = STANDING
    entrance = StepAdmission(gate, lambda left: setattr(gate, "next", EVERYTHING))
    assert entrance.enter(lambda: DECODES) == STANDING
    entrance.finish_step(True)
    assert (gate.asked, gate.ended) == ([], 1)
    assert entrance.enter(lambda: BOTH) == EVERYTHING
    assert gate.asked == [BOTH]


def test_a_grant_that_stands_is_given_back_by_who_wants_nothing_any_more() -> None:
    gate = Gate()
    gate.standing = STANDING
    entrance = StepAdmission(gate, time.sleep)
    entrance.enter(lambda: DECODES)
    entrance.finish_step(True)
    for _ in range(2):
        assert entrance.enter(lambda: NOTHING) is None
    assert gate.asked == [NOTHING], "once"
    gate.standing, gate.next = None, STANDING
    entrance.enter(lambda: DECODES)
    assert entrance.enter(lambda: NOTHING) is None
    assert gate.asked == [NOTHING, DECODES, NOTHING]


def test_what_comes_meanwhile_is_served_and_asked_for() -> None:
    gate, now = Gate(limit_s=10.0), [DECODES]

    def serve(left: float) -> None:
        if now[0] is DECODES:
            now[0] = BOTH  # a request has come
        else:
            gate.next = EVERYTHING

    assert StepAdmission(gate, serve).enter(lambda: now[0]) == EVERYTHING
    assert gate.asked == [DECODES, BOTH]


def test_a_question_is_taken_back_when_all_that_it_was_for_is_gone() -> None:
    gate, now = Gate(limit_s=10.0), [DECODES]
    entrance = StepAdmission(gate, lambda left: now.__setitem__(0, NOTHING))
    assert entrance.enter(lambda: now[0]) is None
    assert gate.asked == [DECODES, NOTHING]


def test_a_grant_for_what_is_gone_is_given_back_and_asked_anew() -> None:
    gate, now = Gate(limit_s=10.0), [DECODES]

    def serve(left: float) -> None:
        now[0] = PROMPTS
        gate.next = DECODE if gate.ended == 0 else EVERYTHING

    assert StepAdmission(gate, serve).enter(lambda: now[0]) == EVERYTHING
    assert gate.ended == 1
    assert gate.asked == [DECODES, PROMPTS]


def test_a_gate_that_never_answers_is_waited_for_once(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate(limit_s=0.02)
    entrance = StepAdmission(gate, time.sleep)
    began = time.monotonic()
    for _ in range(50):
        assert entrance.enter(lambda: BOTH) is EVERYTHING
        entrance.finish_step(True)
    assert 0.02 <= time.monotonic() - began < 0.5
    assert entrance.unanswered == 50
    assert gate.ended == 0
    assert len(caplog.records) == 1, "said once"


def test_it_is_waited_for_again_once_it_has_answered() -> None:
    gate, waits = Gate(limit_s=0.02), list[float]()

    def serve(left: float) -> None:
        waits.append(left)
        time.sleep(left)

    entrance = StepAdmission(gate, serve)
    entrance.enter(lambda: BOTH)
    waits.clear()
    entrance.enter(lambda: BOTH)
    assert waits == []
    gate.answers += 1  # a late one, to a question that was taken back
    entrance.enter(lambda: BOTH)
    assert waits


def test_a_silent_gate_is_asked_now_and_then() -> None:
    gate = Gate(limit_s=0.05)
    entrance = StepAdmission(gate, time.sleep)
    entrance.enter(lambda: BOTH)
    gate.asked.clear()
    for _ in range(100):
        entrance.enter(lambda: BOTH)
    assert gate.asked == []
    time.sleep(0.05)
    entrance.enter(lambda: BOTH)
    assert gate.asked == [BOTH, NOTHING]


def test_an_engine_that_can_compute_nothing_looks_ever_less_often() -> None:
    waits: list[float] = []
    entrance = StepAdmission(Gate(), waits.append)
    for _ in range(8):
        entrance.wait_for_work()
    assert waits[0] == 0.001
    assert waits[-1] == max(waits) == 0.05
    entrance.finish_step(True)
    entrance.wait_for_work()
    assert waits[-1] == 0.001


# -- numbers


def answer_to(number: int, grant: StepGrant) -> StepGrant:
    return replace(grant, number=number)


class Wire:
    """What a gate sends."""

    def __init__(self) -> None:
        self.wants: list[StepRequest] = []
        self.dones: list[int] = []
        self.gate = UnitGate(self.wants.append, self.dones.append)


def test_an_answer_to_a_question_that_was_taken_back_frees_its_parts_at_once() -> None:
    wire = Wire()
    wire.gate.request_step(DECODES)
    wire.gate.request_step(NOTHING)
    wire.gate.receive_grant(answer_to(1, DECODE))
    assert wire.gate.answer() is None
    assert wire.dones == [1]


def test_an_answer_that_nobody_took_is_given_back_with_the_next_question() -> None:
    wire = Wire()
    wire.gate.request_step(DECODES)
    wire.gate.receive_grant(answer_to(1, DECODE))
    wire.gate.request_step(BOTH)
    assert wire.dones == [1]
    assert wire.wants[-1] == replace(BOTH, number=2)


def test_taking_back_what_was_never_asked_tells_nobody() -> None:
    wire = Wire()
    wire.gate.request_step(NOTHING)
    assert wire.wants == []


def standing() -> Wire:
    """One whose engine makes its first step with a grant that stands."""
    wire = Wire()
    wire.gate.request_step(DECODES)
    wire.gate.receive_grant(answer_to(1, STANDING))
    assert wire.gate.answer() == answer_to(1, STANDING)
    return wire


def test_a_grant_that_stands_is_good_for_steps_that_nobody_hears_of() -> None:
    wire = standing()
    for _ in range(3):
        wire.gate.finish_step()
        assert wire.gate.reuse_grant() == answer_to(1, STANDING)
    assert (wire.wants, wire.dones) == ([replace(DECODES, number=1)], [])


def test_a_grant_that_is_called_back_between_two_steps_is_given_back_at_once() -> None:
    wire = standing()
    wire.gate.finish_step()
    wire.gate.recall_grant(1)
    assert wire.dones == [1]
    assert wire.gate.reuse_grant() is None


def test_a_grant_that_is_called_back_in_a_step_is_given_back_at_its_end() -> None:
    wire = standing()
    wire.gate.recall_grant(1)
    assert wire.dones == []
    wire.gate.finish_step()
    assert wire.dones == [1]
    assert wire.gate.reuse_grant() is None


def test_a_grant_that_is_called_back_before_it_was_taken_is_good_for_one_step() -> None:
    wire = Wire()
    wire.gate.request_step(DECODES)
    wire.gate.receive_grant(answer_to(1, STANDING))
    wire.gate.recall_grant(1)
    assert wire.gate.answer() == answer_to(1, DECODE)
    wire.gate.finish_step()
    assert (wire.gate.reuse_grant(), wire.dones) == (None, [1])


def test_a_question_gives_back_the_grant_that_stood() -> None:
    wire = standing()
    wire.gate.finish_step()
    wire.gate.request_step(BOTH)
    assert wire.dones == [1]
    wire.gate.recall_grant(1)  # it was on its way
    assert (wire.gate.reuse_grant(), wire.dones) == (None, [1])


def test_a_grant_stands_no_more_once_its_agent_has_gone() -> None:
    wire = standing()
    wire.gate.finish_step()
    wire.gate.close()
    assert wire.gate.reuse_grant() is None


# -- who decides


def test_grants_of_decodes_stand_until_somebody_is_left_waiting() -> None:
    turns = StepScheduler(job_s=5.0)
    for name in ("a", "b", "c"):
        turns.join(name, ComputeShares(10, 4))
    for name in ("a", "b"):
        turns.request_step(name, replace(DECODES, number=1))
    assert [one.stands for one in turns.grants(0.0).values()] == [True, True]
    assert turns.recalls(0.0) == {}
    assert turns.next_overdue() is None
    turns.request_step("c", replace(PROMPTS, number=1))
    assert turns.grants(100.0) == {}
    assert turns.recalls(100.0) == {"a": 1, "b": 1}
    assert turns.recalls(100.0) == {}, "once"
    assert turns.next_overdue() == 105.0
    turns.finish_step("a", 1, 100.1)
    turns.request_step("a", replace(DECODES, number=2))
    turns.finish_step("b", 1, 100.1)
    ((member, grant),) = turns.grants(100.1).items()
    assert (member, grant.stands) == ("c", False)
    turns.finish_step("c", 1, 100.2)
    ((member, grant),) = turns.grants(100.2).items()
    assert (member, grant.stands) == ("a", True)


@pytest.mark.parametrize("policy", ["fcfs", "round-robin"])
def test_where_one_computes_at_a_time_no_grant_stands_while_two_want(policy: str) -> None:
    turns = StepScheduler(policy)
    for name in ("a", "b"):
        turns.join(name, ComputeShares(10, 4))
        turns.request_step(name, replace(DECODES, number=1))
    (first,) = turns.grants(0.0).values()
    assert not first.stands


def test_a_member_that_dies_frees_its_parts() -> None:
    turns = StepScheduler()
    for name in ("a", "b"):
        turns.join(name, ComputeShares(10, 10))
        turns.request_step(name, replace(PROMPTS, number=1))
    ((first, grant),) = turns.grants(0.0).items()
    assert (first, grant.prompts) == ("a", True)
    turns.remove_member("a")
    assert list(turns.grants(0.1)) == ["b"]
    assert turns.members == ["b"]


def test_a_job_whose_end_nobody_says_ends_after_a_limit() -> None:
    turns = StepScheduler(job_s=5.0)
    for name in ("a", "b"):
        turns.join(name, ComputeShares(10, 10))
        turns.request_step(name, replace(PROMPTS, number=1))
    turns.grants(0.0)
    assert turns.next_overdue() == 5.0
    assert turns.grants(4.9) == {}
    assert list(turns.grants(5.0)) == ["b"]
    assert turns.overdue == 1
    turns.finish_step("a", 1, 6.0)  # it lives again
    turns.request_step("a", replace(DECODES, number=2))
    turns.finish_step("b", 1, 6.0)
    assert list(turns.grants(6.0)) == ["a"]
    assert turns.job_seconds == {("a", "prefill"): 5.0, ("b", "prefill"): 1.0}


def test_a_question_that_came_before_the_end_of_the_last_job_is_kept() -> None:
    turns = StepScheduler()
    turns.join("a", ComputeShares(10, 4))
    turns.request_step("a", replace(DECODES, number=1))
    turns.grants(0.0)
    turns.request_step("a", replace(BOTH, number=2))
    assert turns.grants(0.1) == {}
    turns.finish_step("a", 1, 0.2)
    (again,) = turns.grants(0.2).values()
    assert (again.number, again.prompts) == (2, True)


def test_turns_survive_who_comes_and_goes() -> None:
    turns = StepScheduler("round-robin")
    for name in ("b", "d"):
        turns.join(name, ComputeShares(10, 10))
    turns.request_step("b", replace(DECODES, number=1))
    turns.grants(0.0)
    turns.join("a", ComputeShares(10, 10))
    turns.request_step("a", replace(DECODES, number=1))
    turns.request_step("d", replace(DECODES, number=1))
    turns.finish_step("b", 1, 1.0)
    assert list(turns.grants(1.0)) == ["d"]


def test_engines_of_several_threads_never_book_too_much_and_always_get_their_turns() -> None:
    unit, until = LocalUnit("adbs"), time.monotonic() + 0.3
    inside: dict[str, int] = {}
    booked: list[int] = []
    entrances: list[StepAdmission] = []

    def engine(name: str, chance: random.Random) -> None:
        gate, came = unit.gates[name], queue.SimpleQueue[None]()
        gate.on_answer = lambda: came.put(None)

        def serve(left: float) -> None:
            with contextlib.suppress(queue.Empty):
                came.get(timeout=left)

        entrance = StepAdmission(gate, serve)
        entrances.append(entrance)
        while time.monotonic() < until:
            want = chance.choice([*[DECODES] * 8, BOTH, NOTHING])
            grant = entrance.enter(lambda want=want: want)  # type: ignore[misc]
            if grant is not None:
                inside[name] = grant.parts or PARTS
                booked.append(sum(list(inside.values())))
                time.sleep(chance.choice([0.0, 1e-4]))
                del inside[name]
                entrance.finish_step(computed=True)
        gate.request_step(NOTHING)

    for name in "abc":
        unit.join(name, ComputeShares(10, 5))
    threads = [threading.Thread(target=engine, args=(one, random.Random(one))) for one in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert max(booked) == PARTS
    assert sum(one.unanswered for one in entrances) == 0
    assert running_steps(unit.turns) == []


steps = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.sampled_from(["ask", "back", "take", "leave", "join"]),
        st.sampled_from([PROMPTS, DECODES, BOTH]),
    ),
    max_size=60,
)


@given(policy=st.sampled_from(sorted(POLICIES)), steps=steps)
def test_whatever_happens_what_is_granted_ends_and_everybody_gets_a_turn(
    policy: str, steps: list[tuple[str, str, StepRequest]]
) -> None:
    unit = LocalUnit(policy)
    for name, what, want in [*[(name, "join", BOTH) for name in "abc"], *steps]:
        gate = unit.gates.get(name) or unit.join(name, ComputeShares(10, 5))
        if what == "ask":
            gate.request_step(want)
        elif what == "back":
            gate.request_step(NOTHING)
        elif what == "leave":
            unit.leave(name)
        elif gate.answer() is not None:
            gate.finish_step()
    gates = list(unit.gates.values())
    for want in (NOTHING, BOTH):
        for gate in gates:
            gate.request_step(want)
        for gate in gates * 9:
            if gate.answer() is not None:
                gate.finish_step()
                gate.request_step(NOTHING)
        assert running_steps(unit.turns) == []
