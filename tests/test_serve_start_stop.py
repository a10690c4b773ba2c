"""Ends of servers and of their processes, the scheduler's own moves, and what goes on after."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from kvmig.cli.served import SMALL, Served
from tests.conftest import NEVER_BY_ITSELF
from tests.leaks import Footprint, assert_server_is_empty, orphans
from tests.streams import Stream, StreamFailed, ask, count_from, counted, row_of, run_unmoved

pytestmark = pytest.mark.server

PATH = "/v1/completions"
PATIENCE_S = 60.0
ONE = (*SMALL, "--instances=1")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Or one instance takes all cores, which others use."""
TWO = (*SMALL, "--instances=2")


async def ended(served: Served, within_s: float = PATIENCE_S) -> int:
    """The server's exit code."""
    assert served.process is not None
    return await asyncio.to_thread(served.process.wait, within_s)


def send(served: Served, name: signal.Signals) -> None:
    assert served.process is not None
    served.process.send_signal(name)


# -- shutdown


async def test_sigterm_lets_streams_finish_and_takes_no_new_ones(log_file: Path) -> None:
    with Served([*ONE, "--drain-timeout=60"], environment=ONE_THREAD, log=log_file) as served:
        footprint = Footprint.of(served)
        stream = Stream(served, PATH, count_from(10, 1500))
        await stream.reach(10)
        send(served, signal.SIGTERM)
        while "stopping: 1 requests run" not in served.output():  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.02)
        async with httpx.AsyncClient(base_url=served.url, verify=False) as client:
            body = {"model": served.model, **count_from(20, 10)}
            refused = await client.post(PATH, json=body)

        answer = await stream.end()

        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == 503
        assert answer.tokens == 1500
        counted(answer, 10)
        assert await ended(served) == 0
    footprint.assert_gone()
    assert "Traceback" not in served.output()


@pytest.mark.long
async def test_what_does_not_finish_in_time_is_ended(log_file: Path) -> None:
    with Served([*ONE, "--drain-timeout=0.5"], environment=ONE_THREAD, log=log_file) as served:
        footprint = Footprint.of(served)
        stream = Stream(served, PATH, count_from(10, 8000))
        await stream.reach(10)
        send(served, signal.SIGTERM)

        assert await ended(served) == 0
        with pytest.raises((StreamFailed, httpx.HTTPError)):
            await stream.end()
    footprint.assert_gone()
    assert "Traceback" not in served.output()


@pytest.mark.long
async def test_a_second_signal_does_not_wait(log_file: Path) -> None:
    with Served([*ONE, "--drain-timeout=600"], environment=ONE_THREAD, log=log_file) as served:
        footprint = Footprint.of(served)
        stream = Stream(served, PATH, count_from(10, 8000))
        await stream.reach(10)
        send(served, signal.SIGINT)
        while "stopping: 1 requests run" not in served.output():  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.02)
        send(served, signal.SIGTERM)

        assert await ended(served) == 0
        with pytest.raises((StreamFailed, httpx.HTTPError)):
            await stream.end()
    footprint.assert_gone()
    assert "Traceback" not in served.output()


async def test_children_of_a_killed_launcher_go_by_themselves(log_file: Path) -> None:
    before = orphans()
    with Served([*TWO, NEVER_BY_ITSELF], log=log_file) as served:
        footprint = Footprint.of(served)
        stream = Stream(served, PATH, count_from(10, 8000))
        await stream.reach(10)
        send(served, signal.SIGKILL)

        await ended(served)
        with pytest.raises(httpx.HTTPError):
            await stream.end()
    await asyncio.to_thread(footprint.assert_gone, PATIENCE_S)
    assert orphans() <= before


# -- a server that loses parts, in the order of the tests


@pytest.fixture(scope="module")
def even(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Footprint]]:
    """A server whose scheduler evens out what is more than a little uneven."""
    flags = [*TWO, "--migrate-below=150", "--migrate-above=160", "--round-ms=100"]
    flags.append("--max-restarts=0")
    with Served(flags, log=tmp_path_factory.mktemp("even") / "log") as served:
        deadline = time.monotonic() + PATIENCE_S
        while not Footprint.of(served).named("kvmig.cli.scheduler"):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield served, Footprint.of(served)


async def one_sided(served: Served) -> None:
    """Put all streams on one instance; the scheduler spreads them again, and all end right."""
    known = {report["id"] for report in await asyncio.to_thread(served.get, "migrations")}
    numbers = [1000 * n for n in range(6)]
    streams = [Stream(served, PATH, count_from(number, 1500)) for number in numbers]
    for stream in streams:
        await row_of(served, stream, output_tokens=1)
    async with asyncio.TaskGroup() as tasks:
        for stream in streams:
            tasks.create_task(place_once(served, stream, "i0"))
    answers = [await stream.end() for stream in streams]

    reports = await asyncio.to_thread(served.get, "migrations")
    away = [
        report
        for report in reports
        if report["id"] not in known and report["source"] == "i0" and report["state"] == "committed"
    ]
    assert away, f"nobody moved a request off i0: {reports}"
    for number, answer in zip(numbers, answers, strict=True):
        assert answer.tokens == 1500
        counted(answer, number)
    assert_server_is_empty(served)


async def place_once(served: Served, stream: Stream, instance: str) -> None:
    """Ask for a move there, whether or not the scheduler moves it at the same time."""
    answer = await ask(served, stream.answer.request_id, instance)
    assert answer.status_code in (200, 409), answer.text


async def test_the_scheduler_evens_out_by_itself(even: tuple[Served, Footprint]) -> None:
    await one_sided(even[0])


async def test_a_killed_scheduler_comes_back_and_serving_goes_on(
    even: tuple[Served, Footprint],
) -> None:
    served, footprint = even
    (scheduler,) = footprint.named("kvmig.cli.scheduler")
    stream = Stream(served, PATH, count_from(10, 1000))
    await stream.reach(10)
    scheduler.kill()
    assert (await stream.end()).tokens == 1000

    async with asyncio.timeout(PATIENCE_S):
        while not (again := Footprint.of(served).named("kvmig.cli.scheduler")):
            assert (await run_unmoved(served, PATH, count_from(20, 20))).tokens == 20
    assert again != [scheduler]
    assert "serving goes on without migrations" in served.output()
    await asyncio.to_thread(assert_server_is_empty, served)


async def test_the_new_scheduler_evens_out_too(even: tuple[Served, Footprint]) -> None:
    await asyncio.sleep(2)  # it hears of the instances
    await one_sided(even[0])


async def test_a_killed_instances_streams_go_on_at_the_other_one(
    even: tuple[Served, Footprint],
) -> None:
    served, footprint = even
    streams = [Stream(served, PATH, count_from(1000 * n, 2000)) for n in range(2)]
    rows = [await row_of(served, stream, output_tokens=1) for stream in streams]
    assert {row["instance"] for row in rows} == {"i0", "i1"}
    llumlet(footprint, "i0").kill()

    for n, stream in enumerate(streams):
        answer = await stream.end()
        assert answer.tokens == 2000
        counted(answer, 1000 * n)
    rows = await asyncio.to_thread(served.get, "instances")
    assert [(row["id"], row["state"]) for row in rows] == [("i0", "failed"), ("i1", "serving")]
    assert (await run_unmoved(served, PATH, count_from(20, 20))).tokens == 20
    assert "instance i0 is given up (killed by SIGKILL)" in served.output()
    await asyncio.to_thread(assert_server_is_empty, served)


async def test_without_any_instance_the_server_ends_with_exit_code_1(
    even: tuple[Served, Footprint],
) -> None:
    served, footprint = even
    for process in footprint.named("kvmig.cli.llumlet"):
        process.kill()

    assert await ended(served) == 1
    assert "no instance is left, stopping" in served.output()
    footprint.assert_gone()


def llumlet(footprint: Footprint, instance: str) -> psutil.Process:
    """The process that may write the instance's shared memory."""
    (found,) = [
        one
        for one in footprint.named("kvmig.cli.llumlet")
        if any(f"-{instance}-" in file.path and "+" in file.mode for file in one.open_files())
    ]
    return found
