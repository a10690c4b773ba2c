"""Live migrations at a steady rate, beside those of the policy; what became of all."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import aiohttp

from kvmig_tools.served import Served

COLLECT_S = 2.0
MOST = 1000
"""Reports that a front end keeps."""
TIMEOUT_S = 60.0


class Mover:
    """Asks for migrations; everything that the admin API refuses now is as good as a report.

    ended: migrations by `committed`, or `aborted: REASON`. answers: of asked ones, by status.
    """

    def __init__(self, served: Served, seed: int, per_s: float) -> None:
        self.answers: Counter[str] = Counter()
        self.longest_pause_ms = 0.0
        self._url = f"{served.url}/kvmig/v1"
        self._random = Random(f"moves {seed}")
        self._every_s = 1 / per_s
        self._seen: dict[str, str] = {}
        self._asking: set[asyncio.Task[None]] = set()

    @property
    def ended(self) -> Counter[str]:
        """So far."""
        return Counter(self._seen.values())

    async def run(self, until: Callable[[], bool]) -> None:
        """Move something now and then, and read the reports. A server that is in trouble is
        asked again."""
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
            collected, due = 0.0, time.monotonic()
            while not until():
                now = time.monotonic()
                if now > collected + COLLECT_S:
                    collected = now
                    await self._collect(http)
                await self._move_one(http)
                due = max(due + self._every_s, time.monotonic())
                await asyncio.sleep(max(0.0, due - time.monotonic()))
            if self._asking:
                await asyncio.wait(self._asking, timeout=TIMEOUT_S)
            await self._collect(http)

    async def _rows(self, http: aiohttp.ClientSession, path: str) -> list[dict[str, Any]]:
        """None of a front end that has just gone."""
        try:
            async with http.get(f"{self._url}/{path}") as answer:
                return list((await answer.json())["data"]) if answer.status == 200 else []
        except (aiohttp.ClientError, TimeoutError) as error:
            self.answers[type(error).__name__] += 1
            return []

    async def _collect(self, http: aiohttp.ClientSession) -> None:
        for row in await self._rows(http, f"migrations?limit={MOST}"):
            reason = f"aborted: {row['reason']}"
            self._seen[row["id"]] = row["state"] if row["state"] == "committed" else reason

    async def _move_one(self, http: aiohttp.ClientSession) -> None:
        instances = await self._rows(http, "instances")
        serving = [row["id"] for row in instances if row["state"] == "serving"]
        requests = await self._rows(http, "requests")
        running = [row for row in requests if row["state"] == "running" and not row["unmovable"]]
        if not running:
            return
        row = self._random.choice(running)
        others = [one for one in serving if one != row["instance"]]
        if others:
            task = asyncio.create_task(self._ask(http, row["id"], self._random.choice(others)))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)

    async def _ask(self, http: aiohttp.ClientSession, request_id: str, destination: str) -> None:
        body = {"request_id": request_id, "destination": destination}
        try:
            async with http.post(f"{self._url}/migrations", json=body) as answer:
                self.answers[str(answer.status)] += 1
        except (aiohttp.ClientError, TimeoutError) as error:
            self.answers[type(error).__name__] += 1
