"""Bodies are bounded by what the model can use of them, and by no less."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.asgi.body_bounds import (
    DEPTH,
    MEDIA,
    TURNS,
    VALUES,
    BodyBound,
    BodyCheck,
    ModelReach,
    TooMuch,
    bound_of,
    largest_size,
)
from kvmig.asgi.route_table import CLIENT_ROUTES, ClientRoute, find_route

REACH = ModelReach(tokens=131_072, longest=128)


def route(path: str) -> ClientRoute:
    found = find_route("POST", path)
    assert found is not None
    return found.route


def refused(body: Any, path: str, reach: ModelReach = REACH, size: int = 1 << 16) -> str:
    """Why a body is refused; empty: it isn't."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    bound = bound_of(reach, route(path))
    if len(content) > bound.size:
        return "too large"
    check = BodyCheck(bound, json=True)
    try:
        for at in range(0, len(content), size):
            check.feed(content[at : at + size])
        check.check(content)
    except TooMuch as error:
        return str(error)
    return ""


COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGE = {"role": "user", "content": "a, b: [c]"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

HOSTILE: dict[str, tuple[str, Any]] = {
    "messages": (CHAT, {"messages": [MESSAGE] * 10_000}),
    "messages that are none": (CHAT, {"messages": [1] * 20_000}),
    "parts of a message": (CHAT, {"messages": [{"role": "user", "content": [MESSAGE] * 9000}]}),
    "token ids": (COMPLETIONS, {"prompt": [1] * 300_000}),
    "prompts of token ids": (COMPLETIONS, {"prompt": [[1] * 3000] * 100}),
    "allowed_token_ids": (COMPLETIONS, {"prompt": "a", "allowed_token_ids": [1] * 50_000}),
    "stop_token_ids": (CHAT, {"messages": [MESSAGE], "stop_token_ids": [1] * 50_000}),
    "logit_bias": (CHAT, {"messages": [], "logit_bias": dict.fromkeys(range(20_000), 1)}),
    "vllm_xargs": (COMPLETIONS, {"prompt": "a", "vllm_xargs": {"a": [1] * 50_000}}),
    "some vllm_xargs": (
        COMPLETIONS,
        {"prompt": "a", "vllm_xargs": dict.fromkeys("abc", [1] * 400)},
    ),
    "unknown field": (COMPLETIONS, {"prompt": "a", "anything": [{}] * 50_000}),
    "schema": (
        CHAT,
        {"messages": [], "response_format": {"a": {str(one): {"t": 1} for one in range(9000)}}},
    ),
    "choice": (COMPLETIONS, {"prompt": "a", "structured_outputs": {"choice": ["a"] * 50_000}}),
    "tools": (CHAT, {"messages": [], "tools": [TOOL] * 4000}),
    "template": (CHAT, {"messages": [], "chat_template_kwargs": {"a": [1] * 50_000}}),
    "detokenize": ("/detokenize", {"tokens": [1] * 300_000}),
    "tokenize": ("/tokenize", {"prompt": "a " * 5_000_000}),
    "count_tokens": ("/v1/messages/count_tokens", {"messages": [MESSAGE] * 2000}),
    "items": (RESPONSES, {"input": [MESSAGE] * 2000}),
    "items that are none": (RESPONSES, {"input": [1] * 20_000}),
    "documents": ("/rerank", {"query": "a", "documents": ["a"] * 50_000}),
    "inputs": ("/v1/embeddings", {"input": [[1] * 1000] * 1000}),
    "generate": ("/inference/v1/generate", {"token_ids": [1] * 300_000}),
    "deep": (CHAT, b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}"),
    "a list": (COMPLETIONS, [1] * 500_000),
    "no JSON": (COMPLETIONS, b"," * 500_000),
    "text": (COMPLETIONS, {"prompt": "a" * 6_000_000}),
    "a field twice": (
        COMPLETIONS,
        b'{"prompt": "a", "stop": [' + b"1," * 500_000 + b'1], "stop": []}',
    ),
}


@pytest.mark.parametrize(("path", "body"), HOSTILE.values(), ids=HOSTILE)
def test_what_the_model_can_not_use_is_refused_before_anything_is_decoded(
    path: str, body: Any
) -> None:
    assert refused(body, path)


USABLE: dict[str, tuple[str, Any]] = {
    "a prompt of as many token ids as the context": (COMPLETIONS, {"prompt": [131_071] * 131_072}),
    "a prompt of token ids that is a little too long": (COMPLETIONS, {"prompt": [1] * 140_000}),
    "a text of commas": (COMPLETIONS, {"prompt": "a, b: [c] {" * 100_000}),
    "a text in escapes": (CHAT, {"messages": [{"role": "user", "content": "\u0431" * 500_000}]}),
    "a long conversation": (CHAT, {"messages": [MESSAGE] * TURNS}),
    "many texts": ("/v1/embeddings", {"input": ["a, b " * 100] * 2048}),
    "many short lists of token ids": ("/v1/embeddings", {"input": [[1] * 100] * 2048}),
    "many tools": (CHAT, {"messages": [MESSAGE], "tools": [TOOL] * 500}),
    "all biases of OpenAI's": (
        CHAT,
        {"messages": [MESSAGE], "logit_bias": dict.fromkeys(map(str, range(300)), 1)},
    ),
    "detokenized": ("/detokenize", {"tokens": [131_071] * 131_072}),
    "no JSON at all": (CHAT, b"hello"),
}


@pytest.mark.parametrize(("path", "body"), USABLE.values(), ids=USABLE)
def test_what_the_model_can_use_is_taken(path: str, body: Any) -> None:
    assert refused(body, path) == ""


@given(
    tokens=st.integers(16, 300),
    longest=st.integers(1, 40),
    content=st.text(st.characters(codec="utf-8")),
    ascii_only=st.booleans(),
)
def test_no_text_is_refused_that_fits_the_context_by_the_longest_token(
    tokens: int, longest: int, content: str, ascii_only: bool
) -> None:
    reach = ModelReach(tokens, longest)
    most = tokens * min(longest, 5)  # five times as many as texts have on the average
    text = (content * (most // max(1, len(content.encode())) + 1)).encode()[:most]
    body = {"messages": [{"role": "user", "content": text.decode(errors="ignore")}]}
    raw = json.dumps(body, ensure_ascii=ascii_only).encode()
    assert refused(raw, CHAT, reach) == ""


@given(
    path=st.sampled_from([COMPLETIONS, CHAT, RESPONSES, "/v1/embeddings", "/detokenize"]),
    field=st.sampled_from(["prompt", "messages", "input", "tokens", "stop", "tools", "x"]),
    item=st.sampled_from(["1,", '"",', '"a",', "{},", "[],", '{"a":1},', "[1,1],"]),
    size=st.integers(1, 1 << 16),
    key=st.booleans(),
)
def test_whatever_comes_is_bounded(
    path: str, field: str, item: str, size: int, *, key: bool
) -> None:
    reach = ModelReach(tokens=1000)
    bound = bound_of(reach, route(path))
    count = 2 * bound.all_values // max(1, item.count(",")) if not key else bound.all_values
    named = "".join(f'"{number}":{item}' for number in range(count)) if key else item * count
    listed = f'{{"{field}": {"{" if key else "["}{named[:-1]}{"}" if key else "]"}}}'
    assert refused(listed.encode(), path, reach, max(size, 4096))


def test_a_body_nested_to_the_bound_is_taken() -> None:
    bound = BodyBound(1000, 1000)
    deep = b"[" * DEPTH + b"]" * DEPTH
    BodyCheck(bound, json=True).feed(deep)
    with pytest.raises(TooMuch, match=f"allowed are {DEPTH} levels"):
        BodyCheck(bound, json=True).feed(b"[" + deep + b"]")


def test_bounds_follow_from_the_model() -> None:
    small, large = ModelReach(600, 4), ModelReach(131_072, 128)
    sizes = {one: bound_of(large, route(one)).size for one in (CHAT, "/tokenize", "/v1/embeddings")}
    assert all(4_000_000 < size < 5_500_000 for size in sizes.values())
    assert bound_of(small, route(CHAT)).size < 1_100_000
    assert bound_of(ModelReach(600, 4, media=True), route(CHAT)).size > MEDIA
    assert bound_of(ModelReach(600, 4, media=True), route("/tokenize")).size < MEDIA
    assert largest_size(large) == max(
        bound_of(large, one).size for one in CLIENT_ROUTES if one.content not in ("audio", "image")
    )
    assert bound_of(large, None).values == VALUES


def test_a_form_is_bounded_by_its_size_alone() -> None:
    check = BodyCheck(bound_of(REACH, route("/v1/audio/transcriptions")), json=False)
    recording = b"," * 20_000_000
    check.feed(recording)
    check.check(recording)
