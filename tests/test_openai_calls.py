"""Calls to kvmig's own OpenAI server when something behind it goes wrong, or ends early."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import httpx
import pytest
from fastapi import FastAPI

from kvmig.engines.transformers.payload import Output, Submitted, decode
from kvmig.gateway.access import bearer
from kvmig.gateway.request_id import RequestIdMiddleware
from kvmig.gateway.router import Router
from kvmig.ground.errors import NoInstance
from kvmig.kvtransfer.wire import Frame
from kvmig.openai_server.generation import Engines, Outlet
from kvmig.openai_server.routes import openai_api

if TYPE_CHECKING:
    from kvmig.engines.transformers.tokenizer import Tokenizer

EOS = 0


class Bytes:
    """A tokenizer whose tokens are bytes."""

    max_tokens, vocabulary, eos_ids, longest = 100, 256, (EOS,), 1

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(
        self, messages: Sequence[Mapping[str, str]], options: Mapping[str, Any]
    ) -> list[int]:
        raise ValueError("the model has no chat template")

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode("utf-8", "replace")


class Instances:
    """A router whose instances answer what a test says; `live`: what they still run."""

    def __init__(self, outlet: Outlet) -> None:
        self._outlet = outlet
        self.script: list[Output | tuple[str, bool]] = []
        self.live: set[str] = set()
        self.ended: list[tuple[str, bool]] = []
        self.submitted: list[Submitted] = []
        self.there = True

    async def submit(
        self, request_id: str, external_id: str, tokens: int, priority: int, payload: list[Frame]
    ) -> str:
        if not self.there:
            raise NoInstance("no instance takes requests")
        self.submitted.append(decode(payload[0], Submitted))
        self.live.add(request_id)
        asyncio.get_running_loop().call_soon(self._run, request_id)
        return "i0"

    async def abort(self, request_ids: Sequence[str], complete: bool = False) -> None:
        self.live.difference_update(request_ids)
        self.ended += [(one, complete) for one in request_ids]

    def _run(self, request_id: str) -> None:
        for one in self.script:
            if isinstance(one, Output):
                one.request_id = request_id
                self._outlet.deliver(0, [one], None)
                over = one.finished
            else:
                self._outlet.fail([request_id], *one)
                over = True
            if over:
                self.live.discard(request_id)


def out(text: str, finish_reason: Any = "", error: str = "") -> Output:
    return Output("", list(text.encode()), finish_reason, error=error)


@pytest.fixture
def instances() -> Instances:
    return Instances(Outlet())


@pytest.fixture
async def http(instances: Instances) -> AsyncIterator[httpx.AsyncClient]:
    app = FastAPI()
    app.add_middleware(RequestIdMiddleware)
    engines = Engines(cast("Router", instances), instances._outlet, cast("Tokenizer", Bytes()))
    app.include_router(openai_api(engines, ["bytes"], 100, bearer([])))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client
    assert not instances.live
    assert not instances._outlet._queues


async def complete(http: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await http.post("/v1/completions", json={"prompt": "a", **fields})


def events(answer: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("stream", [False, True])
async def test_without_an_instance_a_call_is_answered_503(
    http: httpx.AsyncClient, instances: Instances, stream: bool
) -> None:
    instances.there = False
    answer = await complete(http, stream=stream)
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "no instance takes requests"


@pytest.mark.parametrize(
    ("end", "status"),
    [
        (("instance i0 is lost", True), 503),
        (("instances crashed while they ran it", False), 500),
        (out("", "error", "it can't run"), 500),
    ],
)
async def test_a_request_that_fails_is_answered_with_the_reason(
    http: httpx.AsyncClient, instances: Instances, end: Any, status: int
) -> None:
    reason = end.error if isinstance(end, Output) else end[0]
    instances.script = [out("b"), end]
    answer = await complete(http)
    assert (answer.status_code, answer.json()["error"]["message"]) == (status, reason)

    *_, last = events(await complete(http, stream=True))
    assert (last["error"]["code"], last["error"]["message"]) == (status, reason)


async def test_a_stop_string_ends_the_request_as_one_that_has_all_it_wanted(
    http: httpx.AsyncClient, instances: Instances
) -> None:
    instances.script = [out("bc"), out("d"), out("e")]
    answer = (await complete(http, stop="cd")).json()
    assert answer["choices"][0]["text"] == "b"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 3
    assert [complete for _, complete in instances.ended] == [True]


async def test_the_end_of_sequence_is_counted_and_not_told(
    http: httpx.AsyncClient, instances: Instances
) -> None:
    instances.script = [out("b"), out(chr(EOS), "stop")]
    answer = (await complete(http)).json()
    assert (answer["choices"][0]["text"], answer["usage"]["completion_tokens"]) == ("b", 2)
    assert instances.submitted[0].stop_token_ids == [EOS]


async def test_what_was_held_back_comes_with_the_end(
    http: httpx.AsyncClient, instances: Instances
) -> None:
    instances.script = [out("bc"), out("c", "length")]
    chunks = events(await complete(http, stop="cd", stream=True))
    assert "".join(one["choices"][0]["text"] for one in chunks) == "bcc"
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


async def test_a_call_without_a_seed_is_given_one_for_all_its_runs(
    http: httpx.AsyncClient, instances: Instances
) -> None:
    instances.script = [out("b", "length")]
    await complete(http)
    await complete(http, seed=7)
    drawn, asked = [one.seed for one in instances.submitted]
    assert drawn is not None
    assert asked == 7


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("completions", {"prompt": "a", "model": "other"}, 404, "model"),
        ("completions", {"prompt": ""}, 400, "prompt"),
        ("completions", {"prompt": "a" * 101}, 400, "prompt"),
        ("completions", {}, 400, "prompt"),
        ("completions", {"prompt": "a", "temperature": -1}, 400, "temperature"),
        ("completions", {"prompt": "a", "stop": [""]}, 400, "stop"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}]}, 400, "messages"),
        ("chat/completions", {"messages": []}, 400, "messages"),
    ],
)
async def test_a_call_that_cannot_be_names_the_field(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], status: int, param: str
) -> None:
    answer = await http.post(f"/v1/{path}", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", "\ud800"),
        ("prompt", "a" * 101),
        ("model", "\udc00"),
        ("max_tokens", 10**30),
        ("seed", 2**63),
        ("stop", ["a"] * 65),
        ("stop", "a" * 257),
        ("stop_token_ids", [2**64]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [1] * 1025),
        ("temperature", "1"),
        ("stream", "true"),
    ],
)
async def test_what_no_engine_can_take_is_a_short_400_that_names_the_field(
    http: httpx.AsyncClient, field: str, value: Any
) -> None:
    body = json.dumps({"prompt": "a", field: value})
    headers = {"content-type": "application/json"}
    answer = await http.post("/v1/completions", content=body, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].split(".")[0] == field
    assert len(answer.content) < 500


async def test_whole_numbers_may_be_written_with_a_fraction(
    http: httpx.AsyncClient, instances: Instances
) -> None:
    instances.script = [out("b", "length")]
    answer = await complete(http, max_tokens=3.0, seed=7.0, prompt=[97.0])
    assert answer.status_code == 200, answer.text
    (submitted,) = instances.submitted
    assert (submitted.max_tokens, submitted.seed, submitted.prompt_token_ids) == (3, 7, [97])
