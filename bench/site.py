"""A served model as benchmarks use it: streams, a background, migrations by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, contextmanager
from typing import Any

import aiohttp

from bench.client import Stream, StreamFailed, prompt_of
from kvmig_tools.served import Served

SETTLE = 8
"""Tokens of a stream before anything of it is measured."""
BACKGROUND_PROMPT = 64
BACKGROUND_TOKENS = 6000
ENGINE_FLAGS = (
    "--enforce-eager",
    "--block-size=32",
    "--max-num-seqs=16",
    "--kv-cache-memory-bytes=536870912",
)
SERVED_FLAGS = (
    *ENGINE_FLAGS,
    "--instances=2",
    # Calls alternate between the instances, and nothing moves by itself.
    "--policy=round-robin",
    "--shutdown-timeout=2",
)


@contextmanager
def all_up(servers: Sequence[Served]) -> Iterator[None]:
    """Start them at the same time, end them at the end of the block; raises as `start` does."""
    with ExitStack() as stack, ThreadPoolExecutor(len(servers)) as pool:
        for served in servers:
            stack.push(served)
        for starting in [pool.submit(served.start) for served in servers]:
            starting.result()
        yield


class Site:
    """One server of two instances, and the client's connections to it."""

    def __init__(self, served: Served, http: aiohttp.ClientSession) -> None:
        self._served = served
        self._http = http

    def stream(self, prompt: list[int], salt: str | None = None, max_tokens: int = 1500) -> Stream:
        """A call, not sent yet."""
        served = self._served
        return Stream(self._http, served.url, served.model, prompt, max_tokens, salt)

    async def instance_of(self, stream: Stream) -> str:
        """Where the stream runs now."""
        async with self._http.get(f"{self._served.url}/kvmig/v1/requests") as answer:
            rows = (await answer.json())["data"]
        places = [str(row["instance"]) for row in rows if row["call_id"] == stream.request_id]
        if not places:
            raise StreamFailed(f"call {stream.request_id} runs nowhere")
        return places[0]

    async def other_than(self, stream: Stream) -> str:
        """The instance where the stream does not run now."""
        return "i1" if await self.instance_of(stream) == "i0" else "i0"

    async def migrate(self, stream: Stream, destination: str) -> dict[str, Any]:
        """Move the stream; the report of the migration. Raises StreamFailed if it stays."""
        body = {"request_id": stream.request_id, "destination": destination}
        url = f"{self._served.url}/kvmig/v1/migrations"
        async with self._http.post(url, json=body) as answer:
            report: dict[str, Any] = await answer.json()
        if report.get("state") != "committed":
            raise StreamFailed(f"the migration failed: {report}")
        return report

    async def background(self, stack: AsyncExitStack, each: int, name: object) -> list[Stream]:
        """`each` streams on each instance, until the stack unwinds. All have settled."""
        streams = [
            await stack.enter_async_context(
                self.stream(prompt_of(BACKGROUND_PROMPT, name, number), None, BACKGROUND_TOKENS)
            )
            for number in range(2 * each)
        ]
        for stream in streams:
            await stream.reach(SETTLE)
        places = [await self.instance_of(stream) for stream in streams]
        if places.count("i0") != each:
            raise StreamFailed(f"the background is uneven: {places}")
        return streams
