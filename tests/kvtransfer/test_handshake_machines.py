"""The two machines by table: each arrow's actions, and what has no arrow."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from kvmig.core.errors import InvalidTransition
from kvmig.engines import base
from kvmig.engines.base import RequestTail, StagedBlocks
from kvmig.kvtransfer import destination_machine, source_machine
from kvmig.kvtransfer import destination_machine as destination
from kvmig.kvtransfer import source_machine as source
from kvmig.kvtransfer.destination_machine import DestinationMachine, FreeBlocks, SendAnswer
from kvmig.kvtransfer.machine import StateMachine
from kvmig.kvtransfer.messages import (
    Aborted,
    Chunk,
    ChunkDone,
    Commit,
    Committed,
    Refused,
    Reserve,
    Reserved,
)
from kvmig.kvtransfer.source_machine import (
    ReleaseRequest,
    ResumeRequest,
    SendAbort,
    SourceMachine,
    enough,
)
from kvmig.rpc.messages import RpcMessage

TAIL = RequestTail([9], 33, 3, b"")
EXPORT = base.RequestExport("r", 30, [])


def source_at(state: source.SourceState) -> SourceMachine:
    """A source that came to `state` the shortest way."""
    machine = SourceMachine("m", max_stages=8)
    steps: tuple[tuple[source.SourceState | None, Callable[[], object]], ...] = (
        (source.SourceState.EXPORTING, lambda: machine.exported(30)),
        (source.SourceState.RESERVING, lambda: machine.reserved(1)),
        (source.SourceState.CHECKING, lambda: machine.checked(StagedBlocks([4, 5, 6], 31))),
        (source.SourceState.RESERVING_STAGE, lambda: machine.reserved(0)),
        (source.SourceState.COPYING, machine.copied),
        (None, lambda: machine.checked(StagedBlocks([7], 32))),
        (source.SourceState.RESERVING_TAIL, lambda: machine.reserved(0)),
        (source.SourceState.SUSPENDING, lambda: machine.suspended(TAIL)),
        (source.SourceState.SENDING_TAIL, machine.commit_sent),
        (source.SourceState.COMMITTING, machine.unreachable),
    )
    for at, step in steps:
        if machine.state is state and at is state:
            return machine
        step()
    assert machine.state is state
    return machine


def destination_at(state: destination.DestinationState) -> DestinationMachine:
    """A destination that came to `state` the shortest way, with 1 hit and 3 blocks."""
    machine = DestinationMachine("m")
    if state is destination.DestinationState.NEW:
        return machine
    machine.reserve(reserve(0))
    if state is destination.DestinationState.RESERVING:
        return machine
    machine.reserved(1, "tcp")
    if state is destination.DestinationState.CANCELLED:
        machine.cancel("timeout")
        return machine
    if state is destination.DestinationState.RECEIVING:
        return machine
    machine.chunk(chunk(1, 2))
    if state is destination.DestinationState.SCATTERING:
        return machine
    machine.scattered(chunk(1, 2), 0.5)
    machine.commit(commit())
    if state is destination.DestinationState.COMMITTED:
        machine.committed(2.0)
    return machine


def reserve(stage: int) -> Reserve:
    return Reserve("m", "r", 1, stage, 30 + stage, export=EXPORT if stage == 0 else None)


def chunk(first: int, count: int) -> Chunk:
    return Chunk("m", 0, first, slot=2, nbytes=count, checksums=[0] * count)


def commit(blocks: int = 3) -> Commit:
    return Commit("m", "r", 1, TAIL, blocks)


def test_the_source_goes_from_export_to_release() -> None:
    machine = SourceMachine("m", max_stages=8)
    assert machine.start() == [source_machine.ExportRequest()]
    assert machine.exported(30) == [source_machine.SendReserve(0, 30)]
    assert machine.reserved(2) == [source_machine.CheckRequest(sent=2)]
    assert machine.checked(StagedBlocks([4, 5, 6], 31)) == [source_machine.SendReserve(1, 31)]
    assert machine.reserved(0) == [source_machine.CopyStage(1, 2, (4, 5, 6))]
    assert machine.copied() == [source_machine.CheckRequest(sent=5)]
    assert machine.checked(StagedBlocks([7], 33)) == [source_machine.SendReserve(2, 33, last=True)]
    assert machine.reserved(0) == [source_machine.SuspendRequest(sent=5)]
    assert machine.suspended(TAIL) == [source_machine.SendTail(5, TAIL)]
    assert machine.commit_sent() == []
    assert machine.committed() == [ReleaseRequest()]
    assert (machine.state, machine.ended) == (source.SourceState.COMMITTED, True)


BEFORE_COMMIT = [
    source.SourceState.EXPORTING,
    source.SourceState.RESERVING,
    source.SourceState.CHECKING,
    source.SourceState.RESERVING_STAGE,
    source.SourceState.COPYING,
    source.SourceState.RESERVING_TAIL,
    source.SourceState.SUSPENDING,
    source.SourceState.SENDING_TAIL,
]


@pytest.mark.parametrize("state", BEFORE_COMMIT)
def test_before_the_commit_every_end_leaves_the_request_here(state: source.SourceState) -> None:
    assert source_at(state).failed("finished") == [ResumeRequest(), SendAbort("finished")]
    assert source_at(state).cancel("shutdown") == [ResumeRequest(), SendAbort("shutdown")]
    assert source_at(state).refused("no_blocks", "why") == [ResumeRequest()]
    machine = source_at(state)
    machine.refused("no_blocks", "why")
    assert (machine.state, machine.reason, machine.detail) == (
        source.SourceState.ABORTED,
        "no_blocks",
        "why",
    )


def test_an_unanswered_commit_is_sent_twice_more_and_then_the_arbiter_is_asked() -> None:
    machine = source_at(source.SourceState.COMMITTING)
    assert machine.unanswered() == [source_machine.SendCommit()]
    assert machine.unanswered() == [source_machine.SendCommit()]
    assert machine.unanswered() == [source_machine.AskArbiter()]
    assert machine.unanswered() == [source_machine.AskArbiter()]


def test_a_request_whose_fate_nobody_tells_is_dropped_after_so_many_questions() -> None:
    machine = SourceMachine("m", max_stages=0, questions=2)
    machine.exported(30)
    machine.reserved(0)
    machine.checked(StagedBlocks([7], 32))
    machine.reserved(0)
    machine.suspended(TAIL)
    machine.commit_sent()
    assert machine.unreachable() == [source_machine.AskArbiter()]
    assert machine.unreachable() == [source_machine.AskArbiter()]
    assert machine.unreachable() == [ReleaseRequest()]
    assert (machine.state, machine.reason) == (source.SourceState.ABORTED, "orphaned")


def test_the_arbiter_decides() -> None:
    assert source_at(source.SourceState.RESOLVING).resolved(moved=True) == [ReleaseRequest()]
    assert source_at(source.SourceState.RESOLVING).resolved(moved=False) == [
        ResumeRequest(),
        SendAbort("timeout"),
    ]


@pytest.mark.parametrize("state", [source.SourceState.COMMITTING, source.SourceState.RESOLVING])
def test_after_the_commit_was_sent_only_an_answer_resumes(state: source.SourceState) -> None:
    assert source_at(state).refused("corrupt") == [ResumeRequest()]
    assert source_at(state).committed() == [ReleaseRequest()]
    assert source_at(state).orphaned() == [ReleaseRequest()]
    machine = source_at(state)
    assert machine.cancel("aborted_by_client") == []
    assert (machine.state, machine.cancelled) == (state, "aborted_by_client")
    with pytest.raises(InvalidTransition):
        machine.failed("error")


def test_an_answer_that_comes_once_more_is_no_event() -> None:
    machine = source_at(source.SourceState.CHECKING)
    assert machine.receive_message(Reserved("m", 0, 1, "tcp")) == []
    machine = source_at(source.SourceState.RESERVING_STAGE)
    assert machine.receive_message(Reserved("m", 0, 1, "tcp")) == []
    assert machine.receive_message(Reserved("m", 1, 1, "tcp")) == [
        source.CopyStage(1, 1, (4, 5, 6))
    ]


@pytest.mark.parametrize(
    ("message", "reason"),
    [(Refused("m", "no_blocks", "full"), "no_blocks"), (Aborted("m"), "superseded")],
)
def test_a_destination_that_gives_up_leaves_the_request_here(
    message: Refused | Aborted, reason: str
) -> None:
    machine = source_at(source.SourceState.RESERVING)
    assert machine.receive_message(message) == [ResumeRequest()]
    assert machine.reason == reason


def test_a_commit_that_is_confirmed_releases_the_request() -> None:
    assert source_at(source.SourceState.COMMITTING).receive_message(Committed("m", 1.0)) == [
        ReleaseRequest()
    ]


@pytest.mark.parametrize(
    ("state", "actions"),
    [
        (source.SourceState.COPYING, [ResumeRequest(), SendAbort("peer_lost")]),
        (source.SourceState.COMMITTING, [source.AskArbiter()]),
        (source.SourceState.RESOLVING, []),
    ],
)
def test_a_lost_connection_ends_what_is_undecided_and_asks_the_arbiter_once(
    state: source.SourceState, actions: list[source.Action]
) -> None:
    assert source_at(state).lost("no connection") == actions


def test_the_source_stops_copying_at_the_last_stage() -> None:
    machine = SourceMachine("m", max_stages=1)
    machine.exported(30)
    machine.reserved(0)
    machine.checked(StagedBlocks([1, 2], 30))
    machine.reserved(0)
    machine.copied()
    assert machine.checked(StagedBlocks([3, 4, 5], 50)) == [
        source_machine.SendReserve(2, 50, last=True)
    ]
    assert machine.reserved(0) == [source_machine.SuspendRequest(2)]


def test_without_live_stages_the_request_is_suspended_first() -> None:
    machine = SourceMachine("m", max_stages=0)
    machine.exported(30)
    machine.reserved(0)
    assert machine.checked(StagedBlocks([1, 2, 3], 30)) == [
        source_machine.SendReserve(1, 30, last=True)
    ]
    assert machine.reserved(0) == [source_machine.SuspendRequest(0)]


def waiting_source() -> SourceMachine:
    """Suspending a request that waits."""
    machine = SourceMachine("m", max_stages=8)
    machine.exported(30)
    machine.reserved(0)
    assert machine.checked(StagedBlocks([], 0)) == [source_machine.SuspendRequest(0)]
    return machine


def test_a_request_that_waits_goes_without_room_or_blocks() -> None:
    machine, tail = waiting_source(), RequestTail([], 30, 0, b"")
    assert machine.suspended(tail) == [source_machine.SendTail(0, tail)]


def test_a_request_that_waited_and_has_begun_to_run_stays() -> None:
    machine = waiting_source()
    assert machine.suspended(TAIL) == [ResumeRequest(), SendAbort("started")]
    assert (machine.state, machine.reason) == (source.SourceState.ABORTED, "started")


def test_the_destination_goes_from_reserve_to_commit() -> None:
    machine = DestinationMachine("m")
    assert machine.reserve(reserve(0)) == [destination_machine.ReserveBlocks(EXPORT, 30)]
    assert machine.reserved(1, "tcp") == [SendAnswer(Reserved("m", 0, 1, "tcp"))]
    assert machine.chunk(chunk(1, 2)) == [destination_machine.ScatterChunk(chunk(1, 2))]
    assert machine.scattered(chunk(1, 2), 0.5) == [SendAnswer(ChunkDone("m", 2, 0.5))]
    assert machine.reserve(reserve(1)) == [destination_machine.ReserveBlocks(None, 31)]
    assert machine.reserved() == [SendAnswer(Reserved("m", 1, 1, "tcp"))]
    assert machine.commit(commit()) == [destination_machine.RunRequest(TAIL)]
    assert machine.committed(2.0) == [SendAnswer(Committed("m", 2.0))]
    assert machine.committed_here


def test_a_commit_is_answered_the_same_way_however_often_it_comes() -> None:
    machine = destination_at(destination.DestinationState.COMMITTED)
    again: list[destination_machine.Action] = [SendAnswer(Committed("m", 2.0))]
    assert machine.commit(commit()) == machine.abort() == machine.reserve(reserve(0)) == again
    assert machine.chunk(chunk(1, 2)) == machine.fence() == machine.cancel("timeout") == []
    assert machine.committed_here


def refusal(actions: list[destination_machine.Action]) -> str:
    answers = [action.message for action in actions if isinstance(action, SendAnswer)]
    assert len(answers) == 1
    assert isinstance(answers[0], Refused)
    return answers[0].reason


def test_an_aborted_migration_never_commits() -> None:
    machine = destination_at(destination.DestinationState.RECEIVING)
    aborted: RpcMessage = Aborted("m")
    assert machine.abort() == [FreeBlocks(), SendAnswer(aborted)]
    assert refusal(machine.commit(commit())) == "superseded"
    assert machine.abort() == [SendAnswer(aborted)]


@pytest.mark.parametrize(
    "state", [destination.DestinationState.NEW, destination.DestinationState.RECEIVING]
)
def test_a_fenced_migration_never_commits(state: destination.DestinationState) -> None:
    machine = destination_at(state)
    freed = [FreeBlocks()] if state is destination.DestinationState.RECEIVING else []
    assert machine.fence() == [*freed, SendAnswer(Refused("m", "superseded", "fenced"))]
    assert not machine.committed_here
    assert refusal(machine.commit(commit())) == "superseded"
    assert refusal(machine.reserve(reserve(0))) == "superseded"
    assert machine.fence() == []


def test_a_commit_for_an_unknown_migration_is_refused_for_good() -> None:
    machine = DestinationMachine("m")
    assert refusal(machine.commit(commit())) == "superseded"
    assert refusal(machine.reserve(reserve(0))) == "superseded"


def test_a_missing_chunk_is_noticed_by_the_next_one_or_by_the_commit() -> None:
    machine = destination_at(destination.DestinationState.RECEIVING)
    assert machine.chunk(chunk(2, 1))[0] == FreeBlocks()
    machine = destination_at(destination.DestinationState.RECEIVING)
    assert refusal(machine.commit(commit(3))[1:]) == "error"


def test_blocks_that_come_with_the_commit_count() -> None:
    machine = destination_at(destination.DestinationState.RECEIVING)
    last = chunk(1, 2)
    message = Commit("m", "r", 1, TAIL, 3, last)
    assert machine.commit(message) == [destination_machine.RunRequest(TAIL, last)]


@pytest.mark.parametrize(
    "last", [chunk(0, 3), chunk(2, 1), chunk(1, 1)], ids=["shared prefix", "gap", "too few"]
)
def test_blocks_that_come_with_the_commit_must_fit(last: Chunk) -> None:
    machine = destination_at(destination.DestinationState.RECEIVING)
    machine.commit(Commit("m", "r", 1, TAIL, 3, last))
    assert machine.state is destination.DestinationState.CANCELLED


def test_a_chunk_never_writes_into_the_shared_prefix() -> None:
    machine = destination_at(destination.DestinationState.RECEIVING)
    assert machine.chunk(chunk(0, 1))[0] == FreeBlocks()
    assert machine.state is destination.DestinationState.CANCELLED


@pytest.mark.parametrize(
    "state",
    [
        destination.DestinationState.RESERVING,
        destination.DestinationState.RECEIVING,
        destination.DestinationState.SCATTERING,
    ],
)
def test_a_lease_that_runs_out_frees_the_blocks(state: destination.DestinationState) -> None:
    actions = destination_at(state).cancel("timeout")
    assert actions[0] == FreeBlocks()
    assert refusal(actions) == "timeout"


def test_a_failed_reservation_frees_what_the_engine_may_hold() -> None:
    machine = destination_at(destination.DestinationState.RESERVING)
    assert machine.failed("no_blocks") == [FreeBlocks(), SendAnswer(Refused("m", "no_blocks"))]


def test_a_repeated_first_reserve_keeps_what_has_come() -> None:
    machine = destination_at(destination.DestinationState.RECEIVING)
    machine.chunk(chunk(1, 2))
    machine.scattered(chunk(1, 2), 0.5)
    assert machine.reserve(reserve(0)) == [destination_machine.ReserveBlocks(None, 30)]
    assert machine.reserved() == [SendAnswer(Reserved("m", 0, 1, "tcp"))]
    assert machine.received == 3


@pytest.mark.parametrize("machine_type", [SourceMachine, DestinationMachine])
def test_an_event_without_an_arrow_raises_and_changes_nothing(
    machine_type: type[StateMachine],
) -> None:
    events = (
        source.SourceTransition
        if machine_type is SourceMachine
        else destination.DestinationTransition
    )
    for state, event in itertools.product(machine_type.table, events):
        if event in machine_type.table[state]:
            continue
        machine = machine_type.__new__(machine_type)
        StateMachine.__init__(machine, "key", state)
        with pytest.raises(
            InvalidTransition, match=f"key: no transition for {event} in state {state}"
        ):
            machine.apply_event(event)
        assert (machine.state, list(machine.history)) == (state, [])


@pytest.mark.parametrize("machine_type", [SourceMachine, DestinationMachine])
def test_every_state_can_be_reached_and_has_a_way_to_an_end(
    machine_type: type[StateMachine],
) -> None:
    table = machine_type.table
    reached = {next(iter(table))}
    for _ in table:
        reached |= {after for state in reached for after in table[state].values()}
    assert reached == set(table)
    ends = {state for state, arrows in table.items() if set(arrows.values()) <= {state}}
    for _ in table:
        ends |= {state for state, arrows in table.items() if ends & set(arrows.values())}
    assert ends == set(table)


def test_an_error_tells_the_history() -> None:
    machine = DestinationMachine("m")
    machine.fence()
    with pytest.raises(InvalidTransition) as caught:
        machine.committed(1.0)
    assert caught.value.history == ("new --fence--> cancelled",)


def test_copying_stops_at_one_block_or_at_the_last_stage() -> None:
    assert enough(1, 0, 8)
    assert not enough(2, 0, 8)
    assert enough(100, 8, 8)


def test_a_source_that_does_not_know_whether_an_idle_session_was_committed_keeps_it() -> None:
    machine = SourceMachine("m", max_stages=8, idle=True)
    machine.exported(32)
    machine.reserved(0)
    machine.checked(StagedBlocks([4, 5], 32))
    machine.reserved(0)
    machine.copied()
    machine.checked(StagedBlocks([], 32))
    machine.reserved(0)
    machine.suspended(RequestTail([], 32, 0, b""))
    machine.commit_sent()
    assert machine.unreachable() == [ResumeRequest(), SendAbort("timeout")]
    assert (machine.state, machine.reason) == (source.SourceState.ABORTED, "timeout")
