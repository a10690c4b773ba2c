"""A session without a request moves by order, and its next turn finds its beginning there."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kvmig_tools.nursery import Nursery
from kvmig_tools.patience import SERVER_PATIENCE_S
from kvmig_tools.served import SMALL, Served
from tests.conftest import PATIENT
from tests.support.leaks import leaving_nothing
from tests.support.waiting import until

pytestmark = [pytest.mark.server, pytest.mark.long]

BEGINNING = "Count: " + " ".join(f"{number:04d}" for number in range(17, 200))


@pytest.fixture(scope="module")
def served(nursery: Nursery) -> Iterator[Served]:
    flags = [*SMALL, *PATIENT, "--instances=2", "--enable-prompt-tokens-details"]
    with leaving_nothing(Served(flags, nursery=nursery)) as made:
        yield made


def post(served: Served, path: str, body: dict[str, Any], session: str = "") -> httpx.Response:
    headers = {"x-session-id": session} if session else {}
    return httpx.post(f"{served.url}{path}", json=body, headers=headers, timeout=SERVER_PATIENCE_S)


def turn(served: Served, session: str, prompt: str) -> tuple[str, int]:
    """The next answer, and the tokens of the prompt that were cached."""
    body = {
        "model": served.model, "prompt": prompt, "max_tokens": 40, "temperature": 0,
        "cache_salt": session,
    }  # fmt: skip
    answer = post(served, "/v1/completions", body, session)
    answer.raise_for_status()
    said = answer.json()
    details = said["usage"]["prompt_tokens_details"]
    return said["choices"][0]["text"], (details or {}).get("cached_tokens") or 0


def move(served: Served, session: str) -> dict[str, Any]:
    answer = post(served, "/kvmig/v1/sessions/move", {"session": session})
    answer.raise_for_status()
    report: dict[str, Any] = answer.json()
    return report


def used(served: Served) -> int:
    rows = httpx.get(f"{served.url}/kvmig/v1/instances").json()["data"]
    return sum(row["blocks_used"] for row in rows)


async def test_the_next_turn_of_a_moved_session_finds_it_and_gives_what_it_would_have(
    served: Served,
) -> None:
    stays, moves = secrets.token_hex(8), secrets.token_hex(8)
    first, _ = turn(served, stays, BEGINNING)
    assert turn(served, moves, BEGINNING)[0] == first
    report = move(served, moves)
    assert (report["state"], report["why"]) == ("committed", "by-hand"), report
    there, back = report["destination"], report["source"]
    assert there != back
    longer = f"{BEGINNING}{first} "
    text, cached = turn(served, moves, longer)
    assert (text, cached) == turn(served, stays, longer)
    assert cached > len(BEGINNING)
    again = move(served, moves)
    assert (again["source"], again["destination"]) == (there, back), "it ran where it had gone"
    await until(lambda: used(served) == 0)


def test_a_session_that_nobody_knows_is_named(served: Served) -> None:
    answer = post(served, "/kvmig/v1/sessions/move", {"session": "nobody's"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "session")


async def test_a_drain_takes_an_idle_session_along_and_its_next_turn_finds_it(
    served: Served,
) -> None:
    stays, moves = secrets.token_hex(8), secrets.token_hex(8)
    first, _ = turn(served, stays, BEGINNING)
    assert turn(served, moves, BEGINNING)[0] == first
    drained = move(served, moves)["destination"]
    assert post(served, f"/kvmig/v1/instances/{drained}/drain", {}).status_code == 202

    def detail() -> str:
        listed = httpx.get(f"{served.url}/kvmig/v1/instances").json()["data"]
        return str(next(row["detail"] for row in listed if row["id"] == drained))

    await until(lambda: detail().startswith("it is empty"))
    assert "idle sessions moved (" in detail()
    assert "0 did not" in detail()
    moved = await asyncio.to_thread(served.get, "migrations")
    carried = [one for one in moved if (one["source"], one["why"]) == (drained, "drain")]
    assert {one["state"] for one in carried} == {"committed"}
    longer = f"{BEGINNING}{first} "
    text, cached = turn(served, moves, longer)
    assert (text, cached) == turn(served, stays, longer)
    assert cached > len(BEGINNING)
    let_serve = f"{served.url}/kvmig/v1/instances/{drained}/drain"
    (await asyncio.to_thread(httpx.delete, let_serve)).raise_for_status()
