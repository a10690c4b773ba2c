"""What an answer says of its own use."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.asgi.answer_usage import CallUsage, UsageReader
from kvmig.asgi.route_table import Api

JSON, EVENTS = "application/json", "text/event-stream; charset=utf-8"


def read(kind: str, *parts: bytes, api: Api = "openai") -> CallUsage | None:
    reader = UsageReader(api)
    reader.begin(kind)
    for part in parts:
        reader.add_part(part)
    return reader.read_usage()


def body(**fields: Any) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()


def event(**fields: Any) -> bytes:
    return b"data: " + body(**fields) + b"\n\n"


USED = {"prompt_tokens": 7, "completion_tokens": 30, "total_tokens": 37}
DONE = b"data: [DONE]\n\n"


def test_a_whole_answer_says_its_usage() -> None:
    assert read(JSON, body(choices=[{"text": "x"}], usage=USED, more=None)) == CallUsage(7, 30)


def test_an_answer_that_generates_nothing_has_a_prompt_alone() -> None:
    assert read(JSON, body(data=[], usage={"prompt_tokens": 9, "total_tokens": 9})) == CallUsage(
        9, 0
    )


def test_a_stream_says_its_usage_in_the_event_without_choices() -> None:
    each = {"prompt_tokens": 7, "completion_tokens": 1}
    chunk = event(choices=[{"text": "x"}], usage=each)
    assert read(EVENTS, chunk, chunk, event(choices=[], usage=USED), DONE) == CallUsage(7, 30)


def test_usage_of_one_choice_is_not_the_answers() -> None:
    assert read(EVENTS, event(choices=[{"text": "x"}], usage=USED), DONE) is None


def test_a_response_says_its_usage_in_its_own_words_whole_or_as_a_stream() -> None:
    used = {"input_tokens": 70, "output_tokens": 30, "total_tokens": 100}
    assert read(JSON, body(output=[], usage=used), api="responses") == CallUsage(70, 30)
    last = event(type="response.completed", response={"output": [], "usage": used})
    assert read(EVENTS, event(type="x"), last, api="responses") == CallUsage(70, 30)


@pytest.mark.parametrize(
    "answer",
    [b"", b"null", body(usage=None), body(usage={"prompt_tokens": "7"}), body(usage=[7]),
     body(usage={"prompt_tokens": -7}), body(usage={"type": "duration", "seconds": 3}),
     b'{"usage":{', b'{"usage":{"prompt_tokens":7,\xff'],
)  # fmt: skip
def test_an_answer_without_numbers_says_nothing(answer: bytes) -> None:
    assert read(JSON, answer) is None


def test_of_several_parts_nothing_is_read_but_in_a_stream() -> None:
    assert read(JSON, b'{"usage":', body(prompt_tokens=1) + b"}") is None
    assert read("text/plain", body(usage=USED)) is None


@given(st.text())
def test_no_text_of_a_client_or_a_model_is_taken_for_usage(said: str) -> None:
    forged = said + body(usage={"prompt_tokens": 0, "completion_tokens": 0}).decode()
    answer = body(usage=USED, choices=[{"text": forged}], kv={"a": forged})
    assert read(JSON, answer) == CallUsage(7, 30)


FORGED = {"usage": {"input_tokens": 0, "output_tokens": 0}}


def test_no_object_of_a_client_in_a_response_is_taken_for_its_usage() -> None:
    used = {"input_tokens": 70, "output_tokens": 30}
    shown = [{"tools": {"functions": {"parameters": {"properties": FORGED}}}}]
    response = {"output": [], "usage": used, "user": None, "input_messages": shown}
    assert read(JSON, body(**response), api="responses") == CallUsage(70, 30)
    last = event(type="response.completed", response=response)
    assert read(EVENTS, last, api="responses") == CallUsage(70, 30)


def test_a_response_without_usage_has_none_of_its_clients_objects() -> None:
    response = {"tools": [{"parameters": FORGED}], "output": [], "usage": None}
    assert read(JSON, body(**response), api="responses") is None
    del response["usage"]
    assert read(JSON, body(**response), api="responses") is None
    last = event(type="response.incomplete", response=response)
    assert read(EVENTS, last, api="responses") is None
