"""A fleet with another engine's servers: from zero under streams, killed, drained, counted once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_site import FollowedStream, ToyScripts, text_of, toy_command
from tests.support.fleets import ToyFleet, ended
from tests.support.waiting import until, until_yes

pytestmark = pytest.mark.server

PATH = "/v1/completions"
CHAT = "/v1/chat/completions"
STREAMS = 40
TOKENS = 30


@pytest.fixture
def toys(fleet: ToyFleet, tmp_path: Path) -> Iterator[ToyScripts]:
    made = ToyScripts(tmp_path / "script")
    yield made
    made.hold(None)
    fleet.ask("DELETE", "models/other")


@pytest.fixture
def key(fleet: ToyFleet) -> str:
    """Another for each test."""
    return str(fleet.ask("POST", "keys", {"user": "admin"}).json()["key"])


def add(fleet: ToyFleet, toys: ToyScripts, *flags: str, **more: Any) -> None:
    spec = {
        "name": "other",
        "source": f"path:{toys.folder}",
        "engine": "command",
        "command": list(toy_command(toys.folder, *flags)),
        "memory": 64 << 20,
        "share_prefixes": True,
        **more,
    }
    fleet.add(spec)


def ask(tokens: int = TOKENS, **more: Any) -> dict[str, Any]:
    return {"model": "other", "prompt": "one two three", "max_tokens": tokens, **more}


def ledger(fleet: ToyFleet, key: str) -> list[tuple[str, int, int]]:
    """Status, prompt and output of each of a key's calls that are over."""
    wanted = (
        "SELECT status, prompt, output FROM usage JOIN api_keys ON id = key_id WHERE prefix = ?"
        " AND status != 'running'"
    )
    with contextlib.closing(sqlite3.connect(fleet.folder / "kvmig.sqlite")) as file:
        return file.execute(wanted, (key.split("-")[1],)).fetchall()


async def test_forty_streams_from_zero_lose_nothing_when_servers_die_drain_and_end(
    fleet: ToyFleet, toys: ToyScripts, key: str
) -> None:
    add(fleet, toys, instances={"min": 0, "max": 4, "target": 2, "zero_after_s": 1}, parallel=10)
    toys.hold(2)
    streams = [FollowedStream() for _ in range(STREAMS)]
    async with fleet.client(key) as http:
        tasks = [asyncio.create_task(one.follow(http, PATH, ask())) for one in streams]
        await until(lambda: all(len(one.text) >= 10 for one in streams))
        shown = fleet.until("models/other", state="serving", serving=4)
        assert shown["running"] == STREAMS
        rows = fleet.instances("other")
        victim = max(rows, key=lambda one: one["running"])
        os.kill(victim["pid"], signal.SIGKILL)
        await until(lambda: sum(one.done() for one in tasks) == victim["running"])
        assert fleet.ask("POST", "models/other/scale", {"min": 0, "max": 1}).status_code == 200
        await until_yes(
            lambda: [one["state"] for one in fleet.instances("other")].count("serving") == 1
        )
        toys.hold(None)
        await asyncio.gather(*tasks)
        cut = Counter((one.text, one.error) for one in streams)
        assert cut == {
            (text_of(TOKENS), ""): STREAMS - victim["running"],
            (text_of(2), "the server ended while it answered"): victim["running"],
        }
        assert not any(one.usage for one in streams)
        await until_yes(lambda: len(ledger(fleet, key)) == STREAMS)
    counted = Counter(ledger(fleet, key))
    whole = counted.pop(("finished", 3, TOKENS))
    assert whole == STREAMS - victim["running"]
    # What was cut is counted by the bytes that came: ten, of which four are a token.
    assert [(status, output) for status, _, output in counted] == [("cut", 3)]
    assert sum(counted.values()) == victim["running"]
    found = fleet.get("usage?by=key")["data"]
    row = next(one for one in found if one["key"] == key.split("-")[1])
    assert (row["calls"], row["output"]) == (STREAMS, whole * TOKENS + 3 * victim["running"])
    fleet.until("models/other", state="zero", serving=0)
    assert all(ended(one["pid"]) for one in rows if one["pid"])


async def test_limits_and_quotas_hold_for_another_engine(fleet: ToyFleet, toys: ToyScripts) -> None:
    add(fleet, toys)
    made = fleet.ask("POST", "keys", {"user": "admin", "parallel": 1, "quota": 1000}).json()
    toys.hold(2)
    async with fleet.client(made["key"]) as http:
        stream = FollowedStream()
        task = asyncio.create_task(stream.follow(http, PATH, ask()))
        await until(lambda: len(stream.text) >= 10)
        refused = await http.post(PATH, json=ask())
        assert (refused.status_code, refused.json()["error"]["code"]) == (
            429,
            "rate_limit_exceeded",
        )
        toys.hold(None)
        await task
        assert stream.text == text_of(TOKENS)
        await until_yes(lambda: ledger(fleet, made["key"]) == [("finished", 3, TOKENS)])
        late = await http.post(
            CHAT, json={"model": "other", "messages": [{"role": "user", "content": "a " * 1000}]}
        )
        assert (late.status_code, late.json()["error"]["code"]) == (429, "insufficient_quota")


@pytest.mark.long
async def test_the_name_that_a_server_has_for_the_model_is_not_its_clients(
    fleet: ToyFleet, toys: ToyScripts, key: str
) -> None:
    command = [one.replace("{name}", "its own") for one in toy_command(toys.folder)]
    add(fleet, toys, command=command, served="its own")
    async with fleet.client(key) as http:
        answer = await http.post(PATH, json=ask(3))
        assert answer.json()["choices"][0]["text"] == text_of(3)
        unknown = await http.post(PATH, json={**ask(3), "model": "its own"})
        assert unknown.status_code == 404


@pytest.mark.long
async def test_a_command_that_cannot_start_says_so_to_who_waits(
    fleet: ToyFleet, toys: ToyScripts, key: str
) -> None:
    add(fleet, toys, command=["false", "{port}"])
    async with fleet.client(key) as http:
        answer = await http.post(PATH, json=ask(3))
    assert answer.status_code == 503
    assert "false ended before it was ready (exit code 1)" in answer.json()["error"]["message"]


async def test_texts_speech_recordings_and_images_pass_the_door_and_are_counted(
    fleet: ToyFleet, toys: ToyScripts, key: str
) -> None:
    add(fleet, toys)
    texts = {"model": "other", "input": ["one two", "three"]}
    ranks = {"model": "other", "query": "one", "documents": ["two", "three"]}
    speech = {"model": "other", "input": "Grüße", "voice": "a"}
    images = {"model": "other", "prompt": "a cat", "n": 2}
    async with fleet.client(key) as http:
        answers = [
            await http.post("/v1/embeddings", json=texts),
            await http.post("/v1/rerank", json=ranks),
            await http.post("/v1/score", json={"model": "other", "text_1": "a", "text_2": "b"}),
            await http.post("/v1/audio/speech", json=speech),
            await http.post(
                "/v1/audio/transcriptions",
                files={"file": ("a.wav", b"RIFF" * 100)},
                data={"model": "other"},
            ),
            await http.post("/v1/images/generations", json=images),
        ]
    assert [one.status_code for one in answers] == [200] * 6
    assert (answers[3].headers["content-type"], answers[3].content) == ("audio/wav", b"\0" * 3000)
    assert answers[4].json()["text"] == " 0001 0002"
    await until_yes(lambda: len(ledger(fleet, key)) == 6)
    found = fleet.get("usage?by=key")["data"]
    row = next(one for one in found if one["key"] == key.split("-")[1])
    assert (row["characters"], row["seconds"], row["images"]) == (5, 7, 2)
    assert row["prompt"] > 9  # three each of the first three, and what the rule says
    (asked,) = toys.asked().values()
    assert [one["model"] for one in asked] == ["other"] * 5
