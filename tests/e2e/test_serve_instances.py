"""Instances that come and go under running streams, and two front ends."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import psutil
import pytest

from kvmig.core.order_fence import TOKEN_HEADER
from kvmig_tools.nursery import Nursery
from kvmig_tools.patience import SERVER_PATIENCE_S
from kvmig_tools.served import Served
from tests.conftest import NEVER_BY_ITSELF, PATIENT
from tests.support.leaks import Footprint, assert_server_is_empty, leaving_nothing
from tests.support.streams import (
    Stream,
    call_admin,
    count_from,
    counted,
    row_of,
    run_unmoved,
    start_stream,
    start_streams,
    until_said,
)
from tests.support.toys import Toys
from tests.support.waiting import until_yes

pytestmark = pytest.mark.server

PATH = "/v1/completions"
SILENT = ("--heartbeat-timeout=20",)
"""A busy machine may hold an instance up; here nobody shall be taken for lost by it."""
TOKENS = 60
HELD = 20
"""Where streams wait for the test."""


@pytest.fixture(scope="module")
def several(toy_nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Toys]:
    """Two instances, at most three, behind two front ends."""
    flags = [*PATIENT, *SILENT, NEVER_BY_ITSELF, "--instances=2", "--max-instances=3"]
    flags += ["--front-ends=2", "--max-num-seqs=32", "--scheduler-interval-ms=50"]
    with leaving_nothing(
        Toys(flags, tmp_path_factory.mktemp("several"), nursery=toy_nursery), no_traceback=True
    ) as served:
        yield served


async def rows(served: Served) -> dict[str, dict[str, Any]]:
    """Instances by id."""
    answer = await call_admin(served, "GET", "instances")
    return {row["id"]: row for row in answer.json()["data"]}


async def until(served: Served, **states: str | None) -> dict[str, dict[str, Any]]:
    """Wait until these instances are in these states; None: until there is none of that name."""
    deadline = time.monotonic() + SERVER_PATIENCE_S
    while True:
        now = await rows(served)
        if all(now.get(name, {}).get("state") == state for name, state in states.items()):
            return now
        assert time.monotonic() < deadline, f"{states} was never true: {now}"
        await asyncio.sleep(0.1)


async def streams(served: Toys, count: int) -> list[Stream]:
    """So many, all running up to where they are held."""
    return await start_streams(served, [count_from(100 * n, TOKENS) for n in range(count)], HELD)


async def all_right(started: list[Stream]) -> None:
    """Every stream ends with exactly what an undisturbed one gives."""
    for n, stream in enumerate(started):
        answer = await stream.end()
        assert (answer.tokens, answer.choices[0].finish_reason) == (TOKENS, "length")
        counted(answer, 100 * n)


async def test_any_front_end_answers_for_the_streams_of_all(several: Toys) -> None:
    with several.held(HELD):
        started = await streams(several, 6)
        expected = {stream.answer.request_id for stream in started}

        for _ in range(8):  # whoever takes the connection
            listed = (await call_admin(several, "GET", "requests")).json()["data"]
            assert {row["call_id"] for row in listed} == expected
        moved = []
        for stream in started:
            row = await row_of(several, stream)
            destination = "i1" if row["instance"] == "i0" else "i0"
            body = {"request_id": stream.answer.request_id, "destination": destination}
            moved.append((await call_admin(several, "POST", "migrations", json=body)).json())

    assert [report["state"] for report in moved] == ["committed"] * 6
    await all_right(started)
    await asyncio.to_thread(assert_server_is_empty, several)


async def say_parked(served: Served, parked: bool) -> None:
    """Wait until several new connections in a row, to whichever front end, hear that."""
    alike, deadline = 0, time.monotonic() + SERVER_PATIENCE_S
    while alike < 8:
        async with (
            httpx.AsyncClient(base_url=served.url, timeout=SERVER_PATIENCE_S) as client,
            client.stream("GET", "/kvmig/v1/events") as answer,
        ):
            lines = answer.aiter_lines()
            told = next(
                json.loads(line[6:])
                for line in [await anext(lines), await anext(lines)]
                if line.startswith("data: ")
            )
        alike = alike + 1 if told["parked"] == parked else 0
        assert time.monotonic() < deadline


async def test_any_front_end_parks_and_wakes_the_instances_and_all_know_it(several: Toys) -> None:
    for order, parked in (("park", True), ("park", True), ("unpark", False), ("unpark", False)):
        (await call_admin(several, "POST", order)).raise_for_status()
        await say_parked(several, parked)


@contextmanager
def standing_still(process: psutil.Process) -> Iterator[None]:
    """Inside the block the process takes nothing."""
    process.suspend()
    try:
        yield
    finally:
        process.resume()


async def test_a_session_is_moved_by_the_front_end_that_served_its_last_call(
    several: Toys,
) -> None:
    first, second = Footprint.of(several).named("kvmig.frontend.process_main")
    headers = {"x-session-id": "chat"}
    for serves, waits in ((first, second), (second, first)):
        with standing_still(waits):
            stream = count_from(7, 3)
            async with httpx.AsyncClient(timeout=SERVER_PATIENCE_S) as client:
                said = await client.post(f"{several.url}{PATH}", json=stream, headers=headers)
                said.raise_for_status()
        with standing_still(serves):
            asking = asyncio.create_task(
                call_admin(several, "POST", "sessions/move", json={"session": "chat"})
            )
            await asyncio.sleep(0.5)  # until the other one has taken it
            assert not asking.done()
        moved = await asking
        # Toys keep nothing of ended requests: the one that knows the session was asked for it.
        assert (moved.status_code, moved.json().get("reason")) == (200, "unsupported"), moved.text
    nobodys = await call_admin(several, "POST", "sessions/move", json={"session": "nobody's"})
    assert nobodys.status_code == 404


async def test_a_front_end_that_dies_is_started_again_and_the_others_go_on(
    several: Toys,
) -> None:
    with several.held(HELD):
        started = await streams(several, 6)
        first, second = Footprint.of(several).named("kvmig.frontend.process_main")
        first.kill()
        ready = ("front end 0 is ready", "front end 1 is ready")
        await until_yes(lambda: any(one in several.output() for one in ready))

    ends = await asyncio.gather(*(stream.end() for stream in started), return_exceptions=True)

    lost = [end for end in ends if isinstance(end, httpx.HTTPError)]
    assert not [end for end in ends if isinstance(end, BaseException) and end not in lost]
    for n, end in enumerate(ends):
        if not isinstance(end, BaseException):
            assert end.tokens == TOKENS
            counted(end, 100 * n)
    assert second in Footprint.of(several).named("kvmig.frontend.process_main")
    await asyncio.to_thread(assert_server_is_empty, several)  # those of the dead were aborted


async def test_a_late_order_of_an_earlier_server_of_the_fleet_is_refused_by_any_front_end(
    several: Toys,
) -> None:
    there = await rows(several)
    async with httpx.AsyncClient(base_url=f"{several.url}/kvmig/v1/", verify=False) as client:
        begun = {TOKEN_HEADER: "6.1"}
        async with client.stream("GET", "events", headers=begun) as events:
            assert events.status_code == 200
    late = {TOKEN_HEADER: "5.7"}
    for method, path in (
        ("POST", "instances"), ("DELETE", "instances/i0"), ("POST", "instances/i0/drain"),
        ("DELETE", "instances/i0/drain"), ("POST", "instances/restart"), ("POST", "park"),
        ("POST", "unpark"), ("GET", "events"),
    ):  # fmt: skip
        for _ in range(4):  # some reach the other front end
            answer = await call_admin(several, method, path, headers=late)
            assert answer.status_code == 409, (method, path, answer.text)
            assert "is of an earlier server of the fleet" in answer.text
    assert {name: one["state"] for name, one in (await rows(several)).items()} == {
        name: one["state"] for name, one in there.items()
    }
    unread = await call_admin(several, "POST", "park", headers={TOKEN_HEADER: "six"})
    assert unread.status_code == 400
    assert "must be TERM.CONTACT" in unread.text
    assert (await call_admin(several, "POST", "unpark", headers=begun)).status_code == 200


async def test_a_drain_of_twenty_streams_loses_none_and_moves_them_all(several: Toys) -> None:
    added = await call_admin(several, "POST", "instances?wait_s=60", json={"count": 1})
    assert (added.status_code, [row["id"] for row in added.json()["data"]]) == (201, ["i2"])
    assert added.json()["data"][0]["state"] == "serving"
    too_many = await call_admin(several, "POST", "instances")
    assert (too_many.status_code, too_many.json()["error"]["type"]) == (409, "ConflictError")
    assert "--max-instances allows 3" in too_many.json()["error"]["message"]
    await until(several, i2="serving")
    # All on one: the others take nothing new while they drain.
    for name in ("i1", "i2"):
        assert (await call_admin(several, "POST", f"instances/{name}/drain")).status_code == 202
    await until(several, i1="draining", i2="draining")
    with several.held(HELD):
        started = await streams(several, 20)
        assert (await rows(several))["i0"]["running"] == 20
        for name in ("i1", "i2"):
            assert (
                await call_admin(several, "DELETE", f"instances/{name}/drain")
            ).status_code == 200
        listed = (await call_admin(several, "GET", "migrations")).json()["data"]
        before = {report["id"] for report in listed}

        assert (await call_admin(several, "POST", "instances/i0/drain")).status_code == 202

        now = await until(several, i0="draining")
        deadline = time.monotonic() + SERVER_PATIENCE_S
        while not now["i0"]["detail"].startswith("it is empty"):
            assert time.monotonic() < deadline, now
            await asyncio.sleep(0.05)
            now = await rows(several)
        assert not any(stream.task.done() for stream in started), "moves have emptied it"
    reports = (await call_admin(several, "GET", "migrations?limit=1000")).json()["data"]
    away = [one for one in reports if one["id"] not in before and one["state"] == "committed"]
    assert {one["destination"] for one in away if one["source"] == "i0"} == {"i1", "i2"}
    await all_right(started)
    assert (await call_admin(several, "DELETE", "instances/i0/drain")).status_code == 200
    await until(several, i0="serving")


async def test_one_that_is_ended_at_once_leaves_its_streams_to_the_others(
    several: Toys,
) -> None:
    with several.held(HELD):
        started = await streams(several, 6)

        ended = await call_admin(several, "DELETE", "instances/i2?now=true")

        assert ended.status_code == 202
        await until(several, i2=None)
    await all_right(started)
    unknown = await call_admin(several, "DELETE", "instances/i2")
    assert (unknown.status_code, unknown.json()["error"]["message"]) == (
        404, "there is no instance i2, only i0, i1",
    )  # fmt: skip


async def test_a_rolling_restart_under_load_loses_no_stream(several: Toys) -> None:
    await until(several, i0="serving", i1="serving", i2=None)
    before = {one.pid for one in llumlets(several)}
    listed = {row["pid"]: row["id"] for row in (await rows(several)).values()}
    titles = {one.pid: " ".join(one.cmdline()) for one in llumlets(several)}
    assert {pid: f"{listed[pid]} of {several.model} at {several.url}" for pid in before} == {
        pid: title.partition("kvmig.launcher.llumlet_main ")[2].rstrip()
        for pid, title in titles.items()
    }
    said = len(several.output())
    begun: list[int] = []
    over = asyncio.Event()

    async def one_after_the_other(client: int) -> None:
        while not over.is_set():
            number = 100 * client + len(begun) % 50
            begun.append(number)
            answer = await run_unmoved(several, PATH, count_from(number, TOKENS))
            assert answer.tokens == TOKENS
            counted(answer, number)

    async with asyncio.TaskGroup() as clients:
        for client in range(3):
            clients.create_task(one_after_the_other(client))
        ordered = await call_admin(several, "POST", "instances/restart")
        assert ordered.status_code == 202, ordered.text
        second = await call_admin(several, "POST", "instances/restart")
        assert second.json()["error"]["message"] == "a rolling restart is under way"
        await until_said(several, "rolling restart: done", within_s=SERVER_PATIENCE_S)
        over.set()

    assert not before & {one.pid for one in llumlets(several)}
    assert "recompute" not in several.output()
    assert "WARNING" not in several.output()[said:]
    await until(several, i0="serving", i1="serving")
    await asyncio.to_thread(assert_server_is_empty, several)


async def test_a_drain_that_is_over_its_deadline_goes_on_by_recompute(several: Toys) -> None:
    with several.held(HELD):
        started = await streams(several, 6)

        assert (await call_admin(several, "DELETE", "instances/i1?deadline_s=0")).status_code == 202

        await until(several, i1=None)
    await all_right(started)
    only = await call_admin(several, "DELETE", "instances/i0")
    assert (only.status_code, only.json()["error"]["message"]) == (
        409, "instance i0 is the only one that serves",
    )  # fmt: skip


async def test_a_killed_instance_comes_back_under_its_name(several: Toys) -> None:
    (llumlet,) = llumlets(several)
    with several.held(HELD):
        stream = await start_stream(several, count_from(100, TOKENS), HELD)
        llumlet.kill()

    answer = await stream.end()  # it has waited for the new one

    assert answer.tokens == TOKENS
    counted(answer, 100)
    await until(several, i0="serving")
    assert "instance i0 is gone (killed by SIGKILL), again in 0.5 s" in several.output()
    assert (await run_unmoved(several, PATH, count_from(20, 20))).tokens == 20
    await asyncio.to_thread(assert_server_is_empty, several)


@pytest.fixture(scope="module")
def elastic(toy_nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Toys]:
    """One instance, two under load."""
    flags = [*PATIENT, *SILENT, "--instances=1", "--max-instances=2", "--autoscale=20,200"]
    flags += ["--scale-stabilization=0.5", "--scale-cooldown=1", "--num-blocks=200"]
    with leaving_nothing(
        Toys(flags, tmp_path_factory.mktemp("elastic"), nursery=toy_nursery)
    ) as served:
        yield served


def llumlets(served: Served) -> list[psutil.Process]:
    """The processes of its instances."""
    return Footprint.of(served).named("kvmig.launcher.llumlet_main")


async def test_load_adds_an_instance_and_its_end_takes_one_away(elastic: Toys) -> None:
    with elastic.held(HELD):
        started = [Stream(elastic, PATH, count_from(100 * n, TOKENS)) for n in range(14)]
        now = await until(elastic, i0="serving", i1="serving")
        while not now["i1"]["running"]:
            started.append(Stream(elastic, PATH, count_from(100 * len(started), TOKENS)))
            await started[-1].reach(1)
            now = await rows(elastic)
    await all_right(started)

    deadline = time.monotonic() + SERVER_PATIENCE_S
    while len(await rows(elastic)) == 2 or len(llumlets(elastic)) == 2:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.2)
    assert "autoscaling: 1 more" in elastic.output()
    await asyncio.to_thread(assert_server_is_empty, elastic)
