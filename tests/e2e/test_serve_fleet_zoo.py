"""A fleet of families that people serve, whose models change places while they stream."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvmig_tools.patience import SERVER_PATIENCE_S
from tests.e2e.test_serve_fleet_placement import body, places
from tests.support.fleets import PATH, ToyFleet
from tests.support.streams import Answer, Door, Stream
from tests.support.zoo import make

pytestmark = [pytest.mark.server, pytest.mark.long]

MODELS = {"a": "qwen3", "b": "gemma3", "c": "qwen3-next"}
"""Full attention, windows, states."""
FLAGS = [
    "--enforce-eager",
    "--kv-cache-memory-bytes=1g",
    "--max-model-len=3072",
    "--max-num-seqs=8",
]
TOKENS = 2000
"""Of each stream: a placement is reached before one ends."""


def spec(name: str, folder: Path, **more: Any) -> dict[str, Any]:
    source = f"path:{make(MODELS[name], folder / name)}"
    return {"name": name, "source": source, "flags": FLAGS, "memory": 3 << 30, **more}


async def reached(fleet: ToyFleet) -> None:
    async with asyncio.timeout(SERVER_PATIENCE_S):
        while (state := fleet.get("placement")["state"]) != "reached":
            assert state == "running"
            await asyncio.sleep(0.5)


async def whole(stream: Stream) -> Answer:
    async with asyncio.timeout(SERVER_PATIENCE_S):
        return await stream.task


async def test_streams_of_three_families_survive_new_places_to_the_last_bit(
    fleet: ToyFleet, tmp_path: Path
) -> None:
    asked = {"prompt": "There was once", "max_tokens": TOKENS, "logprobs": 1, "seed": 7}
    asked["ignore_eos"] = True
    for name in MODELS:
        fleet.add(spec(name, tmp_path, instances={"min": 0, "max": 3}))
    doors = [Door(fleet.url, name, fleet.key) for name in MODELS]
    alone = await asyncio.gather(*(whole(Stream(door, PATH, asked)) for door in doors))
    fleet.ask("PUT", "placement", body({"left": "a b", "right": "c"})).raise_for_status()
    await reached(fleet)
    streams = [Stream(door, PATH, asked) for door in doors]
    try:
        for one in streams:
            await one.reach(20)
        fleet.ask("PUT", "placement", body({"left": "c", "right": "a b"})).raise_for_status()
        await reached(fleet)
        assert not any(one.task.done() for one in streams)
        assert places(fleet) == {"a": ["right"], "b": ["right"], "c": ["left"]}
        for one, wanted in zip(streams, alone, strict=True):
            (await whole(one)).same_as(wanted)
    finally:
        fleet.ask("DELETE", "placement")
