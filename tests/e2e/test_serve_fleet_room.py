"""A fleet of toys on a host that holds two of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.fleets import PATH, Streamed, ToyFleet, answer, ask, counted, hold_streams

pytestmark = [pytest.mark.server, pytest.mark.long]

CLAIM = 1_000_000_000


@pytest.fixture(scope="module")
def small_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToyFleet]:
    with ToyFleet(tmp_path_factory.mktemp("fleet"), f"--memory={2 * CLAIM}") as made:
        yield made


@pytest.fixture
def small(small_fleet: ToyFleet) -> Iterator[ToyFleet]:
    yield small_fleet
    small_fleet.hold(None)
    for one in small_fleet.get("models")["data"]:
        small_fleet.ask("DELETE", f"models/{one['name']}")
    small_fleet.until("status", claimed_bytes=0)


def add(fleet: ToyFleet, *names: str, **more: Any) -> None:
    for name in names:
        fleet.add_toy(name, memory=CLAIM, **more)


async def in_use(fleet: ToyFleet, *names: str) -> list[Streamed]:
    """A stream of each, which goes on until the hold ends."""
    return await hold_streams(fleet, *(ask(name, 40) for name in names))


async def test_a_third_model_waits_for_one_that_answers_and_hears_why(small: ToyFleet) -> None:
    add(small, "a", "b", "c")
    streams = await in_use(small, "a", "b")
    async with small.client() as client:
        third = asyncio.create_task(answer(client, ask("c")))
        found = await asyncio.to_thread(small.until, "models/c", state="waiting")
        assert found["why"].startswith("no room: it needs 0.9 GiB, 0.0 GiB is free")
        await asyncio.sleep(1)
        assert [small.get(f"models/{name}")["state"] for name in "ab"] == ["serving"] * 2
        small.hold(None)
        assert await third == counted(10)
    assert [await one.task for one in streams] == [counted(40)] * 2
    states = [small.get(f"models/{name}")["state"] for name in "ab"]
    assert "serving" in states, "no more end than must"


async def test_without_room_until_its_deadline_a_request_is_answered_with_the_reason(
    small: ToyFleet,
) -> None:
    add(small, "a", "b")
    add(small, "c", instances={"start_timeout_s": 1})
    await in_use(small, "a", "b")
    async with small.client() as client:
        refused = await client.post(PATH, json=ask("c"))
    assert refused.status_code == 503
    assert "c was not ready within 1 s: no room: it needs" in refused.json()["error"]["message"]
    await asyncio.to_thread(small.until, "models/c", state="zero")


async def test_a_model_with_a_least_number_never_ends_for_another(small: ToyFleet) -> None:
    add(small, "a", "b", instances={"min": 1})
    for name in "ab":
        await asyncio.to_thread(small.until, f"models/{name}", state="serving")
    add(small, "c", instances={"start_timeout_s": 2})
    async with small.client() as client:
        refused = await client.post(PATH, json=ask("c"))
    assert "the rest is taken for good" in refused.json()["error"]["message"]
    assert [small.get(f"models/{name}")["state"] for name in "ab"] == ["serving"] * 2


def test_a_model_that_can_never_fit_is_refused_by_its_missing_bytes(small: ToyFleet) -> None:
    spec = {"name": "a", "source": "path:/toy", "engine": "toy", "memory": 2 * CLAIM + 7}
    refused = small.ask("POST", "models", spec)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == (
        f"model a needs {2 * CLAIM + 7} bytes of memory, 7 more than the {2 * CLAIM} that all"
        " models may take"
    )
    twice = {**spec, "memory": CLAIM + 1, "instances": {"min": 2, "max": 2}}
    assert small.ask("POST", "models", twice).status_code == 400
    assert small.get("models")["data"] == []


async def test_instances_are_added_only_as_far_as_there_is_room(small: ToyFleet) -> None:
    add(small, "a", instances={"max": 3, "target": 1})
    small.hold(8)
    streams = [Streamed(small, ask("a", 40, start)) for start in range(20)]
    await asyncio.to_thread(small.until, "models/a", serving=2)
    await asyncio.sleep(2)
    found = small.get("models/a")
    assert found["serving"] == 2
    ups = [one["what"][:7] for one in found["events"] if one["what"].startswith("up to")]
    assert ups == ["up to 2"]
    small.hold(None)
    assert [await one.task for one in streams] == [counted(40, start) for start in range(20)]


async def test_three_models_take_turns_and_none_starves(small: ToyFleet) -> None:
    """Each is asked for again and again with short pauses: nothing fails, nothing is wrong. How
    long a turn is follows from how long starts take here."""
    add(small, "a", "b", "c")
    before, began = small.get("status")["starts"], time.monotonic()
    answered = dict.fromkeys("abc", 0)

    def goes_on() -> bool:
        spent = time.monotonic() - began
        return spent < 8 or (min(answered.values()) < 2 and spent < 60)

    async def use(name: str) -> None:
        async with small.client() as client:
            while goes_on():
                assert await answer(client, ask(name, 10, answered[name])) == counted(
                    10, answered[name]
                )
                answered[name] += 1
                await asyncio.sleep(0.3)

    await asyncio.gather(*map(use, "abc"))
    starts = small.get("status")["starts"] - before
    assert min(answered.values()) >= 2
    assert starts >= 4, "they take turns"
    assert 2 * starts <= sum(answered.values()), "but don't only start"
