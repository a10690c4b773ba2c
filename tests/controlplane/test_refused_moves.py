"""When a request that a destination has refused is tried there again."""

from __future__ import annotations

import pytest

from kvmig.controlplane.messages import PairedDestination, Why
from kvmig.controlplane.refused_moves import FIRST_S, LAST_S, RefusedMoves
from tests.controlplane.test_mover import Instance, Turns


def pair(room: float, why: Why = "drain", destination: str = "b") -> PairedDestination:
    return PairedDestination(destination, f"tcp://{destination}", 1e9, room, why)


@pytest.mark.parametrize("reason", ["no_blocks", "no_batch_slot"])
async def test_a_full_destination_is_asked_once_for_each_request_not_once_a_round(
    reason: str,
) -> None:
    here = Instance(0, stay={f"r{number}": reason for number in range(20)}, running=True)
    here.fill(20)
    async with Turns(here, at_once=4) as turns:
        for _ in range(50):
            await turns.round(pair(5.0))
        assert sorted(here.tried) == sorted(here.stay)


async def test_they_are_tried_again_once_it_reports_more_room() -> None:
    here = Instance(0, stay={"r0": "no_blocks"}, running=True)
    here.fill(1)
    async with Turns(here) as turns:
        await turns.round(pair(5.0))
        await turns.round(pair(3.0))
        here.stay = {}

        await turns.round(pair(4.0))

        assert (here.tried, here.queue) == (["r0", "r0"], [])


async def test_a_refusal_by_one_destination_keeps_no_request_from_another() -> None:
    here = Instance(0, stay={"r0": "no_blocks"}, running=True)
    here.fill(1)
    async with Turns(here) as turns:
        await turns.round(pair(5.0))
        here.stay = {}

        await turns.round(pair(5.0), pair(5.0, destination="c"))

        assert here.went == ["b", "c"]


async def test_without_news_it_is_tried_again_after_a_while_each_time_twice_as_long() -> None:
    here = Instance(0, stay={"r0": "no_blocks"}, running=True)
    here.fill(1)
    async with Turns(here) as turns:
        for number in range(1, 8):
            await turns.round(pair(5.0))
            assert len(here.tried) == number
            turns.now += min(FIRST_S * 2 ** (number - 1), LAST_S) - 0.01
            await turns.round(pair(5.0))
            assert len(here.tried) == number
            turns.now += 0.02


async def test_other_reasons_to_stay_are_tried_again_in_the_next_round() -> None:
    here = Instance(0, stay={"r0": "busy"}, running=True)
    here.fill(1)
    async with Turns(here) as turns:
        await turns.round(pair(5.0))
        await turns.round(pair(5.0))
        assert here.tried == ["r0", "r0"]


@pytest.mark.parametrize("why", ["balance", "drain"])
@pytest.mark.parametrize("reason", ["incompatible", "unsupported", "corrupt", "error"])
async def test_one_that_can_not_run_there_keeps_no_other_from_going(reason: str, why: Why) -> None:
    here = Instance(0, stay={"r0": reason}, running=True)
    here.fill(3)
    async with Turns(here) as turns:
        await turns.round(pair(5.0, why))

        assert [one.request_id for one in here.queue] == ["r0"]


async def test_one_that_can_not_run_there_is_tried_again_after_a_while_whatever_the_room() -> None:
    here = Instance(0, stay={"r0": "incompatible"}, running=True)
    here.fill(1)
    async with Turns(here) as turns:
        for room in (5.0, 4.0, 9.0):
            await turns.round(pair(room))
        assert here.tried == ["r0"]
        turns.now += FIRST_S

        await turns.round(pair(5.0))

        assert here.tried == ["r0", "r0"]


def test_requests_that_are_gone_are_forgotten() -> None:
    refused = RefusedMoves()
    for number in range(3):
        refused.refuse(f"r{number}", pair(5.0), "no_blocks", 0.0)

    refused.forget(["r1"])

    assert len(refused) == 1
    assert refused.waiting(pair(5.0), 0.5) == {"r1"}
