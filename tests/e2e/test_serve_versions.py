"""Servers whose weights on disk are replaced: toys that count by 1, then by 2, then by 3."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from kvmig_tools.nursery import Nursery
from kvmig_tools.patience import SERVER_PATIENCE_S
from kvmig_tools.served import Served
from tests.conftest import PATIENT
from tests.support.leaks import assert_server_is_empty, leaving_nothing
from tests.support.streams import (
    Stream,
    StreamFailed,
    ask,
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

pytestmark = pytest.mark.server

PATH = "/v1/completions"
TOKENS = 60
HELD = 20
FLAGS = (
    "--heartbeat-timeout=20",
    "--scheduler-interval-ms=50",
    "--failover-timeout=1",
    "--max-restarts=0",
)


@pytest.fixture(scope="module")
def three(toy_nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Toys]:
    """Three instances."""
    flags = [*PATIENT, *FLAGS, "--instances=3", "--max-instances=6"]
    with leaving_nothing(
        Toys(flags, tmp_path_factory.mktemp("three"), nursery=toy_nursery), no_traceback=True
    ) as served:
        yield served


@pytest.fixture(scope="module")
def two_classes(toy_nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Toys]:
    """Two instances, which round differently."""
    flags = [*PATIENT, *FLAGS, "--instances=2", "--instance-flags=i1: --numerics=other"]
    with leaving_nothing(
        Toys(flags, tmp_path_factory.mktemp("two_classes"), nursery=toy_nursery)
    ) as served:
        yield served


async def weights(served: Served) -> dict[str, str]:
    """Of each instance that serves."""
    rows = (await call_admin(served, "GET", "instances")).json()["data"]
    return {row["id"]: row["weights"] for row in rows if row["state"] == "serving"}


async def until_weights(served: Toys, **wanted: str) -> None:
    """Wait until these instances, and no others, serve with these weights."""
    deadline = time.monotonic() + SERVER_PATIENCE_S
    while (now := await weights(served)) != wanted:
        assert time.monotonic() < deadline, (now, served.output()[-2000:])
        await asyncio.sleep(0.05)


async def started(served: Toys, count: int) -> list[Stream]:
    """So many streams, all running up to where they are held."""
    return await start_streams(served, [count_from(100 * n, TOKENS) for n in range(count)], HELD)


async def test_in_a_rolling_restart_onto_other_weights_each_stream_ends_under_its_own(
    three: Toys,
) -> None:
    with three.held(HELD):
        old = await started(three, 9)
        three.replace_weights(2)
        with three.held(HELD):
            answer = await call_admin(three, "POST", "instances/restart")
            assert answer.status_code == 202, answer.text
            # The last of the old ones holds all nine, and waits for their ends.
            await until_weights(three, i0="counts-by-2", i1="counts-by-2")
            rows = [await row_of(three, stream) for stream in old]
            new = await start_stream(three, count_from(4000, TOKENS), HELD)
            row = await row_of(three, new)
    ends = [await stream.end() for stream in old]

    assert {one["instance"] for one in rows} == {"i2"}
    assert row["instance"] in ("i0", "i1")
    for n, end in enumerate(ends):
        assert end.tokens == TOKENS
        counted(end, 100 * n)
    assert (await new.end()).tokens == TOKENS
    counted(new.answer, 4000, by=2)
    await until_said(three, "rolling restart: done")
    assert len(set((await weights(three)).values())) == 1
    await asyncio.to_thread(assert_server_is_empty, three)


async def test_at_the_deadline_a_stream_that_could_go_on_nowhere_ends_and_says_why(
    three: Toys,
) -> None:
    with three.held(HELD):
        old = await started(three, 3)
        three.replace_weights(3)
        with three.held(HELD):
            body = {"deadline_s": 2}
            assert (
                await call_admin(three, "POST", "instances/restart", json=body)
            ).status_code == 202
            failed = await asyncio.gather(*(one.end() for one in old), return_exceptions=True)
            await until_said(three, "rolling restart: done", 2)

    for n, (stream, error) in enumerate(zip(old, failed, strict=True)):
        assert isinstance(error, StreamFailed)
        words = "no other one has the weights that the request began with (counts-by-2)"
        assert words in str(error)
        assert "deadline_s" in str(error)
        counted(stream.answer, 100 * n, by=2)
    await asyncio.to_thread(assert_server_is_empty, three)


async def test_a_stream_whose_weights_died_with_their_last_instance_ends_and_says_so(
    three: Toys,
) -> None:
    assert (await call_admin(three, "DELETE", "instances/i2?now=true")).status_code == 202
    three.replace_weights(4)
    await until_weights(three, i0="counts-by-3", i1="counts-by-3")
    with three.held(HELD):
        (stream,) = await started(three, 1)
        row = await row_of(three, stream)
        rest = {"i0", "i1"} - {row["instance"]}
        assert (
            await call_admin(three, "DELETE", f"instances/{rest.pop()}?now=true")
        ).status_code == 202
        assert (await call_admin(three, "POST", "instances", json={"count": 2})).status_code == 201
        deadline = time.monotonic() + SERVER_PATIENCE_S
        while list((await weights(three)).values()).count("counts-by-4") < 2:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        path = f"instances/{row['instance']}?now=true"
        assert (await call_admin(three, "DELETE", path)).status_code == 202
        with pytest.raises(StreamFailed, match="no instance with the weights that the request"):
            await stream.end()
    counted(stream.answer, 0, by=3)
    answer = await run_unmoved(three, PATH, count_from(20, 20))
    counted(answer, 20, by=4)


async def test_with_room_for_no_second_version_a_restart_is_refused_before_anything_is_drained(
    three: Toys,
) -> None:
    gone, kept = sorted(await weights(three))
    assert (await call_admin(three, "DELETE", f"instances/{gone}?now=true")).status_code == 202
    await until_weights(three, **{kept: "counts-by-4"})
    three.replace_weights(5)

    refused = await call_admin(three, "POST", "instances/restart")

    assert refused.status_code == 409
    message = refused.json()["error"]["message"]
    assert message == (
        "1 instance serves, must be 2 or more:"
        f" instance {kept} runs weights counts-by-4, those on disk are counts-by-5,"
        " and there is no room for both; add an instance first (POST /kvmig/v1/instances)"
    )
    assert await weights(three) == {kept: "counts-by-4"}


async def test_a_move_that_rounds_otherwise_needs_the_callers_word(two_classes: Toys) -> None:
    with two_classes.held(HELD):
        (stream,) = await started(two_classes, 1)
        row = await row_of(two_classes, stream)
        destination = "i1" if row["instance"] == "i0" else "i0"

        refused = (await ask(two_classes, row["id"], destination)).json()
        body = {"request_id": row["id"], "destination": destination, "inexact": True}
        moved = (await call_admin(two_classes, "POST", "migrations", json=body)).json()

    assert (refused["state"], refused["reason"]) == ("aborted", "incompatible")
    assert "round differently" in refused["detail"]
    assert "engine=other" in refused["detail"]
    assert (moved["state"], moved["exact"]) == ("committed", False)
    assert (await stream.end()).tokens == TOKENS
    counted(stream.answer, 0)
    await asyncio.to_thread(assert_server_is_empty, two_classes)


async def test_a_drain_moves_nothing_to_another_class_by_itself(two_classes: Toys) -> None:
    with two_classes.held(HELD):
        (stream,) = await started(two_classes, 1)
        row = await row_of(two_classes, stream)
        before = (await call_admin(two_classes, "GET", "migrations")).json()["data"]
        path = f"instances/{row['instance']}/drain"
        assert (await call_admin(two_classes, "POST", path)).status_code == 202
        await asyncio.sleep(0.5)  # ten rounds of the scheduler
        assert (await row_of(two_classes, stream))["instance"] == row["instance"]
        assert (await call_admin(two_classes, "GET", "migrations")).json()["data"] == before
        assert (await call_admin(two_classes, "DELETE", path)).status_code == 200
    assert (await stream.end()).tokens == TOKENS
