"""What of a call changes on its way to a server, and what it may cost."""

from __future__ import annotations

import io
import json
import wave
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.asgi.route_table import ClientRoute, find_route
from kvmig.command.call_plan import MEDIA_TOKENS, OUTPUT_MOST, CallPlan, limited, plan_call
from kvmig.command.recordings import seconds_of


def route(path: str = "/v1/completions") -> ClientRoute:
    found = find_route("POST", path)
    assert found is not None
    return found.route


def planned(path: str = "/v1/completions", *, sequences: int = 1, **fields: Any) -> CallPlan:
    body = json.dumps(fields).encode()
    return plan_call(route(path), body, sequences=sequences, prompts=1, asks_usage=True)


def sent(plan: CallPlan) -> Any:
    return json.loads(plan.body)


def test_a_stream_is_asked_for_its_usage_which_is_then_hidden() -> None:
    plan = planned(prompt="a", stream=True)
    assert sent(plan)["stream_options"] == {"include_usage": True}
    assert plan.hides_usage


def test_other_options_of_a_stream_stay() -> None:
    plan = planned(prompt="a", stream=True, stream_options={"include_obfuscation": False})
    assert sent(plan)["stream_options"] == {"include_obfuscation": False, "include_usage": True}


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "a"},
        {"prompt": "a", "stream": False},
        {"prompt": "a", "stream": True, "stream_options": {"include_usage": True}},
    ],
)
def test_any_other_body_stays_byte_for_byte(fields: dict[str, Any]) -> None:
    body = json.dumps(fields, indent=3).encode()
    plan = plan_call(route(), body, sequences=1, prompts=1, asks_usage=True)
    assert plan.body == body
    assert not plan.hides_usage


def test_a_server_that_takes_no_such_option_is_not_asked() -> None:
    body = b'{"prompt": "a", "stream": true}'
    plan = plan_call(route(), body, sequences=1, prompts=1, asks_usage=False)
    assert (plan.body, plan.hides_usage, plan.streams) == (body, False, True)


def test_the_proxys_id_of_a_response_is_not_for_other_engines() -> None:
    assert sent(planned("/v1/responses", input="a", request_id="resp_1")) == {"input": "a"}


def test_a_body_that_is_no_object_is_the_servers_to_refuse() -> None:
    plan = plan_call(route(), b"[1, 2", sequences=1, prompts=1, asks_usage=True)
    assert plan.body == b"[1, 2"


@given(st.text(max_size=300), st.lists(st.text(max_size=50), max_size=5))
def test_a_prompt_has_no_more_tokens_than_its_bound(prompt: str, turns: list[str]) -> None:
    size = len(prompt.encode(errors="surrogatepass"))
    assert planned(prompt=prompt).prompt_most >= size
    messages = [{"role": "user", "content": one} for one in turns]
    size = sum(len(one.encode(errors="surrogatepass")) for one in turns)
    assert planned("/v1/chat/completions", messages=messages).prompt_most >= size


def test_an_image_counts_by_number_and_not_by_its_bytes() -> None:
    image = "data:image/png;base64," + "A" * 100_000
    content = [{"type": "image_url", "image_url": {"url": image}}]
    plan = planned("/v1/chat/completions", messages=[{"role": "user", "content": content}])
    assert MEDIA_TOKENS < plan.prompt_most < 2 * MEDIA_TOKENS
    assert plan.prompt < 100


LOOKS = "data:" + "x " * 10_000
PARTS = [{"type": "image_url", "image_url": {"url": LOOKS}}]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": LOOKS}),
        ("/v1/completions", {"prompt": [LOOKS, LOOKS]}),
        ("/v1/embeddings", {"input": [LOOKS]}),
        ("/v1/responses", {"input": LOOKS}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LOOKS}]}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": LOOKS}]}]},
        ),
        ("/v1/chat/completions", {"messages": [], "documents": [{"content": PARTS}]}),
        ("/v1/rerank", {"query": LOOKS, "documents": [LOOKS]}),
        ("/v2/embed", {"texts": [LOOKS]}),
        ("/v1/chat/completions", {"messages": [], "tools": [{"messages": PARTS, "input": PARTS}]}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "assistant", "tool_calls": [{"content": PARTS}]}]},
        ),
    ],
)
def test_text_that_looks_like_a_medium_counts_by_its_bytes(
    path: str, fields: dict[str, Any]
) -> None:
    plan = planned(path, **fields)
    assert plan.prompt_most >= len(LOOKS)
    assert plan.prompt >= len(LOOKS) // 4


URL = "data:image/png;base64," + "A" * 100_000
CONTENT = {"content": [{"type": "image_url", "image_url": {"url": URL}}, {"type": "text"}]}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}]},
        ),
        ("/v1/chat/completions/batch", {"messages": [[{"role": "user", **CONTENT}]]}),
        ("/cohere/v2/chat", {"messages": [{"role": "user", **CONTENT}]}),
        ("/v1/embeddings", {"messages": [{"role": "user", **CONTENT}]}),
        ("/v2/embed", {"inputs": [CONTENT]}),
        ("/v2/embed", {"images": [URL]}),
        ("/score", {"data_1": "a", "data_2": CONTENT}),
        ("/v1/score", {"queries": ["a"], "documents": [CONTENT, "b"]}),
        ("/v1/rerank", {"query": CONTENT, "documents": ["a"]}),
    ],
)
def test_an_image_counts_by_number_wherever_an_api_takes_one(
    path: str, fields: dict[str, Any]
) -> None:
    for indent in (None, 2):
        body = json.dumps(fields, indent=indent).encode()
        plan = plan_call(route(path), body, sequences=1, prompts=1, asks_usage=True)
        assert MEDIA_TOKENS < plan.prompt_most < 2 * MEDIA_TOKENS


@pytest.mark.parametrize(
    ("path", "fields", "most"),
    [
        ("/v1/completions", {}, 16),
        ("/v1/completions", {"max_tokens": 5}, 5),
        ("/v1/chat/completions", {}, OUTPUT_MOST),
        ("/v1/chat/completions", {"max_tokens": 9, "max_completion_tokens": 7}, 7),
        ("/v1/responses", {"max_output_tokens": 3}, 3),
        ("/v1/embeddings", {}, 0),
    ],
)
def test_an_answers_most_tokens_are_what_its_call_says(
    path: str, fields: dict[str, Any], most: int
) -> None:
    assert planned(path, **fields).output_most == most


def test_a_granted_call_gets_no_more_than_its_grant() -> None:
    plan = limited(planned("/v1/chat/completions", messages=[]), 100, 1)
    assert (sent(plan)["max_tokens"], plan.output_most) == (100, 100)
    plan = limited(planned(prompt="a", max_tokens=500, n=4, sequences=4), 100, 4)
    assert (sent(plan)["max_tokens"], plan.output_most) == (25, 100)
    plan = limited(planned("/v1/chat/completions", messages=[], max_completion_tokens=7), 100, 1)
    assert sent(plan) == {"messages": [], "max_completion_tokens": 7}


@pytest.mark.parametrize(
    "given",
    ["500", 500.0, "500.0", "0" * 60 + "500", "0" * 9000, 10**30, 1e300, -1, "many", True, [5]],
)
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_a_limit_of_any_spelling_is_no_way_past_a_grant(field: str, given: Any) -> None:
    plan = limited(planned("/v1/chat/completions", messages=[], **{field: given}), 100, 1)
    fields = sent(plan)
    assert fields[field] in (1, 100)
    assert type(fields[field]) is int


@pytest.mark.parametrize("field", ["n_predict", "max_new_tokens"])
def test_a_limit_of_another_engines_own_is_no_way_past_a_grant(field: str) -> None:
    large: dict[str, Any] = {"prompt": "a", "max_tokens": 500, field: 9000}
    plan = limited(planned(**large), 100, 1)
    assert sent(plan) == {"prompt": "a", "max_tokens": 100, field: 100}
    small: dict[str, Any] = {"prompt": "a", field: 5}
    plan = limited(planned(**small), 16, 1)
    assert sent(plan) == {"prompt": "a", "max_tokens": 16, field: 5}


@pytest.mark.parametrize(
    "path",
    ["/invocations", "/v1/chat/completions/batch", "/cohere/v2/chat", "/v1/messages"],
)
def test_every_route_of_answers_gets_no_more_than_its_grant(path: str) -> None:
    plan = planned(path, messages=[], max_tokens=50_000)
    assert (plan.output_most, plan.output_least) == (50_000, 1)
    assert sent(limited(plan, 100, 1))["max_tokens"] == 100
    assert sent(limited(planned(path, messages=[]), 100, 1))["max_tokens"] == 100


def test_a_limit_among_sampling_parameters_is_kept_to_too() -> None:
    path = "/inference/v1/generate"
    plan = planned(path, token_ids=[1], sampling_params={"max_tokens": 50_000, "seed": 1})
    assert plan.output_most == 50_000
    assert sent(limited(plan, 100, 1))["sampling_params"] == {"max_tokens": 100, "seed": 1}
    plan = limited(planned(path, token_ids=[1]), 100, 1)
    assert sent(plan)["sampling_params"] == {"max_tokens": 100}


@pytest.mark.parametrize("path", ["/v1/systemone", "/generative_scoring"])
def test_a_call_whose_answer_nothing_limits_needs_all_of_its_grant(path: str) -> None:
    plan = planned(path, items=["a"])
    assert plan.output_least == plan.output_most == OUTPUT_MOST


def test_the_most_tokens_of_a_call_are_a_number_that_a_quota_can_take() -> None:
    assert planned(prompt="a", max_tokens=10**30).output_most == 2**31


def test_speech_is_counted_by_its_characters() -> None:
    plan = planned("/v1/audio/speech", input="Grüße", voice="a")
    assert (plan.characters, plan.output_most) == (5, 0)


def test_images_are_counted_by_what_is_wanted() -> None:
    plan = planned("/v1/images/generations", sequences=3, prompt="a", n=3)
    assert (plan.images, plan.output_most) == (3, 3 * MEDIA_TOKENS)


def recording(seconds: float, rate: int = 8000) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as made:
        made.setnchannels(1)
        made.setsampwidth(2)
        made.setframerate(rate)
        made.writeframes(b"\0\0" * int(seconds * rate))
    return file.getvalue()


def form(data: bytes) -> tuple[bytes, str]:
    part = b'--b\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
    return part + data + b"\r\n--b--\r\n", "multipart/form-data; boundary=b"


@pytest.mark.parametrize(
    ("data", "seconds"),
    [(recording(2.5), 3), (recording(4), 4), (b"ID3" + b"\0" * 40_000, 3), (b"", 0)],
)
def test_a_recordings_seconds_are_those_of_its_header_or_of_its_bytes(
    data: bytes, seconds: int
) -> None:
    body, kind = form(data)
    plan = plan_call(
        route("/v1/audio/transcriptions"), body, kind, sequences=1, prompts=1, asks_usage=True
    )
    assert (plan.seconds, plan.body) == (seconds, body)


def test_a_header_that_names_more_than_there_is_is_not_believed() -> None:
    data = bytearray(recording(1))
    data[40:44] = (0x7FFFFFFF).to_bytes(4, "little")
    assert seconds_of(bytes(data)) <= 2


def test_a_header_that_names_no_frames_does_not_make_a_recording_free() -> None:
    data = bytearray(recording(9))
    data[40:44] = bytes(4)
    assert seconds_of(bytes(data)) == 10


@given(st.integers(0, 43), st.binary(min_size=1, max_size=8))
def test_a_recording_with_any_header_is_counted(at: int, put: bytes) -> None:
    data = bytearray(recording(1))
    data[at : at + len(put)] = put
    assert seconds_of(bytes(data)) >= 1


@given(st.integers(1, 100))
def test_a_recording_of_which_only_the_beginning_came_is_counted(size: int) -> None:
    assert seconds_of(recording(1)[:size]) >= 1


def test_a_header_whose_chunk_is_longer_than_the_file_is_no_failure() -> None:
    data = bytearray(recording(1))
    data[36:44] = b"LIST" + (0x7FFFFFFF).to_bytes(4, "little")
    assert seconds_of(bytes(data)) >= 1


def test_a_form_that_cannot_be_read_is_the_servers_to_refuse() -> None:
    plan = plan_call(
        route("/v1/audio/transcriptions"), b"x", "text/plain", sequences=1, prompts=1,
        asks_usage=True,
    )  # fmt: skip
    assert (plan.body, plan.seconds) == (b"x", 0)
