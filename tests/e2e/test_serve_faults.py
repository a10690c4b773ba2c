"""Instances that go while they serve: silent, hung, killed, in the middle of a migration."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from random import Random
from typing import Any

import httpx
import psutil
import pytest

from bench.chaos.answers import RIGHT
from bench.chaos.calls import COUNTING
from bench.chaos.cast import sever
from bench.chaos.clients import Client, Ledger, keep_asking
from bench.chaos.mover import Mover
from kvmig.engines.toy.script import ToyScript
from kvmig_tools.patience import SERVER_PATIENCE_S
from kvmig_tools.served import Served
from tests.conftest import NEVER_BY_ITSELF
from tests.support.leaks import Footprint, assert_server_is_empty
from tests.support.streams import (
    Stream,
    StreamFailed,
    ask,
    count_from,
    counted,
    start_streams,
    until_said,
)
from tests.support.toys import Toys
from tests.support.waiting import until, until_yes

# A second without an answer is a death here.
pytestmark = [pytest.mark.server, pytest.mark.alone]

PATH = "/v1/completions"
TOKENS = 60
HELD = 20
"""Where streams wait for the test."""
CALLS = (
    count_from(1000, TOKENS),
    count_from(2000, TOKENS, stop=["2011"]),
    count_from(3000, TOKENS, temperature=1.0, seed=3, n=2),
    count_from(4000, TOKENS, temperature=0.7, seed=4, logprobs=1),
)
INSTANCES = ("i0", "i1", "i2")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Toys]:
    flags = ["--instances=3", NEVER_BY_ITSELF, "--step-timeout=1", "--shutdown-timeout=5"]
    with Toys(flags, tmp_path_factory.mktemp("faults")) as served:
        yield served


@pytest.fixture
def llumlets(server: Toys) -> dict[str, psutil.Process]:
    """By instance, once all are there."""
    deadline = time.monotonic() + SERVER_PATIENCE_S
    while True:
        found = Footprint.of(server).llumlets()
        # One may end or start again after the test before.
        states = {row["id"]: row["state"] for row in server.get("instances")}
        if found.keys() == set(INSTANCES) and set(states.values()) == {"serving"}:
            return found
        assert time.monotonic() < deadline, (found, states)
        time.sleep(0.2)


@contextmanager
def stopped(*processes: psutil.Process) -> Iterator[None]:
    """They do and say nothing inside the block."""
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            with suppress(psutil.NoSuchProcess):  # silent for too long: the launcher has ended it
                process.resume()


def state(served: Served, instance: str) -> str:
    return next((row["state"] for row in served.get("instances") if row["id"] == instance), "")


async def said(served: Served, instance: str, wanted: str) -> None:
    """Wait until the instance is in that state."""
    await until_yes(lambda: state(served, instance) == wanted)


async def left(served: Served, instance: str) -> None:
    """Wait until no request is known to be there."""
    await until_yes(lambda: all(row["instance"] != instance for row in served.get("requests")))


def scraped(served: Served) -> str:
    return httpx.get(f"{served.url}/metrics", verify=False, timeout=30).text


def counted_by(served: Served, counter: str) -> float:
    (line,) = [one for one in scraped(served).splitlines() if one.startswith(f"{counter} ")]
    return float(line.split()[1])


async def test_calls_whose_instance_falls_silent_equal_those_left_alone(
    server: Toys, llumlets: dict[str, psutil.Process]
) -> None:
    undisturbed = [await Stream(server, PATH, body).end() for body in CALLS]
    with server.held(HELD):
        streams = await start_streams(server, CALLS, HELD)
        for names in (("i0", "i1"), ("i2",)):
            with stopped(*(llumlets[name] for name in names)):
                for name in names:
                    await said(server, name, "silent")
                    await left(server, name)
            for name in names:
                await said(server, name, "serving")
    for stream, alone in zip(streams, undisturbed, strict=True):
        (await stream.end()).same_as(alone)
    assert counted_by(server, "kvmig_requests_run_again_total") >= len(streams) / 2
    await asyncio.to_thread(assert_server_is_empty, server)


async def several(served: Served) -> tuple[list[Stream], list[dict[str, Any]]]:
    """Six streams, and their rows once they are held."""
    streams = await start_streams(served, [count_from(1000 * n, TOKENS) for n in range(6)], HELD)
    return streams, await asyncio.to_thread(served.get, "requests")


async def all_counted(streams: list[Stream]) -> None:
    for number, stream in enumerate(streams):
        answer = await stream.end()
        assert answer.tokens == TOKENS
        counted(answer, 1000 * number)


@pytest.mark.parametrize("which", ["source", "destination"])
async def test_either_end_of_migrations_may_fall_silent(
    server: Toys, llumlets: dict[str, psutil.Process], which: str
) -> None:
    asked = []
    with server.held(HELD):
        streams, found = await several(server)
        source, destination = found[0]["instance"], INSTANCES[found[0]["instance"] == "i0"]
        silent = source if which == "source" else destination
        for row in found:
            if row["instance"] == source:
                asked.append(asyncio.create_task(ask(server, row["id"], destination)))
                await asyncio.sleep(0.01)  # so that they are in different states
        with stopped(llumlets[silent]):
            await said(server, silent, "silent")
            await left(server, silent)
    await all_counted(streams)
    assert {(await one).status_code for one in asked} <= {200, 404, 409, 503}
    await asyncio.to_thread(assert_server_is_empty, server)


@pytest.mark.parametrize("which", ["destination", "source"])
async def test_either_end_that_is_killed_in_migrations_takes_nothing_along(
    server: Toys, llumlets: dict[str, psutil.Process], which: str
) -> None:
    with server.held(HELD):
        streams, found = await several(server)
        source, destination = found[0]["instance"], INSTANCES[found[0]["instance"] == "i0"]
        moving = [row["id"] for row in found if row["instance"] == source]
        asked = [asyncio.create_task(ask(server, one, destination)) for one in moving]
        await asyncio.sleep(0.02)
        killed = source if which == "source" else destination
        before = server.output()
        llumlets[killed].kill()
        await left(server, killed)

    await all_counted(streams)
    assert {(await one).status_code for one in asked} <= {200, 404, 409, 503}
    await asyncio.to_thread(assert_server_is_empty, server)
    again = "again in" if f"instance {killed} is gone" in before else "again in 0.5 s"
    said_since = server.output().removeprefix(before)
    assert f"instance {killed} is gone (killed by SIGKILL), {again}" in said_since
    await said(server, killed, "serving")


async def test_a_short_chaos_leaves_every_answer_right(
    server: Toys, llumlets: dict[str, psutil.Process]
) -> None:
    """Of `bench.chaos` what fits here: its clients, its migrations, its judge."""
    ledger, mover = Ledger(began=time.monotonic()), Mover(server, seed=1, per_s=5)
    over = asyncio.Event()

    async def client(number: int) -> None:
        async with Client(server.url, server.model, ledger) as one:
            await keep_asking(one, Random(number), {}, over.is_set, kinds=COUNTING)

    async with asyncio.TaskGroup() as group:
        for number in range(6):
            group.create_task(client(number))
        group.create_task(mover.run(over.is_set))
        await asyncio.sleep(1)
        with stopped(llumlets["i0"]):
            await asyncio.sleep(2)
        llumlets["i1"].kill()
        await asyncio.sleep(2)
        await asyncio.to_thread(sever, llumlets["i2"].pid, [one.pid for one in llumlets.values()])
        await asyncio.sleep(1)
        over.set()

    bad = [one for one in ledger.outcomes if one.error or one.verdict != RIGHT]
    assert not bad, bad[:3]
    assert len(ledger.outcomes) >= 6
    assert mover.ended["committed"] > 0
    await asyncio.to_thread(assert_server_is_empty, server)


async def test_an_engine_that_hangs_for_good_is_started_again(
    server: Toys, llumlets: dict[str, psutil.Process]
) -> None:
    server.play(ToyScript(hang_at=50, hang_s=600.0))
    answer = await Stream(server, PATH, count_from(10, 100)).end()

    assert answer.tokens == 100
    counted(answer, 10)

    await until_said(server, "is gone (exit code 1), again in")
    assert "a step has been running for" in server.output()


async def test_a_request_that_hangs_two_instances_fails_with_one_clear_error_and_both_serve_on(
    server: Toys, llumlets: dict[str, psutil.Process]
) -> None:
    server.play(ToyScript(hang_at=50, hang_s=1.7))
    stream = Stream(server, PATH, count_from(10, 100))
    ending = asyncio.create_task(stream.end())

    await until(lambda: stream.answer.tokens == 50)
    await asyncio.sleep(0.2)
    server.play(ToyScript(hang_at=50, hang_s=1.7))
    with pytest.raises(StreamFailed, match="hung while they ran this request") as failure:
        await ending

    assert failure.value.args[0]["code"] == 500
    assert stream.answer.tokens == 50
    counted(stream.answer, 10)
    for name in INSTANCES:
        await said(server, name, "serving")
    assert Footprint.of(server).llumlets() == llumlets


async def test_a_request_that_kills_two_instances_fails_with_one_clear_error(
    server: Toys, llumlets: dict[str, psutil.Process]
) -> None:
    before = counted_by(server, "kvmig_requests_poisoned_total")
    server.play(ToyScript(crash_at=100))
    stream = Stream(server, PATH, count_from(10, 200))

    with pytest.raises(StreamFailed, match="crashed while they ran this request") as failure:
        await stream.end()

    assert failure.value.args[0]["code"] == 500
    assert stream.answer.tokens == 100
    counted(stream.answer, 10)
    assert counted_by(server, "kvmig_requests_poisoned_total") == before + 1
