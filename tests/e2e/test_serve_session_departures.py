"""An idle session goes along where its instance is restarted, removed, or leaves its unit, and no
other tenant finds it where it has gone: on real vLLMs.

The next turn's tokens, log-probabilities and cached tokens equal those of a session that stayed.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvmig_tools.nursery import Nursery
from kvmig_tools.patience import SERVER_PATIENCE_S
from kvmig_tools.served import SMALL, Served
from tests.conftest import PATIENT
from tests.e2e.test_serve_instances import standing_still
from tests.e2e.test_serve_prompts import states
from tests.e2e.test_serve_turn_carriage import Turn, alone, post, turn
from tests.e2e.test_serve_units import FLAGS as UNIT_FLAGS
from tests.e2e.test_serve_units import Agent
from tests.support.leaks import Footprint, assert_server_is_empty, leaving_nothing
from tests.support.waiting import until_yes

pytestmark = [pytest.mark.server, pytest.mark.long]

BEGINNING = "Count: " + " ".join(f"{number:04d}" for number in range(17, 200))
"""Some 900 tokens, 28 blocks."""


@pytest.fixture(scope="module")
def server(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    flags = [*SMALL, *PATIENT, "--instances=2", "--enable-prompt-tokens-details"]
    log = tmp_path_factory.mktemp("departures") / "log"
    with leaving_nothing(Served(flags, nursery=nursery, log=log)) as made:
        yield made


@pytest.fixture
def served(server: Served) -> Iterator[Served]:
    yield server
    assert_server_is_empty(server)


async def order(served: Served, method: str, path: str, **fields: Any) -> Any:
    async with httpx.AsyncClient(timeout=SERVER_PATIENCE_S, verify=False) as client:
        url = f"{served.url}/kvmig/v1/{path}"
        answer = await client.request(method, url, json=fields or None)
    assert answer.is_success, answer.text
    return answer.json()


async def stay(served: Served) -> tuple[Turn, Turn]:
    """The two turns of a session that stays where it began."""
    session = secrets.token_hex(8)
    first = await turn(served, session, BEGINNING)
    second = await turn(served, session, f"{BEGINNING}{first.text} ")
    assert second.cached > len(BEGINNING)
    return first, second


async def carried(served: Served) -> list[tuple[str, str]]:
    """Source and destination of each session that a drain has moved."""
    rows = await order(served, "GET", "migrations")
    return [
        (one["source"], one["destination"])
        for one in rows["data"]
        if one["request_id"].startswith("session-")
        and (one["state"], one["why"]) == ("committed", "drain")
    ]


async def begin(served: Served, first: Turn) -> tuple[str, str]:
    """A session that has had its first turn at i0; and the prompt of its next one."""
    session = secrets.token_hex(8)
    async with alone(served, "i0"):
        assert await turn(served, session, BEGINNING) == first
    return session, f"{BEGINNING}{first.text} "


async def test_no_other_tenant_finds_a_session_where_it_has_moved(served: Served) -> None:
    first, second = await stay(served)
    session, longer = await begin(served, first)
    body = {"session": session, "destination": "i1"}
    report = await post(served, "/kvmig/v1/sessions/move", body)
    assert report["state"] == "committed", report
    async with alone(served, "i1"):
        theirs = await turn(served, secrets.token_hex(8), longer)
        assert theirs.cached == 0
        assert (theirs.text, await turn(served, session, longer)) == (second.text, second)


async def test_a_rolling_restart_takes_an_idle_session_along_twice(served: Served) -> None:
    first, second = await stay(served)
    session, longer = await begin(served, first)
    before = {row["id"]: row["pid"] for row in served.get("instances")}

    await order(served, "POST", "instances/restart")

    def renewed() -> bool:
        rows = served.get("instances")
        return all(row["state"] == "serving" and row["pid"] != before[row["id"]] for row in rows)

    await until_yes(renewed)
    assert {("i0", "i1"), ("i1", "i0")} <= set(await carried(served))
    assert await turn(served, session, longer) == second


async def test_an_instance_that_is_removed_leaves_its_idle_session_to_the_others(
    served: Served,
) -> None:
    first, second = await stay(served)
    session, longer = await begin(served, first)

    await order(served, "DELETE", "instances/i0")

    await until_yes(lambda: states(served) == {"i1": "serving"})
    assert await turn(served, session, longer) == second


async def test_front_ends_move_a_session_by_order_of_another_one_and_carry_each_ones_own(
    nursery: Nursery, tmp_path: Path
) -> None:
    flags = [*SMALL, *PATIENT, "--instances=2", "--front-ends=2", "--enable-prompt-tokens-details"]
    with leaving_nothing(Served(flags, nursery=nursery, log=tmp_path / "log")) as served:
        one, other = Footprint.of(served).named("kvmig.frontend.process_main")
        first, second = await stay(served)
        sessions = []
        for waits in (one, other):
            async with alone(served, "i0"):
                with standing_still(waits):
                    sessions.append(secrets.token_hex(8))
                    assert await turn(served, sessions[-1], BEGINNING) == first
        with standing_still(other):  # it has served the second one's call
            body = {"session": sessions[1], "destination": "i1"}
            asking = asyncio.create_task(post(served, "/kvmig/v1/sessions/move", body))
            await asyncio.sleep(0.5)
            assert not asking.done()
        report = await asking
        assert (report["state"], report["source"]) == ("committed", "i0"), report
        await order(served, "POST", "instances/i1/drain")
        await until_yes(lambda: states(served)["i1"] == "draining" and rests(served, "i1"))
        await order(served, "DELETE", "instances/i1/drain")
        async with alone(served, "i0"):
            for session in sessions:
                assert await turn(served, session, f"{BEGINNING}{first.text} ") == second
        assert_server_is_empty(served)


def rests(served: Served, instance: str) -> bool:
    """Whether all that was to leave it has left."""
    rows = {row["id"]: row["detail"] for row in served.get("instances")}
    return str(rows[instance]).startswith("it is empty; 1 idle sessions moved")


@pytest.fixture
def units(tmp_path: Path) -> Iterator[tuple[Agent, Agent]]:
    with Agent(tmp_path / "one") as one, Agent(tmp_path / "other") as other:
        yield one, other


async def test_an_instance_that_leaves_its_unit_takes_its_idle_session_to_the_other_unit(
    units: tuple[Agent, Agent], nursery: Nursery, tmp_path: Path
) -> None:
    here, there = units
    flags = [*UNIT_FLAGS, f"--unit={here.path}", "--enable-prompt-tokens-details"]
    with leaving_nothing(Served(flags, nursery=nursery, log=tmp_path / "log")) as served:
        first, second = await stay(served)
        session = secrets.token_hex(8)
        assert await turn(served, session, BEGINNING) == first
        added = {"count": 1, "unit": str(there.path)}
        await order(served, "POST", "instances?wait_s=100", **added)
        await until_yes(lambda: states(served) == {"i0": "serving", "i1": "serving"})

        await order(served, "DELETE", "instances/i0")

        await until_yes(lambda: states(served) == {"i1": "serving"})
        assert await turn(served, session, f"{BEGINNING}{first.text} ") == second
        assert_server_is_empty(served)
