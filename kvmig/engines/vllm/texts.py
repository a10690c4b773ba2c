"""A text that is far too long is refused before all of it is in tokens.

A tokenizer keeps some 150 bytes for each byte of a text, before it is known how many tokens it
has. A long text is therefore counted piece by piece first, which takes the memory of one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.renderers.base import BaseRenderer
from vllm.utils.async_utils import make_async

PIECE = 1 << 16
"""Characters that are counted at a time. Shorter texts are not counted before."""
WORDS = 8192
"""Characters of all words that a call forbids: vLLM spells them on the event loop, each twice."""
STOPS = 256
"""Stop strings of a call: each is sought in the text of every token, on the event loop."""
TRUNCATED = 262_144
"""Tokens of a text that its call wants truncated, where the context has fewer."""


def most_tokens(context: int, *, truncated: bool) -> int:
    """Most tokens of a whole text. vLLM itself refuses one that is a little too long."""
    most = context + context // 4 + 1024
    return max(most, TRUNCATED) if truncated else most


def has_more_tokens(text: str, most: int, count: Callable[[str], int]) -> bool:
    """Whether a text has more tokens. count: of a piece.

    A cut may make two tokens of one, which are few compared with those of a piece.
    """
    found = 0
    for at in range(0, len(text), PIECE):
        found += count(text[at : at + PIECE])
        if found > most:
            return True
    return False


def check_words(words: Sequence[str] | None) -> None:
    """Raises VLLMValidationError for words that a call forbids (`bad_words`), and are too long."""
    length = sum(map(len, words or ()))
    if length > WORDS:
        raise VLLMValidationError(
            f"bad_words has {length} characters in all, allowed are {WORDS}",
            parameter="bad_words", value=length,
        )  # fmt: skip


def check_stops(stops: Sequence[str] | str | None) -> None:
    """Raises VLLMValidationError for too many stop strings."""
    if not isinstance(stops, str) and len(stops or ()) > STOPS:
        raise VLLMValidationError(
            f"stop has {len(stops or ())} strings, allowed are {STOPS}",
            parameter="stop", value=len(stops or ()),
        )  # fmt: skip


def bound_texts(renderer: BaseRenderer[Any], context: int) -> None:
    """Let the renderer refuse such texts. context: of the model, in tokens."""
    whole = renderer._tokenize_prompt

    def count(piece: str) -> int:
        return len(renderer.get_tokenizer()(piece, add_special_tokens=False)["input_ids"])

    def tokenize(prompt: Any, params: Any) -> Any:
        most = most_tokens(context, truncated=params.truncate_prompt_tokens is not None)
        text = prompt["prompt"]
        if len(text) > PIECE and has_more_tokens(text, most, count):
            raise VLLMValidationError(
                f"This model's maximum context length is {context} tokens. However, your prompt "
                f"contains more than {most} tokens. Please reduce the length of the input prompt.",
                parameter="input_text",
                value=len(text),
            )
        return whole(prompt, params)

    renderer._tokenize_prompt = tokenize
    renderer._tokenize_prompt_async = make_async(tokenize, executor=renderer._executor)
