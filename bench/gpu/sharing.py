"""Two models of one unit on one GPU under load: each alone, then both at once, and who has the KV
cache meanwhile.

Both are a Qwen3-0.6B with random weights, a `kvmig.serve` of one instance each, and share KV cache
by an agent. ratio: the seconds of both loads at once over those of one after the other; below 1 it
pays to share. With $KVMIG_BENCH_MPS=1 an MPS daemon runs meanwhile, and steps with prompts get 80 %
of the SMs, those with decodes alone 40 % (--unit-shares); without `nvidia-cuda-mps-control` that is
skipped.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, closing, contextmanager
from pathlib import Path
from statistics import quantiles
from typing import TYPE_CHECKING, Any

from bench.gpu.device import Deadline, note_gpu, options_of
from bench.gpu.serving import missing, skipped, write
from bench.report import Result, begin, finish, say, table
from kvmig.core.errors import KvmigError

if TYPE_CHECKING:
    import aiohttp

    from bench.units.site import Agent
    from kvmig_tools.nursery import Nursery
    from kvmig_tools.served import Served

MIB = 1 << 20
MOST_S = 60.0
"""Without the start of the servers."""
MPS = "KVMIG_BENCH_MPS"
MPS_CONTROL = "nvidia-cuda-mps-control"
MPS_S = 20.0
SHARES = "--unit-shares=80,40"
FLAGS = ("--instances=1", "--shutdown-timeout=2", "--no-enable-prefix-caching")
ON_GPU = ("--max-model-len=8192", "--max-num-seqs=64", "--instance-gpus=i0: 0")
TARGETS = {"unfinished": {"max": 0.0}, "over_arena_bytes": {"max": 0.0}}
NAMES = "a", "b"


@contextmanager
def mps(wanted: bool) -> Iterator[dict[str, str]]:
    """An MPS daemon of our own until the end of the block, if it is wanted; the environment of its
    clients. Raises OSError, subprocess.SubprocessError."""
    if not wanted:
        yield {}
        return
    with tempfile.TemporaryDirectory() as folder:
        own = {
            "CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe",
            "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log",
        }
        environment = {**os.environ, **own}
        for one in own.values():
            Path(one).mkdir()
        subprocess.run([MPS_CONTROL, "-d"], env=environment, check=True, timeout=MPS_S)
        try:
            yield own
        finally:
            subprocess.run(
                [MPS_CONTROL], input=b"quit\n", env=environment, check=False, timeout=MPS_S
            )


class Load:
    """So many streams of one model at once."""

    def __init__(self, http: aiohttp.ClientSession, settings: Mapping[str, Any]) -> None:
        self._http = http
        self._streams = settings["streams"]
        self._prompt = settings["prompt"]
        self._tokens = settings["tokens"]

    async def run(self, served: Served, name: str) -> dict[str, Any]:
        """A sample: how long all take, and how long clients wait between two tokens."""
        from bench.arrivals import intervals_ms
        from bench.client import Stream, StreamFailed, prompt_of

        unfinished, waits, began = 0, list[float](), time.monotonic()
        async with AsyncExitStack() as stack:
            prompts = [prompt_of(self._prompt, name, number) for number in range(self._streams)]
            streams = [
                Stream(self._http, served.url, name, prompt, self._tokens) for prompt in prompts
            ]
            await asyncio.gather(*(stack.enter_async_context(one) for one in streams))
            for one in streams:
                try:
                    await one.reach(self._tokens)
                except (StreamFailed, OSError) as error:
                    say(f"a stream of {name} failed: {error}")
                    unfinished += 1
                waits += intervals_ms(one.arrivals)
        seconds = time.monotonic() - began
        return {
            "model": name,
            "seconds": round(seconds, 3),
            "tokens_s": round(self._streams * self._tokens / seconds, 1),
            "p99_ms": round(quantiles(waits, n=100)[98], 2) if len(waits) > 1 else 0.0,
            "unfinished": unfinished,
        }


class Leases:
    """What each model has of the unit's KV cache, looked at all the time."""

    def __init__(self, agent: Agent) -> None:
        self._path = agent.path
        self.most: dict[str, int] = {}
        """Bytes of each model at most."""
        self.together = 0
        """Bytes of both at most."""

    async def watch(self) -> None:
        """Until cancelled."""
        from kvmig.sharing.unit_state import fetch_unit

        while True:
            shares = (await fetch_unit(self._path)).shares
            self.together = max(self.together, sum(one.lease for one in shares))
            for one in shares:
                self.most[one.model] = max(one.lease, self.most.get(one.model, 0))
            await asyncio.sleep(0.05)


async def measure(
    served: Mapping[str, Served], agent: Agent, result: Result, options: argparse.Namespace
) -> None:
    """Into the result, whose file is written after each load. Raises StreamFailed."""
    from bench.client import session

    deadline = Deadline(MOST_S)
    async with session() as http:
        load = Load(http, result.settings)
        await asyncio.gather(*(load.run(served[name], name) for name in NAMES))  # a warm-up
        for names in (("a",), ("b",), NAMES):
            if deadline.over(result):
                return
            leases = Leases(agent)
            watching = asyncio.create_task(leases.watch())
            try:
                found = await asyncio.gather(*(load.run(served[name], name) for name in names))
            finally:
                watching.cancel()
                await asyncio.wait([watching])
            for one in found:
                one["at_once"] = len(names)
                one["lease_mib"] = round(leases.most.get(one["model"], 0) / MIB, 1)
                one["together_bytes"] = leases.together
                result.samples.append(one)
                say(str(one))
            record(result, options)


def record(result: Result, options: argparse.Namespace) -> None:
    """The summary of what is there, and the file."""
    found = [sample for sample in result.samples if "model" in sample]
    arena = result.settings["arena_mib"] * MIB
    result.summary = {
        "unfinished": float(sum(one["unfinished"] for one in found)),
        "over_arena_bytes": float(max(0, max(one["together_bytes"] for one in found) - arena)),
    }
    alone = sum(one["seconds"] for one in found if one["at_once"] == 1)
    if both := [one["seconds"] for one in found if one["at_once"] == 2]:
        result.summary |= {"alone_s": alone, "both_s": max(both), "ratio": max(both) / alone}
    write(result, options)


def main(
    arguments: list[str] | None = None,
    flags: Sequence[str] = (),
    nursery: Nursery | None = None,
) -> int:
    """flags: of the servers, in place of those for their device; nursery: where they are forked."""
    options = options_of(__doc__, arguments)
    by_mps = os.environ.get(MPS) == "1"
    quick = options.quick or options.device != "cuda"
    settings = {
        "device": options.device,
        "model": "count" if quick else "qwen3-0.6b",
        "mps": by_mps,
        "arena_mib": 128 if quick else 8192,
        "streams": 4 if quick else 32,
        "prompt": 64 if quick else 512,
        "tokens": 20 if quick else 256,
    }
    result = begin("gpu sharing", settings)
    note_gpu(result)
    if reason := missing():
        return skipped(result, options, reason)
    if by_mps and shutil.which(MPS_CONTROL) is None:
        return skipped(result, options, f"{MPS_CONTROL} is not installed")
    import uvloop

    from bench.models import model_folder
    from bench.site import all_up
    from bench.units.site import Agent
    from kvmig_tools.served import SMALL, Served

    result.targets = dict(TARGETS)
    own = [*FLAGS, *(flags or (ON_GPU if options.device == "cuda" else SMALL))]
    settings["flags"] = own + [SHARES] * by_mps
    failed = False
    try:
        with tempfile.TemporaryDirectory() as logs, mps(by_mps) as environment:
            model, path = model_folder(settings["model"]), Path(logs, "unit")
            with closing(Agent(path, settings["arena_mib"] * MIB)) as agent:
                served = {
                    name: Served(
                        [*settings["flags"], f"--unit={path}", f"--served-model-name={name}"],
                        model=model,
                        log=Path(logs, name),
                        nursery=nursery,
                        environment=environment,
                    )
                    for name in NAMES
                }
                with all_up(list(served.values())):
                    uvloop.run(measure(served, agent, result, options))
    except (KvmigError, RuntimeError, OSError, subprocess.SubprocessError) as error:
        failed = True
        result.samples.append({"failed": f"{type(error).__name__}: {error}"})
        say(str(error))
    names = ("model", "at_once", "seconds", "tokens_s", "p99_ms", "lease_mib", "unfinished")
    rows = [tuple(one[name] for name in names) for one in result.samples if "model" in one]
    columns = ("model", "at once", "s", "tokens/s", "p99 between, ms", "lease, MiB", "unfinished")
    shown = table(f"two models of a unit{', by MPS' * by_mps}", columns, rows)
    return finish(result, options, [shown]) or int(failed)


if __name__ == "__main__":
    sys.exit(main())
