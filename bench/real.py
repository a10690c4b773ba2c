"""One realistic run, as a user sees it: a model of Qwen3-0.6B's shape on two instances.

For each block size: how long the server takes to start; the longest gap of a stream in a window
around a move beside the longest in an equally long window of the same stream without one; bytes
and time of the move, by the server's own report; and 32 calls at once: where they went, and how
long the last one waited for its first token. Both engines share this machine's cores, so a token
takes as long as it does; the ratio of the two gaps is the figure to look at.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from contextlib import AsyncExitStack
from statistics import median
from typing import Any

import uvloop

from bench import report
from bench.arrivals import longest_ms
from bench.client import prompt_of, session
from bench.models import model_folder
from bench.site import SETTLE, Site
from kvmig_tools.served import Served

FLAGS = (
    "--enforce-eager", "--instances=2", "--max-model-len=4096", "--max-num-seqs=32",
    "--policy=round-robin", "--kv-cache-memory-bytes=2147483648", "--shutdown-timeout=2",
)  # fmt: skip
BLOCKS = (32, 128)
"""The least that vLLM's attention takes on a CPU (16 is a GPU's), and its own choice there."""
PROMPTS = (256, 2000)
WINDOW = 24
"""Tokens of a window; the move begins within the first ones of its own."""
CALLS, CALL_PROMPT = 32, 32


async def one_move(site: Site, block: int, prompt: int, run: int) -> dict[str, Any]:
    """A stream's longest gap in a window without a move, and in one with it."""
    name = f"{block} {prompt} {run}"
    async with site.stream(prompt_of(prompt, name), name) as stream:
        await stream.reach(SETTLE)
        began = time.monotonic()
        await stream.reach(len(stream.tokens) + WINDOW)
        quiet = longest_ms(stream.arrivals, began, time.monotonic())
        destination = await site.other_than(stream)
        began, first = time.monotonic(), len(stream.tokens)
        migration = await site.migrate(stream, destination)
        await stream.reach(max(first + WINDOW, int(migration["output_tokens"]) + 2))
        gap = longest_ms(stream.arrivals, began, time.monotonic())
    return {
        "block": block,
        "prompt": prompt,
        "run": run,
        "longest_quiet_ms": quiet,
        "longest_move_ms": gap,
        "ratio": gap / quiet,
        "bytes": migration["bytes"],
        "move_ms": migration["total_ms"],
        "migration": migration,
    }


async def dispatch(site: Site, block: int, calls: int) -> dict[str, Any]:
    """Calls at once: TTFT of each, and how many each instance has."""
    async with AsyncExitStack() as stack:
        streams = [
            site.stream(prompt_of(CALL_PROMPT, block, number), f"call {number}", 8)
            for number in range(calls)
        ]
        await asyncio.gather(*(stack.enter_async_context(one) for one in streams))
        places = Counter([await site.instance_of(one) for one in streams if not one.arrivals])
        await asyncio.gather(*(one.reach(1) for one in streams))
        waits = [(one.arrivals[0].at - one.sent_at) * 1e3 for one in streams]
    return {
        "block": block,
        "calls": calls,
        "ttft_ms": median(waits),
        "longest_ttft_ms": max(waits),
        "waiting_at": dict(places),
    }


async def measure(served: Served, block: int, quick: bool) -> list[dict[str, Any]]:
    """All samples of one server."""
    rows: list[dict[str, Any]] = []
    async with session() as http:
        site = Site(served, http)
        for prompt in PROMPTS[:1] if quick else PROMPTS:
            # The first pair of moves pays for connections, staging and shapes never met before.
            for run in range(-1, 2 if quick else 5):
                row = await one_move(site, block, prompt, run)
                if run >= 0:
                    rows.append(row)
        rows.append(await dispatch(site, block, 8 if quick else CALLS))
    return rows


def main(argv: list[str] | None = None) -> int:
    root = report.parser(__doc__)
    root.add_argument("--model", default="qwen3-0.6b", help="or a folder")
    options = root.parse_args(argv)
    model = model_folder(options.model)
    settings = {"model": options.model, "flags": FLAGS, "window": WINDOW}
    result = report.begin("real", settings)
    for block in BLOCKS[-1:] if options.quick else BLOCKS:
        report.say(f"blocks of {block}")
        began = time.monotonic()
        with Served([*FLAGS, f"--block-size={block}"], model=model) as served:
            ready = time.monotonic() - began
            rows = uvloop.run(measure(served, block, options.quick))
        result.samples += [{"block": block, "ready_s": ready}, *rows]
        result.summary[f"start_s block {block}"] = ready
        for prompt in sorted({row["prompt"] for row in rows if "prompt" in row}):
            of = [row for row in rows if row.get("prompt") == prompt]
            what = f"block {block}, {prompt} tokens"
            result.summary |= {
                f"longest gap, move / quiet, {what}": median(row["ratio"] for row in of),
                f"the same, worst, {what}": max(row["ratio"] for row in of),
                f"MB moved, {what}": median(row["bytes"] for row in of) / 1e6,
                f"move_ms, {what}": median(row["move_ms"] for row in of),
            }
        (calls,) = (row for row in rows if "calls" in row)
        result.summary[f"TTFT of {calls['calls']} calls at once, ms, block {block}"] = calls[
            "ttft_ms"
        ]
        result.summary[f"the longest of them, block {block}"] = calls["longest_ttft_ms"]
    return report.finish(result, options)


if __name__ == "__main__":
    sys.exit(main())
