"""A client that follows a stream and moves it while it runs."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx

from kvmig_tools.patience import SERVER_PATIENCE_S
from kvmig_tools.served import Served
from tests.support.retries import SESSION, EndedEarly, until_moved
from tests.support.waiting import until


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
    request_id: str = ""

    @property
    def tokens(self) -> int:
        """Output tokens so far, of all choices (a busy server puts several into one chunk)."""
        return self.usage["completion_tokens"] if self.usage else 0

    def take(self, chunk: dict[str, Any]) -> None:
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

    def same_as(self, other: Answer, within: float = 0.0) -> None:
        """Assert equality of everything that a client can compare.

        within: largest difference of a sampled token's log-probability, relative to those
        below -1; of the others, some may be equally likely.
        """
        assert self.choices.keys() == other.choices.keys()
        for index, choice in self.choices.items():
            unmoved = other.choices[index]
            assert choice.text == unmoved.text
            assert choice.finish_reason == unmoved.finish_reason
            assert choice.stop_reason == unmoved.stop_reason
            same_logprobs(flat(choice.token_logprobs), flat(unmoved.token_logprobs), within)
        assert self.usage == other.usage


def same_logprobs(entries: list[Any], wanted: list[Any], within: float) -> None:
    """Assert that they are equal, or those of sampled tokens to within so much."""
    if not within:
        assert entries == wanted
        return
    for one, other in zip(map(chosen, entries), map(chosen, wanted), strict=True):
        assert one[0] == other[0]
        assert abs(one[1] - other[1]) <= within * max(1.0, abs(other[1]))


def flat(logprobs: list[Any]) -> list[Any]:
    """One entry a token, however the chunks were cut."""
    tokens: list[Any] = []
    for part in logprobs:
        if part and isinstance(part[0], dict):  # chat: a list of entries
            tokens.extend(part)
        else:  # completions: parallel lists
            tokens.extend(zip(*(column or [None] * len(part[0]) for column in part), strict=True))
    return tokens


def chosen(entry: Any) -> tuple[str, float]:
    """Of one entry of `flat`: the token that was sampled, and its log-probability."""
    if isinstance(entry, dict):
        return entry["token"], entry["logprob"]
    return entry[0], entry[1]


class StreamFailed(Exception):
    """The server has ended the stream with an error object."""


class Door(NamedTuple):
    """Where a model of a fleet is reached."""

    url: str
    model: str
    key: str


class Stream:
    """One streaming call; `answer` grows while it runs."""

    def __init__(self, served: Served | Door, path: str, body: dict[str, Any]) -> None:
        self.answer = Answer(request_id=uuid.uuid4().hex)
        self._served = served
        self._path = path
        self._headers = {"x-request-id": self.answer.request_id}
        if isinstance(served, Door):
            self._headers["authorization"] = f"Bearer {served.key}"
        options = {"include_usage": True, "continuous_usage_stats": True}
        self._body = {
            "model": served.model, "stream": True, "stream_options": options, **body
        }  # fmt: skip
        self._grown = asyncio.Event()
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> Answer:
        async with (
            httpx.AsyncClient(timeout=SERVER_PATIENCE_S, verify=False) as client,
            client.stream(
                "POST",
                f"{self._served.url}{self._path}",
                json=self._body,
                headers=self._headers,
            ) as response,
        ):
            assert response.headers["x-request-id"] == self.answer.request_id
            if response.status_code != 200:
                raise AssertionError((await response.aread()).decode())
            async for line in response.aiter_lines():
                data = line.removeprefix("data: ")
                if data in (line, "[DONE]"):  # empty, or a comment while a model starts
                    continue
                chunk = json.loads(data)
                if "error" in chunk:
                    raise StreamFailed(chunk["error"])
                self.answer.take(chunk)
                self._grown.set()
        return self.answer

    async def reach(self, tokens: int) -> None:
        """Wait until so many tokens have come."""
        while self.answer.tokens < tokens:
            grown = asyncio.create_task(self._grown.wait())
            done, _ = await asyncio.wait(
                (grown, self.task), timeout=SERVER_PATIENCE_S, return_when=asyncio.FIRST_COMPLETED
            )
            grown.cancel()
            assert done, "the stream stands still"
            if self.task in done and self.answer.tokens < tokens:
                raise EndedEarly(f"at {self.task.result().tokens} of {tokens} tokens")
            self._grown.clear()

    async def leave(self) -> None:
        """Close the connection in the middle of the stream."""
        self.task.cancel()
        await asyncio.wait([self.task])

    async def end(self) -> Answer:
        """The whole answer."""
        async with asyncio.timeout(SERVER_PATIENCE_S):
            return await self.task


async def until_said(
    served: Served, words: str, times: int = 1, within_s: float = SERVER_PATIENCE_S
) -> None:
    """Wait until a server has printed the words so many times."""
    try:
        await until(lambda: served.output().count(words) >= times, within_s, 0.05)
    except TimeoutError:
        raise AssertionError(served.output()[-2000:]) from None


async def start_stream(served: Served | Door, body: dict[str, Any], tokens: int) -> Stream:
    """A completion that has so many tokens."""
    (stream,) = await start_streams(served, [body], tokens)
    return stream


async def start_streams(
    served: Served | Door, bodies: Iterable[dict[str, Any]], tokens: int
) -> list[Stream]:
    """Completions, all started at once, that have so many tokens each."""
    streams = [Stream(served, "/v1/completions", body) for body in bodies]
    await asyncio.gather(*(stream.reach(tokens) for stream in streams))
    return streams


def count_from(number: int, tokens: int, **fields: Any) -> dict[str, Any]:
    """A completion that counts on from there."""
    prompt = f"Count: {number:04d} {number + 1:04d}"
    body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    return {**body, **fields}


def counted(answer: Answer, number: int, by: int = 1) -> None:
    """Assert that it did, whatever moved it meanwhile. by: what the weights count by."""
    text = answer.choices[0].text
    numbers = [number + 1 + by * (one + 1) for one in range(1 + len(text) // 5)]
    assert text == "".join(f" {one % 10_000:04d}" for one in numbers)[: len(text)]


async def sequences(served: Served, call_id: str) -> list[dict[str, Any]]:
    """The call's live sequences."""
    rows = await asyncio.to_thread(served.get, "requests")
    return [row for row in rows if row["call_id"] == call_id]


async def move(served: Served, stream: Stream) -> list[dict[str, Any]]:
    """Move every sequence of the call to the other instance; the reports."""
    rows = await sequences(served, stream.answer.request_id)
    if len(rows) < max(1, len(stream.answer.choices)):
        raise EndedEarly(stream.answer.request_id)
    return [await move_one(served, row) for row in rows]


def other(instance: str) -> str:
    """Of two instances."""
    return "i1" if instance == "i0" else "i0"


async def call_admin(served: Served, method: str, path: str, **more: Any) -> httpx.Response:
    """One admin call over a connection of its own: any of the front ends may take it."""
    async with httpx.AsyncClient(base_url=f"{served.url}/kvmig/v1/", verify=False) as client:
        return await client.request(method, path, timeout=SERVER_PATIENCE_S, **more)


async def row_of(
    served: Served, stream: Stream, state: str = "running", output_tokens: int = 0
) -> dict[str, Any]:
    """The call's one sequence, once it is in that state and has so many tokens."""
    return await row_when(
        served,
        stream,
        lambda row: row["state"] == state and row["output_tokens"] >= output_tokens,
    )


async def row_when(
    served: Served, stream: Stream, ready: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    """The call's one sequence, once it is so."""
    while True:
        rows = await sequences(served, stream.answer.request_id)
        if row := next(filter(ready, rows), None):
            return row
        if stream.task.done():
            stream.task.result()  # raises what ended it, if that was no answer
            raise EndedEarly(f"while it was waited for: {rows}")
        await asyncio.sleep(0.005)


async def place(served: Served, stream: Stream, instance: str) -> None:
    """See to it that the call runs there, even if the dispatcher lets it wait elsewhere."""
    reason = "started"
    while reason == "started":  # it was moved as one that waits, and began to run
        row = await row_when(
            served, stream, lambda row: row["state"] == "waiting" or row["output_tokens"]
        )
        if row["instance"] == instance:
            break
        report = await move_one(served, row)
        reason = report["reason"]
        assert report["state"] == "committed" or reason == "started", report
    await row_of(served, stream, output_tokens=1)


async def ask(served: Served, request_id: str, destination: str) -> httpx.Response:
    """POST a migration; whatever the answer is."""
    return await asyncio.to_thread(served.migrate, request_id, destination)


async def move_one(served: Served, row: dict[str, Any]) -> dict[str, Any]:
    """Move one sequence to the other instance; the report."""
    answer = await ask(served, row["id"], other(row["instance"]))
    if answer.status_code == 409 and "has finished" in answer.text:
        raise EndedEarly(row["id"])
    assert answer.status_code == 200, answer.text
    report: dict[str, Any] = answer.json()
    if report["reason"] == "finished":
        raise EndedEarly(row["id"])
    return report


async def run_unmoved(served: Served | Door, path: str, body: dict[str, Any]) -> Answer:
    """The same call, left alone."""
    return await Stream(served, path, body).end()


async def run_moved(
    served: Served, path: str, body: dict[str, Any], at: tuple[int, ...] = (30, 80)
) -> tuple[Answer, list[dict[str, Any]]]:
    """The call, moved to the other instance whenever it has grown to `at` tokens."""
    return await until_moved(lambda: _moved(served, path, body, at), SESSION)


async def _moved(
    served: Served, path: str, body: dict[str, Any], at: tuple[int, ...]
) -> tuple[Answer, list[dict[str, Any]]]:
    stream = Stream(served, path, body)
    reports: list[dict[str, Any]] = []
    for tokens in at:
        await stream.reach(tokens)
        reports += await move(served, stream)
    return await stream.end(), reports


async def run_whole(
    served: Served, path: str, body: dict[str, Any], call_id: str | None = None
) -> dict[str, Any]:
    """The call without streaming."""
    headers = {"x-request-id": call_id} if call_id else {}
    async with httpx.AsyncClient(timeout=SERVER_PATIENCE_S, verify=False) as client:
        body = {"model": served.model, **body}
        answer = await client.post(f"{served.url}{path}", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    whole: dict[str, Any] = answer.json()
    return whole


async def run_whole_moved(
    served: Served, path: str, body: dict[str, Any], at: tuple[int, ...] = (30, 80)
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The call without streaming; all its sequences are moved at `at` output tokens."""
    return await until_moved(lambda: _whole_moved(served, path, body, at), SESSION)


async def _whole_moved(
    served: Served, path: str, body: dict[str, Any], at: tuple[int, ...]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    call_id = f"whole-{uuid.uuid4().hex}"
    call = asyncio.create_task(run_whole(served, path, body, call_id))
    reports: list[dict[str, Any]] = []
    for tokens in at:
        while True:
            rows = await sequences(served, call_id)
            if rows and all(row["output_tokens"] >= tokens for row in rows):
                break
            if call.done():
                raise EndedEarly(f"before it had {tokens} tokens")
            await asyncio.sleep(0.01)
        reports.extend([await move_one(served, row) for row in rows])
    return await call, reports
