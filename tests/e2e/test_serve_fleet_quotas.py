"""Quotas and limits of keys on a fleet of toys, as clients meet them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
import time
from typing import Any, NamedTuple

import httpx
import pytest

from kvmig_tools.patience import SERVER_PATIENCE_S
from tests.e2e.test_serve_fleet_usage import used
from tests.support.fleets import PATH, Streamed, ToyFleet, ask, counted, hold_streams, kill
from tests.support.waiting import until

pytestmark = [pytest.mark.server, pytest.mark.long]

QUOTA = 10_000


def new_key(fleet: ToyFleet, **limits: Any) -> str:
    made = fleet.ask("POST", "keys", {"user": "admin", **limits})
    assert made.status_code == 201, made.text
    return str(made.json()["key"])


async def test_a_quota_of_10000_tokens_under_32_streams_delivers_10000(fleet: ToyFleet) -> None:
    fleet.add_toy("a", flags=["--max-model-len=4096", "--num-blocks=8000"])
    key = new_key(fleet, quota=QUOTA, period="day")
    streams = [Streamed(fleet, ask("a", 1000, start), key) for start in range(32)]
    texts = await asyncio.gather(*(stream.task for stream in streams))

    for start, (stream, text) in enumerate(zip(streams, texts, strict=True)):
        assert text == counted(1000, start)[: len(text)]
        if len(text) < 1000:
            assert stream.error is not None
            assert stream.error["code"] == "insufficient_quota"
            assert "quota of 10000 tokens a day is used up" in stream.error["message"]
    row = await asyncio.to_thread(used, fleet, key, sum(map(len, texts)))
    assert row["output"] == sum(map(len, texts))
    assert row["prompt"] + row["output"] == QUOTA

    async with fleet.client(key) as http:
        refused = await http.post(PATH, json=ask("a"))
    assert refused.status_code == 429
    assert refused.json()["error"]["type"] == "insufficient_quota"


async def test_a_models_quota_under_32_streams_delivers_it_and_other_models_go_on(
    fleet: ToyFleet,
) -> None:
    for name in ("a", "b"):
        fleet.add_toy(name, flags=["--max-model-len=4096", "--num-blocks=8000"])
    key = new_key(fleet, quotas={"a": {"tokens": 4_000, "period": "day"}})
    streams = [Streamed(fleet, ask("a", 400, start), key) for start in range(24)]
    others = [Streamed(fleet, ask("b", 400, start), key) for start in range(8)]
    texts = await asyncio.gather(*(stream.task for stream in streams))

    assert [await other.task for other in others] == [counted(400, start) for start in range(8)]
    assert all(text == counted(400, start)[: len(text)] for start, text in enumerate(texts))
    errors = [stream.error["message"] for stream in streams if stream.error is not None]
    assert errors
    assert all("quota of 4000 tokens a day for model a is used up" in one for one in errors)
    output = sum(map(len, texts)) + 8 * 400
    row = await asyncio.to_thread(used, fleet, key, output)
    rows = {one["model"]: one for one in fleet.get("usage?by=key,model")["data"]
            if one["key"] == row["key"]}  # fmt: skip
    assert rows["a"]["prompt"] + rows["a"]["output"] == 4_000
    assert (rows["b"]["output"], row["output"]) == (8 * 400, output)


async def test_a_users_quota_is_delivered_to_the_token_whichever_keys_share_it(
    fleet: ToyFleet,
) -> None:
    fleet.add_toy("a", flags=["--max-model-len=4096", "--num-blocks=8000"])
    fleet.ask("POST", "users", {"name": "bea"})
    keys = [new_key(fleet, user="bea") for _ in range(2)]
    rotated = fleet.ask("POST", f"keys/{keys[0].split('-')[1]}/rotate?keep_s=600").json()["key"]
    keys.append(rotated)
    changed = fleet.ask("PATCH", "users/bea", {"quota": 2000, "period": "day"})
    assert changed.status_code == 200
    streams = [Streamed(fleet, ask("a", 400, n), keys[n % 3]) for n in range(9)]
    texts = await asyncio.gather(*(stream.task for stream in streams))

    errors = [stream.error["message"] for stream in streams if stream.error is not None]
    assert errors
    assert all(one.startswith("the user bea's quota of 2000 tokens a day is") for one in errors)
    got = [sum(map(len, texts[n::3])) for n in range(3)]
    rows = [
        await asyncio.to_thread(used, fleet, key, tokens)
        for key, tokens in zip(keys, got, strict=True)
    ]
    assert [row["output"] for row in rows] == got
    assert sum(row["prompt"] + row["output"] for row in rows) == 2000


async def test_a_server_that_is_killed_neither_ends_a_stream_nor_gives_out_too_much(
    fleet: ToyFleet,
) -> None:
    fleet.add_toy("a", flags=["--max-model-len=4096", "--num-blocks=8000"])
    key = new_key(fleet, quota=3000, period="total")
    streams = await hold_streams(fleet, *(ask("a", 1200, start) for start in range(4)), key=key)
    (server,) = fleet.processes("kvmig.fleet.server")
    kill(server)
    fleet.hold(None)
    texts = await asyncio.gather(*(stream.task for stream in streams))

    assert [text == counted(1200, start)[: len(text)] for start, text in enumerate(texts)]
    await asyncio.to_thread(fleet.until_it_listens)
    row = await asyncio.to_thread(used, fleet, key, sum(map(len, texts)))
    assert row["output"] == sum(map(len, texts))
    # A grant whose answer died with the server is not given out again while its call runs.
    assert 3000 - 4 * 1024 <= row["prompt"] + row["output"] <= 3000


def grants_of(fleet: ToyFleet) -> int:
    """Calls that have tokens which they haven't used, or given back."""
    with contextlib.closing(sqlite3.connect(fleet.folder / "kvmig.sqlite")) as file:
        return int(file.execute("SELECT count(*) FROM grants").fetchone()[0])


async def test_what_a_killed_front_end_was_granted_is_given_back(fleet: ToyFleet) -> None:
    fleet.add_toy("a", flags=["--max-model-len=4096"])
    key = new_key(fleet, quota=400, period="total")
    (stream,) = await hold_streams(fleet, ask("a", 300), key=key, tokens=5)
    fronts = fleet.processes("kvmig.frontend.process_main")
    fleet.hold(None)
    for front in fronts:
        kill(front)
    with contextlib.suppress(httpx.HTTPError):
        await stream.task

    async with fleet.client(key) as http, asyncio.timeout(SERVER_PATIENCE_S):
        while grants_of(fleet):  # noqa: ASYNC110 - nobody announces it
            await asyncio.sleep(0.1)
        while (answer := await http.post(PATH, json=ask("a", 250))).status_code == 503:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
    assert answer.json()["choices"][0]["text"] == counted(250)


async def test_a_server_that_stands_still_loses_no_tokens_of_a_quota(fleet: ToyFleet) -> None:
    """Calls come meanwhile and leave, and what they have asked for is heard when they are over."""
    quota = 6000
    fleet.add_toy("a", flags=["--max-model-len=4096", "--num-blocks=8000"])
    key = new_key(fleet, quota=quota, period="total")
    async with fleet.client() as http:
        await http.post(PATH, json=ask("a", 1))
    (server,) = fleet.processes("kvmig.fleet.server")

    async def leave(after_s: float) -> None:
        async with fleet.client(key) as http:
            call = asyncio.create_task(http.post(PATH, json=ask("a", 500)))
            await asyncio.sleep(after_s)
            assert not call.done(), "no tokens are granted to it"
            call.cancel()
            await asyncio.wait([call])

    os.kill(server, signal.SIGSTOP)
    try:
        leaving = [leave(1 + n / 3) for n in range(12)]
        await asyncio.gather(*leaving, asyncio.sleep(5.5))  # an unanswered question is put again
    finally:
        os.kill(server, signal.SIGCONT)
    # One or the other may not have come as far as the front end.
    await until(lambda: (found := calls_of(fleet, key)).ended >= 8 and not found.granted)
    row = await asyncio.to_thread(used, fleet, key)
    assert (row["prompt"], row["output"]) == (0, 0)

    got = 0
    async with fleet.client(key) as http:
        while (answer := await http.post(PATH, json=ask("a", 2000))).status_code == 200:
            got += answer.json()["usage"]["total_tokens"]
    assert (answer.status_code, got) == (429, quota), answer.text


class Calls(NamedTuple):
    """Of a key."""

    ended: int
    granted: int
    """That have tokens of a quota."""


def calls_of(fleet: ToyFleet, key: str) -> Calls:
    ended = "SELECT count(*) FROM usage WHERE ended IS NOT NULL AND key_id = ?"
    standing = "SELECT count(*) FROM grants WHERE key_id = ?"
    with contextlib.closing(sqlite3.connect(fleet.folder / "kvmig.sqlite")) as file:
        wanted = "SELECT id FROM api_keys WHERE prefix = ?"
        own = file.execute(wanted, (key.split("-")[1],)).fetchone()
        counts = [file.execute(one, own).fetchone()[0] for one in (ended, standing)]
    return Calls(*counts)


async def test_tokens_a_minute_close_the_door_until_they_are_paid_off(fleet: ToyFleet) -> None:
    fleet.add_toy("a")
    key = new_key(fleet, tpm=100)
    statuses: list[int] = []
    async with fleet.client(key) as http, asyncio.timeout(30):
        while not statuses or statuses[-1] == 200:
            answer = await http.post(PATH, json=ask("a", 90))
            statuses.append(answer.status_code)
            await asyncio.sleep(0.5)
        error = answer.json()["error"]
    assert statuses[0] == 200
    assert statuses[-1] == 429
    assert "may use 100 tokens per minute" in error["message"]
    assert answer.headers["x-ratelimit-remaining-tokens"] == "0"


async def test_a_killed_proxy_and_a_killed_server_forget_no_requests_of_the_last_minute(
    fleet: ToyFleet,
) -> None:
    fleet.add_toy("a")
    key, let_in, began = new_key(fleet, rpm=20), 0, time.monotonic()

    async def is_let_in() -> bool:
        try:
            async with fleet.client(key) as http:
                return (await http.post(PATH, json=ask("a", 1))).is_success
        except httpx.HTTPError:  # the proxy is not there again
            await asyncio.sleep(0.1)
            return False

    for words in ("kvmig.proxy", "kvmig.fleet.server"):
        let_in += sum([await is_let_in() for _ in range(21)])
        for pid in fleet.processes(words):
            kill(pid)
    async with asyncio.timeout(30):
        while not await is_let_in():
            pass
    await asyncio.to_thread(fleet.until_it_listens)
    assert let_in + 1 <= 20 * (1 + (time.monotonic() - began) / 60)


async def start_server_again(fleet: ToyFleet) -> None:
    """Kill the server, and wait for the API of the next one."""
    killed = fleet.processes("kvmig.fleet.server")
    for pid in killed:
        kill(pid)
    async with asyncio.timeout(SERVER_PATIENCE_S):
        while set(fleet.processes("kvmig.fleet.server")) <= set(killed):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    await asyncio.to_thread(fleet.until_it_listens)
    with contextlib.suppress(httpx.ReadError):  # the connection to the one before
        await asyncio.to_thread(fleet.ask, "GET", "users")
    assert (await asyncio.to_thread(fleet.ask, "GET", "users")).is_success


async def test_a_key_that_is_shown_is_known_at_the_door(fleet: ToyFleet) -> None:
    """Also where the server has just been started again, and the proxy isn't connected yet."""
    fleet.add_toy("a")
    (proxy,) = fleet.processes("kvmig.proxy")
    os.kill(proxy, signal.SIGSTOP)
    try:
        await start_server_again(fleet)
        making = asyncio.create_task(asyncio.to_thread(new_key, fleet))
        await asyncio.sleep(0.3)
        assert not making.done(), "the proxy can't know it"
    finally:
        # A proxy that hangs for as long as a slow start takes gives way to another.
        with contextlib.suppress(ProcessLookupError):
            os.kill(proxy, signal.SIGCONT)
    async with fleet.client(await making) as http:
        assert (await http.post(PATH, json=ask("a"))).status_code == 200


async def test_a_proxy_that_hangs_does_not_keep_an_order(fleet: ToyFleet) -> None:
    (proxy,) = fleet.processes("kvmig.proxy")
    os.kill(proxy, signal.SIGSTOP)
    try:
        key = await asyncio.wait_for(asyncio.to_thread(new_key, fleet), 10)
    finally:
        os.kill(proxy, signal.SIGCONT)
    assert key.startswith("kv-")


async def test_a_key_may_be_given_more_while_its_client_is_refused(fleet: ToyFleet) -> None:
    fleet.add_toy("a")
    key = new_key(fleet, quota=1)
    async with fleet.client(key) as http:
        before = await http.post(PATH, json=ask("a"))
        changed = fleet.ask("PATCH", f"keys/{key.split('-')[1]}", {"quota": 1000})
        assert changed.status_code == 200
        after = await http.post(PATH, json=ask("a"))
    assert (before.status_code, after.status_code) == (429, 200)
    assert before.json()["error"]["code"] == "insufficient_quota"


async def test_a_quota_that_ends_within_a_whole_answer_gives_what_it_paid_for(
    fleet: ToyFleet,
) -> None:
    fleet.add_toy("a")
    key = new_key(fleet, quota=60, period="total")
    async with fleet.client(key) as http:
        first = await http.post(PATH, json=ask("a", 20))
        second = await http.post(PATH, json=ask("a", 20))
        third = await http.post(PATH, json=ask("a", 20))
    prompt = first.json()["usage"]["prompt_tokens"]
    assert (first.status_code, second.status_code) == (200, 200), second.text
    rest = 60 - (prompt + 20) - prompt
    assert second.json()["usage"]["completion_tokens"] == rest
    (choice,) = second.json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == (counted(rest), "length")
    sentence = "the API key's quota of 60 tokens in all is used up"
    assert second.headers["x-kvmig-truncated"] == sentence
    assert "x-kvmig-truncated" not in first.headers
    assert third.status_code == 429
    assert third.json()["error"]["message"] == sentence
    row = await asyncio.to_thread(used, fleet, key, 20 + rest)
    assert (row["prompt"], row["output"]) == (2 * prompt, 20 + rest)


async def test_calls_that_share_the_end_of_a_quota_cost_what_their_clients_got(
    fleet: ToyFleet,
) -> None:
    fleet.add_toy("a")
    key = new_key(fleet, quota=500, period="total")
    async with fleet.client(key) as http:
        answers = await asyncio.gather(*(http.post(PATH, json=ask("a", 90)) for _ in range(12)))
    told = [one.json()["usage"] for one in answers if one.status_code == 200]
    refused = [one for one in answers if one.status_code != 200]
    assert told
    assert refused
    assert {one.status_code for one in refused} == {429}
    output = sum(one["completion_tokens"] for one in told)
    row = await asyncio.to_thread(used, fleet, key, output)
    assert (row["prompt"], row["output"]) == (sum(one["prompt_tokens"] for one in told), output)
    assert row["prompt"] + row["output"] <= 500


async def test_a_call_that_needs_more_than_is_left_is_refused_with_what_is_left_and_costs_nothing(
    fleet: ToyFleet,
) -> None:
    fleet.add_toy("a")
    key = new_key(fleet, quota=10, period="total")
    async with fleet.client(key) as http:
        refused = await http.post(PATH, json=ask("a"))
    prompt = len(ask("a")["prompt"])
    assert refused.status_code == 429
    error = refused.json()["error"]
    assert error["code"] == "insufficient_quota"
    assert error["message"] == (
        f"the API key's quota of 10 tokens in all has 10 left, the request needs {prompt + 1} to"
        " begin"
    )
    row = await asyncio.to_thread(used, fleet, key)
    assert (row["calls"], row["prompt"], row["output"]) == (1, 0, 0)
