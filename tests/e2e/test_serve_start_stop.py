"""Ends of servers and of their processes, the scheduler's own moves, and what goes on after."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kvmig_tools.nursery import Nursery
from kvmig_tools.patience import SERVER_PATIENCE_S
from kvmig_tools.served import Served
from tests.conftest import NEVER_BY_ITSELF
from tests.support.leaks import Footprint, assert_server_is_empty, orphans
from tests.support.streams import (
    Stream,
    StreamFailed,
    ask,
    count_from,
    counted,
    row_of,
    run_unmoved,
    start_stream,
    start_streams,
    until_said,
)
from tests.support.toys import Toys
from tests.support.waiting import wait_until

pytestmark = pytest.mark.server

PATH = "/v1/completions"
TOKENS = 60
HELD = 20
"""Where streams wait for the test."""


async def ended(served: Served, within_s: float = SERVER_PATIENCE_S) -> int:
    """The server's exit code."""
    assert served.process is not None
    return await asyncio.to_thread(served.process.wait, within_s)


def send(served: Served, name: signal.Signals) -> None:
    assert served.process is not None
    served.process.send_signal(name)


# -- shutdown


async def test_sigterm_lets_streams_finish_and_takes_no_new_ones(tmp_path: Path) -> None:
    with Toys(["--instances=1", "--shutdown-timeout=60"], tmp_path) as served:
        footprint = Footprint.of(served)
        with served.held(HELD):
            stream = await start_stream(served, count_from(10, TOKENS), HELD)
            send(served, signal.SIGTERM)
            await until_said(served, "stopping: 1 requests run")
            async with httpx.AsyncClient(base_url=served.url, verify=False) as client:
                body = {"model": served.model, **count_from(20, 10)}
                refused = await client.post(PATH, json=body)

        answer = await stream.end()

        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == 503
        assert answer.tokens == TOKENS
        counted(answer, 10)
        assert await ended(served) == 0
    footprint.assert_gone()
    assert "Traceback" not in served.output()


@pytest.mark.parametrize(
    ("timeout_s", "first"), [("0.5", None), ("600", signal.SIGINT)], ids=["late", "twice"]
)
async def test_what_does_not_finish_in_time_or_before_a_second_signal_is_ended(
    tmp_path: Path, timeout_s: str, first: signal.Signals | None
) -> None:
    flags = ["--instances=1", f"--shutdown-timeout={timeout_s}"]
    with Toys(flags, tmp_path) as served, served.held(HELD):
        footprint = Footprint.of(served)
        stream = await start_stream(served, count_from(10, TOKENS), HELD)
        if first is not None:
            send(served, first)
            await until_said(served, "stopping: 1 requests run")
        send(served, signal.SIGTERM)

        assert await ended(served) == 0
        with pytest.raises((StreamFailed, httpx.HTTPError)):
            await stream.end()
    footprint.assert_gone()
    assert "Traceback" not in served.output()


async def test_children_of_a_killed_launcher_go_by_themselves(tmp_path: Path) -> None:
    before = orphans()
    with Toys(["--instances=2", NEVER_BY_ITSELF], tmp_path) as served, served.held(HELD):
        footprint = Footprint.of(served)
        stream = await start_stream(served, count_from(10, TOKENS), HELD)
        send(served, signal.SIGKILL)

        await ended(served)
        with pytest.raises(httpx.HTTPError):
            await stream.end()
    await asyncio.to_thread(footprint.assert_gone, SERVER_PATIENCE_S)
    assert orphans() <= before


# -- a server that loses parts, in the order of the tests


@pytest.fixture(scope="module")
def even(
    toy_nursery: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Toys, Footprint]]:
    """A server whose scheduler evens out what is more than a little uneven."""
    flags = [
        "--instances=2",
        "--migrate-below=150",
        "--migrate-above=160",
        "--scheduler-interval-ms=100",
    ]
    flags.append("--max-restarts=0")
    with Toys(flags, tmp_path_factory.mktemp("even"), nursery=toy_nursery) as served:
        wait_until(lambda: Footprint.of(served).named("kvmig.launcher.scheduler"))
        yield served, Footprint.of(served)


async def one_sided(served: Toys) -> None:
    """Put all streams on one instance; the scheduler spreads them again, and all end right."""
    known = {report["id"] for report in await asyncio.to_thread(served.get, "migrations")}
    numbers = [1000 * n for n in range(6)]
    with served.held(HELD):
        streams = await start_streams(
            served, [count_from(number, TOKENS) for number in numbers], HELD
        )
        async with asyncio.TaskGroup() as tasks:
            for stream in streams:
                tasks.create_task(place_once(served, stream, "i0"))
        async with asyncio.timeout(SERVER_PATIENCE_S):
            while True:
                reports = await asyncio.to_thread(served.get, "migrations")
                new = [one for one in reports if one["id"] not in known]
                if any(one["source"] == "i0" and one["state"] == "committed" for one in new):
                    break
                await asyncio.sleep(0.05)
    answers = [await stream.end() for stream in streams]

    for number, answer in zip(numbers, answers, strict=True):
        assert answer.tokens == TOKENS
        counted(answer, number)
    await asyncio.to_thread(assert_server_is_empty, served)


async def place_once(served: Served, stream: Stream, instance: str) -> None:
    """Ask for a move there, whether or not the scheduler moves it at the same time."""
    answer = await ask(served, stream.answer.request_id, instance)
    assert answer.status_code in (200, 409), answer.text


async def test_the_scheduler_evens_out_by_itself(even: tuple[Toys, Footprint]) -> None:
    await one_sided(even[0])


async def test_a_killed_scheduler_comes_back_and_serving_goes_on(
    even: tuple[Toys, Footprint],
) -> None:
    served, footprint = even
    (scheduler,) = footprint.named("kvmig.launcher.scheduler")
    with served.held(HELD):
        stream = await start_stream(served, count_from(10, TOKENS), HELD)
        scheduler.kill()
        await until_said(served, "serving goes on without migrations")
    assert (await stream.end()).tokens == TOKENS

    async with asyncio.timeout(SERVER_PATIENCE_S):
        while not (again := Footprint.of(served).named("kvmig.launcher.scheduler")):
            assert (await run_unmoved(served, PATH, count_from(20, 20))).tokens == 20
    assert again != [scheduler]
    await asyncio.to_thread(assert_server_is_empty, served)


async def test_the_new_scheduler_evens_out_too(even: tuple[Toys, Footprint]) -> None:
    await one_sided(even[0])


async def test_a_killed_instances_streams_go_on_at_the_other_one(
    even: tuple[Toys, Footprint],
) -> None:
    served, footprint = even
    with served.held(HELD):
        streams = await start_streams(
            served, [count_from(1000 * n, TOKENS) for n in range(2)], HELD
        )
        rows = [await row_of(served, stream) for stream in streams]
        assert {row["instance"] for row in rows} == {"i0", "i1"}
        footprint.llumlets()["i0"].kill()
        await until_said(served, "instance i0 is given up (killed by SIGKILL)")

    for n, stream in enumerate(streams):
        answer = await stream.end()
        assert answer.tokens == TOKENS
        counted(answer, 1000 * n)
    rows = await asyncio.to_thread(served.get, "instances")
    assert [(row["id"], row["state"]) for row in rows] == [("i0", "failed"), ("i1", "serving")]
    assert (await run_unmoved(served, PATH, count_from(20, 20))).tokens == 20
    await asyncio.to_thread(assert_server_is_empty, served)


async def test_without_any_instance_the_server_ends_with_exit_code_1(
    even: tuple[Toys, Footprint],
) -> None:
    served, footprint = even
    for process in footprint.named("kvmig.launcher.llumlet_main"):
        process.kill()

    assert await ended(served) == 1
    assert "no instance is left, stopping" in served.output()
    footprint.assert_gone()
