"""A fleet with a real server of images: museq, with a tiny Stable Diffusion."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.fleets import ToyFleet, ended
from tests.support.waiting import until_yes, wait_until

pytestmark = [pytest.mark.server, pytest.mark.long]

MUSEQ = "KVMIG_MUSEQ_PYTHON"
"""Environment variable: a Python with `museq[server,images]`."""
PATH = "/v1/images/generations"
START_S = 500.0


@pytest.fixture(scope="module")
def python() -> str:
    found = os.environ.get(MUSEQ, "")
    if not found:
        pytest.skip(f"{MUSEQ} names no Python with museq[server,images]")
    return found


@pytest.fixture(scope="module")
def pictures(python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """museq's folder, with one model."""
    folder = tmp_path_factory.mktemp("museq")
    maker = Path(__file__).parents[1] / "support" / "make_diffusion.py"
    subprocess.run([python, str(maker), str(folder)], check=True, timeout=START_S)
    return folder


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


def spec_of(python: str, pictures: Path, **instances: int) -> dict[str, Any]:
    """Each server has a copy of museq's catalogue: one waits for the other where they share it."""
    worker = f"{python} -m muse.cli _worker --model tiny --host 127.0.0.1 --device cpu"
    own = "own=$(mktemp -d -p $0) && cp $0/catalog.json $own && MUSE_CATALOG_DIR=$own exec"
    return {
        "name": "other", "source": f"path:{pictures}", "engine": "command", "served": "tiny",
        "command": ["sh", "-c", f"{own} {worker} --port $1", "{model}", "{port}"],
        "memory": 2 << 30, "share_prefixes": True, "hang_timeout_s": 600,
        "instances": {"start_timeout_s": 400, **instances},
    }  # fmt: skip


async def draw(client: httpx.AsyncClient, images: int = 1, steps: int = 2) -> httpx.Response:
    body = {"model": "other", "prompt": "a cat", "n": images, "size": "64x64", "steps": steps}
    return await client.post(PATH, json={**body, "seed": 1}, timeout=START_S)


def pictures_of(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [one["b64_json"] for one in answer.json()["data"]]


def counted(fleet: ToyFleet, key: str) -> tuple[int, int]:
    """Calls and images of a key."""
    found = fleet.get("usage?by=key")["data"]
    row = next((one for one in found if one["key"] == key.split("-")[1]), None)
    return (0, 0) if row is None else (row["calls"], row["images"])


async def test_images_are_drawn_from_zero_and_counted(
    fleet: ToyFleet, python: str, pictures: Path
) -> None:
    fleet.add(spec_of(python, pictures, max=1, zero_after_s=5))
    async with fleet.client("kvmig-none-such") as nobody:
        assert (await draw(nobody)).status_code == 401
    assert fleet.get("models/other")["state"] == "zero"
    key = str(fleet.ask("POST", "keys", {"user": "admin"}).json()["key"])
    async with fleet.client(key) as http:
        one, three = await asyncio.gather(draw(http), draw(http, 3))
    assert (len(pictures_of(one)), len(pictures_of(three))) == (1, 3)
    await until_yes(lambda: counted(fleet, key) == (2, 4))


async def test_a_server_that_is_drained_and_a_model_that_is_removed_end_their_images_first(
    fleet: ToyFleet, python: str, pictures: Path
) -> None:
    fleet.add(spec_of(python, pictures, min=2, max=2))
    await until_yes(lambda: fleet.get("models/other")["serving"] == 2, within_s=START_S)
    async with fleet.client() as http:
        wanted = pictures_of(await draw(http, steps=50))
        calls = [asyncio.create_task(draw(http, steps=50)) for _ in range(6)]
        await until_yes(lambda: [one["running"] for one in fleet.instances("other")] == [3, 3])
        assert fleet.ask("POST", "models/other/scale", {"min": 1, "max": 1}).status_code == 200
        await until_yes(lambda: "draining" in states(fleet))
        (drained,) = (one for one in fleet.instances("other") if one["state"] == "draining")
        assert drained["running"] > 0
        assert [pictures_of(one) for one in await asyncio.gather(*calls)] == [wanted] * 6
        await until_yes(lambda: states(fleet) == ["serving"])
        assert ended(drained["pid"])

        (last,) = fleet.instances("other")
        calls = [asyncio.create_task(draw(http, steps=50)) for _ in range(2)]
        await until_yes(lambda: fleet.instances("other")[0]["running"] == 2)
        assert fleet.ask("DELETE", "models/other").status_code == 200
        assert [pictures_of(one) for one in await asyncio.gather(*calls)] == [wanted] * 2
        await until_yes(lambda: ended(last["pid"]))


def states(fleet: ToyFleet) -> list[str]:
    return [one["state"] for one in fleet.instances("other")]
