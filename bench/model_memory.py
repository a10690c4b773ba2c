"""What `kvmig model evaluate` says that a model takes of the host's memory, beside what it takes.

A fleet on this machine's CPU gets one small model after another, each of another family. Each is
evaluated before it starts, and answers a call. The most that its instance's process has taken, as
the kernel counts it (VmHWM), is compared to what was said. The first model's figure is assumed; the
fleet learns from each for the next ones. The KV cache is small, for it counts whole in a claim.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx

from bench import report
from kvmig.core.errors import StartupError
from kvmig_tools.fleet import FleetUp
from tests.support.zoo import FAMILIES, make

FLAGS = ["--enforce-eager", "--kv-cache-memory-bytes=32M", "--max-model-len=1216"]
QUICK = ("llama3", "gemma3", "deepseek-v2", "mamba2")
TOKENS = 40
CALLS = 4
PATH = "/v1/completions"


def rows_of(fleet: FleetUp) -> list[dict[str, Any]]:
    """Rows of the instances of the deployment that runs."""
    for path in fleet.sockets():
        try:
            with httpx.Client(
                transport=httpx.HTTPTransport(uds=str(path)), base_url="http://x"
            ) as it:
                rows: list[dict[str, Any]] = it.get("/kvmig/v1/instances").json()["data"]
                return rows
        except httpx.ConnectError:  # of one that has ended
            continue
    return []


def peak_of(pid: int) -> int:
    """The most bytes that a process has had."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"process {pid} has no VmHWM")


async def asked(fleet: FleetUp, model: str) -> None:
    """Let it answer some calls at once. Raises StartupError with what the fleet says."""
    async with fleet.client() as client:
        bodies = [
            {"model": model, "prompt": [7 + one] * 300, "max_tokens": TOKENS, "ignore_eos": True}
            for one in range(CALLS)
        ]
        for answer in await asyncio.gather(*(client.post(PATH, json=body) for body in bodies)):
            if answer.is_error:
                raise StartupError(f"{model}: {answer.text}")


def once(fleet: FleetUp, family: str, folder: Path, name: str = "") -> dict[str, Any]:
    """Evaluate, start, ask, measure and end it."""
    name = name or family.replace(".", "-")
    spec = {"name": name, "source": f"path:{folder}", "flags": FLAGS}
    found = fleet.ask("POST", "evaluate", spec).raise_for_status().json()
    fleet.add(spec)
    asyncio.run(asked(fleet, name))
    (row,) = rows_of(fleet)
    said, peak = found["host"]["need_bytes"], peak_of(row["pid"])
    fleet.ask("POST", f"models/{name}/switch", {"on": False}).raise_for_status()
    fleet.until(f"models/{name}", state="zero")
    return {
        "family": family,
        "said_mib": said >> 20,
        "rest_basis": found["rest_basis"],
        "peak_mib": peak >> 20,
        "off": said / peak - 1,
        "weights_mib": found["weights_bytes"] >> 20,
        "beside_kv_mib": row["beside_kv"] >> 20,
    }


def main(argv: list[str] | None = None) -> int:
    options = report.parser(__doc__).parse_args(argv)
    families = QUICK if options.quick else tuple(FAMILIES)
    result = report.begin("model_memory", {"families": list(families), "flags": FLAGS})
    with tempfile.TemporaryDirectory() as data, FleetUp(Path(data)) as fleet:
        for family in families:
            row = once(fleet, family, make(family, Path(data)))
            result.samples.append(row)
            report.say(json.dumps(row))
    learned = [one for one in result.samples if one["rest_basis"] != "assumed"]
    result.summary = {
        "assumed: off": result.samples[0]["off"],
        "learned: most too high": max(one["off"] for one in learned),
        "learned: most too low": min(one["off"] for one in learned),
    }
    result.targets = {
        "learned: most too high": {"max": 0.1},
        "learned: most too low": {"min": -0.1},
    }
    return report.finish(result, options)


if __name__ == "__main__":
    sys.exit(main())
