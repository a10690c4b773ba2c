"""Following, by table: how both machines come to it, and out of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvmig.engines import base
from kvmig.engines.base import Pace, Stage, Tail
from kvmig.ground.config import Way
from kvmig.kvtransfer import destination_actions, source_actions
from kvmig.kvtransfer import destination_machine as destination
from kvmig.kvtransfer import source_machine as source
from kvmig.kvtransfer.destination_actions import Answer, FreeBlocks
from kvmig.kvtransfer.destination_machine import DestinationMachine
from kvmig.kvtransfer.messages import (
    Chunk,
    Commit,
    Follow,
    Following,
    Refused,
    Reserve,
    Tokens,
)
from kvmig.kvtransfer.source_actions import Resume, SendAbort
from kvmig.kvtransfer.source_machine import SourceMachine
from kvmig.kvtransfer.stages import FOLLOW_LEAST, FOLLOW_MOST, in_step

FORK = Tail([9], 33, 3, b"")
TAIL = Tail([9, 10], 37, 7, b"")


def source_before_the_tail(way: Way = "follow") -> SourceMachine:
    machine = SourceMachine("m", 8)
    machine.exported(30)
    machine.reserved(1)
    machine.checked(Stage([4], 31, decoding=True), way)
    return machine


def followed_source() -> SourceMachine:
    machine = source_before_the_tail()
    machine.reserved(0)
    machine.forked(FORK)
    machine.fork_sent(1)
    return machine


def following_destination() -> DestinationMachine:
    machine = DestinationMachine("m")
    machine.reserve(Reserve("m", "r", 1, 0, 30, export=base.Export("r", 30, [])))
    machine.reserved(0, "tcp")
    machine.chunk(Chunk("m", 0, 0, 2, 1, [0]))
    machine.scattered(Chunk("m", 0, 0, 2, 1, [0]), 0.1)
    machine.follow(Follow("m", FORK, 1))
    machine.joined(Pace(5, 0), 0.1)
    return machine


def test_the_source_forks_sends_listens_and_suspends_without_a_tail() -> None:
    machine = source_before_the_tail()
    assert machine.reserved(0) == [source_actions.Fork(sent=1)]
    assert machine.forked(FORK) == [source_actions.SendFork(1, FORK)]
    assert machine.fork_sent(1) == [source_actions.Listen()]
    assert machine.followed(Pace(5, 0), 9.0, 10.0) == [source_actions.Listen()]
    assert machine.followed(Pace(2, 0), 0.1, 10.0) == [source_actions.Listen()]
    assert machine.followed(Pace(0, 0), 0.5, 10.0) == [source_actions.Suspend(sent=2)]
    assert machine.suspended(TAIL) == [source_actions.SendTail(2, Tail([], 37, 7, b""))]


def test_an_answer_after_the_decision_changes_nothing() -> None:
    machine = followed_source()
    for _ in range(FOLLOW_LEAST):
        machine.followed(Pace(0, 0), 0.0, 10.0)
    assert machine.followed(Pace(0, 0), 0.0, 10.0) == []
    assert machine.state is source.S.SUSPENDING


def test_a_rest_that_is_computed_again_is_left_out() -> None:
    machine = source_before_the_tail("recompute")
    assert machine.reserved(0) == [source_actions.Suspend(1)]
    assert machine.suspended(TAIL) == [source_actions.SendTail(1, Tail([], 37, 7, b"", missing=2))]


def test_only_a_pause_that_comes_next_is_told_of() -> None:
    for way, last in (("copy", True), ("recompute", True), ("follow", False)):
        machine = SourceMachine("m", 8)
        machine.exported(30)
        machine.reserved(1)
        plan = Stage([4], 31, decoding=True)
        assert machine.checked(plan, way) == [source_actions.SendReserve(1, 31, last)]  # type: ignore[arg-type]


@pytest.mark.parametrize("state", [source.S.FORKING, source.S.SENDING_FORK, source.S.FOLLOWED])
def test_until_the_switch_every_end_leaves_the_request_here(state: source.S) -> None:
    def at() -> SourceMachine:
        machine = source_before_the_tail()
        machine.reserved(0)
        if state is not source.S.FORKING:
            machine.forked(FORK)
        if state is source.S.FOLLOWED:
            machine.fork_sent(1)
        assert machine.state is state
        return machine

    assert at().failed("finished") == [Resume(), SendAbort("finished")]
    assert at().cancel("shutdown") == [Resume(), SendAbort("shutdown")]
    assert at().refused("preempted") == [Resume()]


def test_the_destination_joins_extends_and_commits() -> None:
    machine = following_destination()
    tokens = Tokens("m", 3, [7])
    assert machine.tokens(tokens) == [destination_actions.Extend(tokens)]
    assert machine.extended(Pace(1, 2), 0.4) == [Answer(Following("m", Pace(1, 2), 0.4))]
    assert machine.commit(Commit("m", "r", 1, TAIL, 1)) == [destination_actions.RunRequest(TAIL)]


def test_the_destination_follows_only_when_all_blocks_are_there() -> None:
    machine = DestinationMachine("m")
    machine.reserve(Reserve("m", "r", 1, 0, 30, export=base.Export("r", 30, [])))
    machine.reserved(0, "tcp")
    actions = machine.follow(Follow("m", FORK, 1))
    assert actions == [FreeBlocks(), Answer(Refused("m", "error", "0 of 1 blocks came"))]


def test_a_follower_takes_no_more_blocks() -> None:
    machine = following_destination()
    assert machine.chunk(Chunk("m", 0, 0, 2, 1, [0])) == []
    assert machine.state is destination.S.FOLLOWING


@pytest.mark.parametrize("end", ["abort", "fence", "lease", "failed"])
def test_a_follower_that_is_given_up_is_freed(end: str) -> None:
    machine = following_destination()
    ends: dict[str, Callable[[], list[destination_actions.Action]]] = {
        "abort": machine.abort,
        "fence": machine.fence,
        "lease": lambda: machine.cancel("timeout"),
        "failed": lambda: machine.failed("preempted"),
    }
    actions = ends[end]()
    assert actions[0] == FreeBlocks()
    assert machine.extended(Pace(0, 0), 0.0) == []


RESTS, COMPUTES, BUSY = Pace(0, 0), Pace(2, 0), Pace(1, 4)


def test_a_destination_that_rests_is_in_step() -> None:
    assert in_step(FOLLOW_LEAST, RESTS, wait_ms=9.0, step_ms=10.0)


def test_one_that_computes_for_it_alone_will_rest_soon() -> None:
    assert not in_step(FOLLOW_LEAST, COMPUTES, wait_ms=0.1, step_ms=10.0)


def test_one_with_other_requests_is_in_step_when_it_takes_tokens_at_once() -> None:
    assert in_step(FOLLOW_LEAST, BUSY, wait_ms=1.0, step_ms=10.0)
    assert not in_step(FOLLOW_LEAST, BUSY, wait_ms=3.0, step_ms=10.0)
    assert not in_step(FOLLOW_LEAST, Pace(9, 4), wait_ms=1.0, step_ms=10.0)


def test_following_takes_some_steps_and_has_an_end() -> None:
    assert not in_step(FOLLOW_LEAST - 1, RESTS, wait_ms=0.0, step_ms=10.0)
    assert in_step(FOLLOW_MOST, Pace(9, 4), wait_ms=99.0, step_ms=10.0)
