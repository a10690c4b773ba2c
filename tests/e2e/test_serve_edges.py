"""Migrations that are crossed by something: other migrations, a client that leaves, the end."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

import httpx
import pytest

from kvmig_tools.patience import SERVER_PATIENCE_S
from tests.support.leaks import Footprint, assert_server_is_empty
from tests.support.retries import EndedEarly
from tests.support.streams import (
    Stream,
    ask,
    count_from,
    counted,
    move,
    move_one,
    other,
    place,
    row_of,
    run_unmoved,
    sequences,
    start_stream,
    start_streams,
)
from tests.support.toys import Toys
from tests.support.waiting import until

pytestmark = pytest.mark.server

SEEDS = pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2, 3))]
)

PATH = "/v1/completions"
TOKENS = 60
HELD = 20
"""Where streams wait for the test."""
FIRSTS = (1000, 3000, 5000, 7000)
"""As many as may leave an instance at a time."""
JSON = {"Content-Type": "application/json"}


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The body of an error in OpenAI's shape."""
    error: dict[str, Any] = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == answer.status_code
    return error


# -- others at the same time


async def test_several_move_at_once_in_both_directions(toys: Toys) -> None:
    with toys.held(HELD):
        streams = await start_streams(toys, [count_from(100 * n, TOKENS) for n in range(8)], HELD)
        rows = [
            row for stream in streams for row in await sequences(toys, stream.answer.request_id)
        ]
        assert {row["instance"] for row in rows} == {"i0", "i1"}
        reports = await asyncio.gather(*(move_one(toys, row) for row in rows))
    answers = [await stream.end() for stream in streams]

    assert {report["state"] for report in reports} == {"committed"}, reports
    assert {report["source"] for report in reports} == {"i0", "i1"}
    for n, answer in enumerate(answers):
        counted(answer, 100 * n)
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage["completion_tokens"] == TOKENS


async def test_calls_that_move_the_same_way_at_once_share_transfers(toys: Toys) -> None:
    prompts = [" ".join(f"{n:04d}" for n in range(first, first + 700)) for first in FIRSTS]
    bodies = [count_from(0, TOKENS, prompt=prompt) for prompt in prompts]
    with toys.held(HELD):
        streams = [Stream(toys, PATH, body) for body in bodies]
        for stream in streams:
            await place(toys, stream, "i0")
        rows = [await row_of(toys, stream, output_tokens=HELD) for stream in streams]
        reports = await moved_at_once(toys, rows)
    for stream, first in zip(streams, FIRSTS, strict=True):
        counted(await stream.end(), first + 698)

    assert [report["state"] for report in reports] == ["committed"] * len(FIRSTS), reports
    for report in reports:
        assert report["fused_chunks"] <= sum(stage["blocks"] for stage in report["stages"])
    assert sum(report["fused_chunks"] for report in reports) >= 2


async def moved_at_once(toys: Toys, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Move requests from i0 to i1, which i0 is told of all at the same time; the reports.

    On a busy machine it may have moved the first one before the front end gets the next order, so
    it stands still until the front end has passed on all of them.
    """
    sent: list[str] = []

    async def note(event: str, _: Any) -> None:
        if event == "http11.send_request_body.complete":
            sent.append(event)

    process = Footprint.of(toys).llumlets()["i0"]
    async with httpx.AsyncClient(
        base_url=toys.url, timeout=SERVER_PATIENCE_S, verify=False
    ) as client:
        process.suspend()
        try:
            asked = [
                asyncio.create_task(
                    client.post(
                        "/kvmig/v1/migrations",
                        json={"request_id": row["id"], "destination": "i1"},
                        extensions={"trace": note},
                    )
                )
                for row in rows
            ]
            await until(lambda: len(sent) == len(rows))
            for _ in range(3):  # it reads its connections in turn
                (await client.get("/health")).raise_for_status()
        finally:
            process.resume()
        return [(await one).raise_for_status().json() for one in asked]


async def test_a_second_move_of_a_moving_request_is_a_conflict(toys: Toys) -> None:
    with toys.held(HELD):
        stream = Stream(toys, PATH, count_from(10, TOKENS))
        row = await row_of(toys, stream, output_tokens=10)
        to = other(row["instance"])
        answers = await asyncio.gather(*(ask(toys, row["id"], to) for _ in "abc"))
    answer = await stream.end()

    assert sorted(one.status_code for one in answers) == [200, 409, 409]
    assert all(error_of(one)["type"] == "ConflictError" for one in answers if one.is_error)
    counted(answer, 10)


async def test_a_storm_of_moves_changes_no_stream(toys: Toys) -> None:
    chance = random.Random(20)
    numbers = [chance.randrange(0, 5000) for _ in range(10)]
    bodies = [count_from(number, chance.randrange(250, 400)) for number in numbers]
    reports: list[dict[str, Any]] = []

    async def move_any(live: list[Stream]) -> None:
        stream = chance.choice(live)
        answer = await ask(toys, stream.answer.request_id, chance.choice(["i0", "i1"]))
        assert answer.status_code in (200, 404, 409), answer.text
        if answer.status_code == 200:
            reports.append(answer.json())

    with toys.held(200):
        streams = [Stream(toys, PATH, body) for body in bodies]
        while sum(report["state"] == "committed" for report in reports) <= 10:
            await move_any(streams)
    while live := [one for one in streams if not one.task.done()]:
        await move_any(live)
    moved = [await stream.end() for stream in streams]

    assert {report["reason"] for report in reports} <= {"", "finished"}, reports
    unmoved = await asyncio.gather(*(run_unmoved(toys, PATH, body) for body in bodies))
    for number, whole, alone in zip(numbers, moved, unmoved, strict=True):
        whole.same_as(alone)
        counted(whole, number)


# -- the end comes first


@SEEDS
async def test_one_that_ends_while_it_moves_ends_right(toys: Toys, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(10):
        number, tokens = chance.randrange(0, 5000), chance.randrange(100, 150)
        stream = Stream(toys, PATH, count_from(number, tokens))
        with contextlib.suppress(EndedEarly):
            await stream.reach(tokens - chance.randrange(1, 60))
        asked = await ask(toys, stream.answer.request_id, chance.choice(["i0", "i1"]))
        answer = await stream.end()

        if asked.status_code == 200:
            report = asked.json()
            assert (report["state"], report["reason"]) in (
                ("committed", ""),
                ("aborted", "finished"),
            ), report
        else:
            assert asked.status_code in (404, 409), asked.text
            message = error_of(asked)["message"]
            assert "has finished" in message or "runs on instance" in message
        assert answer.usage is not None
        assert answer.usage["completion_tokens"] == tokens
        assert answer.choices[0].finish_reason == "length"
        counted(answer, number)


async def test_a_client_that_left_before_leaves_nothing_to_move(toys: Toys) -> None:
    with toys.held(HELD):
        stream = Stream(toys, PATH, count_from(30, TOKENS))
        row = await row_of(toys, stream, output_tokens=10)
        await stream.leave()
    await asyncio.to_thread(assert_server_is_empty, toys)

    answer = await ask(toys, row["id"], other(row["instance"]))

    assert answer.status_code in (404, 409)
    assert error_of(answer)["param"] == "request_id"


@SEEDS
async def test_a_client_may_leave_while_its_request_moves(toys: Toys, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(4):
        with toys.held(HELD):
            stream = Stream(toys, PATH, count_from(chance.randrange(0, 5000), TOKENS))
            row = await row_of(toys, stream, output_tokens=5)
            asking = asyncio.create_task(ask(toys, row["id"], other(row["instance"])))
            await asyncio.sleep(chance.random() * 0.03)
            await stream.leave()
        answer = await asking
        if answer.status_code == 200:
            assert answer.json()["reason"] in ("", "aborted_by_client", "finished"), answer.text
        else:
            assert answer.status_code in (404, 409), answer.text
    # The fixture sees that nothing is left at either end.


async def test_a_client_that_leaves_after_a_move_frees_the_destination(toys: Toys) -> None:
    with toys.held(HELD):
        stream = await start_stream(toys, count_from(40, TOKENS), HELD)
        (report,) = await move(toys, stream)
        assert report["state"] == "committed"
        await stream.leave()
        await asyncio.to_thread(assert_server_is_empty, toys)


# -- what can't be moved


@pytest.mark.parametrize(
    ("request_id", "destination", "status", "kind", "param"),
    [
        ("nobody", "", 404, "NotFoundError", "request_id"),
        ("", "i7", 404, "NotFoundError", "destination"),
        ("", "same", 409, "ConflictError", "destination"),
    ],
)
async def test_what_cannot_be_moved_is_refused_and_the_stream_goes_on(
    toys: Toys, request_id: str, destination: str, status: int, kind: str, param: str
) -> None:
    with toys.held(HELD):
        stream = Stream(toys, PATH, count_from(50, TOKENS))
        row = await row_of(toys, stream, output_tokens=10)
        if destination == "same":
            destination = row["instance"]

        answer = await ask(toys, request_id or row["id"], destination or other(row["instance"]))

    assert answer.status_code == status, answer.text
    assert (error_of(answer)["type"], error_of(answer)["param"]) == (kind, param)
    counted(await stream.end(), 50)


async def test_a_finished_request_cannot_be_moved(toys: Toys) -> None:
    answer = await run_unmoved(toys, PATH, count_from(60, 20))

    refused = await ask(toys, answer.request_id, "i1")

    assert refused.status_code == 409
    assert "has finished" in error_of(refused)["message"]


async def test_a_call_of_two_sequences_must_be_named_by_sequence(toys: Toys) -> None:
    with toys.held(HELD):
        stream = await start_stream(toys, count_from(70, TOKENS, n=2, temperature=1), 2 * HELD)

        refused = await ask(toys, stream.answer.request_id, "i1")

        assert refused.status_code == 409
        rows = await sequences(toys, stream.answer.request_id)
        assert len(rows) == 2
        assert all(row["id"] in error_of(refused)["message"] for row in rows)
        await stream.leave()


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("{", "not JSON"),
        ("[]", "body"),
        ("{}", "request_id"),
        ('{"destination": "i1"}', "request_id"),
        ('{"request_id": 1, "destination": "i1"}', "request_id"),
        ('{"request_id": "a", "destination": "i1", "more": 1}', "more"),
        ('{"request_id": "", "destination": "i1"}', "request_id"),
    ],
)
async def test_a_malformed_body_is_answered_with_what_is_wrong(
    toys: Toys, body: str, named: str
) -> None:
    answer = await asyncio.to_thread(
        httpx.post, f"{toys.url}/kvmig/v1/migrations", content=body, headers=JSON, verify=False
    )

    assert answer.status_code == 400
    assert named in error_of(answer)["message"]
