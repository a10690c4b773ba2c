"""A text that is far too long is refused before all of it is in tokens."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

vllm = pytest.importorskip("vllm")

from vllm.exceptions import VLLMValidationError  # noqa: E402

from kvmig.engines.vllm.texts import (  # noqa: E402
    PIECE,
    STOPS,
    TRUNCATED,
    WORDS,
    bound_texts,
    check_stops,
    check_words,
    has_more_tokens,
    most_tokens,
)

CONTEXT = 1000


@given(st.integers(0, 3 * PIECE), st.integers(0, 3 * PIECE))
def test_a_text_is_counted_as_a_whole(length: int, most: int) -> None:
    assert has_more_tokens("a" * length, most, len) == (length > most)


def test_no_more_is_counted_than_is_needed() -> None:
    counted: list[int] = []

    def count(piece: str) -> int:
        counted.append(len(piece))
        return len(piece)

    assert has_more_tokens("a" * 100 * PIECE, PIECE, count)
    assert counted == [PIECE, PIECE]


class Renderer:
    """The part of vLLM's renderer that is bounded; a token a character."""

    def __init__(self) -> None:
        self.longest = 0
        self._executor = ThreadPoolExecutor(1)
        self._tokenize_prompt_async: Any = None

    def get_tokenizer(self) -> Any:
        def tokenizer(text: str, **_: Any) -> dict[str, Any]:
            self.longest = max(self.longest, len(text))
            return {"input_ids": range(len(text))}

        return tokenizer

    def _tokenize_prompt(self, prompt: Any, params: Any) -> int:
        return len(self.get_tokenizer()(prompt["prompt"])["input_ids"])


def params(truncate: int | None = None) -> Any:
    return SimpleNamespace(truncate_prompt_tokens=truncate)


async def test_a_text_of_many_contexts_is_never_in_tokens_as_a_whole() -> None:
    renderer = Renderer()
    bound_texts(cast("Any", renderer), CONTEXT)
    with pytest.raises(VLLMValidationError, match="maximum context length is 1000 tokens"):
        await renderer._tokenize_prompt_async({"prompt": "a" * 50 * PIECE}, params())
    assert renderer.longest == PIECE
    with pytest.raises(VLLMValidationError):
        renderer._tokenize_prompt({"prompt": "a" * 50 * PIECE}, params())


async def test_a_text_that_is_to_be_truncated_may_be_longer() -> None:
    renderer = Renderer()
    bound_texts(cast("Any", renderer), CONTEXT)
    text = "a" * 3 * PIECE
    assert await renderer._tokenize_prompt_async({"prompt": text}, params(10)) == len(text)
    with pytest.raises(VLLMValidationError):
        await renderer._tokenize_prompt_async({"prompt": text * 2}, params(10))
    assert most_tokens(CONTEXT, truncated=True) == TRUNCATED


async def test_a_text_that_is_a_little_too_long_hears_so_from_vllm() -> None:
    renderer = Renderer()
    bound_texts(cast("Any", renderer), 4 * PIECE)
    text = "a" * 5 * PIECE
    assert await renderer._tokenize_prompt_async({"prompt": text}, params()) == len(text)


def test_forbidden_words_are_bounded_in_all() -> None:
    check_words(None)
    check_words(["a" * (WORDS // 2)] * 2)
    for words in (["a" * (WORDS + 1)], ["ab"] * WORDS):
        with pytest.raises(VLLMValidationError, match=f"bad_words has .* allowed are {WORDS}"):
            check_words(words)


def test_more_stop_strings_than_are_sought_in_no_time_are_refused() -> None:
    check_stops(None)
    check_stops("a")
    check_stops(["a"] * STOPS)
    with pytest.raises(VLLMValidationError, match="stop has 257 strings, allowed are 256"):
        check_stops(["a"] * (STOPS + 1))
