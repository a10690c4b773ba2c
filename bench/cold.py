"""A model from zero: how long its first client waits, beside plain vLLM started for it.

`kvmig up` with one model of real vLLM. Again and again the model goes to zero and a client asks:
the time to its first token, in phases (the order, the start until it serves, the rest), and the
parts of the instance's start as it says them (imports, weights, compiling and so on). Then many
clients ask a cold model at once: how often it was started, how many answers are wrong, and how long
after it was ready the last one had its first token; with one proxy and with two. Plain vLLM's own
server is started and asked in the same run.

--parked: only a model that is parked where others go to zero: the time to the first token, and the
memory of its processes while it serves and while it is parked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil

from bench import report
from bench.models import model_flags, model_folder
from bench.overhead import PLAIN_VLLM, plain_environment
from bench.site import ENGINE_FLAGS
from kvmig.core.start_times import StartTimes
from kvmig_tools.fleet import FleetUp
from kvmig_tools.served import Served

CLIENTS = 50
TOKENS = 20
FILL, FILL_TOKENS = 144, 1900
"""Prompts that together fill a KV cache of `bench.site.ENGINE_FLAGS`, and the tokens of each."""
PATH = "/v1/completions"


def flags_of(model: str) -> list[str]:
    """Of the engine."""
    return [*ENGINE_FLAGS, "--max-model-len=2048", *model_flags(model)]


def body_of(model: str, start: int) -> dict[str, Any]:
    """A call that counts on from there; what any other model says is as good for a clock."""
    return {
        "model": model, "prompt": f"Count: {start:04} {start + 1:04}", "max_tokens": TOKENS,
        "temperature": 0, "stream": True,
    }  # fmt: skip


def counted(start: int) -> str:
    """What the bundled model says."""
    return "".join(f" {number:04}" for number in range(start + 2, start + 2 + TOKENS))[:TOKENS]


async def ask(client: httpx.AsyncClient, model: str, start: int) -> tuple[float, str]:
    """Time to the first token, by a steady clock's reading, and the text."""
    first, text = 0.0, ""
    async with client.stream("POST", PATH, json=body_of(model, start)) as answer:
        if answer.is_error:
            return time.monotonic(), (await answer.aread()).decode()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                first = first or time.monotonic()
                text += "".join(one["text"] for one in json.loads(line[6:]).get("choices", []))
    return first, text


def to_zero(fleet: FleetUp, model: str) -> None:
    """Let it end, and let it be wanted again."""
    fleet.ask("POST", f"models/{model}/switch", {"on": False})
    fleet.until(f"models/{model}", state="zero")
    fleet.ask("POST", f"models/{model}/switch", {"on": True})


async def once(fleet: FleetUp, model: str) -> dict[str, Any]:
    """One cold start, in phases."""
    asked, wall = time.monotonic(), time.time()
    async with fleet.client() as client:
        first, text = await ask(client, model, 17)
    entered = {
        one["what"].partition("-> ")[2]: one["at"] - wall
        for one in fleet.get(f"models/{model}")["events"]
        if one["at"] >= wall
    }
    return {
        "what": "cold",
        "ttft_s": first - asked,
        "ordered_s": entered.get("starting"),
        "serving_s": entered.get("serving"),
        "right": text == counted(17),
        **start_parts(fleet, model),
    }


def start_parts(fleet: FleetUp, model: str) -> dict[str, Any]:
    """The parts of the start of its first instance, as `kvmig.core.start_times` names them."""
    rows = fleet.instances(model)
    return dict((rows[0]["times"] if rows else None) or {})


def part_medians(samples: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of each part that took a measurable time."""
    names = [name for name in StartTimes.__struct_fields__ if name.endswith("_s")]
    found = {name: [one[name] for one in samples if name in one] for name in names}
    return {f"start {name}": median(some) for name, some in found.items() if some and max(some) > 0}


async def at_once(fleet: FleetUp, model: str, clients: int, proxies: int) -> dict[str, Any]:
    """Many clients of a cold model."""
    starts, asked, wall = fleet.get("status")["starts"], time.monotonic(), time.time()
    async with fleet.client() as client:
        answers = await asyncio.gather(*(ask(client, model, start) for start in range(clients)))
    ready = next(
        one["at"] - wall
        for one in fleet.get(f"models/{model}")["events"]
        if one["at"] >= wall and one["what"].endswith("-> serving")
    )
    return {
        "what": f"{clients} at once, {proxies} proxies",
        "starts": fleet.get("status")["starts"] - starts,
        "wrong": sum(text != counted(start) for start, (_, text) in enumerate(answers)),
        "last_ttft_s": max(first for first, _ in answers) - asked,
        "last_after_ready_s": max(first for first, _ in answers) - asked - ready,
    }


def of_fleet(model: str, folder: Path, proxies: int, repeats: int) -> list[dict[str, Any]]:
    """All samples of one fleet."""
    rows = []
    with (
        tempfile.TemporaryDirectory() as data,
        FleetUp(Path(data), f"--proxies={proxies}") as fleet,
    ):
        source = f"path:{folder.absolute()}"
        fleet.add({"name": "m", "source": source, "flags": flags_of(model)})
        first = asyncio.run(once(fleet, "m"))
        rows.append({**first, "what": "first of the fleet, its nursery loads"})
        for _ in range(repeats if proxies == 1 else 0):
            to_zero(fleet, "m")
            rows.append(asyncio.run(once(fleet, "m")))
        if model == "count":
            to_zero(fleet, "m")
            rows.append(asyncio.run(at_once(fleet, "m", CLIENTS, proxies)))
    return rows


def memory(fleet: FleetUp) -> float:
    """Of the model's processes, in MiB; what they share with others counts by its part."""
    assert fleet.process is not None
    stay = {pid for words in ("kvmig.fleet", "kvmig.proxy", "kvmig.launcher.shared_fork_server")
            for pid in fleet.processes(words)}  # fmt: skip
    every = psutil.Process(fleet.process.pid).children(recursive=True)
    return sum(one.memory_full_info().pss for one in every if one.pid not in stay) / (1 << 20)


async def fill(fleet: FleetUp, model: str) -> None:
    """Let its KV cache have been in use, all of it."""
    async with fleet.client() as client:
        for first in range(0, FILL, 8):
            bodies = [
                {**body_of(model, start), "prompt": [2 + start] * FILL_TOKENS, "max_tokens": 1}
                for start in range(first, first + 8)
            ]
            await asyncio.gather(*(client.post(PATH, json=body) for body in bodies))


async def woken(fleet: FleetUp, model: str) -> dict[str, Any]:
    """Once it is parked: what it takes, and how long its next client waits."""
    await fill(fleet, model)
    serving = memory(fleet)
    fleet.until(f"models/{model}", state="parked")
    parked, wall, asked = memory(fleet), time.time(), time.monotonic()
    async with fleet.client() as client:
        first, text = await ask(client, model, 17)
    entered = {
        one["what"].partition("-> ")[2]: one["at"] - wall
        for one in fleet.get(f"models/{model}")["events"]
        if one["at"] >= wall
    }
    return {
        "what": "parked",
        "ttft_s": first - asked,
        "ordered_s": entered.get("waking"),
        "serving_s": entered.get("serving"),
        "right": text == counted(17),
        "serving_mib": serving,
        "parked_mib": parked,
    }


def of_parked(model: str, folder: Path, repeats: int) -> list[dict[str, Any]]:
    """All samples of a model that is parked again and again."""
    source = f"path:{folder.absolute()}"
    spec = {"name": "m", "source": source, "flags": flags_of(model), "warm": "parked"}
    with tempfile.TemporaryDirectory() as data, FleetUp(Path(data)) as fleet:
        fleet.add({**spec, "instances": {"zero_after_s": 1.0}})
        asyncio.run(once(fleet, "m"))
        rows = [asyncio.run(woken(fleet, "m")) for _ in range(repeats)]
        assert fleet.get("status")["starts"] == 1
    return rows


def plain(model: str, folder: Path) -> dict[str, Any]:
    """vLLM's own server from nothing to the first token."""
    began = time.monotonic()
    environment = plain_environment()
    with Served(
        flags_of(model), model=folder, command=PLAIN_VLLM, environment=environment
    ) as served:

        async def first() -> float:
            async with httpx.AsyncClient(base_url=served.url, timeout=60) as client:
                return (await ask(client, str(folder), 17))[0]

        return {"what": "plain vLLM", "ttft_s": asyncio.run(first()) - began}


def main(argv: list[str] | None = None) -> int:
    root = report.parser(__doc__)
    root.add_argument("--model", default="count", help="or qwen3-0.6b, or a folder")
    root.add_argument("--parked", action="store_true", help="only a model that is parked")
    options = root.parse_args(argv)
    folder = model_folder(options.model)
    if options.parked:
        return parked(folder, options)
    repeats = 2 if options.quick else 10
    result = report.begin("cold", {"model": options.model, "repeats": repeats, "clients": CLIENTS})
    result.samples.append(plain(options.model, folder))
    for proxies in (1, 2):
        result.samples += of_fleet(options.model, folder, proxies, repeats)
        report.say(f"{proxies} proxies")
    cold = sorted(one["ttft_s"] for one in result.samples if one["what"] == "cold")
    serving = median(one["serving_s"] for one in result.samples if one["what"] == "cold")
    alone = result.samples[0]["ttft_s"]
    result.summary = {
        "cold ttft_s median": median(cold),
        "cold ttft_s p90": cold[math.ceil(0.9 * len(cold)) - 1],
        "cold serving_s median": serving,
        "plain vLLM ttft_s": alone,
        "cold / plain vLLM": median(cold) / alone,
        **part_medians([one for one in result.samples if one["what"] == "cold"]),
    }
    result.targets = {"cold ttft_s median": {"max": 5.0}}
    for one in result.samples:
        if "starts" in one:
            for field in ("starts", "wrong", "last_after_ready_s"):
                result.summary[f"{one['what']}: {field}"] = one[field]
            result.targets[f"{one['what']}: starts"] = {"min": 1, "max": 1}
            result.targets[f"{one['what']}: wrong"] = {"max": 0}
            result.targets[f"{one['what']}: last_after_ready_s"] = {"max": 1.0}
    return report.finish(result, options)


def parked(folder: Path, options: argparse.Namespace) -> int:
    """The verdict on one that is parked."""
    repeats = 5 if options.quick else 12
    result = report.begin("cold_parked", {"model": options.model, "repeats": repeats})
    result.samples = of_parked(options.model, folder, repeats)
    times = sorted(one["ttft_s"] for one in result.samples)
    result.summary = {
        "parked ttft_s median": median(times),
        "parked ttft_s p90": times[math.ceil(0.9 * len(times)) - 1],
        "parked serving_s median": median(one["serving_s"] for one in result.samples),
        "serving MiB": median(one["serving_mib"] for one in result.samples),
        "parked MiB": median(one["parked_mib"] for one in result.samples),
        "growth of parked MiB": result.samples[-1]["parked_mib"] - result.samples[0]["parked_mib"],
    }
    result.targets = {"parked ttft_s median": {"max": 0.3}}
    if options.model == "count":
        result.summary["wrong"] = sum(not one["right"] for one in result.samples)
        result.targets["wrong"] = {"max": 0}
    return report.finish(result, options)


if __name__ == "__main__":
    sys.exit(main())
