"""Migrations where blocks, batch slots and steps are scarce, over TCP.

The server has little of everything: blocks for one long request an instance, four
batch slots, and one staging buffer of eight blocks.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvmig.engines.toy.script import ToyScript
from kvmig_tools.nursery import Nursery
from kvmig_tools.served import Served
from tests.conftest import NEVER_BY_ITSELF, PATIENT
from tests.support.leaks import assert_server_is_empty, leaving_nothing
from tests.support.streams import Stream, ask, move, move_one, other, place, row_of, run_unmoved
from tests.support.toys import Toys

pytestmark = pytest.mark.server

PATH = "/v1/completions"
BLOCKS = 70
BLOCK = 32
SLOTS = 4
TOKENS = 60
HELD = 20
"""Where streams wait for the test."""
INSTANCES = ("i0", "i1")
FLAGS = (
    f"--block-size={BLOCK}", f"--num-blocks={BLOCKS}", "--max-model-len=4096",
    f"--max-num-seqs={SLOTS}", "--transport=tcp", "--staging-buffers=1", "--chunk-bytes=4096",
    "--instances=2", *PATIENT, NEVER_BY_ITSELF, "--shutdown-timeout=5",
)  # fmt: skip


@pytest.fixture(scope="module")
def tight_server(toy_nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Toys]:
    with leaving_nothing(
        Toys(FLAGS, tmp_path_factory.mktemp("tight"), nursery=toy_nursery)
    ) as served:
        yield served


@pytest.fixture
def tight(tight_server: Toys) -> Iterator[Toys]:
    yield tight_server
    assert_server_is_empty(tight_server)


def prompt_of(tokens: int, number: int) -> str:
    """Counts up to `number`; numbers differ from the first, so nothing is shared."""
    text = "".join(f" {n:04d}" for n in range(number - tokens // 5 + 2, number))
    return f"Count:{text}"


def count_on(
    number: int, prompt_tokens: int, tokens: int = TOKENS, **fields: Any
) -> dict[str, Any]:
    body = {"prompt": prompt_of(prompt_tokens, number), "max_tokens": tokens, "temperature": 0}
    return {**body, "ignore_eos": True, **fields}


def preemptions(served: Served) -> float:
    """Of all instances, ever."""
    text = httpx.get(f"{served.url}/metrics", verify=False).text
    found = re.findall(r"^kvmig_preemptions_total\{.*\} (\S+)$", text, re.MULTILINE)
    return sum(map(float, found))


async def row_at(served: Served, instance: str) -> dict[str, Any]:
    """What the admin API says of the instance."""
    rows: list[dict[str, Any]] = await asyncio.to_thread(served.get, "instances")
    return next(row for row in rows if row["id"] == instance)


async def test_a_move_over_tcp_changes_nothing(tight: Toys) -> None:
    body = count_on(2000, 500, temperature=0.8, seed=3, logprobs=2)
    unmoved = await run_unmoved(tight, PATH, body)
    reports = []
    with tight.held(HELD):
        stream = Stream(tight, PATH, body)
        for tokens in (HELD, 2 * HELD):
            tight.play(ToyScript(hold=tokens))
            await stream.reach(tokens)
            reports += await move(tight, stream)
    moved = await stream.end()

    assert [(one["state"], one["transport"]) for one in reports] == [("committed", "tcp")] * 2
    moved.same_as(unmoved)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 4}])
async def test_a_request_moves_in_the_middle_of_its_prefill(
    tight: Toys, sampling: dict[str, Any]
) -> None:
    body = count_on(4000, 1700, **sampling)
    unmoved = await run_unmoved(tight, PATH, body)
    tight.play(ToyScript(prefill=1000))
    stream = Stream(tight, PATH, body)
    row = await row_of(tight, stream)
    while not (await row_at(tight, row["instance"]))["blocks_used"]:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    report = await move_one(tight, row)
    tight.play(ToyScript())
    moved = await stream.end()

    assert report["state"] == "committed"
    assert report["output_tokens"] == 0, "it was still in prefill"
    moved.same_as(unmoved)


async def test_a_full_destination_refuses_and_the_stream_goes_on(tight: Toys) -> None:
    body = count_on(2000, 700)
    with tight.held(HELD):
        large = Stream(tight, PATH, count_on(4000, 1700))
        full = (await row_of(tight, large, output_tokens=1))["instance"]
        stream = Stream(tight, PATH, body)
        row = await row_of(tight, stream, output_tokens=1)
        assert row["instance"] == other(full)

        report = await move_one(tight, row)

        assert (report["state"], report["reason"], report["stages"]) == ("aborted", "no_blocks", [])
        assert report["downtime_ms"] is None
        assert (await row_of(tight, stream))["instance"] == other(full)
    moved = await stream.end()
    await large.leave()
    moved.same_as(await run_unmoved(tight, PATH, body))


async def test_a_destination_that_gets_full_while_it_copies_refuses(tmp_path: Path) -> None:
    """Copies take a second, in which the request grows by more than is free there."""
    flags = [*FLAGS, "--max-bandwidth=0.01"]
    body = count_on(2000, 700, 400)
    with Toys(flags, tmp_path) as served:
        with served.held(300):
            filler = Stream(served, PATH, count_on(9000, (BLOCKS - 26) * BLOCK - 300, 400))
            full = (await row_of(served, filler, output_tokens=300))["instance"]
            served.play(ToyScript(hold=HELD))
            stream = Stream(served, PATH, body)
            row = await row_of(served, stream, output_tokens=HELD)
            assert row["instance"] == other(full)
            before = (await row_at(served, full))["blocks_used"]

            moving = asyncio.create_task(move_one(served, row))
            while (await row_at(served, full))["blocks_used"] == before:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            served.play(ToyScript(hold=300))
            report = await moving

            assert (report["state"], report["reason"]) == ("aborted", "no_blocks"), report
            assert report["stages"], "there was room at first"
            await filler.leave()
        (await stream.end()).same_as(await run_unmoved(served, PATH, body))
        await asyncio.to_thread(assert_server_is_empty, served)


async def test_without_a_batch_slot_a_destination_refuses(tight: Toys) -> None:
    with tight.held(HELD):
        stream = Stream(tight, PATH, count_on(1000, 100))
        await place(tight, stream, "i0")
        others: list[Stream] = []
        for n in range(SLOTS):
            others.append(Stream(tight, PATH, count_on(2000 + n, 50)))
            await place(tight, others[n], "i1")

        (report,) = await move(tight, stream)

        assert (report["state"], report["reason"]) == ("aborted", "no_batch_slot")
        for one in others:
            await one.leave()
    moved = await stream.end()
    moved.same_as(await run_unmoved(tight, PATH, count_on(1000, 100)))


async def test_a_request_that_waits_moves_to_where_it_can_run(tight: Toys) -> None:
    body = count_on(5000, 200)
    with tight.held(HELD):
        # One after the other: of eight at once the dispatcher may send five to four slots.
        running: list[Stream] = []
        for n in range(2 * SLOTS):
            running.append(Stream(tight, PATH, count_on(2000 + n, 50)))
            await place(tight, running[n], INSTANCES[n % 2])
        stream = Stream(tight, PATH, body)
        waiting = await row_of(tight, stream, "waiting")
        free = other(waiting["instance"])
        await running[INSTANCES.index(free)].leave()
        while (await row_at(tight, free))["running"] == SLOTS:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.01)

        report = await move_one(tight, waiting)

        assert (report["state"], report["output_tokens"]) == ("committed", 0), report
        await stream.reach(HELD)
        for one in running:
            await one.leave()
    moved = await stream.end()
    moved.same_as(await run_unmoved(tight, PATH, body))


@pytest.mark.long
async def test_requests_that_are_preempted_move_all_the_same(tight: Toys) -> None:
    """Eight streams, one a place, grow to more blocks than both instances have."""
    before = preemptions(tight)
    chance = random.Random(5)
    bodies = [count_on(1500 + 1000 * n, 350, 900) for n in range(2 * SLOTS)]
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
