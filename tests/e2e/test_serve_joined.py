"""Servers with front ends of their own that have joined one scheduler (KVMIG_JOIN)."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from kvmig.core.errors import StartupError
from kvmig_tools.served import Served
from tests.support.joined import (
    CommonScheduler,
    common_scheduler,
    joined_toys,
    own_instance,
    places,
    post,
    until_they_know,
)
from tests.support.streams import Stream, count_from, counted, start_streams, until_said
from tests.support.toys import Toys
from tests.support.waiting import until_yes

pytestmark = [pytest.mark.server, pytest.mark.long]

TOKENS = 60
HELD = 20


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommonScheduler]:
    with common_scheduler(tmp_path_factory.mktemp("scheduler")) as made:
        yield made


@pytest.fixture(scope="module")
def pair(
    scheduler: CommonScheduler, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Toys, Toys]]:
    folder = tmp_path_factory.mktemp("pair")
    with ExitStack() as stack:
        a = stack.enter_context(joined_toys(scheduler, folder / "a", ["--policy=freeness"]))
        b = stack.enter_context(joined_toys(scheduler, folder / "b", ["--policy=freeness"]))
        yield a, b


async def ended(streams: list[Stream], firsts: list[int], tokens: int = TOKENS) -> None:
    """All streams end with what they would have had at one engine."""
    answers = await asyncio.gather(*(stream.end() for stream in streams))
    for answer, first in zip(answers, firsts, strict=True):
        assert answer.tokens == tokens
        counted(answer, first)


async def streaming(served: Served, firsts: list[int], tokens: int = TOKENS) -> list[Stream]:
    """Streams that have begun, and wait at HELD tokens."""
    return await start_streams(served, [count_from(first, tokens) for first in firsts], HELD)


async def test_a_stream_goes_to_the_other_server_and_back_by_an_order_at_either(
    pair: tuple[Toys, Toys],
) -> None:
    a, b = pair
    await until_they_know(a, b)
    here, there = own_instance(a), own_instance(b)
    with a.held(HELD), b.held(HELD):
        (stream,) = await streaming(a, [1000])
        call = stream.answer.request_id
        assert places(a)[call] == here

        moved = await asyncio.to_thread(a.migrate, call, there)
        assert moved.json()["state"] == "committed", moved.text
        assert places(b)[call] == there
        back = await asyncio.to_thread(b.migrate, call, here)
        assert back.json()["state"] == "committed", back.text
    await ended([stream], [1000])


async def test_new_calls_go_to_the_servers_own_engine_alone(pair: tuple[Toys, Toys]) -> None:
    a, b = pair
    await until_they_know(a, b)
    firsts = [100 * number for number in range(10)]
    with a.held(HELD), b.held(HELD):
        streams = await streaming(a, firsts)
        assert set(places(a).values()) == {own_instance(a)}
    await ended(streams, firsts)


async def test_a_servers_streams_outlive_its_engine(pair: tuple[Toys, Toys]) -> None:
    a, b = pair
    await until_they_know(a, b)
    here, there = own_instance(a), own_instance(b)
    firsts = [100 * number for number in range(8)]
    with a.held(HELD), b.held(HELD):
        streams = await streaming(a, firsts)
        theirs = await streaming(b, [5000])
        call = theirs[0].answer.request_id
        moved = await asyncio.to_thread(b.migrate, call, here)
        assert moved.json()["state"] == "committed", moved.text

        assert (await post(a, f"instances/{here}", "DELETE")).is_success
        await until_yes(lambda: {row["id"] for row in a.get("instances")} == {there})
        assert set(places(a).values()) == {there}
        later = await streaming(a, [3000])
    await ended([*streams, *theirs, *later], [*firsts, 5000, 3000])

    assert (await post(a, "instances")).is_success  # it serves by itself again
    await until_they_know(a, b)


async def test_an_order_about_an_instance_of_another_server_names_that_server(
    pair: tuple[Toys, Toys],
) -> None:
    a, b = pair
    await until_they_know(a, b)

    refused = await post(a, f"instances/{own_instance(b)}/drain")

    assert refused.status_code == 409
    assert f"is of toy at {b.url}: order it there" in refused.text


async def test_servers_serve_without_the_scheduler_and_join_again_when_it_is_back(
    scheduler: CommonScheduler, pair: tuple[Toys, Toys]
) -> None:
    a, b = pair
    await until_they_know(a, b)
    here, there = own_instance(a), own_instance(b)
    with a.held(HELD), b.held(HELD):
        (stream,) = await streaming(a, [1000])
        call = stream.answer.request_id
        scheduler.end(signal.SIGKILL)
        await until_said(a, "the common scheduler is lost")
        moved = await asyncio.to_thread(a.migrate, call, there)
        assert moved.json()["state"] == "committed", moved.text
        joined = [served.output().count("joined the scheduler") for served in pair]

        scheduler.start()
        for served, before in zip(pair, joined, strict=True):
            await until_said(served, "joined the scheduler", before + 1)
        assert places(a)[call] == there  # none has taken the other for gone
        assert (await post(b, f"instances/{there}/drain")).is_success
        await until_yes(lambda: places(a)[call] == here)
    await ended([stream], [1000])
    assert (await post(b, f"instances/{there}/drain", "DELETE")).is_success
    assert "Traceback" not in a.output() + b.output()


async def test_a_killed_server_takes_its_own_clients_streams_with_it_alone(
    scheduler: CommonScheduler, pair: tuple[Toys, Toys], tmp_path: Path
) -> None:
    a, _ = pair
    here = own_instance(a)
    with joined_toys(scheduler, tmp_path / "c") as c:
        await until_they_know(*pair, c)
        there = own_instance(c)
        with a.held(HELD), c.held(HELD):
            (ours,), (theirs,) = await streaming(a, [1000]), await streaming(c, [2000])
            for stream, served, destination in ((ours, a, there), (theirs, c, here)):
                call = stream.answer.request_id
                moved = await asyncio.to_thread(served.migrate, call, destination)
                assert moved.json()["state"] == "committed", moved.text
            assert c.process is not None

            os.kill(c.process.pid, signal.SIGKILL)

            await until_yes(lambda: places(a) == {ours.answer.request_id: here})
            with pytest.raises(httpx.TransportError):
                await theirs.end()
        await ended([ours], [1000])
    await until_yes(lambda: all(row["blocks_used"] == 0 for row in a.get("instances")))
    await until_they_know(*pair)


async def test_an_unlike_server_is_served_and_named_but_takes_nothing(
    scheduler: CommonScheduler, pair: tuple[Toys, Toys], tmp_path: Path
) -> None:
    a, _ = pair
    with joined_toys(scheduler, tmp_path / "other", ["--block-size=16"]) as other:
        await until_said(
            a, f"requests don't move between here and toy at {other.url}: its likeness"
        )
        await until_said(other, "requests don't move between here and toy at")
        assert [row["server"] for row in other.get("instances")] == [""]
        await ended(await start_streams(other, [count_from(7, TOKENS)], 1), [7])


def test_a_server_with_another_secret_is_refused_at_its_start(
    scheduler: CommonScheduler, tmp_path: Path
) -> None:
    wrong = {"KVMIG_SECRET": "another secret of 16 b"}

    with (
        pytest.raises(StartupError, match="does not let this server in: its KVMIG_SECRET"),
        joined_toys(scheduler, tmp_path / "wrong", environment=wrong),
    ):
        pass


async def test_a_server_starts_without_the_scheduler_and_joins_once_it_comes(
    tmp_path: Path,
) -> None:
    late = CommonScheduler(tmp_path, f"unix:{tmp_path}/scheduler.sock")
    with joined_toys(late, tmp_path / "early") as early:
        assert "does not answer: this server serves" in early.output()
        late.start()
        try:
            await until_said(early, "joined the scheduler")
        finally:
            late.end()
