"""What `serving` measures: streams that move to the other instance and back, and that stay."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from statistics import median
from typing import Any

import aiohttp

from bench.arrivals import intervals_ms, wait_for_ms
from bench.client import Stream, prompt_of, session
from bench.site import Site
from kvmig_tools.served import Served

EVERY = 32
"""Tokens between two moves."""


async def compared(
    served: Served, lengths: Sequence[int], moves: int, loads: Sequence[int] = (0,)
) -> AsyncIterator[dict[str, Any]]:
    """A sample of each length of prompts under each load. Raises StreamFailed.

    loads: streams on each instance beside the one that moves.
    """
    async with session() as http:
        longest = await longest_call(http, served)
        await _compare(http, served, lengths[0], 2, longest)  # the first of everything: a warm-up
        for load in loads:
            async with AsyncExitStack() as stack:
                if load:
                    await Site(served, http).background(stack, load, load)
                for tokens in lengths:
                    sample = await _compare(http, served, tokens, moves, longest)
                    yield {"load": load, **sample}


async def longest_call(http: aiohttp.ClientSession, served: Served) -> int:
    """Tokens of a prompt and its answer at most."""
    async with http.get(f"{served.url}/v1/models") as answer:
        return int((await answer.json())["data"][0]["max_model_len"])


async def _compare(
    http: aiohttp.ClientSession, served: Served, tokens: int, moves: int, longest: int
) -> dict[str, Any]:
    """longest: a stream is as long as the model lets it be, to outlast its moves; it ends early."""
    site, prompt = Site(served, http), prompt_of(tokens, "serving")

    def stream(most: int) -> Stream:
        return Stream(http, served.url, served.model, prompt, most, logprobs=True)

    reports: list[dict[str, Any]] = []
    async with stream(longest - tokens) as moved:
        await moved.reach(EVERY)
        for _ in range(moves):
            reports.append(await site.migrate(moved, await site.other_than(moved)))
            switch = int(reports[-1]["output_tokens"])
            await moved.reach(max(switch, len(moved.tokens)) + EVERY)
    total = len(moved.tokens)
    async with stream(total) as stays:
        await stays.reach(total)
    switches = [wait_for_ms(moved.arrivals, int(one["output_tokens"])) for one in reports]
    return {
        "tokens": tokens,
        "inter_token_ms": median(intervals_ms(stays.arrivals)),
        "wrong": int((moved.tokens, moved.logprobs) != (stays.tokens, stays.logprobs)),
        "switch_ms": median(switches),
        "total_ms": median(one["total_ms"] for one in reports),
        "transport": ", ".join(sorted({one["transport"] for one in reports})),
        "downtime_ms": [one["downtime_ms"] for one in reports],
    }
