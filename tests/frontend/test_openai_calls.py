"""Calls to kvmig's own OpenAI server when something behind it goes wrong, or ends early."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import anyio
import httpx
import openai
import pytest
from fastapi import FastAPI
from pydantic import ValidationError

from kvmig.asgi.access import bearer
from kvmig.core.errors import Failure, NoInstance
from kvmig.engines.client_request import ClientRequest
from kvmig.engines.transformers.payload import StepOutput, SubmittedRequest, TokenLogprob, decode
from kvmig.frontend.openai.answers import ChatAnswer, ChoicePiece, OutputToken
from kvmig.frontend.openai.bodies import ChatBody
from kvmig.frontend.openai.generation import (
    CallChoices,
    ChoiceGeneration,
    GenerationBackend,
    RequestQueues,
)
from kvmig.frontend.openai.routes import openai_api
from kvmig.frontend.router import FrontendRouter
from tests.support.byte_tokens import EOS, Bytes
from tests.support.http_states import behind_middleware
from tests.support.inside import open_queues

if TYPE_CHECKING:
    from kvmig.engines.transformers.tokenizer import ModelTokenizer


class Instances:
    """A router whose instances answer what a test says; `live`: what they still run."""

    def __init__(self, outlet: RequestQueues) -> None:
        self.outlet = outlet
        self.script: list[StepOutput | tuple[str, Failure]] = []
        self.live: set[str] = set()
        self.ended: list[tuple[str, bool]] = []
        self.submitted: list[SubmittedRequest] = []
        self.there = True

    async def submit(self, request: ClientRequest) -> str:
        if not self.there:
            raise NoInstance("no instance takes requests")
        self.submitted.append(decode(request.payload[0], SubmittedRequest))
        self.live.add(request.request_id)
        asyncio.get_running_loop().call_soon(self._run, request.request_id)
        return "i0"

    async def abort(self, request_ids: Sequence[str], complete: bool = False) -> None:
        self.live.difference_update(request_ids)
        self.ended += [(one, complete) for one in request_ids]

    def _run(self, request_id: str) -> None:
        for one in self.script:
            if isinstance(one, StepOutput):
                one.request_id = request_id
                self.outlet.deliver(0, [one], None)
                over = one.finished
            else:
                self.outlet.fail([request_id], *one)
                over = True
            if over:
                self.live.discard(request_id)


def out(text: str, finish_reason: Any = "", error: str = "") -> StepOutput:
    return StepOutput("", list(text.encode()), finish_reason, error=error)


@pytest.fixture
def instances() -> Instances:
    return Instances(RequestQueues())


@pytest.fixture
async def http(instances: Instances) -> AsyncIterator[httpx.AsyncClient]:
    app = FastAPI()
    behind_middleware(app)
    backend = GenerationBackend(
        cast("FrontendRouter", instances), instances.outlet, cast("ModelTokenizer", Bytes(100))
    )
    app.include_router(openai_api(backend, ["bytes"], 100, bearer([])))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client
    assert not instances.live
    assert not open_queues(instances.outlet)


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
        (("instance i0 is lost", "retry"), 503),
        (("instances crashed while they ran it", "final"), 500),
        (("the API key's quota is used up", "quota"), 429),
        (out("", "error", "it can't run"), 500),
    ],
)
async def test_a_request_that_fails_is_answered_with_the_reason(
    http: httpx.AsyncClient, instances: Instances, end: Any, status: int
) -> None:
    reason = end.error if isinstance(end, StepOutput) else end[0]
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


def scored(text: str, finish_reason: Any = "") -> StepOutput:
    """Each token with its log-probability, and that of "z"."""
    found = [TokenLogprob(-0.5 * at, [ord("z")], [-0.25]) for at in range(len(text))]
    return StepOutput("", list(text.encode()), finish_reason, found)


async def test_log_probabilities_of_a_completion_are_of_all_its_tokens(
    http: httpx.AsyncClient, instances: Instances
) -> None:
    instances.script = [scored("bc"), scored("d", "length")]
    (choice,) = (await complete(http, logprobs=1)).json()["choices"]
    assert choice["logprobs"] == {
        "text_offset": [0, 1, 2],
        "tokens": ["b", "c", "d"],
        "token_logprobs": [0.0, -0.5, 0.0],
        "top_logprobs": [{"b": 0.0, "z": -0.25}, {"c": -0.5, "z": -0.25}, {"d": 0.0, "z": -0.25}],
    }
    assert instances.submitted[0].logprobs == 1

    chunks = events(await complete(http, logprobs=1, stop="cx", stream=True))
    told = [one["choices"][0]["logprobs"] for one in chunks if one["choices"][0]["logprobs"]]
    assert [text for one in told for text in one["tokens"]] == ["b", "c", "d"]
    assert [at for one in told for at in one["text_offset"]] == [0, 1, 2]


async def test_log_probabilities_of_a_chat_have_their_bytes(instances: Instances) -> None:
    answer = ChatAnswer("id", "model", Bytes(100).spell)
    token = OutputToken(ord("b"), TokenLogprob(-0.5, [ord("z")], [-0.25]))
    (choice,) = answer.chunk(1, ChoicePiece("b", 1, None, [token]))["choices"]
    top = {"token": "z", "logprob": -0.25, "bytes": [122]}
    assert choice["index"] == 1
    assert choice["logprobs"] == {
        "content": [{"token": "b", "logprob": -0.5, "bytes": [98], "top_logprobs": [top]}]
    }
    (choice,) = answer.whole([ChoicePiece("b", 1, "stop")])["choices"]
    assert choice["logprobs"] is None


@pytest.mark.parametrize("stream", [False, True])
async def test_several_choices_are_requests_with_seeds_that_follow_each_other(
    http: httpx.AsyncClient, instances: Instances, stream: bool
) -> None:
    instances.script = [out("b"), out("c", "length")]
    answer = await complete(http, n=3, seed=2**63 - 2, stream=stream)
    assert [one.seed for one in instances.submitted] == [2**63 - 2, 2**63 - 1, -(2**63)]
    if stream:
        told = [one["choices"][0] for one in events(answer)]
    else:
        told = answer.json()["choices"]
        assert answer.json()["usage"]["completion_tokens"] == 6
    for index in range(3):
        mine = [one for one in told if one["index"] == index]
        assert "".join(one["text"] for one in mine) == "bc"
        assert mine[-1]["finish_reason"] == "length"


async def test_a_stream_has_what_came_before_its_failure(
    http: httpx.AsyncClient, instances: Instances
) -> None:
    instances.script = [out("b"), out("c"), ("instance i0 is lost", "retry")]
    *chunks, last = events(await complete(http, stream=True))
    assert "".join(one["choices"][0]["text"] for one in chunks) == "bc"
    assert last["error"]["message"] == "instance i0 is lost"


async def test_one_choice_that_fails_ends_them_all(
    http: httpx.AsyncClient, instances: Instances
) -> None:
    instances.script = [out("b"), ("instance i0 is lost", "retry")]
    answer = await complete(http, n=2)
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "instance i0 is lost")


async def test_a_stream_whose_client_leaves_ends_all_choices_though_it_is_cancelled(
    instances: Instances,
) -> None:
    backend = GenerationBackend(
        cast("FrontendRouter", instances), instances.outlet, cast("ModelTokenizer", Bytes(100))
    )
    submitted = SubmittedRequest(prompt_token_ids=[1], max_tokens=9)
    choices = CallChoices(
        [ChoiceGeneration(backend, "c", submitted, (), choice) for choice in range(2)]
    )
    await choices.begin()

    async def read() -> None:
        with anyio.CancelScope() as scope:
            try:
                async for _ in choices.pieces():
                    scope.cancel()
                    await asyncio.sleep(10)
            finally:
                await choices.close()

    instances.script = [out("b")]
    await asyncio.wait_for(read(), 10)
    assert len(instances.ended) == 2
    assert not instances.live


@pytest.mark.parametrize("n", [None, 1])
async def test_a_request_of_its_own_has_the_limits_of_the_call(
    http: httpx.AsyncClient, instances: Instances, n: int | None
) -> None:
    instances.script = [out("b", "length")]
    await complete(http, n=n, top_k=-1, top_p=0.5, min_p=0.25)
    await complete(http, top_k=3)
    first, second = instances.submitted
    assert (first.top_k, first.top_p, first.min_p, first.logprobs) == (0, 0.5, 0.25, None)
    assert (second.top_k, second.top_p, second.min_p) == (3, 1.0, 0.0)


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("completions", {"prompt": "a", "model": "other"}, 404, "model"),
        ("completions", {"prompt": ""}, 400, "prompt"),
        ("completions", {"prompt": "a" * 101}, 400, "prompt"),
        ("completions", {}, 400, "prompt"),
        ("completions", {"prompt": "a", "temperature": -1}, 400, "temperature"),
        ("completions", {"prompt": "a", "stop": [""]}, 400, "stop"),
        ("completions", {"prompt": "a", "top_p": 0}, 400, "top_p"),
        ("completions", {"prompt": "a", "top_k": -2}, 400, "top_k"),
        ("completions", {"prompt": "a", "logprobs": True}, 400, "logprobs"),
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


@pytest.mark.parametrize(
    ("path", "field", "value", "allowed"),
    [
        ("completions", "best_of", 2, "1"),
        ("completions", "min_tokens", 4, "0"),
        ("completions", "presence_penalty", 0.5, "0"),
        ("completions", "frequency_penalty", -1.0, "0"),
        ("completions", "repetition_penalty", 1.1, "1"),
        ("completions", "logit_bias", {"5": 3}, "{}"),
        ("completions", "echo", True, "False"),
        ("completions", "suffix", "b", "''"),
        ("chat/completions", "presence_penalty", 0.5, "0"),
        ("chat/completions", "response_format", {"type": "json_object"}, "{'type': 'text'}"),
        ("chat/completions", "tools", [{"type": "function"}], "[]"),
        ("chat/completions", "tool_choice", "required", "'none' or 'auto'"),
        ("chat/completions", "store", True, "False"),
        ("chat/completions", "service_tier", "flex", "'auto' or 'default'"),
    ],
)
async def test_what_transformers_cannot_do_is_refused_with_the_value_that_is_allowed(
    http: httpx.AsyncClient,
    instances: Instances,
    path: str,
    field: str,
    value: Any,
    allowed: str,
) -> None:
    said = [{"role": "user", "content": "a"}]
    body: dict[str, Any] = {"prompt": "a"} if path == "completions" else {"messages": said}
    answer = await http.post(f"/v1/{path}", json={**body, field: value})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"].split(".")[0] == field
    assert f"{field} is " in error["message"]
    assert f"must be {allowed} with this engine" in error["message"]
    assert not instances.submitted


# -- what has no effect is no error

SAID = {"role": "user", "content": "a"}
NEUTRAL: dict[str, Any] = {
    "n": 1, "user": "u", "metadata": {"a": "b"}, "safety_identifier": "s", "prompt_cache_key": "k",
    "service_tier": "auto", "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {},
    "stream_options": None, "stop": None, "seed": None,
}  # fmt: skip
NEUTRAL_IN_CHATS: dict[str, Any] = NEUTRAL | {
    "logprobs": False, "top_logprobs": None, "tools": [], "tool_choice": "auto",
    "parallel_tool_calls": True, "response_format": {"type": "text"}, "store": False,
    "functions": None, "function_call": "none", "modalities": ["text"], "audio": None,
    "prediction": None, "reasoning_effort": None, "web_search_options": None,
}  # fmt: skip


@pytest.mark.parametrize("field", NEUTRAL_IN_CHATS)
@pytest.mark.parametrize("null", [False, True])
def test_a_field_of_a_chat_with_its_neutral_value_is_taken(field: str, null: bool) -> None:
    value = None if null else NEUTRAL_IN_CHATS[field]
    ChatBody.model_validate({"messages": [SAID], field: value})


async def test_fields_of_a_completion_with_their_neutral_values_are_taken(
    http: httpx.AsyncClient, instances: Instances
) -> None:
    instances.script = [out("b", "length")]
    answer = await complete(http, **NEUTRAL)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("dropped", [False, True])
def test_an_answers_own_message_is_taken_as_history(dropped: bool) -> None:
    answer = ChatAnswer("id", "m", Bytes(100).spell)
    whole: Any = answer.whole([ChoicePiece("b", 1, "stop", [])])
    own = openai.types.chat.ChatCompletionMessage.model_validate(whole["choices"][0]["message"])
    sent = own.model_dump(exclude_none=dropped)
    sent |= {} if dropped else {"annotations": [], "audio": None, "tool_calls": None}
    body = ChatBody.model_validate({"messages": [SAID, sent, SAID]})
    assert body.messages[1].as_template_has_it() == {"role": "assistant", "content": "b"}


def test_a_developers_message_is_a_systems_to_templates() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = ChatBody.model_validate({"messages": [{"role": "developer", "content": parts}]})
    assert body.messages[0].as_template_has_it() == {"role": "system", "content": "ab"}


@pytest.mark.parametrize(
    ("field", "value"),
    [("tool_calls", [{"id": "1"}]), ("refusal", "no"), ("audio", {"id": "1"}), ("reasoning", "x")],
)
def test_what_a_message_would_lose_is_an_error(field: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=field):
        ChatBody.model_validate({"messages": [{**SAID, field: value}]})
