"""A fleet with real servers of recordings, transformers' own and plain vLLM, and a tiny Whisper."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.test_serve_fleet_engines import TRANSFORMERS, VLLM
from tests.support.fleets import ToyFleet, ended
from tests.support.tiny_whisper import make, recording
from tests.support.waiting import until_yes, wait_until

pytest.importorskip("librosa", reason="the servers read recordings with it")
pytestmark = [pytest.mark.server, pytest.mark.long]
EACH = pytest.mark.parametrize("engine", ["transformers", "vllm"])

LENGTH_S = 7.3
SOUND = recording(LENGTH_S)
CALLS = 3
START_S = 500.0
"""A call's time, with the start of its server."""


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def whole_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToyFleet]:
    """Calls have two minutes to their end where a model is removed."""
    flags = ("--allow-commands", "--shutdown-timeout=120")
    with ToyFleet(tmp_path_factory.mktemp("fleet"), *flags) as made:
        yield made


@pytest.fixture
def fleet(whole_fleet: ToyFleet) -> Iterator[ToyFleet]:
    """Afterwards there is no model, and nothing of one runs."""
    yield whole_fleet
    whole_fleet.ask("DELETE", "models/other")
    wait_until(lambda: not whole_fleet.processes("kvmig.command.guard"))


def spec_of(engine: str, whisper: Path, **instances: int) -> dict[str, Any]:
    """A model of the fleet that the engine's own server serves."""
    if engine == "vllm":
        own: dict[str, Any] = {
            "command": f"env VLLM_CPU_KVCACHE_SPACE=1 {VLLM} --model {{model}} --host 127.0.0.1"
            " --port {port} --served-model-name {name} --enforce-eager --max-num-seqs 4"
            " --dtype float32",
        }
    else:
        own = {
            "command": f"{TRANSFORMERS} serve {{model}} --host 127.0.0.1 --port {{port}}"
            " --device {device} --dtype float32",
            "served": str(whisper),
        }
    return {
        "name": "other", "source": f"path:{whisper}", "engine": "command", "memory": 2 << 30,
        "share_prefixes": True, "hang_timeout_s": 600,
        "instances": {"start_timeout_s": 400, **instances}, **own,
    }  # fmt: skip


async def transcribe(
    client: httpx.AsyncClient, task: str = "transcriptions", **fields: str
) -> httpx.Response:
    data, files = {"model": "other", **fields}, {"file": ("a.wav", SOUND)}
    return await client.post(f"/v1/audio/{task}", files=files, data=data, timeout=START_S)


def counted(fleet: ToyFleet, key: str) -> dict[str, Any]:
    """The usage of a key."""
    found = fleet.get("usage?by=key")["data"]
    return next((one for one in found if one["key"] == key.split("-")[1]), {"calls": 0})


@EACH
async def test_recordings_start_a_whisper_from_zero_are_counted_in_seconds_and_kept_to_a_limit(
    fleet: ToyFleet, whisper: Path, engine: str
) -> None:
    fleet.add(spec_of(engine, whisper, max=1, zero_after_s=5))
    async with fleet.client("kvmig-none-such") as nobody:
        assert (await transcribe(nobody)).status_code == 401
    assert fleet.get("models/other")["state"] == "zero"
    key = str(fleet.ask("POST", "keys", {"user": "admin"}).json()["key"])
    async with fleet.client(key) as http:
        answers = await asyncio.gather(*(transcribe(http) for _ in range(CALLS)))
    assert [one.status_code for one in answers] == [200] * CALLS, [one.text for one in answers]
    (text,) = {one.json()["text"] for one in answers}
    assert len(text) > 100
    await until_yes(lambda: counted(fleet, key)["calls"] == CALLS)
    row = counted(fleet, key)
    assert (row["seconds"], row["characters"], row["images"]) == (
        CALLS * math.ceil(LENGTH_S), 0, 0,
    )  # fmt: skip
    few = str(fleet.ask("POST", "keys", {"user": "admin", "parallel": 1}).json()["key"])
    async with fleet.client(few) as http:
        answers = await asyncio.gather(*(transcribe(http) for _ in range(CALLS)))
    assert Counter(one.status_code for one in answers) == {200: 1, 429: 2}
    (row,) = fleet.instances("other")
    await until_yes(lambda: fleet.get("models/other")["state"] == "zero", within_s=60)
    assert ended(row["pid"])


@EACH
async def test_a_server_that_is_drained_and_a_model_that_is_removed_end_their_recordings_first(
    fleet: ToyFleet, whisper: Path, engine: str
) -> None:
    fleet.add(spec_of(engine, whisper, min=2, max=2))
    await until_yes(lambda: fleet.get("models/other")["serving"] == 2, within_s=START_S)
    async with fleet.client() as http:
        first = await asyncio.gather(*(transcribe(http) for _ in range(2)))
        (text,) = {one.json()["text"] for one in first}
        calls = [asyncio.create_task(transcribe(http)) for _ in range(6)]
        await until_yes(lambda: [one["running"] for one in fleet.instances("other")] == [3, 3])
        assert fleet.ask("POST", "models/other/scale", {"min": 1, "max": 1}).status_code == 200
        await until_yes(lambda: "draining" in states(fleet))
        (drained,) = (one for one in fleet.instances("other") if one["state"] == "draining")
        assert drained["running"] > 0
        assert [one.json()["text"] for one in await asyncio.gather(*calls)] == [text] * 6
        await until_yes(lambda: states(fleet) == ["serving"])
        assert ended(drained["pid"])

        (last,) = fleet.instances("other")
        calls = [asyncio.create_task(transcribe(http)) for _ in range(2)]
        await until_yes(lambda: fleet.instances("other")[0]["running"] == 2)
        assert fleet.ask("DELETE", "models/other").status_code == 200
        assert [one.json()["text"] for one in await asyncio.gather(*calls)] == [text] * 2
        await until_yes(lambda: ended(last["pid"]))


async def test_recordings_of_kvmigs_own_instances_are_heard_alike_and_counted_in_seconds(
    fleet: ToyFleet, whisper: Path
) -> None:
    flags = "--enforce-eager --max-num-seqs=4 --dtype=float32 --kv-cache-memory-bytes=128M"
    own = {"engine": "vllm", "flags": flags.split(), "instances": {"min": 2, "max": 2}}
    fleet.add({"name": "other", "source": f"path:{whisper}", **own})
    await until_yes(lambda: fleet.get("models/other")["serving"] == 2, within_s=START_S)
    key = str(fleet.ask("POST", "keys", {"user": "admin"}).json()["key"])
    async with fleet.client(key) as http:
        answers = [await transcribe(http) for _ in range(4)]
    assert [one.status_code for one in answers] == [200] * 4, [one.text for one in answers]
    (text,) = {one.json()["text"] for one in answers}
    # Each character is a token, and the end is one.
    await until_yes(lambda: counted(fleet, key).get("output") == 4 * (len(text) + 1))
    row = counted(fleet, key)
    assert (row["calls"], row["seconds"]) == (4, 4 * math.ceil(LENGTH_S))

    other = str(fleet.ask("POST", "keys", {"user": "admin"}).json()["key"])
    async with fleet.client(other) as http:
        stream = await transcribe(http, stream="true")
        translated = await transcribe(http, "translations")
    assert (stream.status_code, translated.status_code) == (200, 200)
    # Neither answer says how long the recording is.
    assert not [one for one in ("usage", "duration") if one in stream.text + translated.text]
    await until_yes(lambda: counted(fleet, other).get("seconds") == 2 * math.ceil(LENGTH_S))
    assert counted(fleet, other)["calls"] == 2


def states(fleet: ToyFleet) -> list[str]:
    return [one["state"] for one in fleet.instances("other")]
