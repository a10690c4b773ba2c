"""What ends a call reaches the clients of each API as they expect: vLLM's own application."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast, get_args

import anthropic
import httpx
import httpx2
import openai
import pytest
import pytest_asyncio
from fastapi import FastAPI
from fastapi.routing import APIRoute

from tests.support.vllm_application import MODEL, End, EndingRouter, application, client_of

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

QUOTA = "the API key's quota of 9 tokens in all is used up"
ENDS: list[tuple[End, str, int]] = [
    ("retry", "the server stops", 503),
    ("final", "its client did not read for 9 s", 500),
    ("quota", QUOTA, 429),
    ("own", "", 500),
]
BEFORE: list[tuple[End, str, int]] = [
    ("none", "no instance is there to run it", 503),
    ("quota at once", QUOTA, 429),
]
CHAT: dict[str, Any] = {
    "model": MODEL, "messages": [{"role": "user", "content": "Count"}], "max_tokens": 50,
}  # fmt: skip
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": MODEL, "prompt": "Count", "max_tokens": 50},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"model": MODEL, "input": "Count", "max_output_tokens": 50},
    "/v1/messages": CHAT,
}
WORDS = {429: "rate_limit_error", 500: "api_error", 503: "overloaded_error"}
TYPES = {429: "RateLimitError", 500: "InternalServerError", 503: "ServiceUnavailableError"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[tuple[FastAPI, EndingRouter]]:
    async with application() as made:
        yield made


async def ended(
    served: tuple[FastAPI, EndingRouter], path: str, end: End, sentence: str, **more: Any
) -> httpx.Response:
    """The answer to a call that ends so. more: fields of its body."""
    app, router = served
    router.end, router.sentence = end, sentence
    async with client_of(app) as client:
        return await client.post(path, json={**BODIES[path], **more})


def events(text: str) -> Iterator[tuple[str, Any]]:
    """Names and data of a stream's events."""
    for block in text.split("\n\n"):
        name, data = "", None
        for line in block.splitlines():
            if line.startswith("event:"):
                name = line[6:].strip()
            elif line.startswith("data:") and line[5:].strip() != "[DONE]":
                data = json.loads(line[5:])
        if data is not None:
            yield name, data


@pytest.mark.parametrize(("end", "sentence", "status"), ENDS)
@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_ends_with_its_apis_own_error(
    served: tuple[FastAPI, EndingRouter], path: str, end: End, sentence: str, status: int
) -> None:
    text = (await ended(served, path, end, sentence, stream=True)).text
    *_, (name, last) = events(text)
    if path == "/v1/messages":
        assert (name, last["type"]) == ("error", "error")
        assert last["error"]["type"] == WORDS[status]
    else:
        assert last["error"]["type"] == TYPES[status]
        assert last["error"]["code"] == status
    assert sentence in last["error"]["message"]
    assert "validation error" not in text
    assert text.count('"error": {') + text.count('"error":{') <= (2 if "messages" in path else 1)
    if path == "/v1/responses":
        assert name == last["type"] == "error"
        numbers = [data["sequence_number"] for _, data in events(text)]
        assert numbers == list(range(len(numbers)))
    if "completions" in path:
        assert text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(("end", "sentence", "status"), ENDS[:3] + BEFORE)
@pytest.mark.parametrize("path", BODIES)
async def test_an_answer_is_its_apis_own_error(
    served: tuple[FastAPI, EndingRouter], path: str, end: End, sentence: str, status: int
) -> None:
    answer = await ended(served, path, end, sentence)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["message"] == sentence
    assert error["type"] == (WORDS if path == "/v1/messages" else TYPES)[status]
    assert (answer.json().get("type") == "error") == (path == "/v1/messages")


# -- the clients that people have


@contextlib.asynccontextmanager
async def without_socket(app: FastAPI) -> AsyncIterator[httpx2.AsyncClient]:
    transport = httpx2.ASGITransport(app=cast("Any", app), raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport) as client:
        yield client


async def read_message(client: anthropic.AsyncAnthropic) -> None:
    async with client.messages.stream(
        model=MODEL, max_tokens=50, messages=[{"role": "user", "content": "Count"}]
    ) as stream:
        async for _ in stream:
            pass


@pytest.mark.parametrize(("end", "sentence", "status"), ENDS[:3])
async def test_the_anthropic_client_raises_our_sentence(
    served: tuple[FastAPI, EndingRouter], end: End, sentence: str, status: int
) -> None:
    app, router = served
    router.end, router.sentence = end, sentence
    async with without_socket(app) as http:
        client = anthropic.AsyncAnthropic(
            base_url="http://localhost", api_key="none", max_retries=0, http_client=http
        )
        with pytest.raises(anthropic.APIStatusError) as raised:
            await read_message(client)
        assert raised.value.body == {
            "type": "error", "error": {"type": WORDS[status], "message": sentence},
        }  # fmt: skip
        with pytest.raises(anthropic.APIStatusError, match=sentence) as refused:
            await client.messages.create(
                model=MODEL, max_tokens=50, messages=[{"role": "user", "content": "Count"}]
            )
        assert refused.value.status_code == status


@pytest.mark.parametrize(("end", "sentence", "status"), ENDS[:3])
@pytest.mark.parametrize("api", ["completions", "chat", "responses"])
async def test_the_openai_client_raises_our_sentence(
    served: tuple[FastAPI, EndingRouter], api: str, end: End, sentence: str, status: int
) -> None:
    app, router = served
    router.end, router.sentence = end, sentence
    async with without_socket(app) as http:
        client = openai.AsyncOpenAI(
            base_url="http://localhost/v1", api_key="none", max_retries=0, http_client=http
        )
        with pytest.raises(openai.APIError, match=sentence) as raised:
            async for _ in await streamed(client, api):
                pass
    assert raised.value.type == TYPES[status]


async def streamed(client: openai.AsyncOpenAI, api: str) -> Any:
    if api == "completions":
        return await client.completions.create(model=MODEL, prompt="Count", stream=True)
    if api == "responses":
        return await client.responses.create(model=MODEL, input="Count", stream=True)
    return await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Count"}], stream=True
    )


# -- what never was a call of the engine's


@pytest.mark.parametrize("path", ["/v1/nothing", "/v1/messages/nothing"])
async def test_a_path_that_is_not_there_is_an_error_as_any_other(
    served: tuple[FastAPI, EndingRouter], path: str
) -> None:
    app, _ = served
    async with client_of(app) as client:
        answer = await client.post(path, json={})
    kind = "not_found_error" if "messages" in path else "NotFoundError"
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, kind)
    assert answer.json()["error"]["message"] == "Not Found"


async def test_what_the_middleware_refuses_has_the_apis_form(
    served: tuple[FastAPI, EndingRouter],
) -> None:
    app, _ = served
    app.state.kvmig.closed = True
    try:
        async with client_of(app) as client:
            answer: httpx.Response = await client.post("/v1/messages", json=CHAT)
    finally:
        app.state.kvmig.closed = False
    assert answer.status_code == 503
    assert answer.headers["x-kvmig-not-taken"] == "1"
    assert answer.json() == {
        "type": "error",
        "error": {
            "type": "overloaded_error",
            "message": "the server is stopping and takes no new requests",
        },
    }


# -- values that no field should have

WRONG = [
    "7", '"x"', "[]", "{}", "null", "-1", "true", "1e400", "NaN", "1" + "0" * 26, "[[7], [[]]]",
    '{"a": {"b": [7]}}', "[{}]", "[null]", '"\\ud800"', '["\\ud800"]', '{"type": "function"}',
    '[{"type": "function"}]', '{"json": 7}',
]  # fmt: skip
"""As JSON, and as what Python's reader takes for it."""
SMALL = {
    **BODIES,
    "/v1/messages/count_tokens": {"model": MODEL, "messages": CHAT["messages"]},
    "/tokenize": {"model": MODEL, "prompt": "Count"},
    "/detokenize": {"model": MODEL, "tokens": [1]},
}


def body_fields(app: FastAPI, path: str) -> list[str]:
    """Of a route, or of all kinds of bodies that it takes."""
    (route,) = (one for one in app.routes if isinstance(one, APIRoute) and one.path == path)
    assert route.body_field is not None
    kind = route.body_field.field_info.annotation
    kinds = [kind] if hasattr(kind, "model_fields") else get_args(kind)
    return sorted({name for one in kinds for name in getattr(one, "model_fields", {})})


@pytest.mark.parametrize("path", SMALL)
async def test_no_value_of_any_field_is_a_fault_of_the_server(
    served: tuple[FastAPI, EndingRouter], path: str
) -> None:
    app, router = served
    router.end, router.sentence = "none", ""
    faults = []
    async with client_of(app, **{"content-type": "application/json"}) as client:
        for name in body_fields(app, path):
            rest = json.dumps({key: one for key, one in SMALL[path].items() if key != name})
            for value in WRONG:
                body = f'{{"{name}": {value}, {rest[1:]}'
                answer = await client.post(path, content=body)
                if answer.status_code not in (200, 400, 404, 503):
                    faults.append((name, value, answer.text))
    assert faults == []


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("structured_outputs", 7, "structured_outputs is, or has in it, a value of a type"),
        ("top_k", 10**26, "top_k can't be sent to the model: an integer must fit into 64 bits"),
        ("stop", "\ud800", "stop can't be sent to the model: a text must not have half a"),
        ("session_id", "\ud800", "session_id can't be sent to the model"),
    ],
)
async def test_what_breaks_a_check_is_the_clients_mistake_and_named(
    served: tuple[FastAPI, EndingRouter], path: str, field: str, value: object, sentence: str
) -> None:
    app, _ = served
    async with client_of(app, **{"content-type": "application/json"}) as client:
        answer = await client.post(path, content=json.dumps({**BODIES[path], field: value}))
    assert answer.status_code == 400, answer.text
    assert sentence in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] in (field, f"body.{field}")


async def test_a_tool_without_a_function_is_named_though_another_field_asks_for_it(
    served: tuple[FastAPI, EndingRouter],
) -> None:
    app, _ = served
    choice = {"type": "function", "function": {"name": "f"}}
    body = {**CHAT, "tools": [{"type": "function"}], "tool_choice": choice}
    async with client_of(app) as client:
        answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400, answer.text
    assert "the body lacks 'function'" in answer.json()["error"]["message"]
