"""A client that follows a stream and moves it while it runs."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import httpx

from bench.served import Served

TIMEOUT_S = 120.0


@dataclass
class Choice:
    """What one choice of a response gave, put together from its chunks."""

    text: str = ""
    token_logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: Any = None


@dataclass
class Answer:
    """One streamed response."""

    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    chunks: int = 0
    request_id: str = ""

    def take(self, chunk: dict[str, Any]) -> None:
        self.chunks += 1
        self.usage = chunk.get("usage") or self.usage
        for part in chunk["choices"]:
            choice = self.choices.setdefault(part["index"], Choice())
            delta = part.get("delta")
            choice.text += (delta.get("content") or "") if delta is not None else part["text"]
            if part.get("logprobs"):
                choice.token_logprobs.append(part["logprobs"].get("content") or [
                    part["logprobs"]["tokens"], part["logprobs"]["token_logprobs"],
                    part["logprobs"]["top_logprobs"],
                ])  # fmt: skip
            choice.finish_reason = part.get("finish_reason") or choice.finish_reason
            choice.stop_reason = part.get("stop_reason") or choice.stop_reason

    def same_as(self, other: Answer) -> None:
        """Assert equality of everything that a client can compare."""
        assert self.choices.keys() == other.choices.keys()
        for index, choice in self.choices.items():
            unmoved = other.choices[index]
            assert choice.text == unmoved.text
            assert flat(choice.token_logprobs) == flat(unmoved.token_logprobs)
            assert choice.finish_reason == unmoved.finish_reason
            assert choice.stop_reason == unmoved.stop_reason
        assert self.usage == other.usage


def flat(logprobs: list[Any]) -> list[Any]:
    """One entry a token, however the chunks were cut."""
    tokens: list[Any] = []
    for part in logprobs:
        if part and isinstance(part[0], dict):  # chat: a list of entries
            tokens.extend(part)
        else:  # completions: parallel lists
            tokens.extend(zip(*(column or [None] * len(part[0]) for column in part), strict=True))
    return tokens


class Stream:
    """One streaming call; `answer` grows while it runs."""

    def __init__(self, served: Served, path: str, body: dict[str, Any]) -> None:
        self.answer = Answer()
        self._served = served
        self._path = path
        options = {"include_usage": True}
        self._body = {
            "model": served.model, "stream": True, "stream_options": options, **body
        }  # fmt: skip
        self._grown = asyncio.Event()
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> Answer:
        async with (
            httpx.AsyncClient(timeout=TIMEOUT_S) as client,
            client.stream("POST", f"{self._served.url}{self._path}", json=self._body) as response,
        ):
            self.answer.request_id = response.headers["x-request-id"]
            if response.status_code != 200:
                raise AssertionError((await response.aread()).decode())
            async for line in response.aiter_lines():
                data = line.removeprefix("data: ")
                if not data or data == "[DONE]":
                    continue
                chunk = json.loads(data)
                assert "error" not in chunk, chunk
                self.answer.take(chunk)
                self._grown.set()
        return self.answer

    async def reach(self, chunks: int) -> None:
        """Wait until so many chunks have come."""
        while self.answer.chunks < chunks:
            grown = asyncio.create_task(self._grown.wait())
            done, _ = await asyncio.wait(
                (grown, self.task), timeout=TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
            )
            grown.cancel()
            assert done, "the stream stands still"
            if self.task in done:
                raise AssertionError(f"it ended early: {self.task.result().chunks} chunks")
            self._grown.clear()

    async def end(self) -> Answer:
        """The whole answer."""
        async with asyncio.timeout(TIMEOUT_S):
            return await self.task


async def sequences(served: Served, call_id: str) -> list[dict[str, Any]]:
    """The call's live sequences."""
    rows = await asyncio.to_thread(served.get, "requests")
    return [row for row in rows if row["call_id"] == call_id]


async def move(served: Served, stream: Stream) -> list[dict[str, Any]]:
    """Move every sequence of the call to the other instance; the reports."""
    reports = []
    for row in await sequences(served, stream.answer.request_id):
        destination = "i1" if row["instance"] == "i0" else "i0"
        answer = await asyncio.to_thread(served.migrate, row["id"], destination)
        assert answer.status_code == 200, answer.text
        reports.append(answer.json())
    return reports


async def run_unmoved(served: Served, path: str, body: dict[str, Any]) -> Answer:
    """The same call, left alone."""
    return await Stream(served, path, body).end()


async def run_moved(
    served: Served, path: str, body: dict[str, Any], at: tuple[int, ...] = (40, 120)
) -> tuple[Answer, list[dict[str, Any]]]:
    """The call, moved to the other instance whenever it has grown to `at` chunks."""
    stream = Stream(served, path, body)
    reports: list[dict[str, Any]] = []
    for chunks in at:
        await stream.reach(chunks)
        reports += await move(served, stream)
    return await stream.end(), reports
