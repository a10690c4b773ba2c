"""Quotas of keys on speech and images of another engine's servers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvmig.command.call_plan import MEDIA_TOKENS, TEMPLATE_TOKENS, TOKEN_BYTES
from kvmig_tools.patience import SERVER_PATIENCE_S
from tests.e2e.test_serve_fleet_quotas import new_key
from tests.support.command_site import ToyScripts, toy_command
from tests.support.fleets import ToyFleet
from tests.support.waiting import until, until_yes

pytestmark = [pytest.mark.server, pytest.mark.long]

SPEECH: dict[str, Any] = {"model": "other", "input": "Good morning", "voice": "a"}
IMAGE: dict[str, Any] = {"model": "other", "prompt": "a cat", "n": 1}
PATHS = {"speech": "/v1/audio/speech", "images": "/v1/images/generations"}
BODIES = {"speech": SPEECH, "images": IMAGE}
EACH = pytest.mark.parametrize("kind", PATHS)


@pytest.fixture
def toys(fleet: ToyFleet, tmp_path: Path) -> Iterator[ToyScripts]:
    """A model whose servers do what a script says."""
    made = ToyScripts(tmp_path / "script")
    fleet.add(
        {
            "name": "other", "source": f"path:{made.folder}", "engine": "command",
            "command": list(toy_command(made.folder)), "memory": 64 << 20, "share_prefixes": True,
        }
    )  # fmt: skip
    yield made
    made.hold(None)
    fleet.ask("DELETE", "models/other")


def call(client: httpx.AsyncClient, kind: str, **more: Any) -> Any:
    return client.post(PATHS[kind], json=BODIES[kind] | more, timeout=SERVER_PATIENCE_S)


def size_of(kind: str) -> int:
    """Bytes of its body."""
    return len(httpx.Request("POST", "http://x", json=BODIES[kind]).content)


def least_of(kind: str) -> int:
    """Tokens of a quota without which it does not begin."""
    return size_of(kind) + TEMPLATE_TOKENS + (kind == "images")


def cost_of(kind: str) -> int:
    """Tokens that it counts where its server says none: those of its text."""
    return -(-size_of(kind) // TOKEN_BYTES)


def used(fleet: ToyFleet, key: str) -> tuple[int, int]:
    """Calls and tokens of a key."""
    found = fleet.get("usage?by=key")["data"]
    row = next((one for one in found if one["key"] == key.split("-")[1]), None)
    return (0, 0) if row is None else (row["calls"], row["prompt"] + row["output"])


def code_of(answer: httpx.Response) -> str:
    return "" if answer.status_code == 200 else str(answer.json()["error"]["code"])


@EACH
async def test_calls_at_once_begin_with_what_a_quota_has_left_and_no_more_of_them(
    fleet: ToyFleet, toys: ToyScripts, kind: str
) -> None:
    reserved = size_of(kind) + TEMPLATE_TOKENS + MEDIA_TOKENS * (kind == "images")
    quota = 2 * reserved + least_of(kind) - 1
    key = new_key(fleet, quota=quota, period="total")
    toys.hold(0)
    async with fleet.client(key) as http:
        calls = [asyncio.create_task(call(http, kind)) for _ in range(8)]
        await until(lambda: sum(one.done() for one in calls) == 6, within_s=30)
        refused = [one.result() for one in calls if one.done()]
        assert {code_of(one) for one in refused} == {"rate_limit_exceeded"}
        assert all("try again" in one.json()["error"]["message"] for one in refused)
        toys.hold(None)
        answers = await asyncio.gather(*calls)
        assert [one.status_code for one in answers].count(200) == 2
        await until_yes(lambda: used(fleet, key) == (8, 2 * cost_of(kind)))


@EACH
async def test_a_quota_that_is_used_up_ends_calls_within_it(
    fleet: ToyFleet, toys: ToyScripts, kind: str
) -> None:
    quota = least_of(kind) + cost_of(kind)  # room for two, the second one to the token
    key = new_key(fleet, quota=quota, period="total")
    async with fleet.client(key) as http:
        for number in (1, 2):
            answer = await call(http, kind)
            assert answer.status_code == 200, answer.text
            await until_yes(lambda: used(fleet, key) == (number, number * cost_of(kind)))  # noqa: B023
        refused = await call(http, kind)
    assert (refused.status_code, code_of(refused)) == (429, "insufficient_quota")
    assert used(fleet, key)[1] == 2 * cost_of(kind) <= quota


async def test_images_at_once_whose_server_counts_tokens_exceed_a_quota_by_one_call_at_most(
    fleet: ToyFleet, toys: ToyScripts
) -> None:
    drawn = MEDIA_TOKENS
    toys.set("drawing", str(drawn))
    reserved = size_of("images") + TEMPLATE_TOKENS + drawn
    quota = 2 * reserved + least_of("images")  # the third may begin, with a token for its image
    key = new_key(fleet, quota=quota, period="total")
    toys.hold(0)
    async with fleet.client(key) as http:
        calls = [asyncio.create_task(call(http, "images")) for _ in range(8)]
        await until(lambda: sum(one.done() for one in calls) == 5, within_s=30)
        toys.hold(None)
        answers = await asyncio.gather(*calls)
        assert [one.status_code for one in answers].count(200) == 3
        await until_yes(lambda: used(fleet, key) == (8, 3 * (5 + drawn)))
        refused = await call(http, "images")
    assert quota < 3 * (5 + drawn) < quota + reserved
    assert (refused.status_code, code_of(refused)) == (429, "insufficient_quota")
