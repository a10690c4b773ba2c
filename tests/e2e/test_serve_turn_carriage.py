"""A turn that leaves a crowded instance takes its session's blocks along, on two real vLLMs.

The answer equals one of a session that stayed, the source forgets its copy, and where either end is
killed on the way, nothing is lost.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from kvmig_tools.nursery import Nursery
from kvmig_tools.patience import SERVER_PATIENCE_S
from kvmig_tools.served import SMALL, Served
from tests.e2e.test_serve_sessions import used
from tests.support import kill_hooks
from tests.support.leaks import assert_server_is_empty, leaving_nothing
from tests.support.streams import Stream, count_from, start_streams
from tests.support.waiting import until_yes

pytestmark = [pytest.mark.server, pytest.mark.long]

CHUNK = 16
"""Tokens of a step: a prompt takes 120, so that its copy takes a small part of that."""
BEGINNING = "Count: " + " ".join(f"{number:04d}" for number in range(17, 400))
"""More than 1,900 tokens, 60 blocks."""
CROWD = 8
"""Streams at the session's instance. With as many a turn leaves where a copy takes half a
prefill."""
KILLED = ("DestinationSession ReserveBlocks after", "SourceSession SendTail before")
LEASE = ("--reply-timeout-ms=5000", "--lease-ms=10000")
"""What a killed source leaves reserved is free again soon."""


class Turn(NamedTuple):
    """What a client gets."""

    text: str
    logprobs: Any
    cached: int
    """Tokens of its prompt that were cached."""


@pytest.fixture(scope="module")
def kill_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("carriage") / "at"


@pytest.fixture(scope="module")
def server(nursery: Nursery, kill_file: Path) -> Iterator[Served]:
    flags = [
        *SMALL, *LEASE, "--instances=2", f"--max-num-batched-tokens={CHUNK}",
        "--enable-prompt-tokens-details", "--heartbeat-timeout=20", "--shutdown-timeout=5",
        *kill_hooks.flags(kill_file),
    ]  # fmt: skip
    log = kill_file.with_name("log")
    with leaving_nothing(Served(flags, nursery=nursery, log=log)) as made:
        yield made


@pytest.fixture
def served(server: Served) -> Iterator[Served]:
    yield server
    assert_server_is_empty(server)


async def post(served: Served, path: str, body: dict[str, Any], session: str = "") -> Any:
    headers = {"x-session-id": session} if session else {}
    async with httpx.AsyncClient(timeout=SERVER_PATIENCE_S, verify=False) as client:
        answer = await client.post(f"{served.url}{path}", json=body, headers=headers)
    assert answer.status_code in (200, 202), answer.text
    return answer.json()


async def turn(served: Served, session: str, prompt: str) -> Turn:
    body = {
        "model": served.model, "prompt": prompt, "max_tokens": 40, "temperature": 0,
        "cache_salt": session, "logprobs": 2,
    }  # fmt: skip
    said = await post(served, "/v1/completions", body, session)
    (choice,) = said["choices"]
    details = said["usage"]["prompt_tokens_details"] or {}
    return Turn(choice["text"], choice["logprobs"], details.get("cached_tokens") or 0)


@asynccontextmanager
async def alone(served: Served, instance: str) -> AsyncIterator[None]:
    """Inside the block all calls go there: the other instance drains, and keeps what it holds."""
    other = "i1" if instance == "i0" else "i0"
    path = f"/kvmig/v1/instances/{other}/drain"
    await post(served, path, {"deadline_s": 0})
    try:
        yield
    finally:
        async with httpx.AsyncClient(timeout=SERVER_PATIENCE_S, verify=False) as client:
            (await client.delete(f"{served.url}{path}")).raise_for_status()
        await both_serve(served)


async def both_serve(served: Served) -> None:
    def both() -> bool:
        return {row["state"] for row in served.get("instances")} == {"serving"}

    await until_yes(both)


async def measure_link(served: Served) -> None:
    """Let a session move away from i0, and back: the link is measured in both directions."""
    session = secrets.token_hex(8)
    async with alone(served, "i0"):
        await turn(served, session, BEGINNING)
    for there in ("i1", "i0"):
        body = {"session": session, "destination": there}
        report = await post(served, "/kvmig/v1/sessions/move", body)
        assert report["state"] == "committed", report


async def stay(served: Served) -> tuple[Turn, Turn]:
    """The two turns of a session that has i0 for itself."""
    session = secrets.token_hex(8)
    async with alone(served, "i0"):
        first = await turn(served, session, BEGINNING)
        return first, await turn(served, session, f"{BEGINNING}{first.text} ")


@asynccontextmanager
async def crowded(served: Served, session: str) -> AsyncIterator[Turn]:
    """Inside the block the session's instance, i0, has a crowd; the session's first turn."""
    async with alone(served, "i0"):
        first = await turn(served, session, BEGINNING)
        bodies = [count_from(100 * number, 4000) for number in range(CROWD)]
        streams: list[Stream] = await start_streams(served, bodies, 2)
    try:
        yield first
    finally:
        for stream in streams:
            await stream.leave()


async def moves_of_sessions(served: Served) -> list[dict[str, Any]]:
    rows = await asyncio.to_thread(served.get, "migrations")
    return [row for row in rows if row["request_id"].startswith("session-")]


async def test_a_turn_that_leaves_a_crowd_finds_its_session_and_is_what_it_would_have_been(
    served: Served,
) -> None:
    await measure_link(served)
    first, second = await stay(served)
    before, session = len(await moves_of_sessions(served)), secrets.token_hex(8)

    async with crowded(served, session) as begun:
        assert begun == first
        went = await turn(served, session, f"{BEGINNING}{first.text} ")

    assert went == second
    assert went.cached > len(BEGINNING)
    moved = await moves_of_sessions(served)
    assert len(moved) == before + 1, moved
    ends = [(row["state"], row["source"], row["destination"]) for row in moved]
    assert ("committed", "i0", "i1") in ends, moved
    async with alone(served, "i0"):
        again = await turn(served, session, f"{BEGINNING}{first.text} ")
    assert (again.text, again.cached) == (second.text, 0), "the source has forgotten its copy"


@pytest.mark.parametrize("point", KILLED)
async def test_a_turn_whose_sessions_copy_is_cut_off_by_a_kill_is_answered_without_loss(
    served: Served, kill_file: Path, point: str
) -> None:
    await measure_link(served)
    first, second = await stay(served)
    session = secrets.token_hex(8)

    async with crowded(served, session) as begun:
        assert begun == first
        kill_hooks.kill_at(point, kill_file)
        went = await turn(served, session, f"{BEGINNING}{first.text} ")
        kill_hooks.assert_killed(kill_file)

    assert went.text == second.text
    if point.startswith("Destination"):
        assert went.cached == second.cached, "the source has kept its copy"
    await both_serve(served)
    await until_yes(lambda: used(served) == 0)
