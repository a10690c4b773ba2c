"""Servers that have joined one scheduler: a whole one is drained, and the policy balances them."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import PATIENT
from tests.e2e.test_serve_policies import clients_of
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
SEATS = 3


@contextmanager
def joined(
    folder: Path, flags: tuple[str, ...], more: tuple[str, ...] = ()
) -> Iterator[tuple[CommonScheduler, Toys, Toys]]:
    """A scheduler and two servers. flags: of both; more: of the first one."""
    flags = (*PATIENT, *flags)
    with ExitStack() as stack:
        scheduler = stack.enter_context(common_scheduler(folder))
        a = stack.enter_context(joined_toys(scheduler, folder / "a", [*flags, *more]))
        b = stack.enter_context(joined_toys(scheduler, folder / "b", flags))
        yield scheduler, a, b


async def streaming(served: Toys, firsts: list[int]) -> list[Stream]:
    """Streams that have begun, and wait at HELD tokens."""
    return await start_streams(served, [count_from(first, TOKENS) for first in firsts], HELD)


async def ended(streams: list[Stream], firsts: list[int]) -> None:
    """All streams end with what they would have had at one engine."""
    for stream, first in zip(streams, firsts, strict=True):
        answer = await stream.end()
        assert answer.tokens == TOKENS
        counted(answer, first)


def drain_of(served: Toys) -> dict[str, Any]:
    """The report of the server's drain."""
    answer = httpx.get(f"{served.url}/kvmig/v1/drain", verify=False, timeout=30)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def own_rows(served: Toys) -> list[dict[str, Any]]:
    return [row for row in served.get("instances") if not row["server"]]


async def test_a_whole_server_is_drained_and_its_engines_end_while_it_relays(
    tmp_path: Path,
) -> None:
    with joined(tmp_path, (), ("--instances=2",)) as (_, a, b):
        await until_yes(lambda: all(len(one.get("instances")) == 3 for one in (a, b)))
        there = own_instance(b)
        firsts = [100 * number for number in range(8)]
        with a.held(HELD), b.held(HELD):
            streams = await streaming(a, firsts)
            theirs = await streaming(b, [5000])
            here = own_rows(a)[0]["id"]
            moved = await asyncio.to_thread(b.migrate, theirs[0].answer.request_id, here)
            assert moved.json()["state"] == "committed", moved.text
            assert drain_of(a)["state"] == "serving"

            ordered = await post(a, "drain", body={"leave": True})
            assert ordered.status_code == 202, ordered.text
            assert "blocked" in ordered.json()
            await until_yes(lambda: own_rows(a) == [])

            assert drain_of(a) == {"state": "drained", "instances": [], "blocked": []}
            assert set(places(a).values()) == {there}
            later = await streaming(a, [3000])
        await ended([*streams, *theirs, *later], [*firsts, 5000, 3000])

        again = await post(a, "drain")
        assert again.status_code == 409
        assert "no instance of this server is left" in again.text


async def test_a_drain_against_a_full_server_waits_for_room_and_says_so(tmp_path: Path) -> None:
    with joined(tmp_path, (f"--max-num-seqs={SEATS}",)) as (_, a, b):
        await until_they_know(a, b)
        ours, theirs = [0, 100], [1000, 1100, 1200]
        with a.held(HELD):
            with b.held(HELD):
                full = await streaming(b, theirs)
                streams = await streaming(a, ours)

                assert (await post(a, "drain")).status_code == 202
                await until_yes(lambda: len(drain_of(a)["blocked"]) == len(ours))
                await asyncio.sleep(2)

                report = drain_of(a)
                assert report["state"] == "draining"
                assert all("waiting for room" in one["why"] for one in report["blocked"])
                tried = [one for one in a.get("migrations?limit=1000") if one["why"] == "drain"]
                assert len(tried) <= 2 * len(ours), tried
            await ended(full, theirs)
            await until_yes(lambda: drain_of(a)["state"] == "drained")
        await ended(streams, ours)

        assert (await post(a, "drain", "DELETE")).status_code == 200
        assert drain_of(a)["state"] == "serving"


async def test_a_server_without_others_keeps_serving_and_names_why(tmp_path: Path) -> None:
    with joined(tmp_path, (), ("--block-size=16",)) as (_, a, b):
        await until_said(a, "requests don't move between here and")

        refused = await post(a, "drain")
        unknown = await post(a, "migrations", body={"request_id": "r", "destination": "there"})

        assert (refused.status_code, unknown.status_code) == (409, 404)
        assert f"toy at {b.url} can't: its likeness is" in refused.text
        assert f"no requests move to toy at {b.url}: its likeness is" in unknown.text
        assert drain_of(a)["state"] == "serving"


async def test_the_policy_moves_requests_from_a_loaded_server_to_an_idle_one(
    tmp_path: Path,
) -> None:
    with joined(tmp_path, ("--num-blocks=140",)) as (_, a, b):
        await until_they_know(a, b)
        async with clients_of(a) as clients:
            with b.held(HELD):
                for number in (1000, 3000, 5000):
                    clients.start(number, 45)

                moves = await clients.moved("balance")

                assert {one["destination"] for one in moves} == {own_instance(b)}


async def test_streams_of_each_of_two_front_ends_survive_moves(tmp_path: Path) -> None:
    with joined(tmp_path, ("--front-ends=2",)) as (_, a, b):
        await until_they_know(a, b)
        here, there = own_instance(a), own_instance(b)
        firsts = [100 * number for number in range(8)]
        with a.held(HELD), b.held(HELD):
            streams = await streaming(a, firsts)
            for served, destination in ((a, there), (b, here)):
                for stream in streams:
                    call = stream.answer.request_id
                    moved = await asyncio.to_thread(served.migrate, call, destination)
                    assert moved.json()["state"] == "committed", moved.text
        await ended(streams, firsts)


async def test_a_drain_that_is_ordered_without_the_scheduler_is_carried_out_once_it_is_back(
    tmp_path: Path,
) -> None:
    with joined(tmp_path, ()) as (scheduler, a, b):
        await until_they_know(a, b)
        with a.held(HELD), b.held(HELD):
            streams = await streaming(a, [1000])
            scheduler.end(signal.SIGTERM)
            await until_said(a, "the common scheduler is lost")

            assert (await post(a, "drain")).status_code == 202
            assert set(places(a).values()) == {own_instance(a)}
            scheduler.start()

            await until_yes(lambda: drain_of(a)["state"] == "drained")
            assert set(places(a).values()) == {own_instance(b)}
        await ended(streams, [1000])
