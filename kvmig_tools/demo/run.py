"""One text twice: moved back and forth while it streams, and left alone."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvmig_tools.demo.client import Api, DemoFailed
from kvmig_tools.demo.ledger import Ledger

FRAME_S = 0.03
"""Between two looks at what can be shown."""
FIRST_MOVE = 20
"""Tokens before anything is moved."""

Show = Callable[[str, str], None]
"""Gets an instance and text that it made, in the stream's order."""


@dataclass(frozen=True, slots=True)
class Shown:
    """What happened: the tokens, and the reports of the migrations."""

    ledger: Ledger
    reports: list[dict[str, Any]]


def marks(tokens: int, moves: int) -> list[int]:
    """Numbers of tokens after which to move, evenly spread over the stream."""
    first = min(FIRST_MOVE, tokens // 2)
    return [first + (tokens - first) * number // (moves + 1) for number in range(moves)]


class Moved:
    """The stream that is moved at `marks` tokens."""

    def __init__(self, api: Api, body: dict[str, Any], at: list[int], show: Show) -> None:
        self._api = api
        self._body = body
        self._marks = at
        self._show = show
        self._call_id = f"demo-{secrets.token_hex(6)}"
        self._ledger = Ledger()
        self._reports: list[dict[str, Any]] = []
        self._grown = asyncio.Event()
        self._ended = False

    async def run(self) -> Shown:
        """From the first token to the last. Raises DemoFailed, also if others moved it too."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._read())
                tasks.create_task(self._move())
                tasks.create_task(self._draw())
        except ExceptionGroup as group:
            raise group.exceptions[0] from None  # the first, which ended the others
        seen = {report["id"] for report in await self._api.migrations_of(self._call_id)}
        if seen != {report["id"] for report in self._reports}:
            raise DemoFailed("the scheduler moved the stream too: try again on an idle server")
        return Shown(self._ledger, self._reports)

    async def _read(self) -> None:
        try:
            async for chunk in self._api.stream(self._call_id, self._body):
                self._ledger.take(*chunk)
                self._grown.set()
        finally:
            self._ended = True
            self._grown.set()

    async def _move(self) -> None:
        ledger = self._ledger
        await self._reach(1)
        source = await self._api.instance_of(self._call_id)
        if source is None:
            raise DemoFailed("the stream ended before it could be seen where it runs")
        ledger.settle(0, source)
        others = [one for one in await self._api.instances() if one != source]
        if not others:
            raise DemoFailed("there is one instance only: nothing to move to")
        for number, mark in enumerate(self._marks):
            await self._reach(mark)
            destination = source if number % 2 else others[number // 2 % len(others)]
            ledger.moving()
            report = await self._api.migrate(self._call_id, destination)
            if report is None:
                ledger.stayed()
                continue
            self._reports.append(report)
            if report["state"] == "committed":
                ledger.settle(report["output_tokens"], destination)
            else:
                ledger.stayed()

    async def _reach(self, tokens: int) -> None:
        while len(self._ledger) < tokens and not self._ended:
            self._grown.clear()
            await self._grown.wait()

    async def _draw(self) -> None:
        while True:
            ended = self._ended
            for instance, text in self._ledger.known():
                self._show(instance, text)
            if ended and self._ledger.complete:
                return
            await asyncio.sleep(FRAME_S)


async def unmoved(api: Api, body: dict[str, Any]) -> str:
    """The text of the same call, left alone. Raises DemoFailed, also if it was moved."""
    call_id = f"demo-{secrets.token_hex(6)}"
    text = "".join([chunk.text async for chunk in api.stream(call_id, body)])
    if await api.migrations_of(call_id):
        raise DemoFailed("the scheduler moved the run to compare with: try an idle server")
    return text
