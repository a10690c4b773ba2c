"""Errors in each API's form, whatever an application writes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvmig.accounts.keys import QUOTA_CODE, QUOTA_WORDS
from kvmig.asgi.call import HttpCall
from kvmig.asgi.error_forms import ApiError, error_body, error_event, read_error, read_event
from kvmig.asgi.error_stage import ErrorStage
from kvmig.asgi.route_table import Api

SCOPE: dict[str, Any] = {"type": "http", "method": "POST", "path": "/", "headers": []}
APIS: tuple[Api, ...] = ("openai", "responses", "messages", "cohere")


class Client:
    """What it gets."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.body = b""
        self.whole = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], dict(message["headers"])
        else:
            self.body += message.get("body", b"")
            self.whole = not message.get("more_body", False)


async def receive() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


async def answered(
    api: Api, app: ASGIApp, failure: ApiError | None = None, *, worded: bool = False
) -> Client:
    client, call = Client(), HttpCall("c")
    call.failure = failure
    await ErrorStage(api, call, client.send, worded=worded).run(app, SCOPE, receive)
    assert client.whole
    length = client.headers.get(b"content-length")
    assert length is None or int(length) == len(client.body)
    return client


def breaking(*events: bytes) -> ASGIApp:
    """An application whose stream breaks off."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for one in events:
            await send({"type": "http.response.body", "body": one, "more_body": True})
        raise RuntimeError("a bug")

    return app


@pytest.mark.parametrize("api", APIS)
async def test_a_stream_that_breaks_off_ends_with_an_error(api: Api) -> None:
    client = await answered(api, breaking(b"data: {}\n\n"))
    assert b"Internal server error" in client.body
    assert b"a bug" not in client.body
    assert client.body.endswith(b"[DONE]\n\n") == (api in ("openai", "cohere"))


@pytest.mark.parametrize("api", APIS)
async def test_a_stream_that_breaks_off_says_why_it_failed(api: Api) -> None:
    failure = ApiError(429, "no tokens are left")
    client = await answered(api, breaking(b"data: {}\n\n"), failure)
    assert client.body.count(b"no tokens are left") == (2 if api == "responses" else 1)


async def test_an_event_after_others_has_the_next_number() -> None:
    started = b'event: response.created\ndata: {"sequence_number":6}\n\n'
    client = await answered("responses", breaking(started), ApiError(503, "gone"))
    assert b'"sequence_number":7' in client.body


async def test_cohere_clients_are_not_told_of_a_good_end_where_there_is_none() -> None:
    """vLLM ends a chat that failed before its first token like one without text."""
    ended = StreamingResponse(iter([b"data: [DONE]\n\n"]), media_type="text/event-stream")
    client = await answered("cohere", ended, ApiError(503, "gone"))
    first, done, _ = client.body.split(b"\n\n")
    assert json.loads(first[6:])["delta"] == {"error": "gone", "finish_reason": "ERROR"}
    assert done == b"data: [DONE]"


async def test_an_error_of_a_converter_gives_way_to_the_reason() -> None:
    odd = error_event("messages", ApiError(500, "2 validation errors for Chunk"))
    app = StreamingResponse(iter([odd]), media_type="text/event-stream")
    client = await answered("messages", app, ApiError(429, "used up"))
    assert client.body == error_event("messages", ApiError(429, "used up"))


async def test_a_text_of_an_answer_is_no_error() -> None:
    events = [b'data: {"choices": [{"text": "data: {\\"error\\""}]}\n\n', b"data: [DONE]\n\n"]
    app = StreamingResponse(iter(events), media_type="text/event-stream")
    assert (await answered("openai", app)).body == b"".join(events)


@pytest.mark.parametrize("api", APIS)
async def test_a_plain_answer_of_an_error_becomes_the_apis(api: Api) -> None:
    for app in (JSONResponse({"detail": "Not Found"}, 404), PlainTextResponse("Not Found", 404)):
        client = await answered(api, app)
        assert client.body == error_body(api, ApiError(404, "Not Found"))
        assert client.status == 404


@pytest.mark.parametrize("given", [{}, {"retry-after": "2"}])
async def test_an_engines_503_says_when_to_try_again(given: dict[str, str]) -> None:
    app = JSONResponse({"error": {"message": "busy"}}, 503, given)
    client = await answered("openai", app)
    assert client.headers[b"retry-after"] == given.get("retry-after", "5").encode()


async def test_what_is_no_error_that_we_know_passes_as_it_is() -> None:
    client = await answered("openai", JSONResponse({"odd": [1]}, 400))
    assert json.loads(client.body) == {"odd": [1]}


@pytest.mark.parametrize(
    ("status", "message", "kind", "code"),
    [
        (400, "temperature is -1", "invalid_request_error", "invalid_request"),
        (404, "The model `x` does not exist.", "not_found_error", "model_not_found"),
        (404, "Not Found", "not_found_error", "not_found"),
        (429, f"the API key{QUOTA_WORDS}9 tokens is used up", QUOTA_CODE, QUOTA_CODE),
        (429, "9 requests wait", "rate_limit_error", "rate_limit_exceeded"),
        (503, "the server stops", "api_error", "unavailable"),
    ],
)
async def test_a_fleets_clients_read_words(status: int, message: str, kind: str, code: str) -> None:
    vllms = {"error": {"message": message, "type": "X", "param": "p", "code": status}}
    client = await answered("openai", JSONResponse(vllms, status), worded=True)
    error = json.loads(client.body)["error"]
    assert error == {"message": message, "type": kind, "param": "p", "code": code}


@given(
    st.sampled_from(APIS[:3]),
    st.sampled_from([400, 401, 403, 404, 413, 429, 500, 503]),
    st.text(min_size=1),
)
def test_an_event_says_what_the_answer_would_have(api: Api, status: int, message: str) -> None:
    error = ApiError(status, message)
    assert read_error(status, error_body(api, error)) == error
    read = read_event(error_event(api, error))
    assert read is not None
    assert read.message == message
    assert api == "messages" or read == error
