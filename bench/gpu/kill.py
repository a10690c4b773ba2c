"""Streams whose engine is drained or killed, between two vLLM engines of one `kvmig.serve` on one
GPU, or on two where there are two: how long clients wait, and whether anything is lost.

A drain moves all streams of an engine to the other one, and they stay; after that the engine serves
again. `kill -9` ends an engine, and its streams are computed again by the other one. unfinished:
streams that end before their last token; other: streams whose tokens differ from those of the same
call without a fault, which other batches may cause.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.gpu.device import Deadline, note_gpu, options_of
from bench.gpu.serving import FLAGS, ON_GPU, missing, skipped, write
from bench.report import Result, begin, finish, say, table
from kvmig.core.errors import KvmigError

if TYPE_CHECKING:
    import aiohttp

    from bench.client import Stream
    from bench.drain import Admin
    from kvmig_tools.nursery import Nursery
    from kvmig_tools.served import Served

MOST_S = 60.0
"""Without the start of the server."""
DRAINED, KILLED = "i0", "i1"
TARGETS = {"unfinished": {"max": 0.0}}


class Calls:
    """The streams of one server: as many on each engine, each of the same length."""

    def __init__(
        self, served: Served, http: aiohttp.ClientSession, settings: dict[str, Any]
    ) -> None:
        self._served = served
        self._http = http
        self._count = 2 * settings["each"]
        self._prompt = settings["prompt"]
        self.tokens = settings["tokens"]
        self.undisturbed: list[list[int]] = []
        """Tokens of each stream without a fault."""

    async def begin(self, stack: AsyncExitStack) -> list[Stream]:
        """Send them; each has some tokens already."""
        from bench.client import Stream, prompt_of
        from bench.site import SETTLE

        streams = []
        for number in range(self._count):
            prompt = prompt_of(self._prompt, "kill", number)
            stream = Stream(self._http, self._served.url, self._served.model, prompt, self.tokens)
            streams.append(await stack.enter_async_context(stream))
        for stream in streams:
            await stream.reach(SETTLE)
        return streams

    async def end(self, streams: Sequence[Stream]) -> int:
        """Wait for the last token of each; how many do not get it."""
        from bench.client import StreamFailed

        unfinished = 0
        for stream in streams:
            try:
                await stream.reach(self.tokens)
            except (StreamFailed, OSError) as error:
                say(f"a stream failed: {error}")
                unfinished += 1
        return unfinished


async def drain(admin: Admin) -> None:
    """Until nothing runs there."""
    await admin.drain(DRAINED)
    await admin.until(DRAINED, running=0, waiting=0, migrations_out=0)


async def kill(admin: Admin) -> None:
    """The process of an engine."""
    (pid,) = [row["pid"] for row in await admin.rows() if row["id"] == KILLED]
    os.kill(pid, signal.SIGKILL)


async def disturbed(calls: Calls, admin: Admin, what: str) -> dict[str, Any]:
    """A sample of one fault."""
    from bench.arrivals import intervals_ms, longest_ms

    async with AsyncExitStack() as stack:
        streams = await calls.begin(stack)
        began = time.monotonic()
        await (drain(admin) if what == "drain" else kill(admin))
        took = time.monotonic() - began
        unfinished = await calls.end(streams)
        ended = time.monotonic()
        longest = [longest_ms(one.arrivals, began, ended) for one in streams]
        usual = [median(intervals_ms(one.arrivals)) for one in streams]
        other = sum(
            one.tokens != tokens for one, tokens in zip(streams, calls.undisturbed, strict=True)
        )
    if what == "drain":
        await admin.drain(DRAINED, wanted=False)
        await admin.until(DRAINED, state="serving")
    return {
        "what": what,
        "streams": len(streams),
        "seconds": round(took, 3),
        "unfinished": unfinished,
        "other": other,
        "inter_token_ms": median(usual),
        "longest_ms": median(longest),
        "longest_of_all_ms": max(longest),
    }


async def measure(served: Served, result: Result, options: argparse.Namespace) -> None:
    """Into the result, whose file is written after each fault. Raises StreamFailed."""
    from bench.client import session
    from bench.drain import Admin

    deadline = Deadline(MOST_S)
    async with session() as http:
        admin, calls = Admin(served.url, http), Calls(served, http, result.settings)
        async with AsyncExitStack() as stack:
            streams = await calls.begin(stack)
            await calls.end(streams)
            calls.undisturbed = [one.tokens for one in streams]
        for what in (*["drain"] * result.settings["drains"], "kill -9"):  # the last has one engine
            if deadline.over(result):
                return
            result.samples.append(await disturbed(calls, admin, what))
            say(str(result.samples[-1]))
            record(result, options)


def record(result: Result, options: argparse.Namespace) -> None:
    """The summary of what is there, and the file."""
    found = [sample for sample in result.samples if "what" in sample]
    result.summary = {"unfinished": float(sum(one["unfinished"] for one in found))}
    for what, name in (("drain", "drain"), ("kill -9", "kill")):
        if longest := [one["longest_of_all_ms"] for one in found if one["what"] == what]:
            result.summary[f"{name}_longest_ms"] = max(longest)
    write(result, options)


def main(
    arguments: list[str] | None = None,
    flags: Sequence[str] = (),
    nursery: Nursery | None = None,
) -> int:
    """flags: of the server, in place of those for its device; nursery: where it is forked."""
    options = options_of(__doc__, arguments)
    quick = options.quick or options.device != "cuda"
    settings = {
        "device": options.device,
        "model": "count" if quick else "qwen3-0.6b",
        "each": 2 if quick else 4,
        "prompt": 64 if quick else 2048,
        "tokens": 100 if quick else 600,
        "drains": 1 if quick else 3,
    }
    result = begin("gpu kill", settings)
    note_gpu(result)
    if reason := missing():
        return skipped(result, options, reason)
    import uvloop

    from bench.models import model_folder
    from kvmig_tools.served import SMALL, Served

    result.targets = dict(TARGETS)
    settings["flags"] = [*FLAGS, *(flags or (ON_GPU if options.device == "cuda" else SMALL))]
    failed = False
    try:
        with tempfile.TemporaryDirectory() as logs:
            model, log = model_folder(settings["model"]), Path(logs, "served")
            with Served(settings["flags"], model=model, log=log, nursery=nursery) as served:
                uvloop.run(measure(served, result, options))
    except (KvmigError, RuntimeError, OSError) as error:
        failed = True
        result.samples.append({"failed": f"{type(error).__name__}: {error}"})
        say(str(error))
    names = (
        "what", "streams", "seconds", "unfinished", "other", "inter_token_ms", "longest_ms",
        "longest_of_all_ms",
    )  # fmt: skip
    rows = [tuple(one[name] for name in names) for one in result.samples if "what" in one]
    columns = ("what", "streams", "s", "unfinished", "other", "a token", "longest wait", "of all")
    shown = table("engines that leave their streams, ms", columns, rows)
    return finish(result, options, [shown]) or int(failed)


if __name__ == "__main__":
    sys.exit(main())
