"""A streaming client that notes when each token came, and takes little time for it."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import time
from typing import Any

import aiohttp

from bench.arrivals import Arrival

KEEP_S = 1.0
"""Idle connections are used again for so long: plain vLLM closes them after 5 s."""
TIMEOUT_S = 120.0


def session(key: str = "") -> aiohttp.ClientSession:
    """For any number of streams at once. key: of the API; empty: none."""
    gc.collect()
    gc.freeze()  # or a collection, which walks all that is imported, would look like a slow server
    return aiohttp.ClientSession(
        headers={"authorization": f"Bearer {key}"} if key else {},
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_read=TIMEOUT_S),
    )


def prompt_of(tokens: int, *names: object) -> list[int]:
    """Random token ids, the same for the same names: bytes, of which every tokenizer has ids."""
    source = random.Random(repr(names))
    return [source.randrange(256) for _ in range(tokens)]


class StreamFailed(RuntimeError):
    """The server refused a call or ended its stream early."""


class Stream:
    """One completion of exactly `max_tokens` tokens; ended early at the end of the block.

    salt: the prefix cache finds blocks only of calls with the same one. priority: of its class.
    logprobs: ask for those of its tokens, too.
    """

    def __init__(
        self,
        http: aiohttp.ClientSession,
        url: str,
        model: str,
        prompt: list[int],
        max_tokens: int,
        salt: str | None = None,
        priority: int = 0,
        logprobs: bool = False,
    ) -> None:
        self.request_id = ""
        self.prompt = prompt
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.arrivals: list[Arrival] = []
        self.sent_at = 0.0
        self._http = http
        self._url = f"{url}/v1/completions"
        self._body: dict[str, Any] = {
            "model": model, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True,
            "temperature": 0, "stream": True, "return_token_ids": True,
        }  # fmt: skip
        if priority:
            self._body["priority"] = priority
        if logprobs:
            self._body["logprobs"] = 0
        if salt is not None:
            self._body["cache_salt"] = salt
        self._wanted = 0
        self._reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Stream:
        """Returns when the server has taken the call: its id is known."""
        self.sent_at = time.monotonic()
        response = await self._http.post(self._url, json=self._body)
        if response.status != 200:
            raise StreamFailed((await response.text())[:500])
        self.request_id = response.headers.get("x-request-id", "")
        self._task = asyncio.create_task(self._read(response))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Leave: the server aborts what still runs."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def reach(self, tokens: int) -> None:
        """Wait until so many tokens have come. Raises StreamFailed if they never will."""
        assert self._task is not None
        if len(self.tokens) < tokens:
            self._wanted = tokens
            self._reached = asyncio.get_running_loop().create_future()
            await asyncio.wait(
                (self._reached, self._task),
                timeout=TIMEOUT_S,
                return_when=asyncio.FIRST_COMPLETED,
            )
        if len(self.tokens) < tokens:
            if self._task.done():
                self._task.result()  # raises what went wrong
            raise StreamFailed(f"{len(self.tokens)} tokens came, {tokens} were expected")

    async def _read(self, response: aiohttp.ClientResponse) -> None:
        rest = b""
        try:
            async for data in response.content.iter_any():
                at = time.monotonic()
                *events, rest = (rest + data).split(b"\n\n")
                first = len(self.tokens)
                for event in events:
                    self._take(event)
                if len(self.tokens) > first:
                    self.arrivals.append(Arrival(at, first, len(self.tokens) - first))
                if len(self.tokens) >= self._wanted and not self._reached.done():
                    self._reached.set_result(None)
        finally:
            response.close()

    def _take(self, event: bytes) -> None:
        if not event.startswith(b"data: {"):
            return
        chunk = json.loads(event[6:])
        if "error" in chunk:
            raise StreamFailed(chunk["error"]["message"])
        for choice in chunk["choices"]:
            self.tokens += choice["token_ids"] or ()
            self.logprobs += (choice.get("logprobs") or {}).get("token_logprobs", ())
