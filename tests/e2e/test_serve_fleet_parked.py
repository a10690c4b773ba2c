"""A fleet of toys that are parked where others go to zero."""

from __future__ import annotations

import asyncio

import pytest

from kvmig.engines.toy.script import ToyScript
from tests.support.fleets import ToyFleet, answer, ask, counted, hold_streams, kill

pytestmark = pytest.mark.server


def add(fleet: ToyFleet) -> None:
    fleet.add_toy("a", warm="parked", instances={"zero_after_s": 0.5})


def happened(fleet: ToyFleet) -> list[str]:
    """Since it was added last: other tests have had one of that name."""
    said = [one["what"] for one in fleet.get("models/a")["events"]]
    return said[max(at for at, what in enumerate(said) if what == "zero -> starting") :]


async def parked(fleet: ToyFleet) -> None:
    """It answers once, then nobody wants it."""
    async with fleet.client() as client:
        assert await answer(client, ask("a")) == counted(10)
    await asyncio.to_thread(fleet.until, "models/a", state="parked")


async def test_an_idle_model_is_parked_and_answers_again_without_a_start(fleet: ToyFleet) -> None:
    add(fleet)
    before = fleet.get("status")
    await parked(fleet)
    processes = fleet.processes("kvmig.serve")
    claimed = fleet.get("status")["claimed_bytes"]
    async with fleet.client() as client:
        assert await answer(client, ask("a", 10, 41)) == counted(10, 41)
    after = fleet.get("status")
    assert fleet.processes("kvmig.serve") == processes
    assert after["starts"] == before["starts"] + 1
    assert 0 < claimed < after["claimed_bytes"]


async def test_many_clients_of_a_parked_model_wake_it_once_and_all_are_answered(
    fleet: ToyFleet,
) -> None:
    add(fleet)
    await parked(fleet)
    # Held, so that it isn't idle until the last one has come.
    streams = await hold_streams(fleet, *(ask("a", 20, start) for start in range(50)))
    fleet.hold(None)
    answers = await asyncio.gather(*(stream.task for stream in streams))
    assert answers == [counted(20, start) for start in range(50)]
    assert happened(fleet).count("parked -> waking") == 1


async def test_one_that_computes_otherwise_than_before_is_ended_and_started_anew(
    fleet: ToyFleet,
) -> None:
    add(fleet)
    await parked(fleet)
    processes = fleet.processes("kvmig.serve")
    fleet.script.write(ToyScript(counts_by=2))
    async with fleet.client() as client:
        assert await answer(client, ask("a", 10, 16)) == " 0019 0021"
    assert fleet.processes("kvmig.serve") != processes
    said = [one["what"] for one in fleet.get("models/a")["events"]]
    (why,) = [one for one in said if one.startswith("waking failed: ")]
    assert why.endswith("it counts otherwise than before it was parked")


async def test_the_next_server_knows_that_it_is_parked_and_wakes_it(fleet: ToyFleet) -> None:
    add(fleet)
    await parked(fleet)
    processes = fleet.processes("kvmig.serve")
    (server,) = fleet.processes("kvmig.fleet.server")
    kill(server)
    async with fleet.client() as client:
        assert await answer(client, ask("a")) == counted(10)
    assert fleet.processes("kvmig.serve") == processes
    said = [one["what"] for one in fleet.get("models/a")["events"]]
    assert "parked -> waking" in said
    assert fleet.get("status")["starts"] == 0


async def test_a_parked_model_that_is_switched_off_ends(fleet: ToyFleet) -> None:
    add(fleet)
    await parked(fleet)
    assert fleet.ask("POST", "models/a/switch", {"on": False}).status_code == 200
    await asyncio.to_thread(fleet.until, "models/a", state="zero")
    assert fleet.processes("kvmig.serve") == []
