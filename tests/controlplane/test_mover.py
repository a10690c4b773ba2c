"""Which requests a paired llumlet lists and moves, one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from msgspec.structs import replace

from kvmig.controlplane.messages import PairedDestination, Why
from kvmig.controlplane.mover import MOST_WAITING, MigrationDriver
from kvmig.core.background import cancel_tasks
from kvmig.engines.base import RequestState
from kvmig.kvtransfer.report import MigrationReport

ENOUGH = 50
"""Turns of the event loop for a move; nothing here waits for a clock."""


class Instance:
    """One whose requests wait, or run, and end as `stay` says when they are to be moved."""

    def __init__(
        self, waiting: int, stay: dict[str, str] | None = None, *, running: bool = False
    ) -> None:
        self._one = RequestState("", "waiting", 20, 0, 0, 0, wanted_blocks=1)
        if running:
            self._one = RequestState("", "running", 20, 1, 1, 0)
        self.queue: list[RequestState] = []
        self.fill(waiting)
        self.stay = stay or {}
        self.lists: list[int] = []
        self.tried: list[str] = []
        self.went: list[str] = []
        """Where each of them was to go."""
        self.moving = self.most_moving = 0

    def fill(self, count: int) -> None:
        self.queue = [replace(self._one, request_id=f"r{number}") for number in range(count)]

    async def requests(self, most_waiting: int) -> list[RequestState]:
        self.lists.append(most_waiting)
        return self.queue[:most_waiting]

    async def migrate(self, request_id: str, pair: PairedDestination) -> MigrationReport:
        self.tried.append(request_id)
        self.went.append(pair.destination)
        self.moving += 1
        self.most_moving = max(self.most_moving, self.moving)
        await asyncio.sleep(0)
        self.moving -= 1
        reason = self.stay.get(request_id, "")
        if not reason:
            self.queue = [one for one in self.queue if one.request_id != request_id]
        return MigrationReport(
            id="m",
            request_id=request_id,
            source="here",
            destination=pair.destination,
            state="aborted" if reason else "committed",
            reason=reason,
        )

    @asynccontextmanager
    async def paired(
        self, *destinations: str, why: Why = "drain", at_once: int = 1
    ) -> AsyncIterator[None]:
        """Until nothing more moves."""
        mover = MigrationDriver(self.requests, lambda: (), dict, self.migrate, at_once=at_once)
        running = asyncio.create_task(mover.run())
        mover.set([PairedDestination(one, f"tcp://{one}", 1e9, 1e9, why) for one in destinations])
        for _ in range(ENOUGH * (1 + len(self.queue))):
            await asyncio.sleep(0)
        yield
        await cancel_tasks(running)


class Turns:
    """A driver with a clock that only the test moves, and rounds one after the other."""

    def __init__(self, here: Instance, at_once: int = 1) -> None:
        self.now = 0.0
        self._here = here
        self._mover = MigrationDriver(
            here.requests, lambda: (), dict, here.migrate, at_once=at_once, clock=lambda: self.now
        )

    async def __aenter__(self) -> Turns:
        self._running = asyncio.create_task(self._mover.run())
        return self

    async def __aexit__(self, *error: object) -> None:
        await cancel_tasks(self._running)

    async def round(self, *pairs: PairedDestination) -> None:
        """The scheduler's pairs, and all that moves by them."""
        self._mover.set(pairs)
        for _ in range(ENOUGH * (1 + len(self._here.queue))):
            await asyncio.sleep(0)


async def test_requests_are_listed_once_for_all_that_move() -> None:
    here = Instance(MOST_WAITING)
    async with here.paired("b", "c"):
        assert here.queue == []
        assert sorted(here.tried) == sorted(f"r{number}" for number in range(MOST_WAITING))
        assert here.lists == [MOST_WAITING, MOST_WAITING]  # and once more, whether any has come


@pytest.mark.parametrize(("why", "most"), [("drain", 3), ("relieve", 3), ("queue", 1)])
async def test_several_move_at_once_where_all_of_them_must_go(why: Why, most: int) -> None:
    here = Instance(10, running=why == "relieve")
    async with here.paired("b", why=why, at_once=3):
        assert here.queue == []
        assert here.most_moving == most
        assert len(here.tried) == 10


async def test_those_behind_the_listed_ones_move_when_these_have_left() -> None:
    here = Instance(2 * MOST_WAITING + 1)
    async with here.paired("b"):
        assert here.queue == []
        assert len(here.lists) == 4


async def test_one_that_was_listed_and_is_gone_does_not_keep_the_others() -> None:
    here = Instance(3, stay={"r0": "unknown_request", "r1": "finished"})
    async with here.paired("b"):
        assert here.tried[:3] == ["r0", "r1", "r2"]


async def test_requests_that_all_stay_are_not_listed_again() -> None:
    here = Instance(3, stay=dict.fromkeys(("r0", "r1", "r2"), "started"))
    async with here.paired("b", why="queue"):
        assert here.tried == ["r0", "r1", "r2"]
        assert len(here.lists) == 1


async def test_a_move_that_fails_unforeseen_does_not_end_the_moves() -> None:
    asked: list[str] = []
    moved = asyncio.Event()

    async def requests(most_waiting: int) -> list[RequestState]:
        return [RequestState("r", "running", 20, 4, 2, 0)]

    async def migrate(request_id: str, pair: PairedDestination) -> MigrationReport:
        asked.append(pair.destination)
        if len(asked) == 1:
            raise RuntimeError("a bug")
        moved.set()
        return MigrationReport(
            id="m", request_id="r", source="a", destination="b", state="aborted", reason="busy"
        )

    mover = MigrationDriver(requests, lambda: (), dict, migrate)
    running = asyncio.create_task(mover.run())
    mover.set([PairedDestination("b", "tcp://b", 10.0, 10.0)])
    for _ in range(ENOUGH):
        await asyncio.sleep(0)
    assert asked == ["b"]
    async with asyncio.timeout(10):
        mover.set([PairedDestination("b", "tcp://b", 10.0, 10.0)])
        await moved.wait()
    await cancel_tasks(running)
    assert asked == ["b", "b"]


async def test_prompts_that_come_between_two_rounds_do_not_wait_for_the_next() -> None:
    here = Instance(0)
    mover = MigrationDriver(here.requests, lambda: (), dict, here.migrate, at_once=2)
    running = asyncio.create_task(mover.run())
    mover.set([PairedDestination("b", "tcp://b", 1e9, 1e9, "prompt")])
    await turns()
    here.queue = [RequestState("new", "waiting", 20, 0, 0, 0, wanted_blocks=1)]
    mover.look_again()
    await turns()
    assert (here.tried, here.queue) == (["new"], [])
    await cancel_tasks(running)


async def test_nobody_looks_again_for_other_pairs() -> None:
    here = Instance(0)
    mover = MigrationDriver(here.requests, lambda: (), dict, here.migrate)
    running = asyncio.create_task(mover.run())
    mover.set([PairedDestination("b", "tcp://b", 1e9, 1e9, "balance")])
    await turns()
    mover.look_again()
    await turns()
    assert len(here.lists) == 1
    await cancel_tasks(running)


async def test_a_prompt_that_one_destination_refuses_goes_to_another_one_at_once() -> None:
    here = Instance(1)
    refused: list[str] = []
    migrate = here.migrate

    async def refuse_b(request_id: str, pair: PairedDestination) -> MigrationReport:
        report = await migrate(request_id, pair)
        if pair.destination != "b":
            return report
        refused.append(request_id)
        here.queue = [RequestState(request_id, "waiting", 20, 0, 0, 0, wanted_blocks=1)]
        return replace(report, state="aborted", reason="no_blocks")

    mover = MigrationDriver(here.requests, lambda: (), dict, refuse_b)
    running = asyncio.create_task(mover.run())
    mover.set([PairedDestination(one, f"tcp://{one}", 1e9, 1e9, "prompt") for one in "bc"])
    await turns()
    mover.look_again()
    await turns()
    assert (here.tried, refused, here.queue) == (["r0", "r0"], ["r0"], [])
    await cancel_tasks(running)


async def turns() -> None:
    for _ in range(ENOUGH):
        await asyncio.sleep(0)
