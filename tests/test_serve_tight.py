"""Migrations where blocks, batch slots and steps are scarce, over TCP.

The server has little of everything: blocks for one long request an instance, four
batch slots, prefill in chunks of two blocks, and one staging buffer of one block.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kvmig.cli.served import Served
from tests.conftest import NEVER_BY_ITSELF, PATIENT
from tests.leaks import Footprint, assert_server_is_empty
from tests.streams import (
    EndedEarly,
    Stream,
    ask,
    move,
    move_one,
    other,
    place,
    row_of,
    run_moved,
    run_unmoved,
)

pytestmark = pytest.mark.server

PATH = "/v1/completions"
BLOCKS = 140
BLOCK = 32
SLOTS = 4
INSTANCES = ("i0", "i1")


@pytest.fixture(scope="module")
def tight_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    flags = [
        "--enforce-eager", f"--block-size={BLOCK}", f"--num-gpu-blocks-override={BLOCKS}",
        "--max-model-len=4096", f"--max-num-seqs={SLOTS}", "--max-num-batched-tokens=64",
        "--transport=tcp", "--rest=follow", "--staging-chunks=1", "--chunk-bytes=65536",
        "--instances=2", *PATIENT, NEVER_BY_ITSELF, "--drain-timeout=5",
    ]  # fmt: skip
    log = tmp_path_factory.mktemp("tight") / "log"
    with Served(flags, log=log, environment={"VLLM_SERVER_DEV_MODE": "1"}) as served:
        yield served
        footprint = Footprint.of(served)
    footprint.assert_gone()


@pytest.fixture
def tight(tight_server: Served) -> Iterator[Served]:
    """With cold prefix caches (a route of vLLM's development mode)."""
    reset_prefix_caches(tight_server)
    yield tight_server
    assert_server_is_empty(tight_server)


def prompt_of(tokens: int, number: int) -> str:
    """Counts up to `number`; numbers differ from the first, so nothing is shared."""
    text = "".join(f" {n:04d}" for n in range(number - tokens // 5 + 2, number))
    return f"Count:{text}"


def count_on(number: int, prompt_tokens: int, tokens: int, **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt_of(prompt_tokens, number), "max_tokens": tokens, "temperature": 0}
    return {**body, "ignore_eos": True, **fields}


def preemptions(served: Served) -> float:
    """Of all instances, ever; vLLM's own count loses those of requests that then move."""
    text = httpx.get(f"{served.url}/metrics", verify=False).text
    found = re.findall(r"^kvmig_preemptions_total\{.*\} (\S+)$", text, re.MULTILINE)
    return sum(map(float, found))


def reset_prefix_caches(served: Served) -> None:
    httpx.post(f"{served.url}/reset_prefix_cache", verify=False).raise_for_status()


async def row_at(served: Served, instance: str) -> dict[str, Any]:
    """What the admin API says of the instance."""
    rows: list[dict[str, Any]] = await asyncio.to_thread(served.get, "instances")
    return next(row for row in rows if row["id"] == instance)


async def test_a_move_over_tcp_changes_nothing(tight: Served) -> None:
    body = count_on(2000, 500, 1000, temperature=0.8, seed=3, logprobs=2)
    unmoved = await run_unmoved(tight, PATH, body)

    moved, reports = await run_moved(tight, PATH, body)

    assert [(one["state"], one["transport"]) for one in reports] == [("committed", "tcp")] * 2
    moved.same_as(unmoved)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 4}])
async def test_a_request_moves_in_the_middle_of_its_prefill(
    tight: Served, sampling: dict[str, Any]
) -> None:
    body = count_on(4000, 3500, 100, **sampling)
    stream = Stream(tight, PATH, body)
    row = await row_of(tight, stream)
    report = await move_one(tight, row)
    moved = await stream.end()

    assert report["state"] == "committed"
    assert report["output_tokens"] == 0, "it was still in prefill"
    moved.same_as(await run_unmoved(tight, PATH, body))


async def test_a_full_destination_refuses_and_the_stream_goes_on(tight: Served) -> None:
    large = Stream(tight, PATH, count_on(4000, 3500, 500))
    full = (await row_of(tight, large, output_tokens=1))["instance"]
    body = count_on(2000, 1500, 300)
    stream = Stream(tight, PATH, body)
    row = await row_of(tight, stream, output_tokens=1)
    assert row["instance"] == other(full)

    report = await move_one(tight, row)

    assert (report["state"], report["reason"], report["stages"]) == ("aborted", "no_blocks", [])
    assert report["downtime_ms"] is None
    moved = await stream.end()
    await large.leave()
    moved.same_as(await run_unmoved(tight, PATH, body))


async def test_a_destination_that_gets_full_while_it_copies_refuses(tight: Served) -> None:
    """Two requests share their prompt at the source, but not on their way."""
    for attempt in range(8):
        with contextlib.suppress(EndedEarly):
            reports = await two_with_one_prompt(tight, tokens=4 + 2 * attempt)
            assert {report["reason"] for report in reports} <= {"", "no_blocks"}, reports
            if any(report["reason"] and report["stages"] for report in reports):
                return
        await asyncio.to_thread(assert_server_is_empty, tight)
        reset_prefix_caches(tight)
    pytest.fail("the destination had room at every stage, or none at the first")


async def two_with_one_prompt(served: Served, tokens: int) -> list[dict[str, Any]]:
    """Start two on one instance, move both when they have so many tokens; they end right."""
    blocker = Stream(served, PATH, count_on(9000, 3500, 500))
    await row_of(served, blocker, output_tokens=1)
    bodies = [
        count_on(2000 + number, 0, 700, prompt=prompt_of(2140, 2000) + tail)
        for number, tail in enumerate((" 2000", " 5000"))
    ]
    streams = []
    for body in bodies:
        streams.append(Stream(served, PATH, body))
        await row_of(served, streams[-1])  # so that it counts when the next one is dispatched
    rows = [await row_of(served, stream, output_tokens=tokens) for stream in streams]
    await blocker.leave()

    reports = await asyncio.gather(*(move_one(served, row) for row in rows))

    for stream, body in zip(streams, bodies, strict=True):
        (await stream.end()).same_as(await run_unmoved(served, PATH, body))
    return list(reports)


async def test_without_a_batch_slot_a_destination_refuses(tight: Served) -> None:
    stream = Stream(tight, PATH, count_on(1000, 100, 900))
    await place(tight, stream, "i0")
    others = [Stream(tight, PATH, count_on(2000 + n, 50, 1000)) for n in range(SLOTS)]
    for one in others:
        await place(tight, one, "i1")

    (report,) = await move(tight, stream)

    assert (report["state"], report["reason"]) == ("aborted", "no_batch_slot")
    for one in others:
        await one.leave()
    moved = await stream.end()
    moved.same_as(await run_unmoved(tight, PATH, count_on(1000, 100, 900)))


async def test_a_request_that_waits_moves_to_where_it_can_run(tight: Served) -> None:
    running = [Stream(tight, PATH, count_on(2000 + n, 50, 1000)) for n in range(2 * SLOTS)]
    rows = [await row_of(tight, stream, output_tokens=1) for stream in running]
    body = count_on(5000, 200, 100)
    stream = Stream(tight, PATH, body)
    waiting = await row_of(tight, stream, "waiting")
    free = other(waiting["instance"])
    leaves = next(one for one, row in zip(running, rows, strict=True) if row["instance"] == free)
    await leaves.leave()
    while (await row_at(tight, free))["running"] == SLOTS:  # noqa: ASYNC110 - another process
        await asyncio.sleep(0.01)

    report = await move_one(tight, waiting)

    assert (report["state"], report["output_tokens"]) == ("committed", 0), report
    moved = await stream.end()
    for one in running:
        await one.leave()
    moved.same_as(await run_unmoved(tight, PATH, body))


async def test_requests_that_are_preempted_move_all_the_same(tight: Served) -> None:
    """Eight streams, one a place, grow to more blocks than both instances have."""
    before = preemptions(tight)
    chance = random.Random(5)
    bodies = [count_on(1500 + 1000 * n, 700, 600) for n in range(2 * SLOTS)]
    streams = [Stream(tight, PATH, body) for body in bodies]
    reports = []
    while live := [stream for stream in streams if not stream.task.done()]:
        answer = await ask(tight, chance.choice(live).answer.request_id, chance.choice(INSTANCES))
        assert answer.status_code in (200, 404, 409), answer.text
        if answer.status_code == 200:
            reports.append(answer.json())
        await asyncio.sleep(0.02)
    moved = [await stream.end() for stream in streams]

    assert preemptions(tight) > before
    reasons = {report["reason"] for report in reports}
    expected = {"", "finished", "preempted", "started", "no_blocks", "no_batch_slot"}
    assert reasons <= expected, reports
    assert "" in reasons
    for one, body in zip(moved, bodies, strict=True):
        one.same_as(await run_unmoved(tight, PATH, body))
