"""Draw docs/top.svg: `kvmig top` as it shows a fleet of toys that serves streams and moves some.

    python -m scripts.draw_top

It starts `kvmig up` with engines that compute nothing; what is shown is what the fleet reports.
"""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from textual.pilot import Pilot

from kvmig.cli.client import FleetClient
from kvmig.cli.top.app import TopApp
from kvmig.cli.top.sources import FleetSource
from kvmig.engines.toy.script import ScriptFile, ToyScript
from kvmig_tools.fleet import FleetUp

TARGET = Path(__file__).resolve().parents[1] / "docs" / "top.svg"
SIZE = 100, 30
STREAMS = {"qwen3-8b": 9, "llama-3.2-3b": 3}
TOKENS = 96
"""So many tokens each stream has while the picture is taken."""
PATIENCE_S = 120.0
FONTS = re.compile(r"\s*@font-face \{.*?\}", re.DOTALL)
"""Textual's pictures would fetch their font from elsewhere."""


def spec(name: str, script: Path, instances: int) -> dict[str, Any]:
    return {
        "name": name,
        "source": "path:/toy",
        "engine": "toy",
        "flags": [f"--script={script}", "--num-blocks=40", "--policy=freeness"],
        "instances": {"min": instances, "max": max(1, instances)},
    }


async def call(client: httpx.AsyncClient, model: str, at: int) -> None:
    words = "Count: " + " ".join(f"{number:04}" for number in range(10 * at, 10 * at + 4 + at))
    body = {"model": model, "prompt": words, "max_tokens": 3 * TOKENS, "temperature": 0}
    answer = await client.post("/v1/completions", json=body)
    answer.raise_for_status()


async def picture(fleet: FleetUp, script: ScriptFile) -> str:
    """The picture, once streams run, and some of them have moved."""
    script.write(ToyScript(hold=TOKENS))
    async with fleet.client() as client:
        calls = [
            asyncio.create_task(call(client, model, at))
            for model, count in STREAMS.items()
            for at in range(count)
        ]
        app = TopApp(FleetSource(FleetClient("", fleet.url, fleet.key)))
        async with app.run_test(size=SIZE) as pilot:
            await shows(pilot, lambda: sum(one.streams for one in app.fleet.models) == len(calls))
            await pilot.press("s")  # the instance with the fullest cache first
            await pilot.press("s")
            for at, model in enumerate(("qwen3-8b", "qwen3-8b", "llama-3.2-3b")):
                stream = [one for one in app.fleet.streams if one.model == model][at]
                await app.source.move(stream, None)
                moved = len(app.fleet.moves)
                await shows(pilot, lambda before=moved: len(app.fleet.moves) > before)
            await pilot.press("down", "down")
            await pilot.pause(1.5)
            found = app.export_screenshot(title=f"kvmig top, {SIZE[0]}x{SIZE[1]}")
        script.write(ToyScript())
        await asyncio.wait_for(asyncio.gather(*calls), PATIENCE_S)
    return FONTS.sub("", found)


async def shows(pilot: Pilot[None], holds: Any) -> None:
    """Raises TimeoutError."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await pilot.pause(0.1)


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="kvmig-top-") as folder:
        file = Path(folder) / "script"
        with FleetUp(Path(folder)) as fleet:
            fleet.add(spec("qwen3-8b", file, 3))
            fleet.add(spec("llama-3.2-3b", file, 2))
            fleet.add(spec("gpt-oss-20b", file, 0))
            deadline = time.monotonic() + PATIENCE_S
            while sum(one["serving"] for one in fleet.get("models")["data"]) < 5:
                if time.monotonic() > deadline:
                    raise TimeoutError("the fleet's models don't serve")
                time.sleep(0.2)
            TARGET.write_text(asyncio.run(picture(fleet, ScriptFile(str(file)))))
    print(TARGET)
    return 0


if __name__ == "__main__":
    sys.exit(main())
