"""How a front end asks for tokens of a key's quota."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from kvmig.accounts.allowances import FIRST, TokenGrant, TokenRequest
from kvmig.asgi.call import HttpCall
from kvmig.core.errors import NoInstance, QuotaUsedUp
from kvmig.frontend import grant_link
from kvmig.frontend.meter import UsageMeter
from kvmig.frontend.quotas import QuotaClient


class Granter:
    """Who is asked; `answer` decides."""

    def __init__(self) -> None:
        self.asked: list[TokenRequest] = []
        self.tasks: list[asyncio.Task[None] | None] = []
        self.answer: Callable[[TokenRequest], TokenGrant] = lambda ask: TokenGrant(
            ask.number, ask.want
        )

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.tasks.append(asyncio.current_task())
        while line := await reader.readline():
            ask = msgspec.json.decode(line, type=TokenRequest)
            self.asked.append(ask)
            writer.write(msgspec.json.encode(self.answer(ask)) + b"\n")
        writer.close()
        await writer.wait_closed()


@asynccontextmanager
async def asking(folder: Path) -> AsyncIterator[tuple[QuotaClient, Granter]]:
    granter = Granter()
    path = str(folder / "quotas.sock")
    server = await asyncio.start_unix_server(granter.connected, path)
    made = QuotaClient(UsageMeter("a", lambda: 1.0), "front-1", path, lambda _, __: None)
    try:
        yield made, granter
    finally:
        await made.close()
        server.close()
        await asyncio.gather(*(task for task in granter.tasks if task is not None))


def call() -> HttpCall:
    return HttpCall("c", "k", quota=True)


async def test_all_prompts_of_a_call_are_asked_for_at_once(tmp_path: Path) -> None:
    async with asking(tmp_path) as (made, granter):
        one = call()
        begins = [made.begin(one, f"x-{number}", 5, 1) for number in range(100)]
        allowances = await asyncio.gather(*begins)
    assert [ask.want for ask in granter.asked] == [100 * 6 + 100]
    assert granter.asked[0].least == 6
    assert {id(found) for found in allowances} == {id(one.allowance)}
    assert one.allowance is not None
    assert one.allowance.used == 500


async def test_prompts_that_come_one_after_the_other_use_what_is_granted(tmp_path: Path) -> None:
    async with asking(tmp_path) as (made, granter):
        one = call()
        for number in range(30):
            await made.begin(one, f"x-{number}", 5, None)
    assert [ask.want for ask in granter.asked] == [6 + FIRST]


async def test_what_is_reserved_is_asked_for_again_before_the_call_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grant_link, "AGAIN_S", 0.01)
    async with asking(tmp_path) as (made, granter):

        def later(ask: TokenRequest) -> TokenGrant:
            reserved = len(granter.asked) < 3
            return TokenGrant(ask.number, 0 if reserved else ask.want, "reserved", again=reserved)

        granter.answer = later
        found = await made.begin(call(), "x", 5, 10)
        assert found is not None
        assert found.granted == 16
        granter.answer = lambda ask: TokenGrant(ask.number, 0, "used up")
        with pytest.raises(QuotaUsedUp, match="used up"):
            await made.begin(call(), "x", 5, 10)
    assert len(granter.asked) == 4


async def test_a_call_is_refused_when_nobody_grants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grant_link, "PATIENCE_S", 0.1)
    made = QuotaClient(
        UsageMeter("a", lambda: 1.0), "front-1", str(tmp_path / "none"), lambda _, __: None
    )
    with pytest.raises(NoInstance, match="no tokens of the API key's quota can be granted now"):
        await made.begin(call(), "x", 5, 10)
    await made.close()


async def test_a_round_after_the_call_was_counted_is_granted_to_a_record_of_its_own(
    tmp_path: Path,
) -> None:
    """A background response goes on after its call has its answer."""
    async with asking(tmp_path) as (made, granter):
        one = call()
        await made.begin(one, "x-0", 5, 10)
        one.end_answer()
        one.end_call()
        made.meter.take_records()
        await made.begin(one, "x-1", 5, 10)
    assert [ask.seq for ask in granter.asked] == [1, 2]
