"""`kvmig top` in front of a fleet of toys, and of one server of toys, driven by its keys."""

from __future__ import annotations

import asyncio
from contextlib import closing

import httpx
import pytest

from kvmig.cli.client import CallFailure, FleetClient
from kvmig.cli.top.command import observed_once
from kvmig.cli.top.sources import FleetSource, ServeSource, open_source
from kvmig_tools.patience import SERVER_PATIENCE_S
from tests.support.fleets import ToyFleet, ask, hold_streams, kill
from tests.support.top_pilot import line, rows, running, shows
from tests.support.toys import Toys
from tests.support.waiting import until

pytestmark = [pytest.mark.server, pytest.mark.long]


@pytest.fixture
async def two(fleet: ToyFleet) -> ToyFleet:
    """Model a of the fleet with two instances that serve."""
    fleet.add_toy("a", instances={"min": 2, "max": 2}, flags=["--policy=freeness"])
    await until(lambda: fleet.get("models/a")["serving"] == 2, pause_s=0.1)
    return fleet


def client_of(fleet: ToyFleet) -> FleetClient:
    return FleetClient(str(fleet.folder / "run" / "api.sock"))


async def test_a_stream_of_a_fleet_is_seen_and_moved_and_goes_on(two: ToyFleet) -> None:
    (stream,) = await hold_streams(two, ask("a", 40), tokens=8)
    async with running(await asyncio.to_thread(open_source, client_of(two))) as (app, pilot):
        await shows(pilot, lambda: rows(app, "streams"))
        ((_, model, before, *_),) = rows(app, "streams")
        assert model == "a"
        assert [one[0] for one in rows(app, "instances")] == ["a", "i0", "i1"]
        await pilot.press("1", "m", "enter")
        await shows(pilot, lambda: rows(app, "moves"))
        await shows(pilot, lambda: rows(app, "streams")[0][2].split(" ")[0] != before)
        assert "committed" in line(app, "#last")
        two.hold(None)
        await stream.task
        assert stream.error is None
        await shows(pilot, lambda: not rows(app, "streams"))


async def test_an_instance_of_a_fleet_is_drained_by_key_and_replaced(two: ToyFleet) -> None:
    async with running(FleetSource(client_of(two))) as (app, pilot):
        await shows(pilot, lambda: len(rows(app, "instances")) == 3)
        await pilot.press("down", "d", "y")
        await shows(pilot, lambda: "i0" not in [one[0] for one in rows(app, "instances")])
        await shows(
            pilot,
            lambda: [one[1] for one in rows(app, "instances")] == ["serving"] * 3,
        )


async def test_without_a_terminal_what_runs_is_printed_once(two: ToyFleet) -> None:
    # Another test's model of this name may still end.
    async with asyncio.timeout(SERVER_PATIENCE_S):
        while len((await observed_once(FleetSource(client_of(two)))).instances) != 2:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def test_a_server_that_goes_away_and_comes_back_is_shown_again(two: ToyFleet) -> None:
    async with running(FleetSource(client_of(two))) as (app, pilot):
        await shows(pilot, lambda: len(rows(app, "instances")) == 3)
        (server,) = two.processes("kvmig.fleet.server")
        kill(server)
        await shows(pilot, lambda: "does not answer" in line(app, "#summary"))
        assert len(rows(app, "instances")) == 3
        await shows(pilot, lambda: "2 of 2 instances serving" in line(app, "#summary"))


async def test_through_the_proxy_a_key_is_needed(two: ToyFleet) -> None:
    source = await asyncio.to_thread(open_source, FleetClient("", two.url, two.key))
    async with running(source) as (app, pilot):
        await shows(pilot, lambda: len(rows(app, "instances")) == 3)
    with closing(FleetClient("", two.url, "kv-nobody")) as client, pytest.raises(CallFailure):
        await asyncio.to_thread(open_source, client)


async def test_of_a_single_server_a_stream_is_moved_and_an_instance_drained(toys: Toys) -> None:
    source = await asyncio.to_thread(open_source, FleetClient("", toys.url))
    assert isinstance(source, ServeSource)
    body = {**ask("toy", 40), "stream": True}
    async with httpx.AsyncClient(base_url=toys.url, timeout=SERVER_PATIENCE_S) as client:
        with toys.held(8):
            calling = asyncio.create_task(client.post("/v1/completions", json=body))
            async with running(source) as (app, pilot):
                await shows(pilot, lambda: rows(app, "streams"))
                assert [one[0] for one in rows(app, "instances")] == ["toy", "i0", "i1"]
                on = rows(app, "streams")[0][2]
                at = ["i0", "i1"].index(on) + 1
                await pilot.press(*["down"] * at, "d", "y")
                await shows(pilot, lambda: rows(app, "instances")[at][1] == "draining")
                await shows(pilot, lambda: rows(app, "streams")[0][2].split(" ")[0] != on)
                assert rows(app, "moves")
                await pilot.press("u", "y")
                await shows(pilot, lambda: rows(app, "instances")[at][1] == "serving")
                await pilot.press("1", "m", "enter")
                await shows(pilot, lambda: len(rows(app, "moves")) == 2)
        answer = await calling
    assert answer.status_code == 200
